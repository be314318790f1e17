"""What torch makes of a recipe: modules, optimizers, schedules, batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from cleave_dask.errors import RecipeError
from cleave_dask.graph import building
from cleave_dask.graph.recipes import Architecture, Data, LocalModel, Optimizer, Recipe, Schedule, Train

PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-66b": 65_719_701_504,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
}
"""Totals of the published checkpoints."""

MODEL = '[model]\nfamily = "llama"\nhidden = 16\nlayers = 1\nheads = 4\n'
DATA = '[data]\nkind = "python-stdlib"\nbatch = 2\nsequence = 8\n'

SMALL = Recipe(
    name="small",
    model=Architecture("llama", 16, 1, 4, 2, 32, 256, 8, tie_embeddings=True, dropout=0.0),
    data=Data(batch=2, sequence=8),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These products are too small to share: threads would only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", PARAMETERS)
def test_planning_recipes_have_the_published_parameters_and_no_memory(name: str) -> None:
    recipe = Recipe.load(name)
    module = building.build_model(recipe, device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    assert recipe.tokens_per_step == 128 * 1024
    assert building.example_batch(recipe)["input_ids"].shape == (128, 1024)
    assert building.build_optimizer(recipe, module).defaults["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt"])
def test_tiny_recipes_learn(name: str) -> None:
    recipe = Recipe.load(name)
    recipe = replace(recipe, data=replace(recipe.data, batch=4))  # enough to see it, in a quarter of the time
    module = building.build_model(recipe)
    optimizer = building.build_optimizer(recipe, module)
    schedule = building.build_schedule(recipe, optimizer)
    assert schedule is not None
    losses = []
    for batch in islice(building.batches(recipe), 8):
        loss = module(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.train.clip_norm or 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1.5


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("tie", [False, True])
def test_families_build_deterministically_and_leave_the_random_stream_alone(family: Any, tie: bool) -> None:
    model = Architecture(family, 16, 2, 4, 4, 24, 256, 8, tie_embeddings=tie, dropout=0.0)
    recipe = replace(SMALL, model=model)
    before = torch.get_rng_state()
    first, second = building.build_model(recipe), building.build_model(recipe)
    assert torch.equal(torch.get_rng_state(), before)
    states = first.state_dict(), second.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    other = building.build_model(replace(recipe, train=Train(seed=1))).state_dict()
    assert any(not torch.equal(other[key], states[0][key]) for key in other)
    tied = first.get_input_embeddings().weight is first.get_output_embeddings().weight  # type: ignore[operator]
    assert tied == tie
    assert first.training
    loss = first(**building.example_batch(recipe)).loss
    assert loss.shape == ()
    loss.backward()
    assert all(parameter.grad is not None for parameter in first.parameters())


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_dropout_reaches_the_model_but_not_attention(family: Any) -> None:
    model = Architecture(family, 16, 1, 4, 4, 24, 256, 8, tie_embeddings=True, dropout=0.25)
    config = building.build_config(replace(SMALL, model=model)).to_dict()
    assert config["dropout" if family == "opt" else "resid_pdrop"] == 0.25
    assert config["attention_dropout" if family == "opt" else "attn_pdrop"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_have_the_dtype_of_the_recipe(dtype: Any) -> None:
    module = building.build_model(replace(SMALL, train=Train(dtype=dtype)))
    assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, dtype)}


def test_a_local_config_builds_any_architecture(tmp_path: Path) -> None:
    config = Qwen2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=300,
        max_position_embeddings=8,
    )
    config.to_json_file(tmp_path / "config.json")
    recipe = Recipe.load(write(tmp_path, '[model]\nconfig = "config.json"\n' + DATA))
    assert recipe.model == LocalModel(tmp_path / "config.json", pretrained=False)
    module = building.build_model(recipe)
    assert type(module).__name__ == "Qwen2ForCausalLM"
    assert module(**next(building.batches(recipe))).loss.isfinite()
    assert building.example_batch(recipe)["input_ids"].max() < 300
    longer = replace(recipe, data=replace(recipe.data, sequence=9))
    with pytest.raises(RecipeError, match="9 tokens is longer than the model's 8 positions"):
        building.build_model(longer)


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"model_type": "no-such"}'])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    recipe = Recipe.load(write(tmp_path, '[model]\nconfig = "config.json"\n' + DATA))
    with pytest.raises(RecipeError, match=r"config\.json is not a Hugging Face configuration"):
        building.build_model(recipe)


def test_a_run_starts_from_local_weights(tmp_path: Path) -> None:
    module = building.build_model(SMALL)
    assert isinstance(module, LlamaForCausalLM)
    module.save_pretrained(tmp_path / "saved")
    recipe = Recipe.load(write(tmp_path, '[model]\nweights = "saved"\n' + DATA))
    loaded = building.build_model(recipe)
    assert loaded.training
    batch = building.example_batch(recipe)
    assert torch.equal(loaded(**batch).logits, module(**batch).logits)
    assert all(parameter.is_meta for parameter in building.build_model(recipe, device="meta").parameters())


def test_weights_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    module = building.build_model(SMALL)
    assert isinstance(module, LlamaForCausalLM)
    module.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    recipe = replace(SMALL, model=LocalModel(tmp_path, pretrained=True))
    with pytest.raises(RecipeError, match=r"lack \d+ of the model's, such as 'model\.layers\.1"):
        building.build_model(recipe)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="cannot be loaded"):
        building.build_model(recipe)


def test_a_model_too_large_for_this_machine_is_an_error_not_a_crash() -> None:
    huge = Architecture("llama", 10**9, 1, 1, 1, 32, 256, 8, tie_embeddings=True, dropout=0.0)
    with pytest.raises(RecipeError, match="its model cannot be built"):
        building.build_model(replace(SMALL, model=huge))


OPTIMIZERS = ["Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_builds_and_steps(name: str) -> None:
    recipe = replace(SMALL, optimizer=Optimizer(name, (("lr", 0.01), ("weight_decay", 0.1))))
    module = building.build_model(recipe)
    module.get_parameter("model.norm.weight").requires_grad_(False)
    optimizer = building.build_optimizer(recipe, module)
    assert type(optimizer).__name__ == name
    assert len(optimizer.param_groups[0]["params"]) == len(list(module.parameters())) - 1
    module(**building.example_batch(recipe)).loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "keywords", "words"),
    [
        ("Adam W", {}, "name is 'Adam W'; did you mean 'AdamW'"),
        ("Optimizer", {}, "name is 'Optimizer'"),
        ("lr_scheduler", {}, "name is 'lr_scheduler'"),
        ("LBFGS", {}, "cannot be used: it evaluates the model several times"),
        ("AdamW", {"beta": [0.9]}, "AdamW has no key 'beta'; did you mean 'betas'"),
        ("AdamW", {"params": 3}, "has no key 'params'"),
        ("AdamW", {"betas": 3}, "AdamW refuses its values"),
        ("SGD", {"momentum": -1.0}, "SGD refuses its values: Invalid momentum"),
    ],
)
def test_a_wrong_optimizer_is_named_with_the_remedy(name: str, keywords: dict[str, Any], words: str) -> None:
    recipe = replace(SMALL, optimizer=Optimizer(name, tuple(keywords.items())))
    with pytest.raises(RecipeError, match=words) as caught:
        building.build_optimizer(recipe, building.build_model(SMALL))
    assert str(caught.value).startswith("recipe 'small': [optimizer]")


def rates(schedule: Schedule | None, steps: int = 10) -> list[float]:
    """Learning rate of each step."""
    recipe = replace(SMALL, optimizer=Optimizer("SGD", (("lr", 1.0),)), schedule=schedule, train=Train(steps=steps))
    optimizer = building.build_optimizer(recipe, building.build_model(SMALL))
    built = building.build_schedule(recipe, optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if built is not None:
            built.step()
    return seen


def test_schedules_warm_up_and_know_how_long_the_run_is() -> None:
    assert rates(None, 3) == [1.0] * 3
    assert rates(Schedule(), 3) == [1.0] * 3
    assert rates(Schedule(warmup=3), 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    cosine = [0.5 * (1 + np.cos(np.pi * step / 8)) for step in range(8)]
    assert rates(Schedule("CosineAnnealingLR", warmup=2)) == pytest.approx([1 / 3, 2 / 3, *cosine])
    assert rates(Schedule("CosineAnnealingLR", (("T_max", 2), ("eta_min", 0.5))), 3) == pytest.approx([1, 0.75, 0.5])
    assert rates(Schedule("OneCycleLR", (("max_lr", 2.0),)))[3] == pytest.approx(2.0, rel=0.1)
    milestones = Schedule("MultiStepLR", (("milestones", (1, 2)), ("gamma", 0.5)))
    assert rates(milestones, 4) == pytest.approx([1, 0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("name", "keywords", "words"),
    [
        ("CosineAnealingLR", {}, "did you mean 'CosineAnnealingLR'"),
        ("StepLR", {"stepsize": 3}, "StepLR has no key 'stepsize'; did you mean 'step_size'"),
        ("StepLR", {}, "StepLR refuses its values"),
        ("ReduceLROnPlateau", {}, "it waits for a metric"),
        ("LambdaLR", {}, "LambdaLR refuses its values"),
    ],
)
def test_a_wrong_schedule_is_named_with_the_remedy(name: str, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        rates(Schedule(name, tuple(keywords.items())))


def test_a_resumed_run_sees_the_same_batches() -> None:
    recipe = replace(SMALL, train=Train(accumulate=3))
    whole = list(islice(building.batches(recipe), 12))
    resumed = list(islice(building.batches(recipe, start_step=2), 6))
    for batch, again in zip(whole[6:], resumed, strict=True):
        assert torch.equal(batch["input_ids"], again["input_ids"])
    assert torch.equal(building.batch_at(recipe, 3, part=1)["input_ids"], whole[10]["input_ids"])
    assert len({batch["input_ids"].numpy().tobytes() for batch in whole}) == 12
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in whole)
    held_out = next(building.batches(recipe, split="validation"))
    assert not torch.equal(held_out["input_ids"], whole[0]["input_ids"])


def test_a_users_own_text_is_read_by_bytes_or_by_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("one two " * 50)
    (tmp_path / "sub" / "a.txt").write_text("two " * 50)
    data = DATA.replace('kind = "python-stdlib"', 'files = ["*.txt", "**/a.txt"]')
    recipe = Recipe.load(write(tmp_path, MODEL + data))
    assert [path.name for path in recipe.data.files] == ["b.txt", "a.txt"]
    assert building.batch_at(recipe, 0)["input_ids"].max() <= ord("w")
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for place in ("tokenizer.json", "."):
        recipe = Recipe.load(write(tmp_path, MODEL + "vocab = 3\n" + data + f'tokenizer = "{place}"\n'))
        assert set(building.batch_at(recipe, 0)["input_ids"].ravel().tolist()) == {0, 1}
    with pytest.raises(RecipeError, match="has no 'vocab'; add it"):
        Recipe.load(write(tmp_path, MODEL + data + 'tokenizer = "tokenizer.json"\n'))
    recipe = Recipe.load(write(tmp_path, MODEL + "vocab = 3\n" + data + 'tokenizer = "b.txt"\n'))
    with pytest.raises(RecipeError, match=r"tokenizer .*b\.txt cannot be read"):
        building.batch_at(recipe, 0)


def test_token_files_must_belong_to_the_model(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.full(100, 7, dtype=np.int32))
    np.full(100, 7, dtype=np.uint16).tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        data = DATA.replace('kind = "python-stdlib"', f'tokens = "{name}"')
        recipe = Recipe.load(write(tmp_path, MODEL + "vocab = 8\n" + data))
        assert set(building.batch_at(recipe, 0)["input_ids"].ravel().tolist()) == {7}
        small = Recipe.load(write(tmp_path, MODEL + "vocab = 7\n" + data))
        with pytest.raises(RecipeError, match="holds token 7, but the model knows those from 0 to 6"):
            building.batch_at(small, 0)
    np.save(tmp_path / "minus.npy", np.full(100, -1))
    data = DATA.replace('kind = "python-stdlib"', 'tokens = "minus.npy"')
    with pytest.raises(RecipeError, match="holds token -1"):
        building.batch_at(Recipe.load(write(tmp_path, MODEL + "vocab = 8\n" + data)), 0)


def test_llama_is_configured_as_published() -> None:
    config = building.build_config(Recipe.load("llama2-70b"))
    assert isinstance(config, LlamaConfig)
    assert (config.num_key_value_heads, config.rms_norm_eps, config.use_cache) == (8, 1e-5, False)

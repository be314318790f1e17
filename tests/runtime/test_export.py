from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
)

import cleave_dask
from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.runtime.export import export, read_weights

MODELS: Any = AutoModelForCausalLM  # transformers leaves most of its functions without types

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=2),
    "opt": lambda: OPTConfig(
        vocab_size=50, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    ),
}
ROOT = Path(cleave_dask.__file__).parents[1]


def trained(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are unlike those of any fresh one."""
    torch.manual_seed(0)
    model = MODELS.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """As a trainer has them: each parameter once, and every buffer, kept in files or not."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.arange(20).reshape(2, 10)).logits
    return logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("given", ["module", "meta", "config", "all names"])
def test_transformers_loads_what_was_exported(tmp_path: Path, name: str, given: str) -> None:
    dtype = torch.bfloat16 if name in ("llama", "opt") else torch.float32
    model = trained(CONFIGS[name](), dtype)
    weights, what = weights_of(model), model
    if given == "config":
        weights, what = dict(model.named_parameters()), CONFIGS[name]()
    if given == "meta":
        with torch.device("meta"):
            what = MODELS.from_config(CONFIGS[name]()).to(dtype)
    if given == "all names":
        weights = model.state_dict()  # tied weights under both of their names
    expected = outputs(model)
    export(weights, what, tmp_path / "out")
    loaded = MODELS.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == dtype
    assert torch.equal(outputs(loaded), expected)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("given", ["module", "config"])
def test_several_files_and_back(tmp_path: Path, given: str) -> None:
    model = trained(CONFIGS["llama"]())
    weights, what = (weights_of(model), model) if given == "module" else (dict(model.named_parameters()), model.config)
    export(weights, what, tmp_path / "out", shard_bytes=6000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    loaded = MODELS.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(outputs(loaded), outputs(model))
    read = read_weights(tmp_path / "out")
    assert read.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())


def test_a_run_can_start_from_what_transformers_wrote(tmp_path: Path) -> None:
    model = trained(CONFIGS["opt"]())
    model.save_pretrained(tmp_path)
    fresh = MODELS.from_config(CONFIGS["opt"]()).eval()
    missing, unexpected = fresh.load_state_dict(read_weights(tmp_path), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    assert torch.equal(outputs(fresh), outputs(model))
    assert read_weights(tmp_path / "model.safetensors").keys() == read_weights(tmp_path).keys()


def test_how_attention_was_traced_is_not_exported(tmp_path: Path) -> None:
    """The name of an attention of our own would keep others from loading the folder."""
    AttentionInterface.register("of_our_own", AttentionInterface._global_mapping["sdpa"])
    model = MODELS.from_config(CONFIGS["llama"](), attn_implementation="of_our_own")
    export(weights_of(model), model, tmp_path / "module")
    export(weights_of(model), model.config, tmp_path / "config")
    for given in ("module", "config"):
        assert "of_our_own" not in (tmp_path / given / "config.json").read_text()


def test_weights_of_another_model(tmp_path: Path) -> None:
    model = trained(CONFIGS["llama"]())
    weights = weights_of(model)
    with pytest.raises(
        InputError, match=r"not the weights of LlamaForCausalLM: lm_head.weight is missing; export with"
    ):
        export({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}, model, tmp_path / "out")
    with pytest.raises(InputError, match="extra is not of it"):
        export(weights | {"extra": torch.zeros(1)}, model, tmp_path / "out")
    with pytest.raises(InputError, match=r"lm_head.weight is \(3, 16\) instead of \(50, 16\) in LlamaForCausalLM"):
        export(weights | {"lm_head.weight": torch.zeros(3, 16)}, model, tmp_path / "out")
    with pytest.raises(InputError, match="not the weights of Linear: bias is missing"):
        export({}, nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(InputError, match="str is neither a module nor a Hugging Face config"):
        export({}, "llama", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_ones_own_goes_out_and_comes_in_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    for shard_bytes in (10**9, 40):
        folder = export(model.state_dict(), model, tmp_path / "own", overwrite=True, shard_bytes=shard_bytes)
        again = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        again.load_state_dict(read_weights(folder))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name])
    assert not (folder / "config.json").exists()


def test_only_a_former_export_is_overwritten(tmp_path: Path) -> None:
    first, second = trained(CONFIGS["llama"]()), trained(CONFIGS["gpt2"]())
    export(weights_of(first), first, tmp_path / "out")
    with pytest.raises(InputError, match="out is there already"):
        export(weights_of(second), second, tmp_path / "out")
    export(weights_of(second), second, tmp_path / "out", overwrite=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
    (tmp_path / "precious").mkdir()
    with pytest.raises(InputError, match="precious is there already"):
        export(weights_of(second), second, tmp_path / "precious", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"]


FULL = """
import resource, sys, torch
from cleave_dask.errors import CheckpointError
from cleave_dask.runtime.export import export

class Config:
    dtype = None
    def save_pretrained(self, folder):
        (folder / "config.json").write_text("{}")

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    export({"a": torch.zeros(5000)}, Config(), sys.argv[1])
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", FULL, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"exporting to {tmp_path / 'out'} failed" in done.stdout
    assert "it needs 20 kB, " in done.stdout
    assert "are free; free some space, or export to another disk" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = trained(CONFIGS["llama"]())
    with pytest.raises(CheckpointError, match=r"Not a directory.*; make it writable, or export to another folder"):
        export(weights_of(model), model, tmp_path / "file" / "out")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere is not there; give a folder with model.safetensors"):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has no safetensors; give a folder that save_pretrained"):
        read_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"has only pytorch_model.bin, a pickle, which may run code and is not read"):
        read_weights(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "one.safetensors")
    assert read_weights(tmp_path).keys() == {"x"}
    save_file({"y": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(
        InputError, match=r"has 2 files of safetensors and no model.safetensors.index.json; fetch the index"
    ):
        read_weights(tmp_path)
    save_file({"z": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert read_weights(tmp_path).keys() == {"z"}
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model.safetensors cannot be read: .*; fetch or export it again"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "cannot be read: JSONDecodeError"),
        ("[]", "cannot be read: TypeError"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "names gone.safetensors, which is not in the folder; fetch all"),
        ('{"weight_map": {"x": "../out.safetensors"}}', "names ../out.safetensors, which is not in the folder"),
        ('{"weight_map": {"x": "one.safetensors", "y": "one.safetensors"}}', "lacks y, which its index names; fetch"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, index: str, words: str) -> None:
    (tmp_path / "in").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "out.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "in" / "one.safetensors")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=words):
        read_weights(tmp_path / "in")


def test_exported_files_hold_no_aliases(tmp_path: Path) -> None:
    model = trained(CONFIGS["llama-tied"]())
    export(model.state_dict(), model.config, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")

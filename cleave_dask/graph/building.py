"""From a recipe to torch: modules, optimizers, schedules and batches. The door through which torch sees recipes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
)

from cleave_dask.errors import RecipeError
from cleave_dask.graph import corpora
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import StepGraph
from cleave_dask.graph.recipes import Architecture, Keywords, LocalModel, Recipe
from cleave_dask.resources import nearest

_CausalModel: Any = AutoModelForCausalLM  # its methods are half typed, and the wrong half
_AnyConfig: Any = AutoConfig

# What a step on the server cannot drive: a closure that runs the model again, sparse gradients, a metric.
_NO_OPTIMIZERS = {"LBFGS": "it evaluates the model several times a step", "SparseAdam": "gradients here are dense"}
_NO_SCHEDULES = {"ReduceLROnPlateau": "it waits for a metric"}


def build_model(recipe: Recipe, *, device: str | None = None) -> nn.Module:
    """The module that a recipe describes, in training mode; called with `input_ids` and `labels`, it gives `.loss`.

    Same seed, same weights, and the caller's random stream is left as it was. On device "meta" the weights have shapes
    and no memory, for planning; those of a pretrained folder are not read then.
    """
    config = build_config(recipe)
    dtype = getattr(torch, recipe.train.dtype)
    local = recipe.model if isinstance(recipe.model, LocalModel) else None
    if local is not None and local.pretrained and device != "meta":
        return _load_weights(local.path, dtype).to(device=device or "cpu").train()
    with torch.random.fork_rng(devices=[]), torch.device(device or "cpu"):
        torch.manual_seed(recipe.train.seed)
        try:
            model: nn.Module = _CausalModel.from_config(config, dtype=dtype, trust_remote_code=False)
        except Exception as error:  # any class of any architecture's choice, for a config that a user wrote
            raise RecipeError(f"recipe {recipe.name!r}: its model cannot be built: {error}") from error
    return model.train()


def build_config(recipe: Recipe) -> PretrainedConfig:
    """The Hugging Face configuration of a recipe's model, checked against its data."""
    model = recipe.model
    config = _family_config(model) if isinstance(model, Architecture) else _read_config(model.path)
    config.use_cache = False  # keys and values of earlier tokens help generation only
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < recipe.data.sequence:
        raise RecipeError(
            f"recipe {recipe.name!r}: a sequence of {recipe.data.sequence} tokens is longer than the model's "
            f"{positions} positions; lower 'sequence' in [data]"
        )
    return config


def build_optimizer(recipe: Recipe, module: nn.Module) -> Optimizer:
    """The recipe's torch.optim optimizer over the module's trainable parameters."""
    where = f"recipe {recipe.name!r}: [optimizer]"
    cls = _find_class(recipe.optimizer.name, torch.optim, Optimizer, _NO_OPTIMIZERS, where=where)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer: Optimizer = _construct(cls, parameters, recipe.optimizer.keywords, where=where)
    return optimizer


def build_schedule(recipe: Recipe, optimizer: Optimizer) -> LRScheduler | None:
    """The recipe's learning rate schedule, to be stepped after each optimizer update; None: a constant rate.

    Step i of a warm-up of w steps runs at (i + 1) / (w + 1) of the rate. A class that wants to know how long the run is
    (`T_max`, `total_steps`) is told, unless the recipe says otherwise.
    """
    schedule = recipe.schedule
    if schedule is None:
        return None
    parts: list[LRScheduler] = []
    if schedule.warmup:
        start = 1 / (schedule.warmup + 1)
        parts.append(lr_scheduler.LinearLR(optimizer, start_factor=start, total_iters=schedule.warmup))
    if schedule.name is not None:
        where = f"recipe {recipe.name!r}: [schedule]"
        cls = _find_class(schedule.name, lr_scheduler, LRScheduler, _NO_SCHEDULES, where=where)
        rest = max(1, recipe.train.steps - schedule.warmup)
        known = {key: rest for key in ("T_max", "total_steps") if key in inspect.signature(cls).parameters}
        keywords = tuple({**known, **dict(schedule.keywords)}.items())
        parts.append(_construct(cls, optimizer, keywords, where=where))
    if len(parts) == 2:
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[schedule.warmup])
    return parts[0] if parts else None


def batches(recipe: Recipe, *, start_step: int = 0, split: corpora.Split = "train") -> Iterator[dict[str, Tensor]]:
    """Batches from a step on, without end: `accumulate` of them make one step."""
    for step in count(start_step):
        for part in range(recipe.train.accumulate):
            yield batch_at(recipe, step, part=part, split=split)


def batch_at(recipe: Recipe, step: int, *, part: int = 0, split: corpora.Split = "train") -> dict[str, Tensor]:
    """One batch of a step (with `accumulate`, its part of that number); no other batch is drawn for it."""
    data = recipe.data
    drawn = corpora.draw(
        _tokens(recipe),
        shape=(data.batch, data.sequence),
        seed=recipe.train.seed,
        split=split,
        number=step * recipe.train.accumulate + part,
    )
    least, most, vocab = int(drawn.min()), int(drawn.max()), _vocab(recipe)
    if least < 0 or (vocab is not None and most >= vocab):
        raise RecipeError(
            f"recipe {recipe.name!r}: its data holds token {least if least < 0 else most}, but the model knows those "
            f"from 0 to {'its last' if vocab is None else vocab - 1}; give data and a model that belong together"
        )
    return _as_batch(torch.from_numpy(drawn))


def example_batch(recipe: Recipe) -> dict[str, Tensor]:
    """A batch of the right shapes that needs no data: for capture and planning."""
    data = recipe.data
    ids = torch.arange(data.batch * data.sequence).reshape(data.batch, data.sequence) % (
        _vocab(recipe) or corpora.BYTES
    )
    return _as_batch(ids)


def build_graph(recipe: Recipe) -> StepGraph:
    """The step that a recipe describes, without weights or data: for planning and simulation."""
    return capture(build_model(recipe, device="meta"), **example_batch(recipe)).over(recipe.train.wire)


def _as_batch(ids: Tensor) -> dict[str, Tensor]:
    """What a causal language model is called with; it shifts the labels itself."""
    return {"input_ids": ids, "labels": ids.clone()}


def _tokens(recipe: Recipe) -> corpora.Tokens:
    """All tokens of a recipe's data, read once."""
    data = recipe.data
    if data.tokens is not None:
        return _cached_tokens(data.tokens, data.token_dtype)
    if not data.files:
        return corpora.stdlib_tokens()
    return _cached_text(data.files, data.tokenizer)


@lru_cache(maxsize=4)
def _cached_tokens(path: Path, dtype: str) -> corpora.Tokens:
    return corpora.file_tokens(path, dtype)


@lru_cache(maxsize=4)
def _cached_text(files: tuple[Path, ...], tokenizer: Path | None) -> corpora.Tokens:
    text = corpora.text_tokens(files)
    if tokenizer is None:
        return text
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise RecipeError(f"tokenizer {path} cannot be read: {error}; give a tokenizer.json") from error
    return np.array(encoder.encode(text.tobytes().decode("utf-8", errors="replace")).ids, dtype=np.int64)


@lru_cache(maxsize=8)
def _vocab(recipe: Recipe) -> int | None:
    """Number of tokens that the model knows, where its configuration says so."""
    if isinstance(recipe.model, Architecture):
        return recipe.model.vocab
    size = getattr(_read_config(recipe.model.path), "vocab_size", None)
    return size if isinstance(size, int) else None


def _family_config(model: Architecture) -> PretrainedConfig:
    """A family's configuration; attention dropout is off everywhere, because it would take attention apart."""
    common: dict[str, Any] = {
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if model.family == "llama":
        return LlamaConfig(**common, num_key_value_heads=model.kv_heads, intermediate_size=model.ffn, rms_norm_eps=1e-5)
    if model.family == "opt":
        return OPTConfig(
            **common, word_embed_proj_dim=model.hidden, ffn_dim=model.ffn, dropout=model.dropout, layerdrop=0.0
        )
    common |= {"bos_token_id": None, "eos_token_id": None}  # the usual ones may lie beyond the vocabulary
    common |= {"resid_pdrop": model.dropout, "embd_pdrop": model.dropout, "attn_pdrop": 0.0}
    return GPT2Config(**common, n_inner=model.ffn)


def _read_config(path: Path) -> PretrainedConfig:
    """A local config.json, or that of a local folder; no network, no code that came with it."""
    try:
        config: PretrainedConfig = _AnyConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file fails in as many ways as there are architectures
        raise RecipeError(f"{path} is not a Hugging Face configuration: {error}") from error
    return config


def _load_weights(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A local model with its weights; one that lacks any of them is refused."""
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    try:
        model, info = _CausalModel.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # as above
        raise RecipeError(f"weights {folder} cannot be loaded: {error}; give a folder with safetensors") from error
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        raise RecipeError(
            f"weights {folder} lack {len(missing)} of the model's, such as {missing[0]!r}; export it anew"
        )
    model.config.use_cache = False
    module: nn.Module = model
    return module


def _find_class(name: str, module: Any, base: type, refused: dict[str, str], *, where: str) -> Any:
    """The class of that name, if it is one that a recipe can use."""
    classes = {
        key: cls
        for key, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and not key.startswith("_")
    }
    if name in refused:
        raise RecipeError(f"{where} name is {name!r}, which cannot be used: {refused[name]}; take another")
    if name not in classes:
        raise RecipeError(f"{where} name is {name!r}; {nearest(name, set(classes) - set(refused))}")
    return classes[name]


def _construct(cls: Any, first: Any, keywords: Keywords, *, where: str) -> Any:
    """Call a class of torch with its first argument and a recipe's keywords, each of which must be one of its own."""
    _, *known = inspect.signature(cls).parameters
    for key, _ in keywords:
        if key not in known:
            raise RecipeError(f"{where} {cls.__name__} has no key {key!r}; {nearest(key, known)}")
    try:
        return cls(first, **dict(keywords))
    except Exception as error:  # each class checks its values in its own way
        raise RecipeError(f"{where} {cls.__name__} refuses its values: {error}") from error

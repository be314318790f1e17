"""Weights as other tools know them: a Hugging Face folder of safetensors and config.json, written and read.

`export` writes what `transformers.AutoModelForCausalLM.from_pretrained(folder)` loads, with the same outputs;
`read_weights` gives the weights of such a folder, to start a run from. Neither reads or writes a pickle.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.formatting import quantity

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def export(
    weights: Mapping[str, Tensor],
    model: Any,
    folder: str | Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write weights, by the names that the model gives them, beside the config that says what to do with them.

    `model` is the module that was trained (its own numbers do not matter: it may be on the meta device), or a Hugging
    Face config alone; then leave out buffers that the module makes by itself. A module of your own has no config: the
    folder then holds safetensors only. It appears when it is complete. One that is there is replaced only if
    `overwrite` says so, and only if it is a former export.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not (overwrite and _is_export(folder)):
        raise InputError(f"{folder} is there already; export to another folder, or overwrite a former export")
    known = hasattr(model, "save_pretrained")
    if not known and not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is neither a module nor a Hugging Face config; give one of these")
    hidden = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        hidden.mkdir(parents=True)
        _write(weights, model, hidden, shard_bytes)
        if folder.exists():
            shutil.rmtree(folder.rename(folder.with_name(f".removing-{folder.name}-{os.getpid()}")))
        hidden.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_refusal(weights, folder, error)) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return folder


def _write(weights: Mapping[str, Tensor], model: Any, folder: Path, shard_bytes: int) -> None:
    """Write safetensors, and a config where the model has one."""
    if not isinstance(model, nn.Module):
        _write_shards(_untied(weights), folder, shard_bytes)
        _config(model, weights).save_pretrained(folder)
    elif hasattr(model, "save_pretrained"):
        save: Any = model.save_pretrained
        save(folder, state_dict=_fitting(weights, model), max_shard_size=shard_bytes)
        _config(model.config, weights).save_pretrained(folder)
    else:
        _write_shards(_untied(_fitting(weights, model)), folder, shard_bytes)


def _is_export(folder: Path) -> bool:
    """Whether a folder is surely one that was exported before: by its config, or because nothing else is in it."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return "config.json" in names or (bool(names) and all(name.startswith("model") for name in names))


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """All weights in a folder of safetensors, in one file or in several with an index, or in a file of its own."""
    place = Path(folder)
    if place.is_file() and place.suffix == ".safetensors":
        return _load(place)
    if not place.is_dir():
        raise InputError(f"{place} is not there; give a folder with {_SINGLE}, as save_pretrained writes it")
    if (place / _INDEX).is_file():
        return _load_shards(place)
    found = sorted(place.glob("*.safetensors"))
    if (place / _SINGLE) in found or len(found) == 1:
        return _load(place / _SINGLE if len(found) > 1 else found[0])
    if found:
        raise InputError(
            f"{place} has {len(found)} files of safetensors and no {_INDEX}; fetch the index, or name one file"
        )
    pickles = sorted(path.name for path in place.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if pickles:
        remedy = "load it once with transformers and call save_pretrained, which writes safetensors"
        raise InputError(f"{place} has only {pickles[0]}, a pickle, which may run code and is not read; {remedy}")
    raise InputError(f"{place} has no safetensors; give a folder that save_pretrained or `cleave export` wrote")


def _fitting(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The weights that belong into a file of this module, if they are all there and have the right shapes."""
    expected = module.state_dict(keep_vars=True)
    buffers = {name for name, _ in module.named_buffers()} - expected.keys()  # made again by the module itself
    unknown = sorted(weights.keys() - expected.keys() - buffers)
    present = {id(tensor) for name, tensor in expected.items() if name in weights}
    missing = sorted(name for name, tensor in expected.items() if id(tensor) not in present)  # a tied name will do
    kind = type(module).__name__
    if unknown or missing:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not of it"
        raise InputError(f"these are not the weights of {kind}: {what}; export with the module that was trained")
    for name, tensor in weights.items():
        if name in expected and tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(expected[name].shape)}"
            raise InputError(f"{name} is {shapes} in {kind}; export with the module that was trained")
    return {name: tensor.detach() for name, tensor in weights.items() if name in expected}


def _untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under the first of its names: safetensors holds no aliases, and loading ties them again."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,), name)
    return {name: weights[name].detach() for name in first.values()}


def _write_shards(weights: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Write files of at most `shard_bytes`, or of one tensor, and the index that says which tensor is where."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    files = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    for file, names in zip(files if len(shards) > 1 else [_SINGLE], shards, strict=True):
        save_file({name: weights[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in weights.values())
        (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))


def _config(config: Any, weights: Mapping[str, Tensor]) -> Any:
    """The config, saying the dtype that the weights have: loading casts them to it."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    config = copy.deepcopy(config)
    if sizes:
        config.dtype = max(sizes, key=lambda dtype: sizes[dtype])
    return config


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}; fetch or export it again") from error


def _load_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files that the index names."""
    try:
        where: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        files = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / _INDEX} cannot be read: {error!r}; fetch or export it again") from error
    weights: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise InputError(f"{folder / _INDEX} names {file}, which is not in the folder; fetch all files")
        weights |= _load(folder / file)
    absent = sorted(where.keys() - weights.keys())
    if absent:
        raise InputError(f"{folder} lacks {absent[0]}, which its index names; fetch or export all files again")
    return weights


def _refusal(weights: Mapping[str, Tensor], folder: Path, error: Exception) -> str:
    """Why the folder could not be written, and what to do."""
    needed = quantity(sum(tensor.nbytes for tensor in weights.values()), "B")
    free = quantity(shutil.disk_usage(next(path for path in folder.parents if path.is_dir())).free, "B")
    number = re.search(r"os error (\d+)|Errno (\d+)", str(error))  # safetensors has the number in its text only
    full = number is not None and int(number[1] or number[2]) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space, or export to another disk" if full else "make it writable, or export to another folder"
    return f"exporting to {folder} failed: {error}; it needs {needed}, {free} are free; {remedy}"

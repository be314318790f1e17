"""The batch of a step: its tensors by path, and whether another batch fits the step that was captured."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from cleave_dask.errors import BatchError, CaptureError
from cleave_dask.graph.ir import StepGraph
from cleave_dask.graph.torch_ops import dtype_name

OF_ONES = " of ones"


def batch_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf of a batch by its path: "args[0]", "kwargs['labels']"."""
    positional, _ = tree_flatten_with_path(tuple(args))
    named, _ = tree_flatten_with_path(dict(kwargs))
    return {f"args{keystr(path)}": leaf for path, leaf in positional} | {
        f"kwargs{keystr(path)}": leaf for path, leaf in named
    }


def padding_masks(module: torch.nn.Module, leaves: Mapping[str, Any]) -> list[str]:
    """Paths of the two-dimensional attention masks of a batch, whichever way they are passed."""
    names = list(inspect.signature(module.forward).parameters)
    aliases = {f"args[{position}]": name for position, name in enumerate(names)}
    return [
        path
        for path, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor)
        and leaf.ndim == 2
        and aliases.get(path, path).rstrip("']").endswith("attention_mask")
    ]


def require_ones(path: str, mask: torch.Tensor, error: type[Exception]) -> None:
    """Refuse a padding mask that hides something. A mask without data (fake or meta) is taken to hide nothing."""
    if not has_data(mask) or bool((mask == 1).all()):
        return
    hidden = int((mask != 1).sum())
    raise error(
        f"{path} hides {hidden} of {mask.numel()} tokens, and attention that is sent out in tiles has no padding mask: "
        "pack the sequences to full length; or, in a causal model, pad on the right, set the labels of the padding "
        "to -100 and leave the mask out, which gives the same loss"
    )


def describe_batch(leaves: Mapping[str, Any], *, ones: Iterable[str] = ()) -> str:
    """The batch in words, as JSON: for each path a tensor's dtype and shape, or the value that is baked in."""
    for path, leaf in leaves.items():
        if isinstance(leaf, np.ndarray):
            raise CaptureError(f"{path} is a {_describe(leaf)}, which no batch could change: pass torch.from_numpy(it)")
    suffix = dict.fromkeys(ones, OF_ONES)
    return json.dumps({path: _describe(leaf) + suffix.get(path, "") for path, leaf in leaves.items()})


def flatten_batch(graph: StepGraph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch by the source of the graph's inputs, if the batch is like the captured one."""
    expected: dict[str, str] = json.loads(graph.batch)
    leaves = batch_leaves(args, kwargs)
    for path in expected | leaves:
        _compare(path, expected, leaves)
    strides = {entry.source: entry.value.strides for entry in graph.inputs if entry.kind == "batch"}
    return {path: _with_strides(leaves[path].detach(), layout) for path, layout in strides.items()}


def has_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor has numbers in it, rather than only a shape."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
    if isinstance(leaf, np.ndarray):
        return f"numpy array {leaf.dtype}{list(leaf.shape)}"
    return repr(leaf)


def _compare(path: str, expected: Mapping[str, str], leaves: Mapping[str, Any]) -> None:
    """Raise if the batch differs from the captured one in what it has at this path."""
    if path not in leaves:
        raise BatchError(f"the batch has no {path}; the step was captured with {expected[path]}: pass it")
    leaf = leaves[path]
    given = _describe(leaf)
    if path not in expected:
        raise BatchError(f"the batch has {path} = {given}, without which the step was captured: leave it out")
    wanted = expected[path].removesuffix(OF_ONES)
    if given != wanted:
        remedy = "convert, pad or cut it to that" if isinstance(leaf, torch.Tensor) else "pass that"
        raise BatchError(f"{path} is {given}, the step was captured with {wanted}: {remedy}, or capture the step again")
    if wanted != expected[path]:
        require_ones(path, leaf, BatchError)


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def micro_batches(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch cut along its first axis; whatever is no tensor goes to each micro-batch as it is."""
    if count == 1:
        yield args, kwargs
        return
    leaves, structure = torch.utils._pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] % count):
            raise BatchError(
                f"a batch of shape {tuple(leaf.shape)} cannot be cut into {count} equal micro-batches; "
                f"make its first axis a multiple of accumulate={count}"
            )
    pieces = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    for index in range(count):
        yield torch.utils._pytree.tree_unflatten([piece[index] for piece in pieces], structure)

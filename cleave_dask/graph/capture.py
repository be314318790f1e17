"""From a torch module to a step graph: `capture(module, *args, **kwargs)`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_unflatten

from cleave_dask.errors import CaptureError, CleaveError
from cleave_dask.graph.annotating import annotate
from cleave_dask.graph.capture_batch import batch_leaves, describe_batch, flatten_batch, padding_masks, require_ones
from cleave_dask.graph.capture_convert import convert
from cleave_dask.graph.capture_huggingface import adapted, pretrained_models
from cleave_dask.graph.capture_knowledge import Knowledge
from cleave_dask.graph.capture_trace import trace
from cleave_dask.graph.ir import StepGraph
from cleave_dask.graph.merging import merge
from cleave_dask.graph.simplifying import simplify
from cleave_dask.resources import expect

__all__ = ["capture", "flatten_batch"]

LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent)


def capture(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> StepGraph:
    """The whole training step of a module on a batch like this one: forward, loss and backward as one value.

    The module returns a scalar loss, or an object or dict with `loss`. Tensors among the arguments, however nested, are
    the batch; everything else is part of the step. Nothing is computed and no memory is taken for weights: the module
    and the batch may as well be on the meta device or fake. The module is left as it was.
    """
    remedy = "give an instance of torch.nn.Module; cd.with_loss joins a module and its criterion"
    expect(module, torch.nn.Module, what="what to capture", remedy=remedy, error=CaptureError)
    if not any(param.requires_grad for param in module.parameters()):
        raise CaptureError(f"{type(module).__name__} has no parameter to train: give it one that requires a gradient")
    leaves = batch_leaves(args, kwargs)
    masks = padding_masks(module, leaves) if pretrained_models(module) else []
    for path in masks:
        require_ones(path, leaves[path], CaptureError)
    batch = describe_batch(leaves, ones=masks)
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    ones = {path: torch.ones((), dtype=leaves[path].dtype).expand(leaves[path].shape) for path in masks}
    structure = tree_flatten((args, kwargs))[1]

    def call(given: Mapping[str, torch.Tensor]) -> Any:
        positional, named = tree_unflatten((given.get(path, leaf) for path, leaf in leaves.items()), structure)
        return module(*positional, **named)

    knowledge = Knowledge()
    with _explained(module), adapted(module, knows=lambda tensor: knowledge.value(tensor) is not None):
        traced = trace(module, call, tensors, ones, knowledge)
        graph = convert(traced, name=type(module).__name__, batch=batch)
    return annotate(merge(annotate(simplify(graph))), _labels(module))


def _labels(module: torch.nn.Module) -> dict[str, str]:
    """What to call the product with a parameter: by the layer that multiplies, if weights are tied to an embedding."""
    owners = dict(module.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    labels = {}
    for aliases in names.values():
        owner = min(aliases, key=lambda name: isinstance(owners[name.rpartition(".")[0]], torch.nn.Embedding))
        labels[aliases[0]] = owner.removesuffix(".weight")
    return labels


@contextmanager
def _explained(module: torch.nn.Module) -> Iterator[None]:
    """Whatever goes wrong in a trace becomes a CaptureError that says where, and what to do."""
    try:
        yield
    except CleaveError:
        raise
    except Exception as error:
        raise CaptureError(f"{type(module).__name__} cannot be captured: {_explain(error)}{_where(error)}") from error


def _explain(error: Exception) -> str:
    """The error in the words of someone who wrote the module."""
    op = str(getattr(error, "func", "")) or next(iter(re.findall(r"aten\.\w+(?:\.\w+)?", str(error))), "")
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of what {op} returns depends on the numbers in a tensor: "
            "use torch.where or multiply with a mask instead of selecting elements"
        )
    if isinstance(error, DataDependentOutputException) or "_local_scalar_dense" in op:
        return (
            f"it looks at the numbers in a tensor ({op}: `if tensor`, .item(), .tolist()), which differ from batch to "
            "batch: use torch.where, or decide outside of the module (for random depth: set layerdrop to 0)"
        )
    if "dynamo-optimized" in str(error):
        return "torch.compile was applied to it, or to a part of it: capture the module as it was before"
    if "grouped_mm" in str(error) or "grouped_mm" in _where(error):
        return f"{error} For Hugging Face mixtures of experts: model.set_experts_implementation('batched_mm')"
    return f"{type(error).__name__}: {error}"


def _where(error: Exception) -> str:
    """The last line of code before torch took over."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not _is_library(Path(frame.filename))]
    return f" [{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}]" if frames else ""


def _is_library(path: Path) -> bool:
    return any(library in path.parents for library in LIBRARIES) or not path.is_file()

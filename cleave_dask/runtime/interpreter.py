"""How a machine with torch runs a step graph: one op, one gemm, or the whole step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cleave_dask.errors import InputError
from cleave_dask.graph.ir import Gemm, Op, Ref, StepGraph, TorchConstant, Value
from cleave_dask.graph.torch_ops import dtype_of, from_constant, resolve
from cleave_dask.runtime.logits_torch import run_logits

aten = torch.ops.aten

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def run_op(op: Op, env: Mapping[str, Any]) -> Any:
    """What an op yields, given the values that it reads by name."""
    args = [_resolved(argument, env) for argument in op.args]
    kwargs = {key: _resolved(argument, env) for key, argument in op.kwargs}
    return resolve(op.target)(*args, **kwargs)


@torch.no_grad()
def run_gemm(gemm: Gemm, env: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """What a gemm yields, laid out as its outputs say. Joined gemms are run part by part, which copies nothing."""
    sides = [[env[part.name] for part in operand.parts] for operand in gemm.inputs]
    match gemm.kind:
        case "gemm":
            results = tuple(_products(gemm, sides[0], sides[1], env))
        case "bmm":
            results = (torch.bmm(sides[0][0], sides[1][0]),)
        case "attention":
            tensors = [parts[0] for parts in sides]
            results = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, gemm.causal, scale=gemm.scale)
        case "attention_backward":
            tensors = [parts[0] for parts in sides]
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
            results = backward(*tensors, 0.0, gemm.causal, scale=gemm.scale)
        case "logit_sums" | "logit_dx" | "logit_dw":
            results = run_logits(gemm.kind, [parts[0] for parts in sides])
    return tuple(_laid_out(result, value) for result, value in zip(results, gemm.outputs, strict=True))


def empty_output(value: Value) -> torch.Tensor:
    """Memory for a value, laid out as torch would."""
    return torch.empty_strided(value.shape, value.strides, dtype=dtype_of(value.dtype))


def load_constants(graph: StepGraph) -> Tensors:
    """The constants of the captured module, by source."""
    constants = {}
    for entry in graph.inputs:
        if entry.kind == "constant":
            if entry.source not in graph.constants:
                raise InputError(
                    f"constant '{entry.source}' of {graph.name} has no numbers, because the captured module had none: "
                    "capture the step of a module that is not on the meta device"
                )
            flat = torch.frombuffer(bytearray(graph.constants[entry.source]), dtype=dtype_of(entry.value.dtype))
            constants[entry.source] = _laid_out(flat.reshape(entry.value.shape), entry.value)
    return constants


def execute(
    graph: StepGraph,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, Tensors, Tensors]:
    """The whole step on this machine: the loss, the gradients by parameter, and the buffers that changed.

    Every value is freed after its last use. The gradients are fit for an optimizer that works in place: no two share
    memory, and none shares memory with a parameter or the batch.
    """
    sources = {"param": params, "buffer": buffers, "batch": batch, "constant": load_constants(graph)}
    env: dict[str, Any] = {entry.value.name: sources[entry.kind][entry.source].detach() for entry in graph.inputs}
    taken = {tensor.untyped_storage().data_ptr() for tensor in env.values()}
    for step, frees in zip(graph.steps, graph.frees, strict=True):
        if isinstance(step, Gemm):
            env.update(zip(step.writes, run_gemm(step, env), strict=True))
        else:
            env[step.name] = run_op(step, env)
        for name in frees:
            del env[name]
    grads = {name: owned(env[value], taken) for name, value in graph.grads}
    return env[graph.loss], grads, {name: owned(env[value], taken) for name, value in graph.buffers}


def _products(gemm: Gemm, left: list[Any], right: list[Any], env: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The products of the parts: one for each output, or all added up."""
    if len(left) > 1 and len(right) > 1:
        yield _sum_of_products(left, right)
        return
    biases = gemm.biases or (None,) * len(gemm.outputs)
    for number, bias in enumerate(biases):
        a, b = left[number if len(left) > 1 else 0], right[number if len(right) > 1 else 0]
        yield torch.mm(a, b) if bias is None else torch.addmm(env[bias.name], a, b)


def _sum_of_products(left: list[Any], right: list[Any]) -> torch.Tensor:
    """A1 B1 + A2 B2 + ...: in half precision as one product, so that the sum is rounded once."""
    if left[0].dtype in (torch.float16, torch.bfloat16):
        return torch.mm(torch.cat(left, 1), torch.cat(right, 0))
    total = torch.mm(left[0], right[0])
    for a, b in zip(left[1:], right[1:], strict=True):
        total.addmm_(a, b)
    return total


def _laid_out(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """The tensor with the strides that the program was traced with: views of it rely on them."""
    return tensor if tensor.stride() == value.strides else empty_output(value).copy_(tensor)


def owned(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor, copied if it overlaps itself or shares memory with one that is taken."""
    memory = tensor.untyped_storage().data_ptr()
    if memory in taken or 0 in tensor.stride():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    taken.add(tensor.untyped_storage().data_ptr())
    return tensor


def _resolved(argument: Any, env: Mapping[str, Any]) -> Any:
    """An argument as torch wants it."""
    match argument:
        case Ref(name):
            return env[name]
        case TorchConstant():
            return from_constant(argument)
        case tuple():
            return [_resolved(item, env) for item in argument]
    return argument


class Scope(dict[str, Any]):
    """Values made in a round, before those that the round found."""

    def __init__(self, outer: Mapping[str, Any]) -> None:
        super().__init__()
        self.outer = outer

    def __missing__(self, name: str) -> Any:
        return self.outer[name]

"""From a traced fx graph to a step graph: torch's objects become words, products become gemms."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from cleave_dask.errors import CaptureError
from cleave_dask.graph.capture_gemms import gemm_of, value_of
from cleave_dask.graph.capture_trace import Trace
from cleave_dask.graph.ir import Input, Op, Ref, Step, StepGraph
from cleave_dask.graph.torch_ops import constant_of, is_random

LITERALS = (str, bool, int, float, complex, type(None))


def convert(trace: Trace, *, name: str, batch: str) -> StepGraph:
    """The step graph of a trace. Its gemms are bare: roles, names and levels come from `annotating`."""
    nodes = list(trace.program.graph.nodes)
    outputs: list[fx.Node | None] = tree_leaves(nodes[-1].args, is_leaf=lambda leaf: leaf is None)
    names = _value_names(trace, nodes)
    constants = {node.target: getattr(trace.program, node.target) for node in nodes if node.op == "get_attr"}
    grads = zip(trace.grads, outputs[1 : 1 + len(trace.grads)], strict=True)
    buffers = zip(trace.buffers, outputs[1 + len(trace.grads) :], strict=True)
    assert outputs[0] is not None
    return StepGraph(
        name=name,
        inputs=_inputs(trace, nodes, names),
        steps=tuple(step for node in nodes if (step := _step(node, names)) is not None),
        loss=names[outputs[0]],
        grads=tuple((source, names[node]) for source, node in grads if node is not None),
        buffers=tuple((source, names[node]) for source, node in buffers if node is not None and not _is_input(node)),
        batch=batch,
        constants={source: data for source, tensor in constants.items() if (data := _bytes(source, tensor)) is not None},
    )


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _value_names(trace: Trace, nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """A value is called as torch calls it; an input says what it is, with a colon that no op has in its name."""
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs = {node: f"{kind}:{source}" for node, (kind, source) in zip(placeholders, trace.inputs, strict=True)}
    inputs |= {node: f"constant:{node.target}" for node in nodes if node.op == "get_attr"}
    return {node: inputs.get(node, node.name) for node in nodes}


def _inputs(trace: Trace, nodes: list[fx.Node], names: dict[fx.Node, str]) -> tuple[Input, ...]:
    placeholders = [node for node in nodes if node.op == "placeholder"]
    given = [
        Input(kind, source, value_of(names[node], node.meta["val"]))
        for node, (kind, source) in zip(placeholders, trace.inputs, strict=True)
    ]
    constants = {
        names[node]: Input("constant", str(node.target), value_of(names[node], getattr(trace.program, str(node.target))))
        for node in nodes
        if node.op == "get_attr"
    }
    return (*given, *constants.values())


def _bytes(source: str, tensor: torch.Tensor) -> bytes | None:
    """The numbers of a constant in row-major order; None if the module itself has none, as on the meta device."""
    if isinstance(tensor, torch.nn.Parameter):
        raise CaptureError(
            f"a parameter of shape {tuple(tensor.shape)} is used from outside the module's parameters, so it would "
            "not be trained: register it with an nn.ParameterList or as an attribute of the module"
        )
    if isinstance(tensor, FakeTensor):
        return None
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _step(node: fx.Node, names: dict[fx.Node, str]) -> Step | None:
    """The step that a node becomes; None for inputs, the output, and picks from an attention's results."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and gemm_of(node.all_input_nodes[0], names) is not None:
        return None
    return gemm_of(node, names) or _op(node, names)


def _op(node: fx.Node, names: dict[fx.Node, str]) -> Op:
    value = node.meta.get("val")
    return Op(
        name=names[node],
        target=_target(node),
        args=tuple(_argument(node, argument, names) for argument in node.args),
        kwargs=tuple((key, _argument(node, argument, names)) for key, argument in node.kwargs.items()),
        value=value_of(names[node], value) if isinstance(value, torch.Tensor) else None,
        random=is_random(node.target),
    )


def _target(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    raise CaptureError(f"'{node.target}' is not an ATen op: write that part of the module with plain torch functions")


def _argument(node: fx.Node, argument: Any, names: dict[fx.Node, str]) -> Any:
    """An argument in the words of a step graph."""
    if isinstance(argument, fx.Node):
        return Ref(names[argument])
    if isinstance(argument, (tuple, list)):
        return tuple(_argument(node, item, names) for item in argument)
    if isinstance(argument, LITERALS):
        return argument
    constant = constant_of(argument)
    if constant is None:
        raise CaptureError(
            f"{node.target} takes a {type(argument).__name__}, which cannot be sent to the server: "
            "do without it (for a torch.Generator: seed the global one)"
        )
    return constant

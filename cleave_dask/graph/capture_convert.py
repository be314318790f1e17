"""From a traced fx graph to a step graph: torch's objects become words, products become gemms."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from cleave_dask.errors import CaptureError
from cleave_dask.graph.capture_gemms import Names, gemm_of, value_of
from cleave_dask.graph.capture_trace import Trace
from cleave_dask.graph.ir import Input, Op, Ref, Step, StepGraph
from cleave_dask.graph.torch_ops import constant_of, is_random

LITERALS = (str, bool, int, float, complex, type(None))


def convert(trace: Trace, *, name: str, batch: str) -> StepGraph:
    """The step graph of a trace. Its gemms are bare: roles, names and levels come from `annotating`."""
    nodes = list(trace.program.graph.nodes)
    constants = _constants(trace.program)
    names = _value_names(trace, constants)
    outputs: list[fx.Node | None] = tree_leaves(nodes[-1].args, is_leaf=lambda leaf: leaf is None)
    loss, rest = outputs[0], outputs[1:]
    assert loss is not None
    grads = zip(trace.grads, rest, strict=False)
    buffers = zip(trace.buffers, rest[len(trace.grads) :], strict=True)
    data = {source: _bytes(tensor) for source, tensor in constants.values()}
    return StepGraph(
        name=name,
        inputs=_inputs(trace, constants, names),
        steps=tuple(step for node in nodes if (step := _step(node, names)) is not None),
        loss=names[loss],
        grads=tuple((source, names[node]) for source, node in grads if node),
        buffers=tuple((source, names[node]) for source, node in buffers if node and node.op != "placeholder"),
        batch=batch,
        constants={source: numbers for source, numbers in data.items() if numbers is not None},
    )


def _constants(program: fx.GraphModule) -> dict[fx.Node, tuple[str, torch.Tensor]]:
    """The tensors that the program has of its own, each under one name however often it is used."""
    first: dict[int, str] = {}
    found = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(program, node.target)
            if not isinstance(tensor, torch.Tensor):
                raise _unsendable(tensor)
            found[node] = first.setdefault(id(tensor), node.target), tensor
    return found


def _value_names(trace: Trace, constants: dict[fx.Node, tuple[str, torch.Tensor]]) -> Names:
    """A value is called as torch calls it; an input says what it is, with a colon that no op has in its name."""
    names = {node: node.name for node in trace.program.graph.nodes}
    names |= {node: f"constant:{source}" for node, (source, _) in constants.items()}
    placeholders = trace.program.graph.find_nodes(op="placeholder")
    return names | {node: f"{kind}:{source}" for node, (kind, source) in zip(placeholders, trace.inputs, strict=True)}


def _inputs(trace: Trace, constants: dict[fx.Node, tuple[str, torch.Tensor]], names: Names) -> tuple[Input, ...]:
    placeholders = trace.program.graph.find_nodes(op="placeholder")
    given = [
        Input(kind, source, value_of(names[node], node.meta["val"]))
        for node, (kind, source) in zip(placeholders, trace.inputs, strict=True)
    ]
    own = {
        source: Input("constant", source, value_of(names[node], tensor)) for node, (source, tensor) in constants.items()
    }
    return (*given, *own.values())


def _bytes(tensor: torch.Tensor) -> bytes | None:
    """The numbers of a constant in row-major order; None if the module itself has none, as on the meta device."""
    if isinstance(tensor, torch.nn.Parameter):
        raise CaptureError(
            f"a parameter of shape {tuple(tensor.shape)} is used from outside the module's parameters, so it would "
            "not be trained: register it with an nn.ParameterList or as an attribute of the module"
        )
    if isinstance(tensor, FakeTensor):
        return None
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _step(node: fx.Node, names: Names) -> Step | None:
    """The step that a node becomes; None for inputs, the output, and picks from an attention's results."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and gemm_of(node.all_input_nodes[0], names) is not None:
        return None
    return gemm_of(node, names) or _op(node, names)


def _op(node: fx.Node, names: Names) -> Op:
    value = node.meta.get("val")
    return Op(
        name=names[node],
        target=_target(node),
        args=tuple(_argument(argument, names) for argument in node.args),
        kwargs=tuple((key, _argument(argument, names)) for key, argument in node.kwargs.items()),
        value=value_of(names[node], value) if isinstance(value, torch.Tensor) else None,
        random=is_random(node.target),
    )


def _target(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    raise CaptureError(f"'{node.target}' is not an ATen op: write that part of the module with plain torch functions")


def _argument(argument: Any, names: Names) -> Any:
    """An argument in the words of a step graph."""
    if isinstance(argument, fx.Node):
        return Ref(names[argument])
    if isinstance(argument, (tuple, list)):
        return tuple(_argument(item, names) for item in argument)
    if isinstance(argument, LITERALS):
        return argument
    constant = constant_of(argument)
    if constant is None:
        raise _unsendable(argument)
    return constant


def _unsendable(thing: Any) -> CaptureError:
    return CaptureError(
        f"an op of the step takes a {type(thing).__name__}, which cannot be sent to the server: "
        "do without it; instead of a torch.Generator, seed the global one"
    )

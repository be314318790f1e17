"""Pure passes that make a step graph smaller without changing what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cleave_dask.graph.ir import Gemm, Op, Operand, Ref, Step, StepGraph, Value

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "_reshape_alias.default",
        "_unsafe_view.default",
        "alias.default",
        "detach.default",
        "expand.default",
        "lift_fresh.default",
        "permute.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "t.default",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
    )
)
"""Ops that show their input in another shape or with other strides, from its first element on, without copying."""

CAST = "aten._to_copy.default"


def simplify(graph: StepGraph) -> StepGraph:
    """The same step without repeated views and casts, without views that lead back, without dead ops."""
    return drop_dead(unify(graph))


def unify(graph: StepGraph) -> StepGraph:
    """Give one name to values that are one.

    Views of one value that start at its first element and have the same shape and strides are the same tensor: t(t(w))
    is w, and the flat views of a layer's input that each of its projections makes are one. So are equal casts of one
    value, as long as both are before or both after the loss: activation checkpointing casts again to save memory.
    """
    seed = seed_index(graph)
    values = {entry.value.name: entry.value for entry in graph.inputs}
    roots: dict[str, str] = {}  # the value that a view shows
    first: dict[Any, str] = {_identity(value, value.name): name for name, value in values.items()}
    same: dict[str, str] = {}
    steps: list[Step] = []
    for index, old in enumerate(graph.steps):
        step = rename(old, same, values)
        key = None
        if isinstance(step, Op) and step.value is not None:
            if _is_view(step, values):
                source = step.reads[0]
                roots[step.name] = roots.get(source, source)
                key = _identity(step.value, roots[step.name])
            elif step.target == CAST:
                key = (step.args, step.kwargs, index > seed)
        if key in first:
            same[step.name] = first[key]
            continue
        steps.append(step)
        for value in written(step):
            values[value.name] = value
            first[_identity(value, roots.get(value.name, value.name))] = value.name
        if key is not None:
            first[key] = step.name
    return _with_results(replace(graph, steps=tuple(steps)), same)


def drop_dead(graph: StepGraph) -> StepGraph:
    """The same step without what nothing reads. Draws from the random stream stay: those after them depend on it."""
    needed = {graph.loss, *(value for _, value in graph.grads), *(value for _, value in graph.buffers)}
    alive: list[Step] = []
    for step in reversed(graph.steps):
        if needed.intersection(step.writes) or (isinstance(step, Op) and step.random):
            needed.update(step.reads)
            alive.append(step)
    return replace(graph, steps=tuple(reversed(alive)))


def seed_index(graph: StepGraph) -> int:
    """Where the backward pass begins: the op that makes the loss's own gradient, which is one."""
    seed = (Ref(graph.loss),)
    for index, step in enumerate(graph.steps):
        if isinstance(step, Op) and step.target == "aten.ones_like.default" and step.args == seed:
            return index
    return len(graph.steps)


def written(step: Step) -> tuple[Value, ...]:
    """The tensors that a step makes; a tuple of tensors is made by the ops that pick from it."""
    if isinstance(step, Gemm):
        return step.outputs
    return () if step.value is None else (step.value,)


def rename(step: Step, same: Mapping[str, str], values: Mapping[str, Value]) -> Step:
    """The step with other values in place of those that it reads."""
    if same.keys().isdisjoint(step.reads):
        return step
    if isinstance(step, Op):
        return replace(step, args=_renamed(step.args, same), kwargs=_renamed(step.kwargs, same))
    parts = {name: values[same[name]] for name in step.reads if name in same}
    return replace(
        step,
        inputs=tuple(
            Operand(tuple(parts.get(part.name, part) for part in operand.parts), operand.axis)
            for operand in step.inputs
        ),
        biases=tuple(bias and parts.get(bias.name, bias) for bias in step.biases),
    )


def _is_view(op: Op, values: Mapping[str, Value]) -> bool:
    """Whether an op shows its input from its first element on; a slice does if it takes everything."""
    if op.target == "aten.slice.Tensor" and op.value is not None:
        return values[op.reads[0]].shape == op.value.shape
    return op.target in VIEWS


def _identity(value: Value, root: str) -> tuple[Any, ...]:
    return root, value.shape, value.strides


def _renamed(argument: Any, same: Mapping[str, str]) -> Any:
    if isinstance(argument, Ref):
        return Ref(same.get(argument.name, argument.name))
    return tuple(_renamed(item, same) for item in argument) if isinstance(argument, tuple) else argument


def _with_results(graph: StepGraph, same: Mapping[str, str]) -> StepGraph:
    return replace(
        graph,
        loss=same.get(graph.loss, graph.loss),
        grads=tuple((name, same.get(value, value)) for name, value in graph.grads),
        buffers=tuple((name, same.get(value, value)) for name, value in graph.buffers),
    )

"""What each gemm of a step is for, what it is called, and what it has to wait for. Pure functions of a step graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from cleave_dask.graph.ir import Gemm, Op, Role, Step, StepGraph
from cleave_dask.graph.simplifying import CAST, VIEWS, seed_index

PLAIN = VIEWS | {CAST, "aten.clone.default"}
"""Ops after which a value is still the same numbers."""


def annotate(graph: StepGraph, labels: Mapping[str, str] | None = None) -> StepGraph:
    """The graph with the role, the level and the name of each gemm; `labels` are other names for parameters."""
    roles = find_roles(graph)
    levels = find_levels(graph)
    names = find_names(graph, roles, labels or {})
    steps = [
        replace(step, role=roles[index], level=levels[index], name=names[index]) if isinstance(step, Gemm) else step
        for index, step in enumerate(graph.steps)
    ]
    return replace(graph, steps=tuple(steps))


def find_levels(graph: StepGraph) -> list[int]:
    """For each step the length of the longest chain of gemms up to it, itself included.

    Random ops wait for each other, so that nothing of a level draws before something of a level below it.
    """
    levels: list[int] = []
    level_of: dict[str, int] = {}
    last_draw = 0
    for step in graph.steps:
        level = max((level_of.get(name, 0) for name in step.reads), default=0)
        if isinstance(step, Gemm):
            level += 1
        elif step.random:
            level = last_draw = max(level, last_draw)
        levels.append(level)
        level_of.update(dict.fromkeys(step.writes, level))
    return levels


def find_roles(graph: StepGraph) -> dict[int, Role]:
    """The role of each gemm, by its index among the steps.

    Forward: it does not depend on the loss's gradient; so is a product that activation checkpointing repeats. dW: its
    results end in gradients of parameters and nowhere else, on the way only reshaped, cast or added up. Else dX.
    """
    seed = seed_index(graph)
    backward = set(graph.steps[seed].writes) if seed < len(graph.steps) else set()
    targets = trace_gradients(graph)
    roles: dict[int, Role] = {}
    for index, step in enumerate(graph.steps):
        if backward.intersection(step.reads):
            backward.update(step.writes)
        if isinstance(step, Gemm):
            late = not backward.isdisjoint(step.writes)
            weights = late and all(name in targets for name in step.writes)
            roles[index] = "dW" if weights else "dX" if late else "forward"
    return roles


def trace_gradients(graph: StepGraph) -> dict[str, str]:
    """The parameter whose gradient a value becomes, for values that are used for nothing else."""
    targets: dict[str, str] = {}
    for parameter, value in graph.grads:
        targets.setdefault(value, parameter)
    otherwise: set[str] = set()  # values that something else is made of
    for step in reversed(graph.steps):
        passes = isinstance(step, Op) and (step.target in PLAIN or step.target == "aten.add.Tensor")
        target = targets.get(step.writes[0]) if passes else None
        for name in step.reads:
            if target is None or name in otherwise:
                otherwise.add(name)
                targets.pop(name, None)
            else:
                targets.setdefault(name, target)
    return targets


def find_names(graph: StepGraph, roles: Mapping[int, Role], labels: Mapping[str, str]) -> dict[int, str]:
    """A readable and unique name for each gemm, by its index among the steps."""
    params = {entry.value.name: entry.source for entry in graph.inputs if entry.kind == "param"}
    order = list(params.values())
    origins = _trace_parameters(graph, params)
    targets = trace_gradients(graph)
    attentions: dict[str, str] = {}
    names: dict[int, str] = {}
    taken: Counter[str] = Counter()
    for index, step in enumerate(graph.steps):
        if not isinstance(step, Gemm):
            continue
        found = _attention_name(step, attentions)
        if found is None:
            sources = {targets[name] for name in step.writes} if roles[index] == "dW" else _weights(step, origins)
            words = [labels.get(source, source.removesuffix(".weight")) for source in sorted(sources, key=order.index)]
            found = join_names(words) if words else step.writes[0]
        name = found if roles[index] == "forward" else f"{found}:{roles[index]}"
        taken[name] += 1
        names[index] = name if taken[name] == 1 else f"{name}#{taken[name]}"
    return names


def join_names(names: Iterable[str]) -> str:
    """`join_names(["layers.0.q", "layers.0.k"])` is "layers.0.q+k"."""
    paths = [name.split(".") for name in dict.fromkeys(names)]
    common = 0
    while all(len(path) > common + 1 and path[common] == paths[0][common] for path in paths):
        common += 1
    return ".".join([*paths[0][:common], "+".join(".".join(path[common:]) for path in paths)])


def in_order(steps: Iterable[Step], positions: Iterable[int]) -> list[Step]:
    """The steps so that each follows what it reads, as near as that allows to the order of their positions.

    Random ops keep their order.
    """
    items = list(steps)
    order = dict(enumerate(positions))
    writers = {name: index for index, step in enumerate(items) for name in step.writes}
    waits = [{writers[name] for name in step.reads if name in writers} for step in items]
    draws = sorted((i for i, step in enumerate(items) if isinstance(step, Op) and step.random), key=order.__getitem__)
    for before, after in pairwise(draws):
        waits[after].add(before)
    followers: list[list[int]] = [[] for _ in items]
    for index, before_it in enumerate(waits):
        for before in before_it:
            followers[before].append(index)
    missing = [len(before_it) for before_it in waits]
    ready = [(order[index], index) for index, count in enumerate(missing) if count == 0]
    heapify(ready)
    done: list[Step] = []
    while ready:
        _, index = heappop(ready)
        done.append(items[index])
        for follower in followers[index]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heappush(ready, (order[follower], follower))
    assert len(done) == len(items), "a step waits for itself"
    return done


def _trace_parameters(graph: StepGraph, params: Mapping[str, str]) -> dict[str, str]:
    """The parameter whose numbers a value has, for values that are only reshaped or cast ones."""
    origins = dict(params)
    for step in graph.steps:
        if isinstance(step, Op) and step.target in PLAIN and step.reads and step.reads[0] in origins:
            origins[step.name] = origins[step.reads[0]]
    return origins


def _weights(gemm: Gemm, origins: Mapping[str, str]) -> set[str]:
    """The parameters that a gemm multiplies with: its right side, or else its left side."""
    for operand in reversed(gemm.inputs):
        if all(part.name in origins for part in operand.parts):
            return {origins[part.name] for part in operand.parts}
    return set()


def _attention_name(gemm: Gemm, attentions: dict[str, str]) -> str | None:
    """Attentions are numbered forward; a backward has the number of the forward whose logsumexp it reads."""
    if gemm.kind == "attention":
        name = f"attention.{len(attentions)}"
        attentions[gemm.outputs[1].name] = name
        return name
    if gemm.kind == "attention_backward":
        return attentions.get(gemm.inputs[-1].parts[0].name)
    return None

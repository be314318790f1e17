"""Families: the gemms of one linear layer, which have their operands in common.

Forward Y = X W, dX = dY W^T and dW = X^T dY go through the same cuboid of tokens, outs and features, each with another
of its three axes as k. A device that does the same box of all three needs its part of X, of W and of dY once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from cleave_dask.graph.ir import Gemm, Op, Operand, StepGraph

Matrix = tuple[tuple[str, ...], int]
"""What an operand is, whichever way it lies: the values that it is joined from, and along which axis."""

_TURNS = ("aten.t.default", "aten.transpose.int")


@dataclass(frozen=True, slots=True)
class Side:
    """An operand as a gemm reads it."""

    matrix: Matrix
    turned: bool  # transposed


@dataclass(frozen=True, slots=True)
class Member:
    """A gemm of a family."""

    gemm: Gemm
    sides: tuple[Side, Side]
    axes: tuple[int, int, int]  # which of the forward's rows (0), columns (1) and k (2) are this one's rows, columns, k
    kept: tuple[
        bool, bool
    ]  # operands of which a device has its part from the gemms before, if their boxes are the same


def families(graph: StepGraph) -> Iterator[tuple[Member, ...]]:
    """The gemms of each layer, forward first, then dX, then dW; families of one are none."""
    known = _sides(graph)
    gemms = [gemm for gemm in graph.gemms if gemm.name in known]
    forward = [gemm for gemm in gemms if gemm.role == "forward"]
    layers = Counter(known[gemm.name][1].matrix for gemm in forward)
    by_weight = {known[gemm.name][1].matrix: gemm for gemm in gemms if gemm.role == "dX"}
    by_input = {side.matrix: gemm for gemm in gemms if gemm.role == "dW" for side in known[gemm.name]}
    for gemm in forward:
        first, weight = known[gemm.name]
        if layers[weight.matrix] > 1:
            continue  # a weight of several layers: whose gradient is whose would have to be told apart
        found = [Member(gemm, (first, weight), (0, 1, 2), (False, False))]
        later, last = by_weight.get(weight.matrix), by_input.get(first.matrix)
        slope: Side | None = None
        if later is not None and known[later.name][1].turned != weight.turned:
            slope = known[later.name][0]
            found.append(Member(later, known[later.name], (0, 2, 1), (False, True)))
        if last is not None and (member := _gradient(last, known[last.name], first, slope)):
            found.append(member)
        alike = {(_extents(member), member.gemm.tile_dtype) for member in found}
        if len(found) > 1 and len(alike) == 1:
            yield tuple(found)


def numbered(graph: StepGraph, kept: Collection[str]) -> dict[str, tuple[tuple[int, bool], ...]]:
    """A number for each operand, and whether it is transposed, of all gemms in whose family one is `kept`.

    Operands with the same number are the same matrix.
    """
    numbers: dict[Matrix, int] = {}
    return {
        member.gemm.name: tuple((numbers.setdefault(side.matrix, len(numbers)), side.turned) for side in member.sides)
        for family in (families(graph) if kept else ())
        if any(member.gemm.name in kept for member in family)
        for member in family
    }


def _gradient(gemm: Gemm, sides: tuple[Side, Side], first: Side, slope: Side | None) -> Member | None:
    """The gradient of the weight as a member of the family whose input is `first`; `slope`: dY as dX reads it."""
    left, right = sides
    if right == first and (slope is None or left == Side(slope.matrix, not slope.turned)):
        return Member(gemm, sides, (1, 2, 0), (slope is not None, True))
    if left == Side(first.matrix, not first.turned) and (slope is None or right == slope):
        return Member(gemm, sides, (2, 1, 0), (True, slope is not None))
    return None


def _extents(member: Member) -> tuple[int, ...]:
    """Extents along the forward's rows, columns and k."""
    own, found = (member.gemm.m, member.gemm.n, member.gemm.k), [0, 0, 0]
    for axis, extent in zip(member.axes, own, strict=True):
        found[axis] = extent
    return tuple(found)


def _sides(graph: StepGraph) -> dict[str, tuple[Side, Side]]:
    """Both operands of each gemm, where they can be told."""
    origins, found = _origins(graph), dict[str, tuple[Side, Side]]()
    for gemm in graph.gemms:
        if gemm.kind == "gemm":
            left, right = (_side(operand, origins) for operand in gemm.inputs)
            if left is not None and right is not None:
                found[gemm.name] = left, right
    return found


def _origins(graph: StepGraph) -> Mapping[str, tuple[str, bool]]:
    """Of each value that is another one transposed: that other one, and whether the turns add up to one."""
    found: dict[str, tuple[str, bool]] = {}
    for step in graph.steps:
        if isinstance(step, Op) and step.target in _TURNS and step.value is not None and len(step.value.shape) == 2:
            name, turned = found.get(step.reads[0], (step.reads[0], False))
            found[step.name] = (name, not turned)
    return found


def _side(operand: Operand, origins: Mapping[str, tuple[str, bool]]) -> Side | None:
    """What an operand is; None if some of its parts are transposed and some are not."""
    names, turns = zip(*(origins.get(part.name, (part.name, False)) for part in operand.parts), strict=True)
    if len(set(turns)) > 1:
        return None
    axis = 0 if len(names) == 1 else operand.axis ^ turns[0]
    return Side((names, axis), turns[0])

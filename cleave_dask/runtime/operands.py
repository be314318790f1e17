"""Operands on a device: what it has fetched of the server's arrays, piece by piece, and what a tile still needs.

A slice of a gemm's operand is an area of a matrix: a range of its rows and one of its columns. Tiles of a device
overlap in them, and so do gemms that share a matrix, which one of them may read transposed: a tile fetches only the
parts that are neither here nor on their way, and puts its operand together from the pieces; whatever they were, it is
multiplied as one contiguous array, so its product is the same bit for bit. Slices of an attention are fetched whole.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cleave_dask.graph.ir import LOGITS, Range
from cleave_dask.runtime.tiles import SliceName, TileSpec, slice_names

Array = np.ndarray[Any, np.dtype[Any]]

Matrix = tuple[object, ...]
"""What slices have in common that can be pieces of one operand: run, step, and which matrix of these."""

Area = tuple[Range, Range]
"""Rows and columns of a matrix."""


@dataclass(frozen=True, slots=True)
class Need:
    """An operand slice: what the server knows it by, and which part of which matrix it is."""

    name: SliceName
    matrix: Matrix
    turned: bool = False  # it is read transposed
    whole: bool = False  # never fetched in parts
    shared: bool = False  # later gemms may need it too

    @property
    def area(self) -> Area:
        """The part of the matrix."""
        first, second = self.name[4:]
        return (second, first) if self.turned else (first, second)

    def part(self, area: Area) -> Need:
        """Another part of the same matrix."""
        run, step, job, operand = self.name[:4]
        first, second = area[::-1] if self.turned else area
        return replace(self, name=(run, step, job, operand, first, second))


def operand_slices(spec: TileSpec) -> list[Need]:
    """The operand slices of a tile, in the order that its kernel takes them."""
    names = slice_names(spec)
    if spec.values:
        return [
            Need(name, (*name[:2], "shared", number), turned, shared=True)
            for name, (number, turned) in zip(names, spec.values, strict=True)
        ]
    if spec.kind == "gemm" or spec.kind in LOGITS:
        return [Need(name, name[:4]) for name in names]
    return [Need(name, name, whole=True) for name in names]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an operand: an array that is here or on its way, what of it is meant, and where that goes."""

    arriving: asyncio.Future[Array]
    turned: bool  # against the operand
    source: tuple[slice, ...]  # empty: all of it
    target: tuple[slice, ...] = ()  # of the operand

    @property
    def array(self) -> Array:
        """The part, once it has arrived."""
        whole = self.arriving.result()
        part = whole[self.source[: whole.ndim]]
        return part.T if self.turned else part


def assembled(pieces: Sequence[Piece]) -> Array:
    """An operand from its pieces."""
    arrays = [piece.array for piece in pieces]
    if len(arrays) == 1:
        return arrays[0]
    shape = [max(piece.target[axis].stop for piece in pieces) for axis in range(arrays[0].ndim)]
    operand = np.empty(shape, arrays[0].dtype)
    for piece, array in zip(pieces, arrays, strict=True):
        operand[piece.target[: array.ndim]] = array
    return operand


@dataclass
class SliceCache:
    """Operand slices on this device: each fetched once, kept while there is room.

    Out go first, the least used before others, slices that no other gemm needs.
    """

    limit: int  # bytes
    held: OrderedDict[Need, asyncio.Future[Array]] = field(default_factory=OrderedDict)
    bytes: int = 0
    _sizes: dict[Need, int] = field(default_factory=dict)  # bytes of what has arrived and is counted
    _matrices: dict[Matrix, list[Need]] = field(default_factory=dict)  # what is held of each
    _newest: dict[str, int] = field(default_factory=dict)  # step, by run

    def missing(self, need: Need) -> list[Need]:
        """What of a slice is neither here nor on its way."""
        here = self._matrices.get(need.matrix, ())
        if need.whole:
            return [] if here else [need]
        gaps = [need.area]
        for other in here:
            gaps = [left for gap in gaps for left in _without(gap, other.area)]
        return [need.part(gap) for gap in gaps]

    def pieces(self, need: Need) -> list[Piece]:
        """A slice of which nothing is missing, in pieces; of what is here twice, either."""
        found: list[Piece] = []
        gaps = [need.area]
        for other in list(self._matrices.get(need.matrix, ())):
            if need.whole:
                found.append(Piece(self.held[other], turned=False, source=()))
                self.held.move_to_end(other)
                continue
            common = [both for gap in gaps if (both := _common(gap, other.area)) is not None]
            gaps = [left for gap in gaps for left in _without(gap, other.area)]
            for area in common:
                source, target = _within(area, other), _within(area, need)
                found.append(Piece(self.held[other], need.turned != other.turned, source, target))
                self.held.move_to_end(other)
        return found

    def add(self, need: Need, arriving: asyncio.Future[Array]) -> None:
        """Remember a slice that was asked for; slices of steps before it are of no more use."""
        run, step = need.name[:2]
        if step > self._newest.get(run, -1):
            self._newest[run] = step
            for other in [other for other in self.held if other.name[0] == run and other.name[1] < step]:
                self.drop(other)
        self.held[need] = arriving
        self._matrices.setdefault(need.matrix, []).append(need)
        arriving.add_done_callback(lambda done: self._arrived(need, done))

    def drop(self, need: Need) -> None:
        """Let go of a slice."""
        del self.held[need]
        self._forget(need)
        self.bytes -= self._sizes.pop(need, 0)

    def _forget(self, need: Need) -> None:
        held = self._matrices[need.matrix]
        held.remove(need)
        if not held:
            del self._matrices[need.matrix]

    def _arrived(self, need: Need, done: asyncio.Future[Array]) -> None:
        if self.held.get(need) is not done:
            return
        if done.cancelled() or done.exception() is not None:
            del self.held[need]
            self._forget(need)
            return
        self._sizes[need] = done.result().nbytes
        self.bytes += self._sizes[need]
        if self.bytes <= self.limit:
            return
        for other in sorted(self.held, key=lambda other: other.shared):  # stable: the least used first
            if self.bytes <= self.limit:
                break
            if other != need and other in self._sizes:
                self.drop(other)


def _common(one: Area, other: Area) -> Area | None:
    """What two areas have in common."""
    (top, left), (bottom, right) = (
        [end(a[edge], b[edge]) for a, b in zip(one, other, strict=True)] for edge, end in ((0, max), (1, min))
    )
    return ((top, bottom), (left, right)) if top < bottom and left < right else None


def _without(area: Area, hole: Area) -> list[Area]:
    """What is left of an area."""
    common = _common(area, hole)
    if common is None:
        return [area]
    (top, bottom), (left, right) = area
    (first, last), (begin, end) = common
    parts = [
        ((top, first), (left, right)),
        ((first, last), (left, begin)),
        ((first, last), (end, right)),
        ((last, bottom), (left, right)),
    ]
    return [(rows, cols) for rows, cols in parts if rows[0] < rows[1] and cols[0] < cols[1]]


def _within(area: Area, need: Need) -> tuple[slice, ...]:
    """Where an area of a matrix lies in a slice, as that is read."""
    rows, cols = (slice(span[0] - base[0], span[1] - base[0]) for span, base in zip(area, need.area, strict=True))
    return (cols, rows) if need.turned else (rows, cols)

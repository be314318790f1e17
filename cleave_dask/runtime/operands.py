"""Operands on a device: what it has fetched of the server's arrays, piece by piece, and what a tile still needs.

A slice of a gemm's operand has one range along k and one along its rows or columns. Tiles of a device share k and
overlap in the other: a tile fetches only the part that is neither here nor on its way, and puts its operand together
from the pieces; whatever they were, it is multiplied as one contiguous array, so its product is the same bit for bit.
Slices of an attention are fetched whole.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cleave_dask.graph.ir import LOGITS, Range
from cleave_dask.runtime.tiles import SliceName, TileSpec, slice_names

Array = np.ndarray[Any, np.dtype[Any]]

Line = tuple[object, ...]
"""What slices have in common that can be pieces of one operand."""


WHOLE = -1
"""The axis of slices that are not fetched in parts."""


def operand_slices(spec: TileSpec) -> list[tuple[SliceName, int]]:
    """The operand slices of a tile, and the axis along which each can be in pieces: rows of A, columns of B."""
    if spec.kind in LOGITS:
        return [(name, 0) for name in slice_names(spec)]
    return [(name, name[3] if spec.kind == "gemm" else WHOLE) for name in slice_names(spec)]


def named(name: SliceName, axis: int, span: Range) -> SliceName:
    """The same slice with another range along an axis."""
    run, step, job, operand, first, second = name
    if axis == WHOLE:
        return name
    return (run, step, job, operand, span, second) if axis == 0 else (run, step, job, operand, first, span)


def span_of(name: SliceName, axis: int) -> Range:
    """The range of a slice along an axis."""
    if axis == WHOLE:
        return 0, 1
    return name[4] if axis == 0 else name[5]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an operand: an array that is here or on its way, and what of it is meant."""

    arriving: asyncio.Future[Array]
    axis: int
    span: slice

    @property
    def array(self) -> Array:
        """The part, once it has arrived."""
        whole = self.arriving.result()
        if self.axis == WHOLE:
            return whole
        return whole[self.span] if self.axis == 0 else whole[:, self.span]


def assembled(pieces: Sequence[Piece]) -> Array:
    """An operand from its pieces, in order."""
    arrays = [piece.array for piece in pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=pieces[0].axis)


@dataclass
class SliceCache:
    """Operand slices on this device: each fetched once, kept while there is room, least used out first."""

    limit: int  # bytes
    held: OrderedDict[SliceName, asyncio.Future[Array]] = field(default_factory=OrderedDict)
    bytes: int = 0
    _lines: dict[Line, list[SliceName]] = field(default_factory=dict)  # slices with the same other range
    _newest: dict[str, int] = field(default_factory=dict)  # step, by run

    def missing(self, name: SliceName, axis: int) -> list[SliceName]:
        """What of a slice is neither here nor on its way."""
        at, stop = span_of(name, axis)
        gaps: list[SliceName] = []
        for _, start, end in self._overlapping(name, axis):
            if start > at:
                gaps.append(named(name, axis, (at, start)))
            at = max(at, end)
        return [*gaps, named(name, axis, (at, stop))] if at < stop else gaps

    def pieces(self, name: SliceName, axis: int) -> list[Piece]:
        """A slice of which nothing is missing, in pieces that follow each other."""
        at, stop = span_of(name, axis)
        found: list[Piece] = []
        for held, start, end in self._overlapping(name, axis):
            if end > at:
                upto = min(end, stop)
                found.append(Piece(self.held[held], axis, slice(at - start, upto - start)))
                self.held.move_to_end(held)
                at = upto
        return found

    def add(self, name: SliceName, axis: int, arriving: asyncio.Future[Array]) -> None:
        """Remember a slice that was asked for; slices of steps before it are of no more use."""
        run, step = name[:2]
        if step > self._newest.get(run, -1):
            self._newest[run] = step
            for other in [other for other in self.held if other[0] == run and other[1] < step]:
                self.drop(other)
        self.held[name] = arriving
        self._lines.setdefault(_line(name, axis), []).append(name)
        arriving.add_done_callback(lambda done: self._arrived(name, done))

    def drop(self, name: SliceName) -> None:
        """Let go of a slice."""
        gone = self.held.pop(name)
        self._forget(name)
        if gone.done() and not gone.cancelled() and gone.exception() is None:
            self.bytes -= gone.result().nbytes

    def _overlapping(self, name: SliceName, axis: int) -> list[tuple[SliceName, int, int]]:
        """Slices that have some of this one, in order, with their ranges."""
        start, stop = span_of(name, axis)
        spans = [(other, *span_of(other, axis)) for other in self._lines.get(_line(name, axis), ())]
        return sorted((entry for entry in spans if entry[1] < stop and entry[2] > start), key=lambda entry: entry[1])

    def _forget(self, name: SliceName) -> None:
        for axis in (0, 1, WHOLE):
            line = self._lines.get(_line(name, axis), [])
            if name in line:
                line.remove(name)
                if not line:
                    del self._lines[_line(name, axis)]

    def _arrived(self, name: SliceName, done: asyncio.Future[Array]) -> None:
        if self.held.get(name) is not done:
            return
        if done.cancelled() or done.exception() is not None:
            del self.held[name]
            self._forget(name)
            return
        self.bytes += done.result().nbytes
        for other in list(self.held):
            if self.bytes <= self.limit:
                break
            if other != name and self.held[other].done():
                self.drop(other)


def _line(name: SliceName, axis: int) -> Line:
    return (axis, *name) if axis == WHOLE else (axis, *name[:4], name[5 - axis])

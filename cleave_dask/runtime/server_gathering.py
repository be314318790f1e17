"""Slicing operands for devices and gathering the tiles that come back, one job at a time.

The order in which partial products along k are added is fixed by the tiles, never by who is first to deliver: the sum
is the same bit for bit whatever the devices do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any, Self

import numpy as np
import torch

from cleave_dask.graph.ir import LOGITS, Gemm, Operand, Range
from cleave_dask.graph.torch_ops import dtype_of
from cleave_dask.planning.cost import extent
from cleave_dask.planning.slices import SIDED
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.checking import REASON
from cleave_dask.runtime.interpreter import empty_output
from cleave_dask.runtime.trace import HERE
from cleave_dask.runtime.wire import to_wire, wire_dtype
from cleave_dask.runtime.wire_torch import from_wire

Array = np.ndarray[Any, np.dtype[Any]]
Check = Callable[[int, Sequence[Array]], bool]
Read = Callable[[str], torch.Tensor]
"""A value by its name."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who made a tile, and how long each part of it took, as the device says itself; the server adds what it saw."""

    device: str
    pull_seconds: float
    compute_seconds: float
    queued_seconds: float = 0.0
    upload_seconds: float = 0.0  # from the device's last number to the server's last byte
    down_bytes: int = 0
    arrived: float = 0.0  # seconds, on the server's clock
    moved: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # by direction: bytes, and busy seconds

    @classmethod
    def of(
        cls,
        device: str,
        pull_seconds: float,
        compute_seconds: float,
        *,
        timing: Mapping[str, Any] | None = None,
        moved: Mapping[str, tuple[int, float]] | None = None,
        arrived: float = 0.0,
    ) -> Self:
        """What a device says of a tile; what cannot be true becomes zero, so that a lie spoils its own row at most."""
        told = timing or {}
        sent = told.get("sent")
        return cls(
            str(device),
            _seconds(pull_seconds),
            _seconds(compute_seconds),
            _seconds(told.get("queued")),
            _seconds(arrived - sent) if isinstance(sent, int | float) else 0.0,
            int(_seconds(told.get("down_bytes"), most=2**62)),
            arrived,
            _moved(moved or {}),
        )

    def moved_up(self, arrays: Iterable[Any]) -> int:
        """Bytes that travelled with these arrays of a tile."""
        return 0 if self.device == HERE else sum(getattr(array, "nbytes", 0) for array in arrays)

    @property
    def started(self) -> float:
        """When the device took the tile up, on the server's clock."""
        before = self.pull_seconds + self.queued_seconds + self.compute_seconds + self.upload_seconds
        return self.arrived - before


def _seconds(told: Any, *, most: float = 1e6) -> float:
    """A number that a device sent, if it is one and within reason."""
    return float(told) if isinstance(told, int | float) and 0 <= told <= most else 0.0


def _moved(told: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """What a device says that its links carried, as far as a link could."""
    moved = {}
    for side in ("down", "up"):
        pair = told.get(side)
        if isinstance(pair, list | tuple) and len(pair) == 2:
            carried, seconds = int(_seconds(pair[0], most=2**62)), _seconds(pair[1])
            least, most = REASON[side]
            if seconds and least <= carried / seconds <= most:
                moved[side] = carried, seconds
    return moved


class TileRejected(Exception):
    """A pushed tile that is not what was asked for."""


def rounded(gemm: Gemm, read: Read) -> Read:
    """`read`, with the operands of a gemm as they travel: those that are rounded for it are rounded once."""
    if gemm.wire is None:
        return read
    dtypes = {part.name: dtype_of(gemm.sent_dtype(part)) for operand in gemm.inputs for part in operand.parts}
    kept: dict[str, torch.Tensor] = {}

    def read_rounded(name: str) -> torch.Tensor:
        found = kept.get(name)
        return kept.setdefault(name, read(name).to(dtypes[name])) if found is None else found

    return read_rounded


def operand_slice(
    gemm: Gemm,
    number: int,
    ranges: tuple[Range, Range],
    read: Read,
    convert: Callable[[torch.Tensor], Array] = to_wire,
) -> tuple[list[Array], int]:
    """The parts of an operand's slice, ready to send, and the axis along which the device joins them."""
    operand = gemm.inputs[number]
    spans = ranges if gemm.kind in SIDED else (ranges[0], _heads(gemm, operand.shape, ranges[1]))
    parts = [convert(_narrow(read(operand.parts[index].name), inner)) for index, inner in _parts_within(operand, spans)]
    return parts, operand.axis


def _parts_within(operand: Operand, spans: tuple[Range, Range]) -> Iterator[tuple[int, tuple[Range, Range]]]:
    """Which parts of a joined operand a slice touches, and where within each."""
    start = 0
    for index, part in enumerate(operand.parts):
        stop = start + part.shape[operand.axis]
        low, high = max(spans[operand.axis][0], start), min(spans[operand.axis][1], stop)
        if low < high:
            inner = (low - start, high - start)
            yield index, (inner, spans[1]) if operand.axis == 0 else (spans[0], inner)
        start = stop


def _narrow(tensor: torch.Tensor, spans: Sequence[Range]) -> torch.Tensor:
    """A view of a tensor cut along its first axes."""
    for axis, (start, stop) in enumerate(spans):
        if axis < tensor.ndim:
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def _heads(gemm: Gemm, shape: tuple[int, ...], groups: Range) -> Range:
    """The second-axis range of a batched operand: heads of these groups; all of it for a plain batched product."""
    if gemm.kind == "bmm":
        return 0, shape[1]
    ratio = shape[1] // gemm.n
    return groups[0] * ratio, groups[1] * ratio


def tile_forms(gemm: Gemm, tile: Tile) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each array of a tile, as its device sends it."""
    if gemm.kind == "gemm":
        return [((extent(tile.rows), extent(tile.cols)), gemm.tile_dtype)]
    if gemm.kind in LOGITS:
        return [((extent(tile.rows), *value.shape[1:]), gemm.sent_dtype(value)) for value in gemm.outputs]
    return [
        ((extent(tile.rows), extent(_heads(gemm, value.shape, tile.cols)), *value.shape[2:]), gemm.sent_dtype(value))
        for value in gemm.outputs
    ]


def tile_nbytes(gemm: Gemm, tiles: Sequence[Tile], number: int) -> int | None:
    """Bytes of a tile as its device sends it; None if there is no tile of this number."""
    if not 0 <= number < len(tiles):
        return None
    forms = tile_forms(gemm, tiles[number])
    return sum(prod(shape) * np.dtype(wire_dtype(dtype)).itemsize for shape, dtype in forms)


class Gathering:
    """The outputs of one job as they fill up; each tile is taken exactly once."""

    def __init__(self, gemm: Gemm, tiles: Sequence[Tile]) -> None:
        self.gemm = gemm
        self.tiles = tiles
        self.outputs = [empty_output(value) for value in gemm.outputs]
        self.accepted: set[int] = set()
        self._early: dict[int, list[torch.Tensor]] = {}
        self._waiting, self._followers = _chains(tiles, by_columns=gemm.kind == "logit_sums")
        self._lock = Lock()

    @property
    def complete(self) -> bool:
        """Whether every tile has come."""
        return len(self.accepted) == len(self.tiles)

    def wanted(self, numbers: Sequence[int]) -> list[int]:
        """Which of these tiles have not come yet."""
        return [number for number in numbers if number not in self.accepted]

    def accept(self, number: int, arrays: Sequence[Array], right: Check | None = None) -> bool:
        """Take a tile; False if it was taken before. Raises TileRejected if it is not what was asked for.

        `right` says whether a tile of the right form has the right numbers; operands are there until the last tile is.
        """
        if number in self.accepted:
            return False  # whatever it is: nobody looks at it
        tensors = [
            self._checked(array, shape, dtype)
            for array, (shape, dtype) in zip(arrays, self._expected(number, len(arrays)), strict=True)
        ]
        if right is not None and not self._is_right(right, number, arrays):
            raise TileRejected(f"tile {number} of {self.gemm.name} is not the product of its operands")
        with self._lock:
            if number in self.accepted:
                return False
            self._early[number] = tensors
            ready = [number] if self._waiting[number] == 0 else []
            while ready:
                current = ready.pop()
                self._add(self.tiles[current], self._early.pop(current))
                for follower in self._followers[current]:
                    self._waiting[follower] -= 1
                    if self._waiting[follower] == 0 and follower in self._early:
                        ready.append(follower)
            self.accepted.add(number)  # not before its numbers are in: whoever sees it here may end the job
            return True

    def _is_right(self, right: Check, number: int, arrays: Sequence[Array]) -> bool:
        try:
            return right(number, arrays)
        except KeyError:
            if number in self.accepted:
                return True  # another device was first, and the operands have been freed since
            raise

    def _expected(self, number: int, count: int) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of a tile."""
        if not 0 <= number < len(self.tiles):
            raise TileRejected(f"tile {number} of a job of {len(self.tiles)} tiles")
        wanted = tile_forms(self.gemm, self.tiles[number])
        if len(wanted) != count:
            raise TileRejected(f"{count} arrays for a tile of {len(wanted)}")
        return wanted

    def _checked(self, array: Array, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != wire_dtype(dtype):
            given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TileRejected(f"{given} where {wire_dtype(dtype)} {shape} was asked for")
        return from_wire(array, dtype)

    def _add(self, tile: Tile, tensors: Sequence[torch.Tensor]) -> None:
        """Write the first tile of a place along k, add the later ones; of a head's sums along its columns."""
        if self.gemm.kind == "logit_sums" and tile.cols[0] > 0:
            (sums, more), (logit, found) = self._places(tile, tensors)
            torch.logaddexp(sums, more, out=sums)
            logit.add_(found)
            return
        first = tile.ks[0] == 0
        for place, piece in self._places(tile, tensors):
            if first:
                place.copy_(piece)
            else:
                place.add_(piece)

    def _places(self, tile: Tile, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where each piece of a tile goes in the outputs."""
        if self.gemm.kind != "gemm":
            for output, tensor in zip(self.outputs, tensors, strict=True):
                if self.gemm.kind in LOGITS:
                    yield _narrow(output, (tile.rows,)), tensor
                    continue
                yield _narrow(output, (tile.rows, _heads(self.gemm, tuple(output.shape), tile.cols))), tensor
            return
        joined = Operand(self.gemm.outputs, axis=self.gemm.out_axis)
        done = 0
        for index, spans in _parts_within(joined, (tile.rows, tile.cols)):
            width = extent(spans[joined.axis])
            yield _narrow(self.outputs[index], spans), tensors[0].narrow(joined.axis, done, width)
            done += width

    def finish(self, read: Read) -> list[torch.Tensor]:
        """The complete outputs, biases added."""
        for output, bias in zip(self.outputs, self.gemm.biases, strict=False):
            if bias is not None:
                output.add_(read(bias.name))
        return self.outputs

    def block(self, rows: Range, cols: Range) -> Array:
        """A copy of one block of the first output."""
        if self.gemm.kind not in SIDED:
            cols = _heads(self.gemm, self.gemm.outputs[0].shape, cols)
        found = _narrow(self.outputs[0], (rows, cols))
        return np.array(to_wire(found if found.ndim > 1 else found[:, None]))


def _chains(tiles: Sequence[Tile], *, by_columns: bool) -> tuple[list[int], list[list[int]]]:
    """For each tile how many earlier ones along k, or columns, it must wait for, and which later ones wait for it."""
    waiting = [0] * len(tiles)
    followers: list[list[int]] = [[] for _ in tiles]
    sides = [(tile.rows, tile.ks, tile.cols) if by_columns else (tile.rows, tile.cols, tile.ks) for tile in tiles]
    if all(along[0] == 0 for _, _, along in sides):
        return waiting, followers
    cuts = np.array([(*rows, *across, along[0]) for rows, across, along in sides])
    for number, (r0, r1, c0, c1, k0) in enumerate(cuts):
        later = (cuts[:, 4] > k0) & (cuts[:, 0] < r1) & (r0 < cuts[:, 1]) & (cuts[:, 2] < c1) & (c0 < cuts[:, 3])
        followers[number] = np.flatnonzero(later).tolist()
        for follower in followers[number]:
            waiting[follower] += 1
    return waiting, followers

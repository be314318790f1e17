"""What a tile costs: bytes, seconds on each resource, memory.

For a gemm tile of m x n x k numbers of w bytes on a device with downlink B, uplink U (bytes/s) and F flop/s:

    down     (m k + k n) w / B      seconds, operand slices fetched once per device for all tiles that share them
    up       m n w / U              seconds
    compute  2 m n k / F            seconds
    latency  2 (down + up latency)  the tile is assigned, asks for its operands, gets them, and sends its result
    memory   (m k + k n + m n) w    bytes, a slice that tiles in flight share counted once

A batched product or an attention is cut by batch and head group; a tile moves and computes its share of the whole.
Of a head by vocabulary a tile of r rows and v words of width h moves (r + v) h w down, and up r numbers twice (sums) or
r h (dX) or v h (dW); the few numbers that go down with each row are counted where bytes are, not in plans.
The server's egress and ingress carry the sum of all downloads and uploads, and the scheduler spends
SCHEDULER_SECONDS on every parcel, one after another: resources like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from cleave_dask.fleet.devices import Device, Fleet, Server
from cleave_dask.graph.ir import ITEMSIZE, LOGITS, Gemm, Range
from cleave_dask.planning.slices import SIDED
from cleave_dask.planning.values import Tile

IN_FLIGHT = 3
"""Tiles that a device holds at once: one coming down, one in the multiplier, one going up."""

AT_ONCE = 2
"""Gemms that a device works on at once, one ending and one beginning: of each it holds two consecutive tiles."""

_RESIDENT = 0.88  # of what a gemm may fill of a device's memory: the slice that stays while tiles stream past

SCHEDULER_SECONDS = 0.5e-3
"""Seconds that the scheduler, one parcel after another, spends on each (measured: 0.4 to 0.7 ms)."""

ROUND_TRIPS = 2
"""Times that a tile's first byte waits for the links: assigned and asked for; sent and answered."""

UNDER_WAY = 0.1
"""Seconds of traffic that are under way over a link at once, beside its latency: a busy machine answers late."""

LEVEL_SECONDS = 0.03
"""Seconds from the last tile of a level to the first of the next, beside latency: processes written in Python."""

MESSAGE_BYTES = 500.0
"""Bytes of each direction for each tile: questions, answers, what is said of a result."""

CONFIRMED = 66.0 / (2 * 1448.0)
"""Bytes of one direction for each byte of the other: TCP's acknowledgements, one for every second packet."""

TILE_SECONDS = 2.2e-3
"""Seconds of a server process for each tile: handing out its slices, taking it in, checking, a row of the trace."""

BYTE_SECONDS = 2.0e-9
"""Seconds of a server process for each byte that it hands out or takes in."""

SHARED_TILE_SECONDS = 5.3e-3
"""Seconds of a core for each tile, in server, scheduler and device together: what counts where they share cores.

Inferred from core seconds of five runs by hand on a machine of pace 1.6, to within 15% (docs/results.md)."""

SHARED_BYTE_SECONDS = 8.0e-9
"""The same for each byte that goes down or up, with the kernel's part."""

TILES_UNDER_WAY = 2
"""Tiles that are under way over a link at once, however large."""

FILLER_SHARE = 0.15
"""Of what may be under way at once, what filler may fill: what others wait for finds the rest free."""


def work_seconds(server: Server, tiles: float, moved: float) -> dict[str, float]:
    """Seconds that tiles and the bytes moved for them take processes that are written in Python, by resource.

    The server's own, each of which does a part; and all together, where they share cores. Nothing of a server that says
    neither how many processes it has nor how many cores it shares.
    """
    found = {}
    if server.processes is not None:
        found["server"] = server.pace * (TILE_SECONDS * tiles + BYTE_SECONDS * moved) / server.processes
    if server.shared_cores is not None:
        together = SHARED_TILE_SECONDS * tiles + SHARED_BYTE_SECONDS * moved
        found["shared cores"] = server.pace * together / server.shared_cores
    return found


Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Shape:
    """All that planning needs to know of a gemm; gemms of one shape are planned once."""

    kind: str
    m: int
    n: int
    k: int
    flops: float  # of the whole cuboid
    down_bytes: float  # two sides: bytes of one number; otherwise: bytes of all inputs for one (batch, head group) cell
    up_bytes: float  # a gemm: bytes of one number; otherwise: bytes of all outputs for one cell, or row of sums

    @classmethod
    def of(cls, gemm: Gemm) -> Shape:
        """The shape of a gemm."""
        if gemm.kind == "gemm":
            width = ITEMSIZE[gemm.tile_dtype]
            return cls("gemm", gemm.m, gemm.n, gemm.k, gemm.flops, width, width)
        if gemm.kind in LOGITS:
            width, rows = ITEMSIZE[gemm.tile_dtype], sum(ITEMSIZE[value.dtype] for value in gemm.outputs)
            up = rows if gemm.kind == "logit_sums" else width
            return cls(gemm.kind, gemm.m, gemm.n, gemm.k, gemm.flops, width, up)
        cells = gemm.m * gemm.n
        down = sum(prod(operand.shape) * ITEMSIZE[gemm.sent_dtype(operand.parts[0])] for operand in gemm.inputs)
        up = sum(prod(value.shape) * ITEMSIZE[gemm.sent_dtype(value)] for value in gemm.outputs)
        return cls(gemm.kind, gemm.m, gemm.n, gemm.k, gemm.flops, down / cells, up / cells)

    @property
    def volume(self) -> int:
        """Multiplications of a gemm; cells of anything else."""
        return self.m * self.n * self.k

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows, columns, k."""
        return self.m, self.n, self.k

    @property
    def sides(self) -> tuple[int, int, int]:
        """The side that results are kept by, the other one, and the depth of both."""
        return (self.m, self.k, self.n) if self.kind in ("logit_dx", "logit_dw") else self.extents

    @property
    def least_down(self) -> float:
        """Bytes that must come down at least: every operand once."""
        if self.kind not in SIDED:
            return self.volume * self.down_bytes
        kept, other, depth = self.sides
        return (kept + other) * depth * self.down_bytes

    @property
    def least_up(self) -> float:
        """Bytes that must go up at least: every result once."""
        return self.m * self.up_bytes * (1 if self.kind == "logit_sums" else self.n)

    @property
    def longer(self) -> int:
        """The axis, rows (0) or columns (1), along which there is more: boxes of devices stand in columns across it."""
        return 0 if self.m >= self.n else 1


@dataclass(frozen=True)
class Rates:
    """A fleet as columns of numbers, one row per device."""

    down: Floats  # bytes per second
    up: Floats  # bytes per second
    flops: Floats  # flop per second
    memory: Floats  # bytes
    latency: Floats  # seconds that a device's first result waits for its links: ROUND_TRIPS of them

    @classmethod
    def of(cls, fleet: Fleet) -> Rates:
        """The columns of a fleet."""
        rows = np.array(
            [
                (d.down.bandwidth, d.up.bandwidth, d.flops, d.memory, ROUND_TRIPS * (d.down.latency + d.up.latency))
                for d in fleet.devices
            ],
            dtype=np.float64,
        )
        return cls(*np.ascontiguousarray(rows.T))

    def take(self, which: Any) -> Rates:
        """Some of the rows."""
        return Rates(*(column[which] for column in (self.down, self.up, self.flops, self.memory, self.latency)))

    def slowed(self, down: float, up: float) -> Rates:
        """The same devices when a server that cannot feed all links at once leaves each that share of its own."""
        return Rates(self.down * down, self.up * up, self.flops, self.memory, self.latency)

    @property
    def told(self) -> Rates:
        """The same of devices that have been told of their tiles and have asked: latency is that of one round trip."""
        return Rates(self.down, self.up, self.flops, self.memory, self.latency / ROUND_TRIPS)

    def __len__(self) -> int:
        return len(self.down)


def resident(shape: Shape, rates: Rates) -> Floats:
    """Numbers of the operand slice that each device can keep for all tiles of a box."""
    return _RESIDENT * rates.memory / (AT_ONCE * shape.down_bytes)


def smallest_bytes(shape: Shape) -> float:
    """Bytes that a device needs at least to take part: for two smallest tiles of each of the gemms it works on."""
    if shape.kind in LOGITS:  # one row and one word, of their whole width
        return 2 * AT_ONCE * (2 * shape.sides[2] * shape.down_bytes + shape.least_up / shape.m)
    cell = shape.down_bytes + shape.up_bytes if shape.kind != "gemm" else 2 * shape.down_bytes + shape.up_bytes
    return 2 * AT_ONCE * cell


@dataclass(frozen=True, slots=True)
class TileCost:
    """One tile on one device: seconds on every resource, bytes on every link, bytes of memory."""

    down_seconds: float
    up_seconds: float
    compute_seconds: float
    latency_seconds: float
    scheduler_seconds: float
    down_bytes: int
    up_bytes: int
    memory: int

    @property
    def seconds(self) -> float:
        """From the moment the scheduler turns to it until its result is on the server, if nothing overlaps."""
        return (
            self.down_seconds + self.up_seconds + self.compute_seconds + self.latency_seconds + self.scheduler_seconds
        )


def tile_cost(gemm: Gemm, tile: Tile, device: Device, *, scheduler_seconds: float = SCHEDULER_SECONDS) -> TileCost:
    """What `tile` costs on `device` when it fetches all its operands itself."""
    down = sum(slice_bytes(gemm, tile.rows, tile.cols, tile.ks))
    up = result_bytes(gemm, tile.rows, tile.cols)
    return TileCost(
        down_seconds=down / device.down.bandwidth,
        up_seconds=up / device.up.bandwidth,
        compute_seconds=tile_flops(gemm, tile) / device.flops,
        latency_seconds=ROUND_TRIPS * (device.down.latency + device.up.latency),
        scheduler_seconds=scheduler_seconds,
        down_bytes=down,
        up_bytes=up,
        memory=down + up,
    )


def extent(span: Range) -> int:
    """Length of a range."""
    return span[1] - span[0]


def slice_bytes(gemm: Gemm, rows: Range, cols: Range, ks: Range) -> tuple[int, ...]:
    """Bytes of the slice of each input that a tile over these ranges needs."""
    width = ITEMSIZE[gemm.tile_dtype]
    if gemm.kind == "gemm":
        return extent(rows) * extent(ks) * width, extent(ks) * extent(cols) * width
    if gemm.kind in LOGITS:
        other = cols if gemm.kind == "logit_sums" else ks
        lengths = rows, other, *[ks if gemm.kind == "logit_dw" else rows] * (len(gemm.inputs) - 2)
        each = [prod(operand.shape[1:]) * ITEMSIZE[gemm.sent_dtype(operand.parts[0])] for operand in gemm.inputs]
        return tuple(extent(span) * size for span, size in zip(lengths, each, strict=True))
    share = _share(gemm, rows, cols)
    sizes = (prod(operand.shape) * ITEMSIZE[gemm.sent_dtype(operand.parts[0])] for operand in gemm.inputs)
    return tuple(round(share * size) for size in sizes)


def result_bytes(gemm: Gemm, rows: Range, cols: Range) -> int:
    """Bytes of a tile's result."""
    if gemm.kind == "gemm":
        return extent(rows) * extent(cols) * ITEMSIZE[gemm.tile_dtype]
    if gemm.kind in LOGITS:
        return extent(rows) * sum(prod(v.shape[1:]) * ITEMSIZE[gemm.sent_dtype(v)] for v in gemm.outputs)
    size = sum(prod(value.shape) * ITEMSIZE[gemm.sent_dtype(value)] for value in gemm.outputs)
    return round(_share(gemm, rows, cols) * size)


def tile_memory(gemm: Gemm, rows: Range, cols: Range, ks: Range) -> int:
    """Bytes that a device holds for a tile while it multiplies: operands and result."""
    return sum(slice_bytes(gemm, rows, cols, ks)) + result_bytes(gemm, rows, cols)


def tile_flops(gemm: Gemm, tile: Tile) -> float:
    """Floating point operations of a tile: its share of the gemm's cuboid."""
    volume = extent(tile.rows) * extent(tile.cols) * extent(tile.ks)
    return gemm.flops * volume / (gemm.m * gemm.n * gemm.k)


def _share(gemm: Gemm, rows: Range, cols: Range) -> float:
    """Fraction of a batched op that a (batch, head group) range covers."""
    return extent(rows) * extent(cols) / (gemm.m * gemm.n)

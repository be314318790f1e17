"""A layout: the tiles of one gemm as columns of numbers, whose each is, and what that costs on every resource.

A device's slices are fetched once for all its tiles that share them while its memory lasts; where it does not, a slice
that the last tiles did not use comes down again. Tiles go out in parcels: as many for each device as take the scheduler
no more than a quarter of the gemm's time, but one at least. A device begins after its start: the links' latency and
the place of its first parcel in the scheduler's queue. From then on its tiles, in
growing order, follow each other through its three stages, each first come first served:

    arrived[i] = arrived[i-1] + slices not yet there        through[i] = max(through[i-1], ready[i]) + seconds[i]

where a tile is ready for the multiplier when it has arrived, and for the uplink when it is multiplied: the same as the
simulator does. The gemm's time is that of the last device, or of the scheduler or the server's links if those take
longer. In memory a device has two tiles with their operands, a slice that both need once, for each of the gemms that it
works on at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from cleave_dask.fleet.devices import Server
from cleave_dask.planning.cost import AT_ONCE, IN_FLIGHT, SCHEDULER_SECONDS, Floats, Ints, Rates, Shape
from cleave_dask.planning.growing import growing_order
from cleave_dask.planning.slices import SIDED, fetched, newly, results, segments, turned

STAGES = ("downlink", "compute", "uplink")

_SCHEDULER_SHARE = 0.25  # of a gemm's time that the scheduler may spend on its parcels, if there are more than it must


@dataclass(frozen=True, eq=False)
class Layout:
    """The tiles of one gemm, in canonical order (k, rows, columns), and their price."""

    shape: Shape
    ranges: Ints  # (tiles, 6): rows, cols, ks, each start and stop
    owner: Ints  # device of each tile, by its position in the fleet
    devices: Ints  # that have a tile
    stages: Floats  # (3, devices): seconds down, in the multiplier, up
    through: Floats  # seconds from its first byte to its last, of each device
    tiles: Ints  # of each device
    together: int  # tiles of a parcel
    memory: Floats  # bytes that each device needs at most
    latency: Floats  # seconds that the first result of each device waits for its links
    queue: Floats  # seconds that the first parcel of each device waits for the scheduler
    down_bytes: float
    up_bytes: float
    egress_seconds: float
    ingress_seconds: float
    scheduler_seconds: float
    kept: tuple[bool, ...] = ()  # operands of which each device has its part from gemms before; empty: of none

    def places(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The place of each of `count` devices in the scheduler's queue; those without tiles come last."""
        found = np.full(count, len(self.devices), dtype=np.int32)
        found[self.devices[np.argsort(self.queue, kind="stable")]] = np.arange(len(self.devices))
        return found

    def moved(self, devices: Ints, slots: int = 1) -> Layout:
        """The same layout on other devices: those at these positions; `slots` gemms shared the scheduler."""
        return replace(
            self,
            owner=devices[self.owner],
            devices=devices[self.devices],
            scheduler_seconds=self.scheduler_seconds / slots,
        )

    @property
    def start(self) -> Floats:
        """Seconds before the first byte of each device moves."""
        return self.latency + self.queue

    @cached_property
    def finish(self) -> Floats:
        """Seconds after which each device is through."""
        return self.start + self.through

    @cached_property
    def devices_seconds(self) -> float:
        """Seconds until the last device is through."""
        return float(self.finish.max())

    @property
    def seconds(self) -> float:
        """Seconds of this gemm alone on the fleet."""
        return max(self.devices_seconds, self.scheduler_seconds, self.egress_seconds, self.ingress_seconds)

    @property
    def binding(self) -> str:
        """The resource that decides `seconds`."""
        for name in ("scheduler", "egress", "ingress"):
            if getattr(self, f"{name}_seconds") >= self.seconds:
                return name if name == "scheduler" else f"server {name}"
        last = int(self.finish.argmax())
        stage = int(self.stages[:, last].argmax())
        parts = {STAGES[stage]: self.stages[stage, last], "latency": self.latency[last], "scheduler": self.queue[last]}
        return max(parts, key=lambda name: parts[name])


def lay_out(
    shape: Shape,
    ranges: Ints,
    owner: Ints,
    rates: Rates,
    server: Server,
    *,
    scheduler_seconds: float = SCHEDULER_SECONDS,
    place: Ints | None = None,
    kept: tuple[bool, ...] = (),
) -> Layout:
    """The layout of these tiles, priced: `place`, of each device in the scheduler's queue; `kept`, see `Layout`."""
    rows, cols, ks = ranges[:, 0::2].T * (np.array(shape.extents)[:, None] + 1) + ranges[:, 1::2].T
    order = np.lexsort((cols, rows, ks))
    ranges, owner = ranges[order], owner[order]
    devices = np.unique(owner)
    here = rates.take(devices)
    order, turn = growing_order(ranges, owner, place)
    which = np.searchsorted(devices, owner[order])
    size = (ranges[order, 1::2] - ranges[order, 0::2]).astype(np.float64)
    down = _down(shape, ranges[order], which, size, here.memory, kept)
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    up = results(shape.kind, size) * shape.up_bytes
    seconds = np.stack([down / here.down[which], flops / here.flops[which], up / here.up[which]])
    stages: Floats = np.stack([np.bincount(which, stage).astype(np.float64) for stage in seconds])
    tiles = np.bincount(which)
    through = _through(seconds, turn, which)
    turns = np.empty(len(devices))
    turns[which] = turn + 1.0
    together = _together(tiles, scheduler_seconds, float((through + here.latency).max()))
    return Layout(
        shape=shape,
        ranges=ranges,
        owner=owner,
        devices=devices,
        stages=stages,
        through=through,
        tiles=tiles,
        together=together,
        memory=AT_ONCE * _held(shape, ranges[order], which, size),
        latency=here.latency,
        queue=scheduler_seconds * turns,
        down_bytes=float(down.sum()),
        up_bytes=float(up.sum()),
        egress_seconds=float(down.sum()) / server.egress,
        ingress_seconds=float(up.sum()) / server.ingress,
        scheduler_seconds=scheduler_seconds * float(np.ceil(tiles / together).sum()),
        kept=kept,
    )


def _through(seconds: Floats, turn: Ints, which: Ints) -> Floats:
    """When each device is through with its tiles, which come device after device: (3, tiles) are their stages.

    through[i] = total[i] + max over j <= i of (ready[j] - total[j-1]), for all devices at once: what a device has is
    lifted above whatever those before it have.
    """
    first = np.flatnonzero(np.concatenate([[True], turn[1:] != turn[:-1]]))
    counts = np.diff(np.append(first, len(turn)))
    lift = turn * (4.0 * float(np.add.reduceat(seconds, first, axis=1).max()) + 1e-9)
    ready = np.zeros(len(turn))
    for stage in seconds:
        total = np.cumsum(stage)
        total -= np.repeat(total[first] - stage[first], counts)
        ready = total + np.maximum.accumulate(ready - (total - stage) + lift) - lift
    through = np.empty(len(first))
    through[which[first]] = ready[first + counts - 1]
    return through


def footprint(shape: Shape, size: Floats) -> Floats:
    """Bytes of operands and result of each tile."""
    up = results(shape.kind, size) * shape.up_bytes
    if shape.kind not in SIDED:
        return np.asarray(size[:, 0] * size[:, 1] * shape.down_bytes + up)
    kept, other, depth = turned(shape.kind, size).T
    return np.asarray((kept + other) * depth * shape.down_bytes + up)


def _together(tiles: Ints, slot: float, seconds: float) -> int:
    """Tiles of a parcel: few, so that parcels can go to whoever is free, if the scheduler has the time.

    A device has all its parcels in flight at once, so that downloads can run ahead of what is still to be sent.
    """
    parcels = _SCHEDULER_SHARE * seconds / (slot * len(tiles)) if slot else IN_FLIGHT
    return ceil(int(tiles.max()) / min(IN_FLIGHT, max(1, int(parcels))))


def _held(shape: Shape, ranges: Ints, which: Ints, size: Floats) -> Floats:
    """Bytes of any two consecutive tiles of each device at most, operands and results; tiles device after device."""
    held, shared = footprint(shape, size), np.zeros(len(which) - 1)
    if shape.kind in SIDED:
        ranges = turned(shape.kind, ranges)
        low, high = np.maximum(ranges[1:, 0::2], ranges[:-1, 0::2]), np.minimum(ranges[1:, 1::2], ranges[:-1, 1::2])
        both = np.maximum(high - low, 0).astype(np.float64)
        shared = (both[:, 0] + both[:, 1]) * both[:, 2] * shape.down_bytes
    pair = held.copy()
    pair[1:] += np.where(which[1:] == which[:-1], held[:-1] - shared, 0.0)
    most = np.zeros(which.max() + 1)
    np.maximum.at(most, which, pair)
    return most


def _down(shape: Shape, ranges: Ints, which: Ints, size: Floats, memory: Floats, kept: tuple[bool, ...] = ()) -> Floats:
    """Bytes that come down for each tile, of devices' tiles in the order that they take them."""
    if shape.kind not in SIDED:
        return np.asarray(size[:, 0] * size[:, 1] * shape.down_bytes, dtype=np.float64)
    ranges, size, deepest = turned(shape.kind, ranges), turned(shape.kind, size), shape.sides[2] + 1
    group = (which * deepest + ranges[:, 4]) * deepest + ranges[:, 5]
    spans = [(ranges[:, 2 * axis], ranges[:, 2 * axis + 1]) for axis in fetched(kept)]
    if not spans:
        return np.zeros(len(which))
    depth = size[:, 2] * shape.down_bytes
    once = sum(newly(group, *span) for span in spans) * depth
    fits = (np.bincount(which, once, minlength=len(memory)) <= memory / 2)[which]
    if fits.all():
        return np.asarray(once)
    some = ~fits
    needed = _needed(group[some], [(start[some], stop[some]) for start, stop in spans], depth[some], which[some])
    fits[some] = needed <= memory[which[some]] / 2
    again = [_fresh(np.stack([group, *span])) * (span[1] - span[0]) for span in spans]
    return np.where(fits, once, sum(again) * size[:, 2] * shape.down_bytes)


def _needed(group: Ints, spans: list[tuple[Ints, Ints]], depth: Floats, which: Ints) -> Floats:
    """Bytes of operands that the device of each tile must have at once, if it lets go of what no later tile needs.

    Tiles come device after device. Of two that follow each other the second comes down while the first is multiplied.
    """
    change = np.zeros(len(which) + 1)
    firsts = np.flatnonzero(np.concatenate([[True], which[1:] != which[:-1]]))
    counts = np.diff(np.append(firsts, len(which)))
    end = np.repeat(firsts + counts, counts)
    for start, stop in spans:
        place, segment, length = segments(group, start, stop)
        _, first, number = np.unique(segment, return_index=True, return_inverse=True)
        last = np.zeros(len(first), dtype=np.int64)
        np.maximum.at(last, number, place)
        kept = length[first] * depth[place[first]]
        np.add.at(change, place[first], kept)
        np.add.at(change, np.minimum(last + 2, end[last]), -kept)
    return np.repeat(np.maximum.reduceat(np.cumsum(change)[:-1], firsts), counts)


def _fresh(key: Ints) -> Ints:
    """1 where a device's tile needs a slice that none of its last IN_FLIGHT - 1 tiles had, else 0."""
    new = np.ones(key.shape[1], dtype=np.int64)
    for back in range(1, IN_FLIGHT):
        new[back:] &= ~(key[:, back:] == key[:, :-back]).all(axis=0)
    return new

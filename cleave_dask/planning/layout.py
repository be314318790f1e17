"""A layout: the tiles of one gemm as columns of numbers, whose each is, and what that costs on every resource.

A device's slices are fetched once for all its tiles that share them while its memory lasts; where it does not, a slice
that the last tiles did not use comes down again. Tiles go out in parcels: as many for each device as take the scheduler
no more than a quarter of the gemm's time, but one at least. A device's time is its start (latency and the place of its
first parcel in the scheduler's queue, longest work first) and its pipelined stages; the gemm's time is that of the last
device, or of the scheduler or the server's links if those take longer. In memory a device has two tiles with their
operands, a slice that both need once, for each of the gemms that it works on at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from cleave_dask.fleet.devices import Server
from cleave_dask.planning.cost import AT_ONCE, IN_FLIGHT, SCHEDULER_SECONDS, Floats, Ints, Rates, Shape, pipelined

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
        return self.start + pipelined(self.stages[0], self.stages[2], self.stages[1], self.tiles)

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
) -> Layout:
    """The layout of these tiles, priced."""
    order = np.lexsort(ranges.T[[3, 2, 1, 0, 5, 4]])
    ranges, owner = ranges[order], owner[order]
    devices, which = np.unique(owner, return_inverse=True)
    here = rates.take(devices)
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    volume = np.bincount(which, size.prod(axis=1))
    up = np.bincount(which, size[:, 0] * size[:, 1]) * shape.up_bytes
    tiles = np.bincount(which)
    down = _down(shape, ranges, which, size, here.memory)
    stages = np.stack([down / here.down, volume * (shape.flops / shape.volume) / here.flops, up / here.up])
    work = pipelined(stages[0], stages[2], stages[1], tiles) + here.latency
    place = np.empty(len(devices))
    place[np.argsort(-work, kind="stable")] = np.arange(1, len(devices) + 1)
    together = _together(tiles, scheduler_seconds, float(work.max()))
    return Layout(
        shape=shape,
        ranges=ranges,
        owner=owner,
        devices=devices,
        stages=stages,
        tiles=tiles,
        together=together,
        memory=AT_ONCE * _held(shape, ranges, which, size),
        latency=here.latency,
        queue=scheduler_seconds * place,
        down_bytes=float(down.sum()),
        up_bytes=float(up.sum()),
        egress_seconds=float(down.sum()) / server.egress,
        ingress_seconds=float(up.sum()) / server.ingress,
        scheduler_seconds=scheduler_seconds * float(np.ceil(tiles / together).sum()),
    )


def footprint(shape: Shape, size: Floats) -> Floats:
    """Bytes of operands and result of each tile."""
    if shape.kind != "gemm":
        return size[:, 0] * size[:, 1] * (shape.down_bytes + shape.up_bytes)
    return (size[:, 0] + size[:, 1]) * size[:, 2] * shape.down_bytes + size[:, 0] * size[:, 1] * shape.up_bytes


def _together(tiles: Ints, slot: float, seconds: float) -> int:
    """Tiles of a parcel: few, so that parcels can go to whoever is free, if the scheduler has the time."""
    most = int(tiles.max())
    parcels = _SCHEDULER_SHARE * seconds / (slot * len(tiles)) if slot else most
    return ceil(most / min(most, max(1, int(parcels))))


def _held(shape: Shape, ranges: Ints, which: Ints, size: Floats) -> Floats:
    """Bytes of any two consecutive tiles of each device at most, operands and results."""
    order = np.argsort(which, kind="stable")
    who, area = which[order], size[order, 0] * size[order, 1]
    if shape.kind != "gemm":
        slices = [area * shape.down_bytes]
        same = [np.zeros(len(order) - 1, dtype=bool)]
    else:
        slices = [size[order, axis] * size[order, 2] * shape.down_bytes for axis in (0, 1)]
        keys = [ranges[order][:, [2 * axis, 2 * axis + 1, 4, 5]] for axis in (0, 1)]
        same = [(key[1:] == key[:-1]).all(axis=1) for key in keys]
    held = sum(slices) + area * shape.up_bytes
    pair = held.copy()
    before = area[:-1] * shape.up_bytes + sum(np.where(s, 0.0, part[:-1]) for s, part in zip(same, slices, strict=True))
    pair[1:] += np.where(who[1:] == who[:-1], before, 0.0)
    most = np.zeros(who[-1] + 1)
    np.maximum.at(most, who, pair)
    return most


def _down(shape: Shape, ranges: Ints, which: Ints, size: Floats, memory: Floats) -> Floats:
    """Bytes that each device receives."""
    count = len(memory)
    if shape.kind != "gemm":
        return np.bincount(which, size[:, 0] * size[:, 1] * shape.down_bytes, minlength=count).astype(np.float64)
    total, again = np.zeros(count), np.zeros(count)
    for axis in (0, 1):
        weight = size[:, axis] * size[:, 2] * shape.down_bytes
        key = np.stack([which, *(ranges[:, c] for c in (2 * axis, 2 * axis + 1, 4, 5))])
        total += np.bincount(which, weight * _first(key), minlength=count)
        again += np.bincount(which, weight * _fresh(key), minlength=count)
    received: Floats = np.where(total <= memory / 2, total, again)
    return received


def _first(key: Ints) -> Ints:
    """1 where a column of `key` appears for the first time, else 0."""
    order = np.lexsort(key)
    ordered = key[:, order]
    new = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
    found = np.zeros(key.shape[1], dtype=np.int64)
    found[order[new]] = 1
    return found


def _fresh(key: Ints) -> Ints:
    """1 where a device's tile needs a slice that none of its last IN_FLIGHT - 1 tiles had, else 0."""
    order = np.argsort(key[0], kind="stable")
    ordered = key[:, order]
    new = np.ones(key.shape[1], dtype=np.int64)
    for back in range(1, IN_FLIGHT):
        same = (ordered[:, back:] == ordered[:, :-back]).all(axis=0)
        new[back:] &= ~same
    found = np.zeros(key.shape[1], dtype=np.int64)
    found[order] = new
    return found

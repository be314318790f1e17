"""Balancing: the sizes at which all devices of an arrangement finish together.

An arrangement is a cuboid cut into zones, a zone along k into slabs, a slab into columns, a column into boxes, one for
each device. Who is where is fixed here; how large everything is follows from when each device would be through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cleave_dask.planning.cost import Floats, Ints, Rates, Shape, resident
from cleave_dask.planning.growing import ENDLESS, STREAMED, box_seconds, largest_strip

_SWEEPS, _FIRST = 18, 6  # damped, it converges to a percent or so; before the first few it is not worth a look
_STEPS = 2  # of Newton's method
_K = 2

Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Job:
    """What is to be packed: a gemm and, for each device that takes part, its speed, its start and its best box."""

    shape: Shape
    rates: Rates
    start: Floats  # seconds that pass before the device's first byte moves: latency and the scheduler's queue
    strips: Ints  # that the device's box will be cut into
    volume: Floats  # multiplications that the device should do
    best: Floats  # (3, devices): rows, columns and k of its best box
    drag: Floats  # how many times longer than expected each one's tiles turned out to take

    def take(self, which: Ints) -> Job:
        """Some of the devices, in that order."""
        return Job(
            self.shape,
            self.rates.take(which),
            self.start[which],
            self.strips[which],
            self.volume[which],
            self.best[:, which],
            self.drag[which],
        )


@dataclass(frozen=True)
class Arrangement:
    """Devices in zones, slabs and columns: their order, and the sizes of all of them."""

    across: (
        int  # the axis along which columns stand side by side: rows or columns of the gemm; boxes lie along the other
    )
    order: Ints  # devices by zone, slab and column
    column: Ints  # of each device, in that order
    slab: Ints  # of each column
    zone: Ints  # of each slab
    reach: Floats  # of each zone, along the axis of its columns
    thickness: Floats  # of each slab, along k
    width: Floats  # of each column
    height: Floats  # of each device, in that order

    @property
    def extents(self) -> Floats:
        """(3, devices): rows, columns and k of each box, devices in `order`."""
        found = np.empty((3, len(self.order)))
        found[self.across] = self.width[self.column]
        found[1 - self.across] = self.height
        found[_K] = self.thickness[self.slab][self.column]
        return found


def stage_seconds(job: Job, extents: Floats) -> tuple[Floats, Floats, Floats]:
    """Seconds that boxes of these extents (3, devices) take to come down, be multiplied, go up.

    Where no slice of a box fits into memory, its columns come down once for each part of its rows that does.
    """
    rows, cols, ks = extents
    shape, rates = job.shape, job.rates
    room = resident(shape, rates)
    again = np.where(np.minimum(rows, cols) * ks > room, np.maximum(1.0, 2.0 * rows * ks / room), 1.0)
    down = (rows + cols * again) * ks * shape.down_bytes / rates.down
    up = rows * cols * shape.up_bytes / rates.up
    return down, rows * cols * ks * (shape.flops / shape.volume) / rates.flops, up


def fitted(shape: Shape, draft: Arrangement) -> Arrangement:
    """The same arrangement, stretched to fill the cuboid exactly."""
    reach = draft.reach * (shape.extents[draft.across] / draft.reach.sum())
    thickness = draft.thickness * (shape.k / np.bincount(draft.zone, draft.thickness))[draft.zone]
    width = draft.width * (reach[draft.zone] / np.bincount(draft.slab, draft.width))[draft.slab]
    height = draft.height * (shape.extents[1 - draft.across] / np.bincount(draft.column, draft.height))[draft.column]
    return replace(draft, reach=reach, thickness=thickness, width=width, height=height)


def finish_seconds(job: Job, extents: Floats) -> Floats:
    """Seconds after which each device is through with a box of these extents.

    A box is done in growing order while its operands fit into memory: a head as long as the shorter side and it leave
    room for. Then the slice along the shorter side stays, while tiles across the longer one stream past. When the head
    is there, h of p seconds, its part of W can have gone up; if it is a square, or longer, nothing is lost:

        max(growing order, h + q + (1 - h / p) W)   if h < q, else   growing order
    """
    down, compute, up = stage_seconds(job, extents)
    rows, cols, ks = extents
    endless, many = job.strips == ENDLESS, np.maximum(STREAMED * job.strips, 1)
    work = np.maximum(compute, up) + np.minimum(compute, up) * _lag(job)
    second = ks * job.shape.down_bytes / job.rates.down  # of a row or a column
    short, long = np.minimum(rows, cols) * second, np.maximum(rows, cols) * second
    head = np.clip(resident(job.shape, job.rates) * job.shape.down_bytes / job.rates.down - short, 0.0, long)
    growing = np.maximum(down, box_seconds(rows * second, cols * second, work, job.strips))
    waiting = head + short + work * (1.0 - head / np.maximum(long, 1e-300)) + down / many
    streaming = np.where(head < short, np.maximum(growing, waiting), growing)
    through = np.where(endless, np.maximum(down, work), streaming)
    return np.asarray(job.start + job.drag * through, dtype=np.float64)


def _lag(job: Job) -> Floats:
    """What of the lesser of multiplier and uplink does not overlap with the other: the largest strip."""
    return np.where(job.strips == ENDLESS, 0.0, largest_strip(job.strips))


def longest(job: Job, draft: Arrangement) -> float:
    """Seconds until the last device is through with its box; what is lower than a number is rounded away."""
    finish = finish_seconds(job.take(draft.order), draft.extents)
    return float(np.where(draft.height >= 0.5, finish, 0.0).max())


def balanced(job: Job, draft: Arrangement, *, sweeps: int = _SWEEPS) -> Arrangement:
    """The arrangement with the sizes at which all devices finish together.

    For a time T every device has a greatest height in its column. Columns whose heights exceed the cuboid become
    wider, slabs whose columns exceed their zone thicker, zones whose slabs exceed the cuboid longer, and T shrinks
    while the zones exceed it: damped, until all fit.
    """
    ordered = job.take(draft.order)
    best, shortest = draft, longest(job, draft)
    time, offset = shortest, float(np.average(ordered.start, weights=ordered.volume))
    reach, thickness, width = draft.reach, draft.thickness, draft.width
    for sweep in range(sweeps):
        height = _heights(ordered, draft.across, time, thickness[draft.slab][draft.column], width[draft.column])
        if sweep >= _FIRST and sweep % 2 and (np.bincount(draft.column, height) > 0).all():
            found = fitted(job.shape, replace(draft, reach=reach, thickness=thickness, width=width, height=height))
            seconds = longest(job, found)
            if seconds < shortest:
                best, shortest = found, seconds
        fill = np.clip(np.bincount(draft.column, height) / job.shape.extents[1 - draft.across], 0.2, 5.0)
        width = width * fill**0.5
        fill = np.bincount(draft.slab, width) / reach[draft.zone]
        thickness, width = thickness * fill**0.5, width / (fill**0.5)[draft.slab]
        fill = np.bincount(draft.zone, thickness) / job.shape.k
        reach, thickness = reach * fill**0.5, thickness / (fill**0.5)[draft.zone]
        excess = float(reach.sum()) / job.shape.extents[draft.across]
        time, reach = offset + max(time - offset, 0.05 * time) * excess**-0.5, reach / excess**0.5
    return best


def _heights(job: Job, across: int, time: float, thickness: Floats, width: Floats) -> Floats:
    """The greatest height of each box that its device can do by `time`.

    The stages are linear in the height h: p + q = d + d' h, W = w' h. With t seconds left, d + d' h <= t; while W is
    the longest, also w' h + d d' / w' <= t; from there Newton's method takes the strips into account. If the operands
    do not fit into memory, the slice along the width stays, d + w' h <= t, or the one along the height,
    d' h + w' h <= t; and if neither fits, the width comes down again: then the downlink needs (1 + 2 w k / room) h.
    """
    extents = np.empty((3, len(width)))
    extents[across], extents[1 - across], extents[_K] = width, 0.0, thickness
    fixed = stage_seconds(job, extents)[0]
    extents[1 - across] = 1e-9  # so low that its slice fits into any memory
    slope = np.stack(stage_seconds(job, extents)) * 1e9
    slope[0] = (slope[0] * 1e-9 - fixed) * 1e9
    work = np.maximum(np.maximum(slope[1], slope[2]), 1e-300)
    work = work + np.minimum(slope[1], slope[2]) * _lag(job)
    left = np.maximum(time - job.start, 0.0) / job.drag
    free = (left - fixed) / np.maximum(slope[0], 1e-300)
    endless = job.strips == ENDLESS
    growing = np.maximum(np.minimum(free, np.maximum((left - fixed * slope[0] / work) / work, fixed / work)), 0.0)
    for _ in range(_STEPS):
        found = box_seconds(fixed, slope[0] * growing, work * growing, job.strips)
        below = box_seconds(fixed, slope[0] * 0.95 * growing, work * 0.95 * growing, job.strips)
        growing = growing * np.clip(1.0 + 0.05 * (left - found) / np.maximum(found - below, 1e-300), 0.3, 1.5)
    growing = np.where(endless, np.minimum(free, left / work), growing)
    kept = resident(job.shape, job.rates)
    many = np.maximum(STREAMED * job.strips, 1)
    soon = left - np.where(endless, 0.0, (fixed + slope[0] * growing) / many)  # its first tile streams in, too
    height = np.minimum(growing, _streaming(soon, endless, (fixed, slope[0], work), width, kept / thickness))
    if (width * thickness > kept).any():
        again = slope[0] * (1.0 + 2.0 * width * thickness / kept)
        slow = left / np.maximum(np.maximum(again, work), 1e-300)
        height = np.where(width * thickness > kept, np.minimum(height, np.maximum(kept / thickness, slow)), height)
    return np.asarray(np.maximum(height, 0.0), dtype=np.float64)


def _streaming(
    left: Floats, endless: Flags, stages: tuple[Floats, Floats, Floats], width: Floats, room: Floats
) -> Floats:
    """The greatest height whose box is done in `left` seconds if no more than `room` rows and columns fit into memory.

    See `finish_seconds`. With e rows of head, the width w the shorter side: d + e d' + w' (h - e) <= t. With the height
    the shorter side, e = room - h: d' room + w' h (1 - e / w) <= t, a quadratic. No more than half of the room needs
    no wait.
    """
    fixed, slope, work = stages
    head = np.maximum(room - width, 0.0)
    free = np.where(endless, left / work, head + (left - fixed - head * slope) / work)
    lying = np.where((head >= width) & ~endless, np.inf, free)
    short = width - room
    root = np.maximum(short**2 + 4.0 * width * (left - slope * room) / work, 0.0)
    upright = np.maximum(room / 2.0, (np.sqrt(root) - short) / 2.0)
    upright = np.minimum(np.where(endless, left / work, upright), room)
    return np.where((width <= room) & (lying >= width), lying, np.minimum(upright, width))

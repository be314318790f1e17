"""What a parcel costs: the work of its tiles, shared operand slices counted once, and its seconds on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from cleave_dask.fleet.devices import Device
from cleave_dask.graph.ir import Gemm
from cleave_dask.planning.cost import ROUND_TRIPS, Floats, Ints, Shape
from cleave_dask.planning.slices import SIDED, fetched, newly, results, turned

Ranges = np.ndarray[Any, np.dtype[np.integer[Any]]]

LEAST_SECONDS = 0.01
"""No parcel is expected to take less: messages have their price."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a parcel costs."""

    flops: float = 0.0
    down_bytes: float = 0.0  # on its planned device, which has the slices of its parcels before
    up_bytes: float = 0.0
    alone_bytes: float = 0.0  # down, on any other device
    begun: bool = False  # its planned device was told of it ahead, and may be through sooner than it could be

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        """Several together."""
        each = [(work.flops, work.down_bytes, work.up_bytes, work.alone_bytes) for work in works]
        flops, down, up, alone = map(float, np.sum(each, axis=0)) if each else (0.0, 0.0, 0.0, 0.0)
        return cls(flops, down, up, alone)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a device is, as far as a prediction needs it."""

    flops: float  # per second
    down: float  # bytes per second
    up: float  # bytes per second
    latency: float = 0.0  # seconds, of one direction
    memory: float = inf  # bytes

    @classmethod
    def of(cls, device: Device) -> Figures:
        """Those of a device."""
        return cls(device.flops, device.down.bandwidth, device.up.bandwidth, device.down.latency, device.memory)

    def seconds(self, work: Work, *, alone: bool = False) -> float:
        """How long a parcel takes from sent to accepted if nothing overlaps; alone: without slices from others."""
        down = work.alone_bytes if alone else work.down_bytes
        moving = down / self.down + work.up_bytes / self.up + 2 * ROUND_TRIPS * self.latency
        return max(LEAST_SECONDS, moving + work.flops / self.flops)


def parcel_works(gemm: Gemm, ranges: Ranges, parcel: Ranges, device: Ranges, kept: Sequence[bool] = ()) -> Floats:
    """(parcels, 4): flops, bytes down, bytes up and bytes down alone, of each parcel.

    `ranges` are those of the tiles (rows, cols, ks, each start and stop); `parcel` and `device` say whose each is.
    Of operands that are `kept` the planned device has its part already.
    """
    shape, count = Shape.of(gemm), int(parcel.max(initial=-1)) + 1
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    up = results(shape.kind, size) * shape.up_bytes
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    down = alone = size[:, 0] * size[:, 1] * shape.down_bytes
    if shape.kind in SIDED:
        ranges, depth = turned(shape.kind, ranges), turned(shape.kind, size)[:, 2] * shape.down_bytes
        spans = [(ranges[:, 2 * axis], ranges[:, 2 * axis + 1]) for axis in (0, 1)]
        mine, any_other = (with_depth(whose, ranges, shape.sides[2]) for whose in (device, parcel))
        down = sum((newly(mine, *spans[side]) for side in fetched(kept)), start=np.zeros(len(depth))) * depth
        alone = sum(newly(any_other, *span) for span in spans) * depth
    columns = flops, down, up, alone
    return np.column_stack([np.bincount(parcel, column, minlength=count) for column in columns])


def with_depth(owner: Ranges, ranges: Ranges, depth: int) -> Ints:
    """A number for each owner and range of k: only tiles that agree in both share slices."""
    low, high = ranges[:, 4].astype(np.int64), ranges[:, 5].astype(np.int64)
    return (owner.astype(np.int64) * (depth + 1) + low) * (depth + 1) + high

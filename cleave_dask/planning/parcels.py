"""What a parcel costs: the work of its tiles, shared operand slices counted once, and its seconds on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cleave_dask.graph.ir import Gemm
from cleave_dask.planning.cost import ROUND_TRIPS, Floats, Ints, Shape

Ranges = np.ndarray[Any, np.dtype[np.integer[Any]]]

LEAST_SECONDS = 0.01
"""No parcel is expected to take less: messages have their price."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a parcel costs, whoever does it."""

    flops: float = 0.0
    down_bytes: float = 0.0
    up_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What a device is, as far as a prediction needs it."""

    flops: float  # per second
    down: float  # bytes per second
    up: float  # bytes per second
    latency: float = 0.0  # seconds, of one direction

    def seconds(self, work: Work) -> float:
        """How long a parcel takes from sent to accepted if nothing overlaps."""
        moving = work.down_bytes / self.down + work.up_bytes / self.up + 2 * ROUND_TRIPS * self.latency
        return max(LEAST_SECONDS, moving + work.flops / self.flops)


def parcel_works(gemm: Gemm, ranges: Ranges, parcel: Ints) -> Floats:
    """(parcels, 3): flops, bytes down and bytes up of each parcel.

    `ranges` are those of the tiles (rows, cols, ks, each start and stop) and `parcel` says which each belongs to.
    """
    shape, count = Shape.of(gemm), int(parcel.max(initial=-1)) + 1
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    results = size[:, 0] * size[:, 1]
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    if shape.kind == "gemm":
        down = sum(
            size[:, axis] * size[:, 2] * shape.down_bytes * _first(parcel, ranges[:, [2 * axis, 4]]) for axis in (0, 1)
        )
    else:
        down = results * shape.down_bytes
    columns = flops, down, results * shape.up_bytes
    return np.column_stack([np.bincount(parcel, column, minlength=count) for column in columns])


def _first(parcel: Ints, starts: Ranges) -> Floats:
    """1 for the first tile of each parcel that has an operand slice, 0 for those that share it."""
    _, first = np.unique(np.column_stack([parcel, starts]), axis=0, return_index=True)
    found = np.zeros(len(parcel))
    found[first] = 1.0
    return found

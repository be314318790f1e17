"""Parcels as the simulator moves them: what each tile costs, and which operand slices it shares with others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cleave_dask.graph.ir import Gemm
from cleave_dask.planning.cost import Floats, Ints, Shape
from cleave_dask.planning.parcels import Work, first_with_slice, parcel_works
from cleave_dask.planning.values import Tiles


@dataclass(frozen=True, eq=False)
class Cut:
    """A parcel, the same for all gemms that are cut alike."""

    device: str
    work: Work
    tiles: Ints  # their numbers
    slices: tuple[list[tuple[int, ...]], ...]  # of each operand: the name of each tile's slice
    sizes: tuple[list[float], ...]  # their bytes
    down: Floats  # bytes for each tile if nothing is there yet: a slice counts for the first tile that has it
    flops: Floats
    up: Floats  # bytes
    only: bool  # all that its device has of the gemm


def cut(gemm: Gemm, tiles: Tiles) -> list[Cut]:
    """The parcels of a gemm."""
    shape, parcels = Shape.of(gemm), tiles.parcels()
    counts = Counter(device for device, _ in parcels)
    order = np.concatenate([numbers for _, numbers in parcels]).astype(np.int64)
    parcel = np.repeat(np.arange(len(parcels)), [len(numbers) for _, numbers in parcels])
    ranges = tiles.ranges[order].astype(np.int64)
    works = parcel_works(gemm, ranges, parcel, tiles.owner[order]).tolist()
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    up = size[:, 0] * size[:, 1] * shape.up_bytes
    if shape.kind == "gemm":
        names = [ranges[:, [2 * axis, 4]] for axis in (0, 1)]
        sizes = [size[:, axis] * size[:, 2] * shape.down_bytes for axis in (0, 1)]
    else:
        names, sizes = [ranges[:, [0, 2]]], [size[:, 0] * size[:, 1] * shape.down_bytes]
    down = np.sum([first_with_slice(parcel, name) * nbytes for name, nbytes in zip(names, sizes, strict=True)], axis=0)
    found, start = [], 0
    for (device, numbers), work in zip(parcels, works, strict=True):
        part = slice(start, start + len(numbers))
        start = part.stop
        here = tuple([(axis, *row) for row in name[part].tolist()] for axis, name in enumerate(names))
        each = tuple(column[part].tolist() for column in sizes)
        only = counts[device] == 1
        found.append(Cut(device, Work(*work), order[part], here, each, down[part], flops[part], up[part], only))
    return found

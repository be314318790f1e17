"""Parcels as the simulator moves them: what each tile costs, and which operand slices it shares with others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cleave_dask.graph.ir import Gemm
from cleave_dask.planning.cost import Floats, Ints, Shape
from cleave_dask.planning.parcels import Work, parcel_works, with_depth
from cleave_dask.planning.slices import newly, segments
from cleave_dask.planning.values import Tiles


@dataclass(frozen=True, eq=False)
class Cut:
    """A parcel, the same for all gemms that are cut alike."""

    device: str
    work: Work
    tiles: Ints  # their numbers
    slices: tuple[tuple[Ints, Ints, Floats], ...]  # pieces of each operand, tile after tile: whose, name, bytes
    down: Floats  # bytes for each tile if nothing is there yet: what tiles share counts for the first that has it
    flops: Floats
    up: Floats  # bytes
    only: bool  # all that its device has of the gemm


def cut(gemm: Gemm, tiles: Tiles) -> list[Cut]:
    """The parcels of a gemm."""
    shape, parcels = Shape.of(gemm), tiles.parcels()
    counts = Counter(device for device, _ in parcels)
    order = np.concatenate([numbers for _, numbers in parcels]).astype(np.int64)
    ends = np.cumsum([len(numbers) for _, numbers in parcels])
    parcel = np.repeat(np.arange(len(parcels)), np.diff(ends, prepend=0))
    ranges = tiles.ranges[order].astype(np.int64)
    works = parcel_works(gemm, ranges, parcel, tiles.owner[order]).tolist()
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    up = size[:, 0] * size[:, 1] * shape.up_bytes
    if shape.kind == "gemm":
        spans, depth = [(ranges[:, 0], ranges[:, 1]), (ranges[:, 2], ranges[:, 3])], size[:, 2] * shape.down_bytes
        mine, theirs = (with_depth(whose, ranges, shape.k) for whose in (parcel, tiles.owner[order]))
        down = np.asarray(sum(newly(mine, *span) for span in spans) * depth)
        pieces = [_weighed(*segments(theirs, *span), depth) for span in spans]
    else:
        down, every = size[:, 0] * size[:, 1] * shape.down_bytes, np.arange(len(order))
        pieces = [(every, every, down)]
    firsts = [np.searchsorted(piece[0], np.append(0, ends)).tolist() for piece in pieces]
    found = []
    for number, ((device, numbers), work) in enumerate(zip(parcels, works, strict=True)):
        part = slice(ends[number] - len(numbers), ends[number])
        here = tuple(
            (
                place[first[number] : first[number + 1]] - part.start,
                *(c[first[number] : first[number + 1]] for c in rest),
            )
            for (place, *rest), first in zip(pieces, firsts, strict=True)
        )
        only = counts[device] == 1
        found.append(Cut(device, Work(*work), order[part], here, down[part], flops[part], up[part], only))
    return found


def _weighed(place: Ints, segment: Ints, length: Ints, depth: Floats) -> tuple[Ints, Ints, Floats]:
    """Pieces of an operand with their bytes."""
    return place, segment, length * depth[place]

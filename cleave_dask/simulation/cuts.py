"""Parcels as the simulator moves them: what each tile costs, and which operand slices it shares with others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cleave_dask.graph.ir import Gemm
from cleave_dask.planning.cost import Floats, Ints, Shape
from cleave_dask.planning.parcels import Figures, Work, parcel_works, with_depth
from cleave_dask.planning.redealing import Planned, redeal
from cleave_dask.planning.slices import SIDED, fetched, newly, results, segments, turned
from cleave_dask.planning.values import Tiles


@dataclass(frozen=True, eq=False)
class Cut:
    """A parcel, the same for all gemms that are cut alike."""

    device: str
    work: Work
    tiles: Ints  # their numbers
    slices: tuple[tuple[Ints, Ints, Floats], ...]  # pieces of each operand, tile after tile: whose, name, bytes
    down: Sequence[float]  # bytes for each tile if nothing is there yet; what is shared counts for the first of them
    flops: Sequence[float]
    up: Sequence[float]  # bytes
    only: bool  # all that its device has of the gemm
    kept: Sequence[float] = ()  # bytes for each tile that its device has from gemms before, and others have not

    def tile(self, place: int) -> Cut:
        """One of its tiles as a parcel of its own."""
        here, pieces = slice(place, place + 1), []
        for whose, names, sizes in self.slices:
            part = slice(*np.searchsorted(whose, (place, place + 1)))
            pieces.append((whose[part] - place, names[part], sizes[part]))
        down = float(sum(sizes.sum() for _, _, sizes in pieces))
        work = Work(self.flops[place], down, self.up[place], down)
        columns = self.tiles[here], tuple(pieces), [down], self.flops[here], self.up[here]
        return Cut(self.device, work, *columns, only=False, kept=self.kept[here])


def cut(gemm: Gemm, tiles: Tiles) -> list[Cut]:
    """The parcels of a gemm."""
    shape, parcels = Shape.of(gemm), tiles.parcels()
    counts = Counter(device for device, _ in parcels)
    order = np.concatenate([numbers for _, numbers in parcels]).astype(np.int64)
    ends = np.cumsum([len(numbers) for _, numbers in parcels])
    parcel = np.repeat(np.arange(len(parcels)), np.diff(ends, prepend=0))
    ranges = tiles.ranges[order].astype(np.int64)
    works = parcel_works(gemm, ranges, parcel, tiles.owner[order], tiles.kept).tolist()
    kept = np.zeros(len(order))
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    up = results(shape.kind, size) * shape.up_bytes
    if shape.kind in SIDED:
        spans, depth = _spans(shape, ranges)
        layers = turned(shape.kind, ranges)
        mine, theirs = (with_depth(whose, layers, shape.sides[2]) for whose in (parcel, tiles.owner[order]))
        new = [newly(mine, *span) * depth for span in spans]
        sides = fetched(tiles.kept)
        down = sum((new[side] for side in sides), start=kept)
        kept = sum((new[side] for side in (0, 1) if side not in sides), start=kept)
        pieces = [_weighed(*segments(theirs, *spans[side]), depth) for side in sides]
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
        columns = down[part].tolist(), flops[part].tolist(), up[part].tolist()
        once, there = counts[device] == 1, kept[part].tolist() if tiles.kept else ()
        found.append(Cut(device, Work(*work), order[part], here, *columns, only=once, kept=there))
    return found


def recut(
    gemm: Gemm, tiles: Tiles, cuts: Sequence[Cut], takers: Mapping[str, Figures], ahead: Mapping[str, Work]
) -> list[Cut]:
    """The parcels of a gemm as they go out while some of its devices are no takers."""
    planned = [Planned(each.device, each.work, tiles.ranges[each.tiles]) for each in cuts]
    changed: set[int] = set()
    found: list[Cut] = []
    for numbers, dealt in redeal(gemm.kind, planned, takers, ahead):
        changed.update(numbers)
        numbered = [np.array([cuts[parcel].tiles[place] for parcel, place in each.tiles]) for each in dealt]
        order = np.concatenate(numbered)
        shape, names = Shape.of(gemm), 1 + len(found) << 40  # apart from those of other groups
        flops, up, pieces = _parts(shape, tiles.ranges[order].astype(np.int64))
        ends = np.cumsum([len(each) for each in numbered])
        for each, mine, end in zip(dealt, numbered, ends.tolist(), strict=True):
            part = slice(end - len(mine), end)
            own = (
                tiles.owner[mine] == tiles.names.index(each.device) if each.device else np.zeros(len(mine), dtype=bool)
            )
            here = tuple(
                _without(piece, own) if tiles.kept and tiles.kept[side] else piece  # its device has them already
                for side, piece in enumerate(_within(piece, part, names) for piece in pieces)
            )
            down = [sum(float(sizes[place == n].sum()) for place, _, sizes in here) for n in range(len(mine))]
            columns = flops[part].tolist(), up[part].tolist()
            found.append(Cut(each.device, each.work, mine, here, down, *columns, only=False))
    return [each for number, each in enumerate(cuts) if number not in changed] + found


def _parts(shape: Shape, ranges: Ints) -> tuple[Floats, Floats, list[tuple[Ints, Ints, Floats]]]:
    """Flops and bytes up of tiles, and the pieces of their operands, by names that all of them share."""
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    flops, up = size.prod(axis=1) * (shape.flops / shape.volume), results(shape.kind, size) * shape.up_bytes
    if shape.kind not in SIDED:
        every = np.arange(len(ranges))
        return flops, up, [(every, every, size[:, 0] * size[:, 1] * shape.down_bytes)]
    layer = with_depth(np.zeros(len(ranges), dtype=np.int64), turned(shape.kind, ranges), shape.sides[2])
    spans, depth = _spans(shape, ranges)
    return flops, up, [_weighed(*segments(layer, *span), depth) for span in spans]


def _spans(shape: Shape, ranges: Ints) -> tuple[list[tuple[Ints, Ints]], Floats]:
    """The starts and stops of tiles along both sides of their operands, and the bytes of one row of these."""
    along = turned(shape.kind, ranges)
    depth = (along[:, 5] - along[:, 4]).astype(np.float64) * shape.down_bytes
    return [(along[:, 0], along[:, 1]), (along[:, 2], along[:, 3])], depth


def _within(piece: tuple[Ints, Ints, Floats], part: slice, names: int) -> tuple[Ints, Ints, Floats]:
    """The pieces of some tiles that follow each other."""
    here = slice(*np.searchsorted(piece[0], (part.start, part.stop)))
    return piece[0][here] - part.start, piece[1][here] + names, piece[2][here]


def _without(piece: tuple[Ints, Ints, Floats], tiles: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Ints, Ints, Floats]:
    """The pieces of all tiles but these."""
    others = ~tiles[piece[0]]
    return piece[0][others], piece[1][others], piece[2][others]


def _weighed(place: Ints, segment: Ints, length: Ints, depth: Floats) -> tuple[Ints, Ints, Floats]:
    """Pieces of an operand with their bytes."""
    return place, segment, length * depth[place]

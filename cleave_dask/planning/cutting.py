"""Cutting: the box of each device in tiles, few and small enough.

A box whose operands fit into its device's memory becomes strips, unequal as `growing` says. If they do not fit, as much
of it as does: then the slice along its shorter side stays while tiles across the longer side stream past. If not even
that slice fits, its rows are cut first, and its columns come down once for each part.
"""

from __future__ import annotations

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.formatting import quantity
from cleave_dask.planning.cost import AT_ONCE, Floats, Ints, Rates, Shape, resident
from cleave_dask.planning.growing import STREAMED, largest_strip, strip_edges

_LEAST_HEAD = 0.05  # of a box: less is not worth tiles of its own
_FINE = 1024  # cuts are no further off than this part of a box
_ROOMY = 1.1  # rounding may add a little to a box that fits
_SHARES, _SHARE_SECONDS = 16, 0.2  # a strip comes in pieces of such a part of its box, unless they are shorter
MOST_TILES = 1_000_000  # of one gemm: beyond that a plan is of no use
_MOST_PIECES = 32  # of a strip, so that devices with less memory than its own can take over a tile


def cut_boxes(
    shape: Shape, boxes: Ints, owner: Ints, rates: Rates, strips: Ints, *, filler: bool = False
) -> tuple[Ints, Ints]:
    """Each box in about so many strips, and more where its memory asks for it; and whose each is.

    Filler, for whose first and last tile nobody waits, is cut into equal ones.
    """
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    here = rates.take(owner)
    if shape.kind != "gemm" or filler:
        return _grid(shape, boxes, owner, here, strips, (sizes[:, 0] < sizes[:, 1]).astype(np.int64))
    size = sizes.astype(np.float64)
    operands = size[:, :2].sum(axis=1) * size[:, 2]
    results = np.where(strips > 1, 2.0 * largest_strip(strips), 1.0) * size[:, 0] * size[:, 1]
    held = operands * shape.down_bytes + results * shape.up_bytes
    grows = (operands <= _ROOMY * resident(shape, here)) & (held <= here.memory / AT_ONCE)
    smallest = float(here.memory.min(initial=np.inf))
    if grows.all():
        return _strips(shape, boxes, owner, here, strips, smallest)
    heads, tails = _headed(boxes, np.where(grows, size[:, :2].max(axis=1), _heads(shape, size, here, strips)))
    some, rest = (heads[:, 1::2] > heads[:, 0::2]).all(axis=1), (tails[:, 1::2] > tails[:, 0::2]).all(axis=1)
    grown = _strips(shape, heads[some], owner[some], here.take(some), strips[some], smallest)
    part = (tails[:, 1::2] - tails[:, 0::2]).prod(axis=1) / size.prod(axis=1)
    tiles = np.ceil(STREAMED * strips * part).astype(np.int64)[rest]
    longer = (size[:, 0] < size[:, 1]).astype(np.int64)[rest]
    streamed = _grid(shape, tails[rest], owner[rest], here.take(rest), tiles, longer)
    return np.concatenate([grown[0], streamed[0]]), np.concatenate([grown[1], streamed[1]])


def _heads(shape: Shape, size: Floats, rates: Rates, strips: Ints) -> Floats:
    """How much of the longer side of each box can be there beside all of the shorter one: it is done in growing order.

    There must be room for the first tile that streams past, and for results; where the head would be little, there is
    none.
    """
    short, long, ks = size[:, :2].min(axis=1), size[:, :2].max(axis=1), size[:, 2]
    tile = 1.0 + 1.1 * long / (STREAMED * np.maximum(strips, 1))  # rounded
    strip = np.where(strips > 1, 2.0 * largest_strip(strips), 1.0)
    free = rates.memory / AT_ONCE - (short + tile) * ks * shape.down_bytes - tile * short * shape.up_bytes
    most = free / (ks * shape.down_bytes + strip * short * shape.up_bytes)
    head = np.floor(np.clip(np.minimum(resident(shape, rates) / ks - short, most), 0.0, long))
    return np.where(head >= _LEAST_HEAD * long, head, 0.0)


def _headed(boxes: Ints, head: Floats) -> tuple[Ints, Ints]:
    """Boxes cut in two along their longer side."""
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    rows, axis = np.arange(len(boxes)), 2 * (sizes[:, 0] < sizes[:, 1]).astype(np.int64)
    heads, tails = boxes.copy(), boxes.copy()
    heads[rows, axis + 1] = tails[rows, axis] = boxes[rows, axis] + head.astype(np.int64)
    return heads, tails


def _units(shape: Shape, sizes: Ints) -> Ints:
    """What cuts of each box should be multiples of: powers of two up to 32, small beside the box."""
    units = np.ones_like(sizes)
    for power in (2, 4, 8, 16, 32):
        units = np.where((sizes >= _FINE * power) & (np.array(shape.extents) % power == 0), power, units)
    return units


def _strips(shape: Shape, boxes: Ints, owner: Ints, rates: Rates, strips: Ints, smallest: float) -> tuple[Ints, Ints]:
    """Boxes in strips: each extends rows or columns of what was there before, over the whole of the other side.

    One that a device with the `smallest` memory could not hold comes in pieces, so that it can take over some; and so
    does one that is much of a box, so that others can share what a lost device had. Pieces cost no operand twice.
    """
    if not len(boxes):
        return boxes, owner
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    rows, cols, ks = sizes.astype(np.float64).T
    second, unit = ks * shape.down_bytes / rates.down, _units(shape, sizes)[:, :2].min(axis=1)
    compute, up = rows * cols * ks * (shape.flops / shape.volume) / rates.flops, rows * cols * shape.up_bytes / rates.up
    longer, lesser = np.maximum(compute, up), np.minimum(compute, up)
    reached = strip_edges(rows * second, cols * second, longer, lesser, strips, unit * second)
    cuts = np.minimum(np.rint(reached / second[:, None, None]).astype(np.int64), sizes[:, :2, None])
    cuts[:, :, -1] = sizes[:, :2]
    before, after = cuts[:, :, :-1], cuts[:, :, 1:]
    start = np.where(after > before, before, 0)
    box, strip = np.nonzero((after > before).any(axis=1))
    lying = (start[box, 0, strip] > 0).astype(np.int64)  # rows are extended: its length is along the columns
    needed = after.sum(axis=1)[box, strip] * ks[box] * (2.0 * AT_ONCE * shape.down_bytes / smallest)
    each = np.where(strip > 0, np.minimum(np.ceil(needed), _MOST_PIECES).astype(np.int64), 1)
    area = (after.prod(axis=1) - before.prod(axis=1))[box, strip] / (rows * cols)[box]
    shares = np.ceil(area * np.minimum(_SHARES, longer / _SHARE_SECONDS)[box]).astype(np.int64)
    each = np.maximum(each, shares)  # so that others can share what a lost device had
    length = after[box, lying, strip]
    each = np.clip(each, 1, np.maximum(1, length // unit[box]))
    part = np.repeat(np.arange(len(box)), each)
    place = np.arange(len(part)) - np.repeat(np.cumsum(each) - each, each)
    of, which = box[part], strip[part]
    found = np.empty((len(part), 6), dtype=np.int64)
    for axis in (0, 1):
        found[:, 2 * axis] = start[of, axis, which]
        found[:, 2 * axis + 1] = after[of, axis, which]
    for side in (0, 1):
        cut = -(-length[part] // unit[of]) * (place + side) // each[part] * unit[of]
        found[np.arange(len(part)), 2 * lying[part] + side] = np.minimum(cut, length[part])
    found[:, :4] += boxes[of][:, [0, 0, 2, 2]]
    found[:, 4:] = boxes[of][:, 4:]
    solid = (found[:, 1::2] > found[:, 0::2]).all(axis=1)
    return found[solid], owner[of[solid]]


def _grid(shape: Shape, boxes: Ints, owner: Ints, here: Rates, tiles: Ints, longer: Ints) -> tuple[Ints, Ints]:
    """Boxes whose operands do not stay, in about so many tiles along one axis, and more where memory asks for it."""
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    units, rows = _units(shape, sizes), np.arange(len(boxes))
    most, parts = np.maximum(1, sizes // units), np.ones_like(sizes)
    if shape.kind == "gemm":
        kept = _ROOMY * resident(shape, here)
        again = sizes[:, :2].min(axis=1) * sizes[:, 2] > kept
        passes = np.ceil(sizes[:, 0] * sizes[:, 2] / (kept / 2.2))
        parts[:, 0] = np.where(again, np.minimum(passes, sizes[:, 0]), 1)
        longer = np.where(again, 1, longer)
    parts[rows, longer] = np.maximum(parts[rows, longer], np.minimum(tiles, most[rows, longer]))
    for _ in range(200):  # those who cannot hold the smallest tiles take no part, so this ends
        unit = np.where(sizes >= parts * units, units, 1)
        size = np.minimum(sizes, (((sizes + unit - 1) // unit + parts - 1) // parts) * unit)
        full = _held(shape, size, parts) > here.memory / AT_ONCE
        if not full.any():
            break
        parts = np.minimum(parts, sizes)
        finished = parts >= sizes
        axis = np.where(finished, 0.0, sizes / parts * np.array([1.0, 1.0, 0.05])).argmax(axis=1)
        grown = np.minimum(parts[rows, axis] + np.maximum(1, parts[rows, axis] // 2), sizes[rows, axis])
        parts[rows, axis] = np.where(full, grown, parts[rows, axis])
    tiles = parts.astype(np.float64).prod(axis=1)
    if tiles.sum() > MOST_TILES:
        least = here.memory[tiles.argmax()]
        raise PlanError(
            f"{shape.kind} of {shape.m} x {shape.n} x {shape.k} would be cut into {tiles.sum():.2g} tiles, more than"
            f" {MOST_TILES:,}, to fit into a device with {quantity(least, 'B')} of memory;"
            " leave such devices out of the fleet, or give them more"
        )
    return _split(boxes, owner, parts, units)


def _split(boxes: Ints, owner: Ints, parts: Ints, units: Ints) -> tuple[Ints, Ints]:
    """Boxes cut into parts[i] = (rows, cols, k) equal pieces."""
    count = parts.prod(axis=1)
    box = np.repeat(np.arange(len(boxes)), count)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    pieces = np.empty((len(box), 6), dtype=np.int64)
    for axis in (1, 0, 2):  # k slowest, columns fastest
        many = parts[box, axis]
        place = number % many
        number = number // many
        start, size = boxes[box, 2 * axis], boxes[box, 2 * axis + 1] - boxes[box, 2 * axis]
        unit = np.where(size >= many * units[box, axis], units[box, axis], 1)
        for side in (0, 1):
            cut = -(-size // unit) * (place + side) // many * unit
            pieces[:, 2 * axis + side] = start + np.minimum(cut, size)
    whole = (pieces[:, 1::2] > pieces[:, 0::2]).all(axis=1)
    return pieces[whole], owner[box[whole]]


def _held(shape: Shape, sizes: Ints | Floats, parts: Ints) -> Floats:
    """Bytes of two consecutive tiles of these sizes, where a box is cut into that many along each axis."""
    rows, cols, ks = (sizes[:, axis].astype(np.float64) for axis in range(3))
    if shape.kind != "gemm":
        return rows * cols * (shape.down_bytes + shape.up_bytes) * np.where(parts[:, :2].prod(axis=1) > 1, 2, 1)
    left, right, out = rows * ks * shape.down_bytes, ks * cols * shape.down_bytes, rows * cols * shape.up_bytes
    deep = parts[:, 2] > 1
    return np.asarray(
        left * np.where((parts[:, 0] > 1) | deep, 2, 1)
        + right * np.where((parts[:, 1] > 1) | deep, 2, 1)
        + out * np.where(parts.prod(axis=1) > 1, 2, 1),
        dtype=np.float64,
    )

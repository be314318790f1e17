"""Cutting: the box of each device in tiles, few and small enough.

A box whose operands fit into its device's memory becomes a grid of row and column slices, unequal as `growing` says. If
they do not fit, the slice along its shorter side stays while tiles across the longer side stream past; if not even that
fits, its rows are cut first, and its columns come down once for each part.
"""

from __future__ import annotations

import numpy as np

from cleave_dask.planning.cost import AT_ONCE, Floats, Ints, Rates, Shape, resident
from cleave_dask.planning.growing import MOST_SLICES, fewest_slices, slice_edges

_WORTH = 0.01  # of a box's time that more tiles must bring
_FINE = 128  # cuts are no further off than this part of a box


def cut_boxes(shape: Shape, boxes: Ints, owner: Ints, rates: Rates, tiles: Ints, *, few: bool) -> tuple[Ints, Ints]:
    """Each box in about as many tiles as wanted, and more where its memory asks for it; and whose each is.

    If few: in less, where more would bring little.
    """
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    units = _units(shape, sizes)
    most = np.maximum(1, sizes // units)
    here, rows = rates.take(owner), np.arange(len(boxes))
    parts, edges = np.ones_like(sizes), np.ones((len(boxes), 2, 2))
    kept, longer = (
        1.1 * resident(shape, here),
        (sizes[:, 0] < sizes[:, 1]).astype(np.int64),
    )  # rounding may add a little
    grows = (sizes[:, :2].sum(axis=1) * sizes[:, 2] <= kept) & (shape.kind == "gemm")
    if shape.kind == "gemm":
        again = sizes[:, :2].min(axis=1) * sizes[:, 2] > kept
        passes = np.ceil(sizes[:, 0] * sizes[:, 2] / (kept / 2.2))
        parts[:, 0] = np.where(again, np.minimum(passes, sizes[:, 0]), 1)
        longer = np.where(again, 1, longer)
        slices = np.clip(np.rint(np.sqrt(tiles)).astype(np.int64), 1, MOST_SLICES)
        ratio = _ratio(shape, sizes.astype(np.float64), here)
        slices = fewest_slices(ratio, slices, _WORTH) if few else slices
        edges, counts = _box_edges(sizes, slice_edges(ratio, slices), slices)
        parts[grows, :2] = counts[grows]
    parts[rows, longer] = np.where(
        grows, parts[rows, longer], np.maximum(parts[rows, longer], np.minimum(tiles, most[rows, longer]))
    )
    room, largest = here.memory / AT_ONCE, np.diff(edges, axis=2).max(axis=2)
    for _ in range(200):  # those who cannot hold the smallest tiles take no part, so this ends
        unit = np.where(sizes >= parts * units, units, 1)
        size = np.minimum(sizes, (((sizes + unit - 1) // unit + parts - 1) // parts) * unit)
        size[grows, :2] = np.minimum(sizes[:, :2], np.ceil(sizes[:, :2] * largest) + units[:, :2])[grows]
        full = _held(shape, size, parts) > room
        if not full.any():
            break
        grows &= ~full
        parts = np.minimum(parts, sizes)
        finished = parts >= sizes
        axis = np.where(finished, 0.0, sizes / parts * np.array([1.0, 1.0, 0.05])).argmax(axis=1)
        grown = np.minimum(parts[rows, axis] + np.maximum(1, parts[rows, axis] // 2), sizes[rows, axis])
        parts[rows, axis] = np.where(full, grown, parts[rows, axis])
    return _split(boxes, owner, parts, units, np.where(grows[:, None, None], edges, np.nan))


def _units(shape: Shape, sizes: Ints) -> Ints:
    """What cuts of each box should be multiples of: powers of two up to 32, small beside the box."""
    units = np.ones_like(sizes)
    for power in (2, 4, 8, 16, 32):
        units = np.where((sizes >= _FINE * power) & (np.array(shape.extents) % power == 0), power, units)
    return units


def _box_edges(sizes: Ints, square: Floats, slices: Ints) -> tuple[Floats, Ints]:
    """(boxes, 2, n): where boxes are cut along rows and columns, as fractions of them; and into how many parts.

    `square` are the cuts of the square of the same area: those that are within a shorter side are its cuts, and a
    longer side goes on in parts like the mean.
    """
    sides = np.maximum(sizes[:, :2], 1).astype(np.float64)
    scale = (np.sqrt(sides.prod(axis=1))[:, None] / sides)[:, :, None]  # of the square's side, in parts of each side
    beyond = np.arange(1, MOST_SLICES + 1) / slices[:, None, None]
    edges = np.concatenate([square, 1.0 + np.broadcast_to(beyond, square[:, :, 1:].shape)], axis=2)
    edges = np.sort(np.minimum(edges * scale, 1.0), axis=2)
    near = (edges > 1.0 - 0.3 * scale / slices[:, None, None]) | (np.diff(edges, axis=2, prepend=-1.0) <= 0.0)
    near[:, :, 0] = False
    edges = np.sort(np.where(near, 1.0, edges), axis=2)
    return np.concatenate([edges, np.ones_like(edges[:, :, :1])], axis=2), (edges < 1.0).sum(axis=2)


def _ratio(shape: Shape, sizes: Floats, rates: Rates) -> Floats:
    """How long the longer of a box's other stages takes beside the download of a square of the same area."""
    rows, cols, ks = sizes.T
    down = 2.0 * np.sqrt(rows * cols) * ks * shape.down_bytes / rates.down
    up, compute = rows * cols * shape.up_bytes / rates.up, rows * cols * ks * (shape.flops / shape.volume) / rates.flops
    return np.asarray(np.maximum(compute, up) / down, dtype=np.float64)


def _split(boxes: Ints, owner: Ints, parts: Ints, units: Ints, edges: Floats) -> tuple[Ints, Ints]:
    """Boxes cut into parts[i] = (rows, cols, k) pieces: at `edges`, or where they are missing into equal ones."""
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
            if axis < 2:
                edge = edges[box, axis, np.minimum(place + side, edges.shape[2] - 1)]
                cut = np.where(np.isnan(edge), cut, np.rint(np.nan_to_num(edge) * size / unit).astype(np.int64) * unit)
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

"""Tiling of one gemm over an uneven fleet: who takes part, with how much, in how many tiles of what shape.

For a time T, each device can do a volume v(T - start), where its start is its links' latency and its place in the
scheduler's queue. The least T at which the volumes of the devices add up to the gemm gives each its share and its best
box: square (rows = columns) and k = side * B / (2 U) deep, as long in k as its links are uneven, or all of K if that
is less. `packing` fits the boxes together. A box is cut into tiles across its longer side, so that download,
multiplication and upload overlap: as many as still take 20 ms each. A device whose share would not be worth a parcel is
left out. Attention and batched products are dealt out cell by cell in the same proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave_dask.fleet.devices import Server
from cleave_dask.planning.balancing import Job
from cleave_dask.planning.capacity import cell_seconds, most
from cleave_dask.planning.cost import (
    AT_ONCE,
    SCHEDULER_SECONDS,
    Floats,
    Ints,
    Rates,
    Shape,
    pipelined,
    resident,
    smallest_bytes,
)
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.packing import aligned_unit, pack

_MOST_TILES = 64  # of a device; more bring less than a percent
_LEAST_TILE = 0.02  # seconds: shorter tiles cost more in messages than their overlap brings
_ENDLESS = 1 << 20  # as if it never had to wait for its first tile nor its last: others' tiles fill in
_PRICED, _MANY_DEVICES = 2, 512  # packings that are priced, and from how many devices on no more than these
_WORTH = 0.03  # a device with less than this part of the mean share is left out


@dataclass(frozen=True)
class Shares:
    """How a gemm is divided among devices, before it is cut."""

    seconds: float
    devices: Ints  # those that take part
    start: Floats  # seconds before each one's first byte moves
    volume: Floats  # multiplications, or cells, of each
    results: Floats  # numbers that each would best send back
    tiles: Ints  # of each
    overlap: Ints  # tiles over which its stages overlap


def tile_gemm(
    shape: Shape,
    rates: Rates,
    server: Server,
    *,
    split_k: bool = True,
    spare: Rates | None = None,
    scheduler_seconds: float = SCHEDULER_SECONDS,
) -> Layout:
    """The best layout found of one gemm on a fleet.

    `spare` makes it filler: what other gemms leave of the links. Their tiles fill the gaps of this one, and it is
    shaped to use what they leave.
    """
    best: Layout | None = None
    down = up = 1.0
    for _ in range(3):
        filler = spare is not None
        slowed = (spare or rates).slowed(down, up)
        shares = _divide(shape, slowed, scheduler_seconds, filler=filler)
        found = _laid_out(shape, rates, server, slowed, shares, split_k, scheduler_seconds, filler)
        best = found if best is None or found.seconds < best.seconds else best
        if best.binding not in ("server egress", "server ingress"):
            break
        down *= min(1.0, 0.98 * best.devices_seconds / max(best.egress_seconds, 1e-12))
        up *= min(1.0, 0.98 * best.devices_seconds / max(best.ingress_seconds, 1e-12))
    assert best is not None
    return best


def volume_share(shape: Shape, rates: Rates, slot: float) -> float:
    """Seconds in which these devices could do a gemm if others filled its gaps and all boxes had their best shape."""
    return _divide(shape, rates, slot, filler=True).seconds


def _divide(shape: Shape, rates: Rates, slot: float, *, filler: bool) -> Shares:
    """The least time in which the devices together can do the gemm, and who does how much in how many tiles."""
    low, high = 0.0, 1e-3
    while (shares := _fitting(shape, rates, slot, high, filler)).volume.sum() < shape.volume:
        low, high = high, 2.0 * high
        assert high < 1e15, f"nobody has the memory for {shape}"
    while high - low > 4e-3 * high:
        middle = (low + high) / 2
        tried = _fitting(shape, rates, slot, middle, filler)
        if tried.volume.sum() >= shape.volume:
            high, shares = middle, tried
        else:
            low = middle
    return shares


def _fitting(shape: Shape, rates: Rates, slot: float, seconds: float, filler: bool) -> Shares:
    """What the devices can do in `seconds`, the most capable first in the scheduler's queue."""
    able = np.flatnonzero(rates.memory >= smallest_bytes(shape))
    order = able[np.argsort(-most(shape, rates, seconds - rates.latency)[0][able], kind="stable")]
    if slot:
        order = order[: max(1, int(seconds / slot))]
    start = rates.latency[order] + slot * np.arange(1, len(order) + 1)
    tiles = np.clip((seconds - start) / _LEAST_TILE, 1, _MOST_TILES).astype(np.int64)
    overlap = np.full(len(order), _ENDLESS) if filler else tiles
    volume, results = _overlapped(shape, rates.take(order), seconds - start, overlap)
    if shape.kind == "gemm":
        worth = volume > _WORTH * volume.sum() / max(1, (volume > 0).sum())
    else:
        volume = np.floor(volume * (1 + 1e-9))
        worth = volume > 0
    return Shares(seconds, order[worth], start[worth], volume[worth], results[worth], tiles[worth], overlap[worth])


def _overlapped(shape: Shape, rates: Rates, seconds: Floats, tiles: Ints) -> tuple[Floats, Floats]:
    """The volume that each device can do in `seconds` with its work in `tiles` tiles, and the results it sends."""
    volume, results = most(shape, rates, seconds)
    if shape.kind != "gemm":
        stages = cell_seconds(shape, rates)
        busiest, others = stages.max(axis=0), stages.sum(axis=0) - stages.max(axis=0)
        evenly = np.minimum(np.maximum(seconds, 0.0) / (busiest + others / tiles), shape.volume)
        volume = np.where(evenly >= tiles, evenly, volume)
        return volume, volume
    down, compute, up = _stages(shape, rates, volume, results)
    whole = pipelined(down, up, compute, tiles)
    shrink = np.where(whole > 0, np.maximum(seconds, 0.0) / np.maximum(whole, 1e-300), 1.0)
    volume, results = most(shape, rates, seconds * np.minimum(shrink, 1.0))
    side = np.minimum(np.sqrt(results), min(shape.m, shape.n))
    room = resident(shape, rates)
    pace = np.sqrt(room * rates.down * rates.up) / (2.0 * shape.down_bytes)  # with slices fetched again
    fitting = np.maximum(results * room / np.maximum(side, 1e-300), pace * np.maximum(seconds, 0.0))
    return np.minimum(volume, fitting), results


def _stages(shape: Shape, rates: Rates, volume: Floats, results: Floats) -> tuple[Floats, Floats, Floats]:
    """Seconds down, in the multiplier and up of the best boxes of these volumes."""
    compute = volume * (shape.flops / shape.volume) / rates.flops
    up = results * shape.up_bytes / rates.up
    side = np.minimum(np.sqrt(results), min(shape.m, shape.n))
    depth = volume / np.maximum(results, 1e-300)
    other = results / np.maximum(side, 1e-300)
    return (side + other) * depth * shape.down_bytes / rates.down, compute, up


def _laid_out(
    shape: Shape,
    rates: Rates,
    server: Server,
    slowed: Rates,
    shares: Shares,
    split_k: bool,
    slot: float,
    filler: bool,
) -> Layout:
    """The tiles of a division: the best of a few packings."""
    if shape.kind != "gemm":
        packed = [_dealt(shape, shares)]
    else:
        results = np.maximum(shares.results, 1.0)
        side = np.minimum(np.sqrt(results), min(shape.m, shape.n))
        across = results / side
        rows, cols = (across, side) if shape.m > shape.n else (side, across)
        depth = np.clip(shares.volume / results, 1e-9, shape.k) if split_k else np.full(len(side), float(shape.k))
        best = np.stack([rows, cols, depth])
        job = Job(shape, slowed.take(shares.devices), shares.start, shares.overlap, shares.volume, best)
        many = 1 if filler else _PRICED if len(side) > _MANY_DEVICES else 2 * _PRICED
        packed = [
            (boxes, shares.devices[who], shares.tiles[who]) for boxes, who in pack(job, split_k=split_k, many=many)
        ]
    layouts = []
    for boxes, owner, tiles in packed:
        cut, whose = cut_boxes(shape, boxes, owner, rates, tiles)
        layouts.append(lay_out(shape, cut, whose, rates, server, scheduler_seconds=slot))
    return min(layouts, key=lambda layout: layout.seconds)


def _dealt(shape: Shape, shares: Shares) -> tuple[Ints, Ints, Ints]:
    """Cells in row-major order dealt out in runs; a run that crosses rows becomes up to three ranges."""
    counts = shares.volume.astype(np.int64)
    order = np.argsort(-counts, kind="stable")
    ends = np.minimum(np.cumsum(counts[order]), shape.volume)
    starts = np.concatenate([[0], ends[:-1]])
    n, ranges, owner, tiles = shape.n, [], [], []
    for place, start, stop in zip(order.tolist(), starts.tolist(), ends.tolist(), strict=True):
        size = stop - start
        while start < stop:
            row, col = divmod(start, n)
            if col == 0 and stop - start >= n:
                rows, cols = (row, row + (stop - start) // n), (0, n)
            else:
                rows, cols = (row, row + 1), (col, min(n, col + stop - start))
            cells = (rows[1] - rows[0]) * (cols[1] - cols[0])
            ranges.append((*rows, *cols, 0, 1))
            owner.append(int(shares.devices[place]))
            tiles.append(max(1, round(int(shares.tiles[place]) * cells / size)))
            start += cells
    return np.array(ranges, dtype=np.int64).reshape(-1, 6), np.array(owner), np.array(tiles)


def cut_boxes(shape: Shape, boxes: Ints, owner: Ints, rates: Rates, tiles: Ints) -> tuple[Ints, Ints]:
    """Each box in as many tiles as wanted, cut across its longer side, and more where its memory asks for it.

    While the tiles of a box stream past, the slice along its shorter side stays. If that does not fit, the box is cut
    along its rows first; columns then come down once for each part.
    """
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    parts = np.ones_like(sizes)
    middle = np.median(sizes, axis=0).tolist()
    units = np.array([aligned_unit(extent, size) for extent, size in zip(shape.extents, middle, strict=True)])
    rows = np.arange(len(boxes))
    room = resident(shape, rates)[owner]
    passes = np.ceil(sizes[:, 0] * sizes[:, 2] / (room / 2))
    again = sizes[:, :2].min(axis=1) * sizes[:, 2] > 1.1 * room  # rounding may have made it a little larger
    if shape.kind == "gemm":
        parts[:, 0] = np.where(again, np.minimum(passes, sizes[:, 0]), 1)
    longer = np.where((sizes[:, 0] >= sizes[:, 1]) & ~again, 0, 1)
    wanted = np.minimum(tiles, np.maximum(1, sizes // units)[rows, longer])
    parts[rows, longer] = np.maximum(parts[rows, longer], wanted)
    room = rates.memory[owner] / AT_ONCE
    for _ in range(200):  # those who cannot hold the smallest tiles take no part, so this ends
        unit = np.where(sizes >= parts * units, units, 1)
        full = _held(shape, np.minimum(sizes, (((sizes + unit - 1) // unit + parts - 1) // parts) * unit), parts) > room
        if not full.any():
            break
        edges = sizes / parts
        finished = parts >= sizes
        axis = np.where(finished, 0.0, edges * np.array([1.0, 1.0, 0.05])).argmax(axis=1)
        grown = np.minimum(parts[rows, axis] + np.maximum(1, parts[rows, axis] // 2), sizes[rows, axis])
        parts[rows, axis] = np.where(full, grown, parts[rows, axis])
    return _split(boxes, owner, parts, units)


def _split(boxes: Ints, owner: Ints, parts: Ints, units: Ints) -> tuple[Ints, Ints]:
    """Boxes cut into parts[i] = (rows, cols, k) pieces of nearly equal size."""
    count = parts.prod(axis=1)
    box = np.repeat(np.arange(len(boxes)), count)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    pieces = np.empty((len(box), 6), dtype=np.int64)
    for axis in (1, 0, 2):  # k slowest, columns fastest
        many = parts[box, axis]
        place = number % many
        number = number // many
        start, size = boxes[box, 2 * axis], boxes[box, 2 * axis + 1] - boxes[box, 2 * axis]
        unit = np.where(size >= many * units[axis], units[axis], 1)
        for side in (0, 1):
            cut = -(-size // unit) * (place + side) // many * unit
            pieces[:, 2 * axis + side] = start + np.minimum(cut, size)
    return pieces, owner[box]


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

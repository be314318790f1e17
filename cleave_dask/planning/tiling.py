"""Tiling of one gemm over an uneven fleet: who takes part, with how much, in how many tiles of what shape.

For a time T, each device can do a volume v(T - start), where its start is its links' latency and its place in the
scheduler's queue. The least T at which the volumes of the devices add up to the gemm gives each its share and its best
box: square (rows = columns) and k = side * B / (2 U) deep, as long in k as its links are uneven, or all of K if that
is less. `packing` fits the boxes together. A box is cut into q tiles, so that download, multiplication and upload
overlap; the scheduler pays for each tile, so q is as large as pays and no larger. A device whose share would not be
worth its tile is left out. Attention and batched products are dealt out cell by cell in the same proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Server
from cleave_dask.formatting import quantity
from cleave_dask.planning.capacity import alone, cell_seconds, most
from cleave_dask.planning.cost import IN_FLIGHT, SCHEDULER_SECONDS, Floats, Ints, Rates, Shape, pipelined
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.packing import Job, aligned_unit, pack

_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # tiles per device that are tried
_ENDLESS = 1 << 20  # as if it never had to wait for its first tile nor its last: others' tiles fill in
_WORTH = 0.03  # a device with less than this part of the mean share is left out
_RESIDENT = 0.75  # of a tile's share of memory may be the operand slice that its device's tiles have in common
_LEAST_TILE = 0.02  # seconds: shorter tiles cost more in messages than their overlap brings


@dataclass(frozen=True)
class Shares:
    """How a gemm is divided among devices, before it is cut."""

    seconds: float
    devices: Ints  # those that take part
    start: Floats  # seconds before each one's first byte moves
    volume: Floats  # multiplications, or cells, of each
    results: Floats  # numbers that each would best send back
    tiles: Ints  # of each


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

    `spare` makes it filler: what other gemms leave of the links. Their tiles fill the gaps of this one, so it needs no
    more tiles than memory asks for, and it is shaped to use what they leave.
    """
    best: Layout | None = None
    down = up = 1.0
    for _ in range(3):
        filler = spare is not None
        slowed = (spare or rates).slowed(down, up)
        shares = _divide(shape, slowed, scheduler_seconds, (_ENDLESS,) if filler else _TILES)
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
    return _divide(shape, rates, slot, (_ENDLESS,)).seconds


def _divide(shape: Shape, rates: Rates, slot: float, choices: tuple[int, ...]) -> Shares:
    """The least time in which the devices together can do the gemm, and who does how much in how many tiles."""
    low, high = 0.0, 1e-3
    while (shares := _fitting(shape, rates, slot, choices, high)).volume.sum() < shape.volume:
        low, high = high, 2.0 * high
        if high > 1e15:
            raise PlanError(_hopeless(shape, rates))
    while high - low > 4e-3 * high:
        middle = (low + high) / 2
        tried = _fitting(shape, rates, slot, choices, middle)
        if tried.volume.sum() >= shape.volume:
            high, shares = middle, tried
        else:
            low = middle
    return shares


def _fitting(shape: Shape, rates: Rates, slot: float, choices: tuple[int, ...], seconds: float) -> Shares:
    """What the devices can do in `seconds`, the most capable first in the scheduler's queue.

    Each device takes the number of tiles q with the largest volume(q) - price * q; the price is the least at which the
    scheduler gets through all tiles in time.
    """
    order = np.argsort(-most(shape, rates, seconds - rates.latency)[0], kind="stable")
    if slot:
        order = order[: max(1, int(seconds / slot))]
    start = rates.latency[order] + slot * np.arange(1, len(order) + 1)
    here = rates.take(order)
    choices = tuple(tiles for tiles in choices if tiles in (1, _ENDLESS) or tiles * _LEAST_TILE <= seconds)
    offers = [_overlapped(shape, here, seconds - start, tiles) for tiles in choices]
    volumes, results = (np.stack([offer[side] for offer in offers]) for side in (0, 1))
    if shape.kind != "gemm":
        volumes = np.floor(volumes * (1 + 1e-9))
    counts = np.array([1 if tiles == _ENDLESS else tiles for tiles in choices])
    pick = _affordable(volumes, counts, seconds / slot if slot else np.inf)
    rows = np.arange(len(order))
    volume = np.where(pick >= 0, volumes[pick, rows], 0.0)
    worth = volume > (_WORTH * volume.sum() / max(1, (volume > 0).sum()) if shape.kind == "gemm" else 0.5)
    tiles = counts[pick]
    return Shares(seconds, order[worth], start[worth], volume[worth], results[pick, rows][worth], tiles[worth])


def _affordable(volumes: Floats, tiles: Ints, budget: float) -> Ints:
    """Which offer each device takes, -1 for none, so that the tiles of all stay within `budget`."""
    low, high = 0.0, float(volumes.max(initial=0.0)) + 1.0
    best = np.where(volumes.max(axis=0) > 0, volumes.argmax(axis=0), -1)
    if np.where(best >= 0, tiles[best], 0).sum() <= budget:
        return best
    for _ in range(14):
        price = (low + high) / 2
        gain = volumes - price * tiles[:, None]
        pick = np.where(gain.max(axis=0) > 0, gain.argmax(axis=0), -1)
        if np.where(pick >= 0, tiles[pick], 0).sum() <= budget:
            high, best = price, pick
        else:
            low = price
    return best


def _overlapped(shape: Shape, rates: Rates, seconds: Floats, tiles: int) -> tuple[Floats, Floats]:
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
    if tiles == 1:
        single, sent = alone(shape, rates, seconds)
        results = np.where(single > volume, sent, results)
        volume = np.maximum(single, volume)
    side = np.minimum(np.sqrt(results), min(shape.m, shape.n))
    room = _RESIDENT * rates.memory / (IN_FLIGHT * shape.down_bytes)  # of the slice that stays while others stream past
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
    """The tiles of a division."""
    if shape.kind != "gemm":
        boxes, owner, tiles = _dealt(shape, shares)
    else:
        results = np.maximum(shares.results, 1.0)
        side = np.minimum(np.sqrt(results), min(shape.m, shape.n))
        across = results / side
        rows, cols = (across, side) if shape.m > shape.n else (side, across)
        depth = np.clip(shares.volume / results, 1e-9, shape.k) if split_k else np.full(len(side), float(shape.k))
        best = np.stack([rows, cols, depth])
        overlap = np.full(len(side), _ENDLESS) if filler else shares.tiles
        job = Job(shape, slowed.take(shares.devices), shares.start, overlap, shares.volume, best)
        boxes, who = pack(job, split_k=split_k, shuffles=not filler)
        owner, tiles = shares.devices[who], shares.tiles[who]
    cut, whose = cut_boxes(shape, boxes, owner, rates, tiles)
    return lay_out(shape, cut, whose, rates, server, scheduler_seconds=slot)


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
    """Each box in at least as many tiles as wanted, cut across its longer side, and as many as its memory asks for."""
    sizes = boxes[:, 1::2] - boxes[:, 0::2]
    parts = np.ones_like(sizes)
    longer = np.where(sizes[:, 0] >= sizes[:, 1], 0, 1)
    middle = np.median(sizes, axis=0).tolist()
    units = np.array([aligned_unit(extent, size) for extent, size in zip(shape.extents, middle, strict=True)])
    most_parts = np.maximum(1, sizes // units)
    rows = np.arange(len(boxes))
    parts[rows, longer] = np.minimum(tiles, most_parts[rows, longer])
    room = rates.memory[owner] / IN_FLIGHT
    for _ in range(200):
        unit = np.where(sizes >= parts * units, units, 1)
        full = _tile_bytes(shape, np.minimum(sizes, (((sizes + unit - 1) // unit + parts - 1) // parts) * unit)) > room
        if not full.any():
            break
        edges = sizes / parts
        finished = parts >= sizes
        axis = np.where(finished, 0.0, edges * np.array([1.0, 1.0, 0.05])).argmax(axis=1)
        grown = np.minimum(parts[rows, axis] + np.maximum(1, parts[rows, axis] // 2), sizes[rows, axis])
        if (full & (grown == parts[rows, axis])).any():
            culprit = int(np.flatnonzero(full & (grown == parts[rows, axis]))[0])
            raise PlanError(_too_large(shape, float(_tile_bytes(shape, np.ones((1, 3)))[0]), owner[culprit], rates))
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


def _tile_bytes(shape: Shape, sizes: Ints | Floats) -> Floats:
    """Bytes of operands and result of tiles of these sizes."""
    rows, cols, ks = (sizes[:, axis].astype(np.float64) for axis in range(3))
    if shape.kind != "gemm":
        return rows * cols * (shape.down_bytes + shape.up_bytes)
    return (rows * ks + ks * cols) * shape.down_bytes + rows * cols * shape.up_bytes


def _hopeless(shape: Shape, rates: Rates) -> str:
    """Nobody can do anything: the memory of all is too small, or they are too slow for any use."""
    return (
        f"no device can hold a tile of a {shape.kind} of {shape.m} x {shape.n} x {shape.k}: the largest has "
        f"{quantity(float(rates.memory.max()), 'B')}; add larger devices or lower the batch"
    )


def _too_large(shape: Shape, need: float, device: int, rates: Rates) -> str:
    return (
        f"the smallest tiles of a {shape.kind} of {shape.m} x {shape.n} x {shape.k} need "
        f"{quantity(IN_FLIGHT * need, 'B')} in flight on device {device}, which has "
        f"{quantity(float(rates.memory[device]), 'B')}; leave that device out or lower the batch"
    )

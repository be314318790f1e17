"""Packing: a cuboid cut into one box for each device, of unequal volumes, each as near to its best shape as can be.

Column-based partitions (Beaumont, Boudet, Rastello, Robert 2001), in three dimensions: a zone of the cuboid is cut
along k into slabs, a slab into columns, a column into boxes. Devices that want boxes equally deep share a slab, those
that want them equally wide a column; zones let devices with even links lie in many layers beside uneven ones
that take all of k. How many slabs and columns is found by dynamic programming; then all sizes are balanced until all
devices of all columns finish together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cleave_dask.planning.cost import Floats, Ints, Rates, Shape, resident

_SWEEPS = 24  # of the balancing; damped, it converges to a percent or so
_TRIALS, _EFFORT = 24, 2048  # shuffles of a small fleet; trials times devices of a large one
_MANY = 64  # devices of a slab, from which on its columns need no dynamic programming
_ROWS, _COLS, _K = 0, 1, 2


@dataclass(frozen=True)
class Job:
    """What is to be packed: a gemm and, for each device that takes part, its speed, its start and its best box."""

    shape: Shape
    rates: Rates
    start: Floats  # seconds that pass before the device's first byte moves: latency and the scheduler's queue
    tiles: Ints  # tiles that the device's box will be cut into
    volume: Floats  # multiplications that the device should do
    best: Floats  # (3, devices): rows, columns and k of its best box

    def take(self, which: Ints) -> Job:
        """Some of the devices, in that order."""
        return Job(
            self.shape,
            self.rates.take(which),
            self.start[which],
            self.tiles[which],
            self.volume[which],
            self.best[:, which],
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


def pack(job: Job, *, split_k: bool = True, shuffles: bool = True, seed: int = 0) -> tuple[Ints, Ints]:
    """An exact partition of the cuboid: ranges (boxes, 6) and whose each is.

    Every way to lay columns and zones is tried; then the best is improved by shuffling a little which devices share a
    slab, more often for small fleets, where a few unlucky neighbours cost more and a trial costs less.
    """
    across = _ROWS if job.shape.m >= job.shape.n else _COLS
    ways = [(across, zones) for zones in _zonings(job, across, split_k)][: None if shuffles else 1]
    tried = [_balanced(job, _arrange(job, *way, job.best[_K])) for way in ways]
    times = [_longest(job, found) for found in tried]
    pick = int(np.argmin(times))
    best, seconds, way, depth = tried[pick], times[pick], ways[pick], job.best[_K]
    chance = np.random.default_rng(seed)
    trials = min(_TRIALS, _EFFORT // len(depth)) if split_k and shuffles and len(depth) > 3 else 0
    for _ in range(trials if trials > 2 else 0):
        shuffled = depth * np.exp(0.06 * chance.standard_normal(len(depth)))
        found = _balanced(job, _arrange(job, *way, shuffled))
        if _longest(job, found) < seconds:
            best, seconds, depth = found, _longest(job, found), shuffled
    return _rounded(job.shape, best)


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


def _zonings(job: Job, across: int, split_k: bool) -> Iterator[Ints]:
    """Ways to sort devices into zones: all in one; or by how many of their best boxes lie behind each other in k."""
    count = len(job.volume)
    yield np.zeros(count, dtype=np.int64) if split_k else np.full(count, -1)
    if not split_k:
        return
    face = float(job.shape.extents[1 - across]) * job.shape.k
    for least in (1.2, 4.0) if count <= 512 else (2.5,):
        layers = np.rint(job.shape.k / job.best[_K])
        zone, number, reach, wanted = np.zeros(count, dtype=np.int64), 0, 0.0, 0.0
        for value in np.unique(layers):
            members = layers == value
            zone[members] = number
            reach += float(job.volume[members].sum()) / face
            wanted = float(np.average(job.best[across][members], weights=job.volume[members]))
            if reach >= least * wanted:
                number, reach = number + 1, 0.0
        zone = np.minimum(zone, max(0, number - (reach < least * wanted)))
        if zone.any():
            yield zone


def _arrange(job: Job, across: int, zones: Ints, depth: Floats) -> Arrangement:
    """Devices of each zone sorted into slabs, of each slab into columns, with boxes of exactly the wanted volumes."""
    length = float(job.shape.extents[1 - across])
    orders: list[Ints] = []
    columns: list[Ints] = []
    slab_of: list[Ints] = []
    zone_of: list[int] = []
    thick: list[float] = []
    reach: list[float] = []
    count = 0
    for number, value in enumerate(np.unique(zones)):
        members = np.flatnonzero(zones == value)
        reach.append(float(job.volume[members].sum()) / (length * job.shape.k))
        for slab, thickness in _slabs(job, members, depth, reach[-1] * length, split=value >= 0):
            ordered, column = _columns(job, slab, thickness, length, reach[-1])
            orders.append(ordered)
            columns.append(column + count)
            slab_of.append(np.full(column[-1] + 1, len(thick)))
            count += int(column[-1]) + 1
            zone_of.append(number)
            thick.append(thickness)
    order, column, slab_ids = np.concatenate(orders), np.concatenate(columns), np.concatenate(slab_of)
    zone_ids, thickness_, reach_ = np.array(zone_of), np.array(thick), np.array(reach)
    width = np.bincount(column, job.volume[order]) / (thickness_[slab_ids] * length)
    height = job.volume[order] / (thickness_[slab_ids] * width)[column]
    return _fitted(job.shape, Arrangement(across, order, column, slab_ids, zone_ids, reach_, thickness_, width, height))


def _slabs(job: Job, members: Ints, depth: Floats, area: float, *, split: bool) -> Iterator[tuple[Ints, float]]:
    """Devices of a zone in slabs, the deepest first, and the thickness of each.

    A box of the wanted volume in a slab x thick, where its best depth is e, takes sqrt(x / e) of its best time if it is
    deeper (to come down) and e / x if it is less deep (to go up): about 8/9 (x / e)^1/2 + 1/9 (e / x)^4.
    """
    if not split:
        yield members, float(job.shape.k)
        return
    members = members[np.argsort(-depth[members], kind="stable")]
    volume, best = job.volume[members], job.best[_K][members]
    steep = best / best.max()
    costs = 8 / 9 * volume / np.sqrt(steep), 1 / 9 * volume * steep**4
    group = _partition(volume / (area * best.max()), *costs, steep=True, wanted=steep)
    for number in range(int(group[-1]) + 1):
        yield members[group == number], float(volume[group == number].sum()) / area


def _columns(job: Job, members: Ints, thickness: float, length: float, reach: float) -> tuple[Ints, Ints]:
    """Devices of a slab in columns, the largest first. A box x wide and area / x high takes (x + area / x) down."""
    members = members[np.argsort(-job.volume[members], kind="stable")]
    area = job.volume[members] / thickness
    pace = job.volume[members] / job.rates.down[members]
    wanted = np.minimum(np.sqrt(area), reach)
    if len(members) > _MANY:
        return members, _grouped(area / (length * wanted))
    return members, _partition(area / length, pace, pace * area, steep=False, wanted=wanted)


def _grouped(shares: Floats) -> Ints:
    """Consecutive members in groups whose shares add up to about one; the number of each one's group."""
    groups = max(1, round(float(shares.sum())))
    middle = np.cumsum(shares) - shares / 2.0
    number = np.minimum(groups - 1, (middle * (groups / shares.sum())).astype(np.int64))
    return np.unique(number, return_inverse=True)[1]


def _partition(part: Floats, rising: Floats, falling: Floats, *, steep: bool, wanted: Floats) -> Ints:
    """Consecutive members in groups of the least total cost; the number of each one's group.

    A group is x = sum of `part` wide and costs x * sum of `rising` + sum of `falling` / x; steep: x^1/2 and x^4.
    Dynamic programming over the last group, which is never much wider than what its members want.
    """
    count = len(part)
    band = 4 + int(2.5 * min(count, np.sort(wanted / part)[(99 * count - 1) // 100]))
    width, up, down = (np.concatenate([[0.0], np.cumsum(column)]) for column in (part, rising, falling))
    least, last = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    for stop in range(1, count + 1):
        first = max(0, stop - band)
        size = width[stop] - width[first:stop]
        wide, narrow = (np.sqrt(size), (size * size) ** 2) if steep else (size, size)
        cost = least[first:stop] + wide * (up[stop] - up[first:stop]) + (down[stop] - down[first:stop]) / narrow
        best = int(cost.argmin())
        least[stop], last[stop] = cost[best], first + best
    starts, stop = np.zeros(count, dtype=np.int64), count
    while stop > 0:
        stop = int(last[stop])
        starts[stop] = 1
    return np.cumsum(starts) - 1


def _fitted(shape: Shape, draft: Arrangement) -> Arrangement:
    """The same arrangement, stretched to fill the cuboid exactly."""
    reach = draft.reach * (shape.extents[draft.across] / draft.reach.sum())
    thickness = draft.thickness * (shape.k / np.bincount(draft.zone, draft.thickness))[draft.zone]
    width = draft.width * (reach[draft.zone] / np.bincount(draft.slab, draft.width))[draft.slab]
    height = draft.height * (shape.extents[1 - draft.across] / np.bincount(draft.column, draft.height))[draft.column]
    return replace(draft, reach=reach, thickness=thickness, width=width, height=height)


def _longest(job: Job, draft: Arrangement) -> float:
    """Seconds until the last device is through with its box."""
    ordered = job.take(draft.order)
    stages = np.stack(stage_seconds(ordered, draft.extents))
    busiest = stages.max(axis=0)
    return float((ordered.start + busiest + (stages.sum(axis=0) - busiest) / ordered.tiles).max())


def _balanced(job: Job, draft: Arrangement) -> Arrangement:
    """The arrangement with the sizes at which all devices finish together.

    For a time T every device has a greatest height in its column. Columns whose heights exceed the cuboid become
    wider, slabs whose columns exceed their zone thicker, zones whose slabs exceed the cuboid longer, and T shrinks
    while the zones exceed it: damped, until all fit.
    """
    ordered = job.take(draft.order)
    best, shortest = draft, _longest(job, draft)
    time, offset = shortest, float(np.average(ordered.start, weights=ordered.volume))
    reach, thickness, width = draft.reach, draft.thickness, draft.width
    for _ in range(_SWEEPS):
        height = _heights(ordered, draft.across, time, thickness[draft.slab][draft.column], width[draft.column])
        if (np.bincount(draft.column, height) > 0).all():
            found = _fitted(job.shape, replace(draft, reach=reach, thickness=thickness, width=width, height=height))
            seconds = _longest(job, found)
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
    """The greatest height of each box that its device can do by `time`, with a slice of it resident.

    The stages are linear in the height h: s = s0 + s1 h; and s (1 - 1/q) + sum / q <= time - start for each of them.
    Where the slice along the width does not fit into memory, that along the height must, or the width comes down again:
    then the downlink needs (1 + 2 w k / room) h.
    """
    extents = np.empty((3, len(width)))
    extents[across], extents[1 - across], extents[_K] = width, 0.0, thickness
    fixed = np.stack(stage_seconds(job, extents))
    extents[1 - across] = 1e-9  # so low that its slice fits into any memory
    slope = (np.stack(stage_seconds(job, extents)) - fixed) * 1e9
    shared = 1.0 / job.tiles
    room = time - job.start - fixed.sum(axis=0) * shared - fixed * (1.0 - shared)
    pace = slope * (1.0 - shared) + slope.sum(axis=0) * shared
    height = (room / np.maximum(pace, 1e-300)).min(axis=0)
    kept = resident(job.shape, job.rates)
    if (width * thickness > kept).any():
        again = slope[0] * (1.0 + 2.0 * width * thickness / kept)
        slow = (time - job.start) / np.maximum(np.maximum(again, slope[1:].max(axis=0)), 1e-300)
        height = np.where(width * thickness > kept, np.minimum(height, np.maximum(kept / thickness, slow)), height)
    return np.asarray(np.maximum(height, 0.0), dtype=np.float64)


def _rounded(shape: Shape, draft: Arrangement) -> tuple[Ints, Ints]:
    """Whole numbers: cuts on multiples of a power of two that moves none of them by more than a percent or so."""
    zones = _edges(draft.reach, np.zeros(len(draft.reach), dtype=np.int64), shape.extents[draft.across])
    slabs = _edges(draft.thickness, draft.zone, shape.k)
    zone = zones[draft.zone][draft.slab]
    columns = zone[:, :1] + _edges(draft.width, draft.slab, zone[:, 1] - zone[:, 0])
    ranges = np.empty((len(draft.order), 6), dtype=np.int64)
    ranges[:, 4:6] = slabs[draft.slab][draft.column]
    ranges[:, 2 * draft.across : 2 * draft.across + 2] = columns[draft.column]
    boxes = _edges(draft.height, draft.column, shape.extents[1 - draft.across])
    ranges[:, 2 - 2 * draft.across : 4 - 2 * draft.across] = boxes
    whole = (ranges[:, 1::2] > ranges[:, 0::2]).all(axis=1)
    return ranges[whole], draft.order[whole]


def _edges(sizes: Floats, group: Ints, length: int | Ints) -> Ints:
    """(start, stop) of consecutive pieces that fill `length` (that of the group) in each group."""
    ends = np.cumsum(sizes)
    first = np.concatenate([[True], group[1:] != group[:-1]])
    before = np.maximum.accumulate(np.where(first, ends - sizes, 0.0))
    unit = aligned_unit(int(np.gcd.reduce(np.atleast_1d(length))), float(np.median(sizes)))
    stops = np.minimum(np.rint((ends - before) / unit).astype(np.int64) * unit, length)
    last = np.concatenate([first[1:], [True]])
    stops = np.where(last, length, stops)
    starts = np.where(first, 0, np.concatenate([[0], stops[:-1]]))
    return np.stack([starts, np.maximum(starts, stops)], axis=1)


def aligned_unit(length: int, size: float) -> int:
    """A power of two up to 32 that divides `length` and is small beside `size`: kernels like full vectors."""
    unit = 32
    while unit > 1 and (length % unit or size < 48 * unit):
        unit //= 2
    return unit

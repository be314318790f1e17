"""Tiling of one gemm over an uneven fleet: who takes part, with how much, in how many tiles of what shape.

For a time T, each device can do a volume v(T - start), where its start is its links' latency and its place in the
scheduler's queue. The least T at which the volumes of the devices add up to the gemm gives each its share and its best
box: square (rows = columns) and about k = side * B / U * 0.7 deep, as long in k as its links are uneven, or all of K if
that is less (`growing.best_ratio`); one that outgrows the device's memory is twice as long as wide. `packing` fits the
boxes together. A box is cut into strips, which its device takes in growing order, so that download, multiplication and
upload overlap: as many as are not too short, and as save what a tile costs server and device (`Grain`). A device whose
share would not be worth a parcel is left out. Attention and batched products are dealt out cell by cell in the same
proportions (`queueing`), heads by vocabulary in groups (`heads`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Server
from cleave_dask.graph.ir import LOGITS
from cleave_dask.planning.balancing import Arrangement, Job, balanced, finish_seconds
from cleave_dask.planning.capacity import cell_seconds, most
from cleave_dask.planning.cost import (
    SCHEDULER_SECONDS,
    Floats,
    Ints,
    Rates,
    Shape,
    resident,
    smallest_bytes,
    work_seconds,
)
from cleave_dask.planning.cutting import cut_boxes
from cleave_dask.planning.growing import ENDLESS, MOST_STRIPS, best_ratio, fewest_strips, square_seconds
from cleave_dask.planning.heads import tile_head
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.packing import FEW_DEVICES, MANY_DEVICES, pack, rounded
from cleave_dask.planning.queueing import Cells, queued

_PRICED = 4  # packings of a gemm, of which the best is taken; one of filler, and one of many devices
_FAR, _FAR_FEW = 1.06, 1.045  # times what its division takes, of all and of few devices: a better packing is sought
_LITTLE = 5e-3  # seconds beyond its division: not worth the half second that a better packing takes to be found
_AGAIN, _THOROUGH = 2, 4  # times that a packing is balanced again by what its tiles take
_FOREVER = 1e15  # seconds, thirty million years: nobody waits for such a plan
_SHRINKS = 2  # of a box that takes too long
_FILLER = 0.1  # seconds of a tile of filler at least
_SHARED = 2.0  # times the turn of a tile on shared cores: nothing else of the step goes on meanwhile
_WORTH = 0.03  # a device with less than this part of the mean share is left out


@dataclass(frozen=True, slots=True)
class Grain:
    """How small tiles may be."""

    shortest: float  # seconds: shorter ones cost more in messages than their overlap brings
    price: float  # seconds that one tile more of a box must save: what it costs its device and the server

    @classmethod
    def of(cls, devices: int, server: Server, *, filler: bool = False) -> Grain:
        """That of a fleet. With many devices gemms are short, and many tiles travel as one parcel.

        Tiles of filler are as long as a gemm of the critical path may have to wait for them; their overlap is for free.
        Where the server says how many processes it has, tiles are priced as it works on them, on one of every device in
        turn: the more devices, the fewer tiles for each. Where devices share its cores,
        all work for a tile counts.
        """
        work = work_seconds(server, devices, 0.0)
        if not work:
            few = devices <= MANY_DEVICES
            return cls(_FILLER, 0.0) if filler else cls(0.025 if few else 0.0125, 5e-3 if few else 2e-3)
        turn = max(work.get("server", 0.0), _SHARED * work.get("shared cores", 0.0))
        return cls(max(_FILLER, turn), 0.0) if filler else cls(max(0.04, 0.5 * turn), max(0.01, 0.25 * turn))


@dataclass(frozen=True)
class Shares:
    """How a gemm is divided among devices, before it is cut."""

    seconds: float
    devices: Ints  # those that take part
    start: Floats  # seconds before each one's first byte moves
    volume: Floats  # multiplications, or cells, of each
    box: Floats  # (3, devices): rows, columns and k of each one's best box
    tiles: Ints  # that each one's box may be cut into at most
    strips: Ints  # that count for its overlap; ENDLESS if tiles of others fill its gaps


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
    if shape.kind in LOGITS:
        return tile_head(shape, rates, server, spare=spare, scheduler_seconds=scheduler_seconds)
    best: Layout | None = None
    down = up = 1.0
    filler = spare is not None
    grain = Grain.of(len(rates), server, filler=filler)
    for _ in range(3):
        slowed = (spare or rates).slowed(down, up)
        shares = _divide(shape, slowed, scheduler_seconds, grain, filler=filler)
        cutter = _Cutter(shape, rates, server, shares, scheduler_seconds, filler)
        found = _laid_out(cutter, slowed, grain.price, split_k=split_k)
        best = found if best is None or found.seconds < best.seconds else best
        if best.binding not in ("server egress", "server ingress"):
            break
        down *= min(1.0, 0.98 * best.devices_seconds / max(best.egress_seconds, 1e-12))
        up *= min(1.0, 0.98 * best.devices_seconds / max(best.ingress_seconds, 1e-12))
    assert best is not None
    return best


def volume_share(shape: Shape, rates: Rates, server: Server, slot: float) -> float:
    """Seconds in which these devices could do a gemm if others filled its gaps and all boxes had their best shape."""
    return _divide(shape, rates, slot, Grain.of(len(rates), server, filler=True), filler=True).seconds


def _divide(shape: Shape, rates: Rates, slot: float, grain: Grain, *, filler: bool) -> Shares:
    """The least time in which the devices together can do the gemm, and who does how much in how many tiles."""
    low, step = _fewest_seconds(shape, rates), 1.1
    high = step * low
    while (shares := _fitting(shape, rates, slot, high, grain, filler)).volume.sum() < shape.volume:
        low, high, step = high, step * high, min(2.0, 1.2 * step)
        if high > _FOREVER:
            size = f"{shape.kind} of {shape.m} x {shape.n} x {shape.k}"
            raise PlanError(f"{size} would take these devices more than {high:.0e} s; give them faster links or speed")
    while high - low > 4e-3 * high:
        middle = (low + high) / 2
        tried = _fitting(shape, rates, slot, middle, grain, filler)
        if tried.volume.sum() >= shape.volume:
            high, shares = middle, tried
        else:
            low = middle
    return shares


def _fewest_seconds(shape: Shape, rates: Rates) -> float:
    """Seconds in which the devices cannot do the gemm, whatever their boxes; in a tenth more perhaps."""
    low, high = 0.0, 1e-3
    while most(shape, rates, high - rates.latency)[0].sum() < shape.volume:
        low, high = high, 2.0 * high
    while high - low > 0.05 * high:
        middle = (low + high) / 2
        enough = most(shape, rates, middle - rates.latency)[0].sum() >= shape.volume
        low, high = (low, middle) if enough else (middle, high)
    return max(low, 1e-6)


def _fitting(shape: Shape, rates: Rates, slot: float, seconds: float, grain: Grain, filler: bool) -> Shares:
    """What the devices can do in `seconds`, the most capable first in the scheduler's queue."""
    able = np.flatnonzero(rates.memory >= smallest_bytes(shape))
    if shape.kind != "gemm":
        return _cells(shape, rates, slot, seconds, able, grain, filler)
    order = able[np.argsort(-most(shape, rates, seconds - rates.latency)[0][able], kind="stable")]
    if slot:
        order = order[: max(1, int(seconds / slot))]
    start = rates.latency[order] + slot * np.arange(1, len(order) + 1)
    tiles = _most_tiles(seconds - start, grain.shortest)
    strips = np.full(len(order), ENDLESS) if filler else np.minimum(tiles, MOST_STRIPS)
    box = _largest_box(shape, rates.take(order), np.maximum(seconds - start, 0.0), strips)
    volume = box.prod(axis=0)
    worth = volume > _WORTH * volume.sum() / max(1, (volume > 0).sum())
    return Shares(seconds, order[worth], start[worth], volume[worth], box[:, worth], tiles[worth], strips[worth])


def _cells(shape: Shape, rates: Rates, slot: float, seconds: float, able: Ints, grain: Grain, filler: bool) -> Shares:
    """The whole cells of a batched op that the devices can do in `seconds`."""
    here = rates.take(able)
    left, stages = seconds - here.latency, cell_seconds(shape, here)
    tiles = _most_tiles(left - slot, grain.shortest)
    busiest = stages.max(axis=0)
    cost = Cells(busiest, stages.sum(axis=0) - busiest, np.where(filler, np.inf, tiles))
    if slot:
        order, cells = queued(left, cost, slot)
    else:
        cells = cost.within(left)
        order = np.flatnonzero(cells)
        cells = cells[order]
    start = here.latency[order] + slot * np.arange(1, len(order) + 1)
    volume = np.minimum(cells, shape.volume).astype(np.float64)
    strips = np.full(len(order), ENDLESS) if filler else np.minimum(tiles[order], MOST_STRIPS)
    return Shares(seconds, able[order], start, volume, np.ones((3, len(order))), tiles[order], strips)


def _most_tiles(seconds: Floats, shortest: float) -> Ints:
    """Tiles in so many seconds, if none is much shorter than that."""
    return np.maximum(1, np.rint(np.maximum(seconds, 0.0) / shortest).astype(np.int64))


def _largest_box(shape: Shape, rates: Rates, seconds: Floats, strips: Ints) -> Floats:
    """(3, devices): the largest box that each device can do in `seconds` with its memory: grown, or streamed."""
    ones, none = np.ones(len(rates)), np.zeros(len(rates))
    job = Job(shape, rates, none, strips, seconds, seconds[None], ones)

    def shrunk(best: Callable[[Shape, Rates, Floats, Ints], Floats]) -> Floats:
        time = seconds
        for _ in range(_SHRINKS):
            box = best(shape, rates, time, strips)
            time = time * np.clip(seconds / np.maximum(finish_seconds(job, box), 1e-300), 0.2, 1.0)
        return best(shape, rates, time, strips)

    grown = shrunk(_best_box)
    full = (grown[0] + grown[1]) * grown[2] > 0.95 * resident(shape, rates)
    if not full.any():
        return grown
    streamed = shrunk(_streamed_box)
    return np.where(full & (streamed.prod(axis=0) > grown.prod(axis=0)), streamed, grown)


def _streamed_box(shape: Shape, rates: Rates, seconds: Floats, strips: Ints) -> Floats:
    """(3, devices): the largest box that takes `seconds` if one slice stays in memory while tiles stream past it.

    With q seconds for the slice that stays and p = T - q for the others, p sqrt(q) of volume: q = T / 3, if it fits.
    """
    speed = rates.down / shape.down_bytes  # numbers per second
    stays = np.minimum(seconds / 3.0, resident(shape, rates) / speed)
    flows = seconds - stays
    area = np.minimum(rates.up * flows / shape.up_bytes, shape.m * shape.n)
    depth = np.minimum(speed * np.sqrt(stays * flows / np.maximum(area, 1e-300)), shape.k)
    across = shape.longer
    short = np.minimum(np.minimum(stays * speed / np.maximum(depth, 1e-300), np.sqrt(area)), shape.extents[1 - across])
    long = np.minimum(area / np.maximum(short, 1e-300), flows * speed / np.maximum(depth, 1e-300))
    sides = np.minimum(long, shape.extents[across]), short
    return np.stack([*(sides if across == 0 else sides[::-1]), depth])


def _best_box(shape: Shape, rates: Rates, seconds: Floats, strips: Ints) -> Floats:
    """(3, devices): the largest box whose download and upload, in so many strips, take `seconds`."""
    received, sent = rates.down * seconds / shape.down_bytes, rates.up * seconds / shape.up_bytes
    around = shape.k * np.sum(_best_sides(shape, sent), axis=0)  # down, if the box were K deep and all sent is its area
    ratio = best_ratio(strips, (received / np.maximum(around, 1e-100)) ** 2)
    down = 1.0 / square_seconds(np.ones(len(ratio)), ratio, strips)
    rows, cols = _best_sides(shape, down * ratio * sent)
    depth = np.minimum(down * received / np.maximum(rows + cols, 1e-300), shape.k)
    return np.stack([rows, cols, depth])


def _best_sides(shape: Shape, results: Floats) -> tuple[Floats, Floats]:
    """Rows and columns of the squarest box with so many results."""
    area = np.minimum(results, shape.m * shape.n)
    side = np.minimum(np.sqrt(area), float(min(shape.m, shape.n)))
    other = area / np.maximum(side, 1e-300)
    return (other, side) if shape.m > shape.n else (side, other)


@dataclass(frozen=True)
class _Cutter:
    """Turns boxes of a division into priced tiles."""

    shape: Shape
    rates: Rates
    server: Server
    shares: Shares
    slot: float
    filler: bool

    def cut(self, boxes: Ints, owner: Ints, strips: Ints) -> Layout:
        """Boxes of these devices in so many strips; in the scheduler's queue devices keep the place of their share."""
        place = np.full(len(self.rates), len(self.rates))
        place[self.shares.devices] = np.arange(len(self.shares.devices))
        tiles = cut_boxes(self.shape, boxes, owner, self.rates, strips, filler=self.filler)
        return lay_out(self.shape, *tiles, self.rates, self.server, scheduler_seconds=self.slot, place=place)

    def laid(self, job: Job, draft: Arrangement) -> Layout:
        """An arrangement of all devices of the division."""
        boxes, who = rounded(self.shape, draft)
        strips = self.shares.tiles if self.filler else job.strips
        return self.cut(boxes, self.shares.devices[who], strips[who])

    def packed(self, job: Job, *, split_k: bool, thorough: bool = False) -> Layout:
        """The best of a few packings, balanced again by what its tiles turned out to take."""
        drafts = pack(job, split_k=split_k, many=1 if self.filler else _PRICED, thorough=thorough)
        some = drafts if thorough or len(job.volume) <= MANY_DEVICES else drafts[:1]
        found = sorted(((self.laid(job, draft), draft) for draft in some), key=lambda pair: pair[0].seconds)
        if self.filler:
            return found[0][0]
        further = thorough and len(job.volume) <= FEW_DEVICES
        rounds, most = (_THOROUGH, len(found)) if further else (_AGAIN, 1)
        corrected = [self.corrected(job, *pair, rounds=rounds) for pair in found[:most]]
        return min(corrected, key=lambda layout: layout.seconds)

    def corrected(self, job: Job, layout: Layout, draft: Arrangement, *, rounds: int) -> Layout:
        """The best layout of an arrangement that is balanced again by what its tiles turned out to take."""
        again = layout
        for _ in range(rounds):
            job = _corrected(job, draft, again, self.shares.devices)
            draft = balanced(job, draft)
            again = self.laid(job, draft)
            layout = again if again.seconds < layout.seconds else layout
        return layout


def _laid_out(cutter: _Cutter, slowed: Rates, price: float, *, split_k: bool) -> Layout:
    """The tiles of a division, for devices so slowed: of a thorough packing, if the first is far from the division."""
    shape, shares, filler = cutter.shape, cutter.shares, cutter.filler
    if shape.kind != "gemm":
        return cutter.cut(*_dealt(shape, shares))
    best = shares.box if split_k else np.stack([*shares.box[:2], np.full(len(shares.devices), float(shape.k))])
    here = slowed.take(shares.devices)
    strips = shares.strips if filler else _strips(shape, here, best, shares.tiles, price)
    job = Job(shape, here, shares.start, strips, shares.volume, best, np.ones(len(shares.devices)))
    layout = cutter.packed(job, split_k=split_k)
    far = _FAR_FEW if len(shares.devices) <= FEW_DEVICES else _FAR
    if filler or not split_k or layout.seconds < max(far * shares.seconds, shares.seconds + _LITTLE):
        return layout
    return min(layout, cutter.packed(job, split_k=split_k, thorough=True), key=lambda found: found.seconds)


def _strips(shape: Shape, rates: Rates, best: Floats, most: Ints, price: float) -> Ints:
    """The strips of each device's best box: at most so many, and no more than save `price` seconds each."""
    rows, cols, depth = best
    down = 2.0 * np.sqrt(rows * cols) * depth * shape.down_bytes / rates.down
    compute = rows * cols * depth * (shape.flops / shape.volume) / rates.flops
    up = rows * cols * shape.up_bytes / rates.up
    return fewest_strips(down, np.maximum(compute, up), np.minimum(compute, up), most, price)


def _corrected(job: Job, draft: Arrangement, layout: Layout, devices: Ints) -> Job:
    """The job with what its tiles turned out to take, and when their devices start, instead of what was expected."""
    expected, start = np.ones(len(devices)), job.start[draft.order]
    expected[draft.order] = np.maximum(finish_seconds(job.take(draft.order), draft.extents) - start, 1e-9)
    place = np.minimum(np.searchsorted(layout.devices, devices), len(layout.devices) - 1)
    there = layout.devices[place] == devices
    drag = np.clip(np.where(there, layout.through[place] / expected, 1.0), 0.9, 1.2)
    return replace(job, drag=job.drag * drag, start=np.where(there, layout.start[place], job.start))


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
            tiles.append(-(-cells // max(1, size // int(shares.tiles[place]))))
            start += cells
    return np.array(ranges, dtype=np.int64).reshape(-1, 6), np.array(owner), np.array(tiles)

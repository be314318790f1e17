"""Packing: a cuboid cut into one box for each device, of unequal volumes, each as near to its best shape as can be.

Several ways to arrange the devices are tried (`arranging`), sizes balanced so that all finish together (`balancing`),
and the most promising are shuffled a little. The best few become whole numbers here; what they cost exactly, with
their tiles, is for the caller to say.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from cleave_dask.planning.arranging import arrange, ways
from cleave_dask.planning.balancing import Arrangement, Job, balanced, longest
from cleave_dask.planning.cost import Floats, Ints, Shape

_TRIALS, _EFFORT = 30, 4096  # shuffles of a small fleet; trials times devices of a large one
_NOISE = 0.1  # of the depths that devices want, in a shuffle
_SHUFFLED = 3  # ways that are shuffled in turn, at least
_SWEEPS, _THOROUGH = 12, 30  # of balancing: enough to tell which is best, and that is balanced again

MANY_DEVICES = 512
"""More devices than these are arranged in the likeliest ways alone, unless the packing is thorough."""

FEW_DEVICES = 128
"""So few devices are cheap to arrange, and hard to arrange well: what is thorough looks further."""


def pack(job: Job, *, split_k: bool = True, many: int = 1, thorough: bool = False, seed: int = 0) -> list[Arrangement]:
    """Up to `many` arrangements of the devices' boxes, the best first.

    With many = 1 the first way is taken as it is. `thorough` tries all ways, also of many devices, and balances
    longer; of few devices it shuffles all ways, then the better half, then the best.
    """
    depth, chance = job.best[2], np.random.default_rng(seed)
    found: list[tuple[float, int, Arrangement]] = []
    every = thorough or len(depth) <= MANY_DEVICES
    tried = list(islice(ways(job, split_k=split_k, all_of_them=every), None if many > 1 else 1))
    sweeps = _THOROUGH if thorough else _SWEEPS
    shortest: list[float] = []
    for way in tried:
        draft = balanced(job, arrange(job, way, depth), sweeps=sweeps)
        shortest.append(longest(job, draft))
        found.append((shortest[-1], len(found), draft))
    trials = min(_TRIALS, _EFFORT // len(depth)) if len(tried) > 1 and len(depth) > 3 else 0
    further = thorough and len(depth) <= FEW_DEVICES
    for some in (len(tried), len(tried) // 2, _SHUFFLED) if further else (_SHUFFLED,):
        likely = sorted(range(len(tried)), key=lambda number: shortest[number])[: max(some, _SHUFFLED)]
        for trial in range(trials if trials > 4 else 0):
            number, shuffled = likely[trial % len(likely)], depth * np.exp(_NOISE * chance.standard_normal(len(depth)))
            draft = balanced(job, arrange(job, tried[number], shuffled), sweeps=sweeps)
            found.append((longest(job, draft), len(found), draft))
            shortest[number] = min(shortest[number], found[-1][0])
    return [draft for _, _, draft in sorted(found)[:many]]


def rounded(shape: Shape, draft: Arrangement) -> tuple[Ints, Ints]:
    """An exact partition of the cuboid: ranges (boxes, 6) and whose each is.

    Whole numbers: cuts on multiples of a power of two that moves none of them by more than half a percent or so.
    """
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
    while unit > 1 and (length % unit or size < 384 * unit):
        unit //= 2
    return unit

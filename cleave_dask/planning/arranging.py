"""Arranging: which devices lie beside, above and behind each other, so that each box is near to its best shape.

Column-based partitions (Beaumont, Boudet, Rastello, Robert 2001), in three dimensions: a zone of the cuboid is cut
along k into slabs, a slab into columns, a column into boxes. Devices that want boxes equally deep share a slab, those
that want them equally wide a column; zones let devices with even links lie in many layers beside uneven ones
that take all of k. How many slabs and columns is found by dynamic programming, or by what the devices can send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cleave_dask.planning.balancing import Arrangement, Job, fitted
from cleave_dask.planning.cost import Floats, Ints

_MANY = 24  # devices of a slab, from which on its columns need no dynamic programming
_EVENED = 12  # devices of a slab, from which on chance evens out what slabs can send
_FEW = 256  # devices of a zone, up to which slabs are evened one swap after another
_K = 2

Slabs = Callable[[Job, Ints, Floats, float], Iterator[tuple[Ints, float]]]
"""Devices of a zone of some area, with the depths they want: the members and the thickness of each slab."""


@dataclass(frozen=True)
class Way:
    """A way to arrange devices."""

    across: int  # the axis, rows (0) or columns (1), along which columns of boxes stand side by side
    zones: Ints  # of each device
    slabs: Slabs


def ways(job: Job, *, split_k: bool, all_of_them: bool) -> Iterator[Way]:
    """Ways to sort devices: all in one zone; or by how many of their best boxes lie behind each other in k; or by size.

    For each of them, slabs by volume and slabs by what devices can send, and columns across the longer and the shorter
    axis; or only the likeliest.
    """
    count, longer = len(job.volume), job.shape.longer
    for across in (longer, 1 - longer) if all_of_them else (longer,):
        if not split_k or (job.best[_K] >= job.shape.k).all():
            yield Way(across, np.zeros(count, dtype=np.int64), _whole)
            continue
        for number, zones in enumerate(_zonings(job, across, all_of_them=all_of_them)):
            yield Way(across, zones, _covering_slabs)
            if number == 0 or all_of_them:
                yield Way(across, zones, _slabs)


def _zonings(job: Job, across: int, *, all_of_them: bool) -> Iterator[Ints]:
    """The zone of each device, in several ways."""
    count = len(job.volume)
    yield np.zeros(count, dtype=np.int64)
    face = float(job.shape.extents[1 - across]) * job.shape.k
    for least in (1.2, 4.0) if all_of_them else (2.5,):
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
    side = float(np.average(np.sqrt(job.best[0] * job.best[1]), weights=job.volume))
    order = np.argsort(-job.best[0] * job.best[1], kind="stable")
    share = np.cumsum(job.volume[order]) / job.volume.sum()
    for zones in (2, 3) if all_of_them else ():
        if job.shape.extents[across] >= zones * side and count >= 4 * zones:
            zone = np.zeros(count, dtype=np.int64)
            zone[order] = np.minimum(zones - 1, (share * zones).astype(np.int64))
            yield zone


def _whole(job: Job, members: Ints, depth: Floats, area: float) -> Iterator[tuple[Ints, float]]:
    """One slab through all of k."""
    yield members, float(job.shape.k)


def arrange(job: Job, way: Way, depth: Floats) -> Arrangement:
    """Devices of each zone sorted into slabs, of each slab into columns, with boxes of exactly the wanted volumes."""
    across = way.across
    length = float(job.shape.extents[1 - across])
    orders: list[Ints] = []
    columns: list[Ints] = []
    slab_of: list[Ints] = []
    zone_of: list[int] = []
    thick: list[float] = []
    reach: list[float] = []
    count = 0
    for number, value in enumerate(np.unique(way.zones)):
        members = np.flatnonzero(way.zones == value)
        reach.append(float(job.volume[members].sum()) / (length * job.shape.k))
        for slab, thickness in way.slabs(job, members, depth, reach[-1] * length):
            ordered, column = _columns(job, slab, thickness, across, reach[-1])
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
    return fitted(job.shape, Arrangement(across, order, column, slab_ids, zone_ids, reach_, thickness_, width, height))


def _slabs(job: Job, members: Ints, depth: Floats, area: float) -> Iterator[tuple[Ints, float]]:
    """Devices of a zone in slabs, the deepest first, and the thickness of each: by volume.

    A box of the wanted volume in a slab x thick, where its best depth is e, takes sqrt(x / e) of its best time if it is
    deeper (to come down) and e / x if it is less deep (to go up): about 8/9 (x / e)^1/2 + 1/9 (e / x)^4.
    """
    members = members[np.argsort(-depth[members], kind="stable")]
    volume, best = job.volume[members], job.best[_K][members]
    steep = best / best.max()
    costs = 8 / 9 * volume / np.sqrt(steep), 1 / 9 * volume * steep**4
    group = _partition(volume / (area * best.max()), *costs, steep=True, wanted=steep)
    for number in range(int(group[-1]) + 1):
        yield members[group == number], float(volume[group == number].sum()) / area


def _covering_slabs(job: Job, members: Ints, depth: Floats, area: float) -> Iterator[tuple[Ints, float]]:
    """Devices of a zone in slabs, the deepest first, and the thickness of each: by what they can send.

    However thin a slab is, its devices must send all of its area A: one whose devices send too little takes A / sum of
    c times as long. One whose devices could send more is thicker than they like: sum of c (e / x)^2 = A gives x. So
    the slabs should send alike; the number of slabs is the one at which the worse of the two is best.
    """
    members = members[np.argsort(-depth[members], kind="stable")]
    sent = job.volume[members] / job.best[_K][members]
    need = sent * job.best[_K][members] ** 2
    most = min(len(members), int(sent.sum() / area) + 1)
    best, shortest = np.zeros(len(members), dtype=np.int64), float("inf")
    for slabs in range(max(1, most - 4), most + 1):
        middle = (np.cumsum(sent) - sent / 2) * (slabs / sent.sum())
        group = np.unique(np.minimum(slabs - 1, middle.astype(np.int64)), return_inverse=True)[1]
        if len(members) < min(_FEW, _EVENED * slabs):
            group = _evened(sent, group)
        thick = np.sqrt(np.bincount(group, need) / area)
        longest = max(area / float(np.bincount(group, sent).min()), job.shape.k / float(thick.sum()))
        if longest < shortest:
            best, shortest = group, longest
    thick = np.sqrt(np.bincount(best, need))
    for number, thickness in enumerate(thick * (job.shape.k / thick.sum())):
        yield members[best == number], float(thickness)


def _evened(sent: Floats, group: Ints) -> Ints:
    """Groups whose sums are more alike: the least swaps one of its members for a larger one of a group nearby."""
    group, total = group.copy(), np.bincount(group, sent)
    for _ in range(3 * len(total)):
        low = int(total.argmin())
        swaps = []
        for other in range(max(0, low - 3), min(len(total), low + 4)):
            mine, theirs = np.flatnonzero(group == low), np.flatnonzero(group == other)
            more = sent[theirs][None, :] - sent[mine][:, None]
            one, two = np.unravel_index(np.abs(more - (total[other] - total[low]) / 2).argmin(), more.shape)
            swaps.append((min(more[one, two], total[other] - total[low] - more[one, two]), mine[one], theirs[two]))
        gain, one, two = max(swaps)
        if gain <= 0.002 * total[low]:
            break
        group[one], group[two] = group[two], group[one]
        total = np.bincount(group, sent)
    return group


def _columns(job: Job, members: Ints, thickness: float, across: int, reach: float) -> tuple[Ints, Ints]:
    """Devices of a slab in columns, the largest first. A box x wide and area / x high takes (x + area / x) down.

    A device that wants its boxes r times as wide as high has x + r area / x in mind.
    """
    members = members[np.argsort(-job.volume[members], kind="stable")]
    area = job.volume[members] / thickness
    pace = job.volume[members] / job.rates.down[members]
    length = float(job.shape.extents[1 - across])
    stout = area * (job.best[across] / job.best[1 - across])[members]
    wanted = np.minimum(np.sqrt(stout), reach)
    if len(members) > _MANY:
        return members, _grouped(area / (length * wanted))
    return members, _partition(area / length, pace, pace * stout, steep=False, wanted=wanted)


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

"""Lower bounds: no plan on a fleet can be faster, whatever its tiles.

The plan space. A gemm is cut into cuboids (a batched op into ranges of cells), any number for a device, each computed
by one device that has received the operands it needs, an operand number once at most for all its tiles, and that sends
its result. The server sends and takes everything, devices do not talk to each other. The scheduler turns to one
parcel after another for `scheduler_seconds` each before it can start, and every device needs at least one. The links'
latency passes before a device's first result is back. Memory is left out: it can only make plans slower. With `boxes`
the plan space is narrower, and the bound sharper: a device's tiles of a gemm are those of one box, as in all plans that
`tiling` makes. In a plan whose gemms share operands (`sharing`), what is kept of them counts as there (`kept_bound`).

Why it is a bound. `capacity.most` caps what a device can do in a time by the inequality of Loomis and Whitney, for any
set of cuboids, and `capacity.lines` by the whole number of devices behind each number of the result. The device whose
first parcel is in the scheduler's slot j has T - j s - latency seconds, and so a worth in that slot. The most that
devices can be worth together is an assignment problem; for any prices of slots, the price of all slots plus each
device's best gain at those prices is above it (weak duality). If even that is below what the gemm needs, T is too
short, and so is all that is less, even where its own prices do not show it. The server's links are bounded in the same
way, by what must cross them at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from cleave_dask.fleet.devices import Server
from cleave_dask.planning.capacity import lines, most, reach
from cleave_dask.planning.cost import SCHEDULER_SECONDS, Floats, Rates, Shape
from cleave_dask.planning.slices import SIDED, fetched

_SLOT_GROUPS = (32, 96)  # slots of a group are priced alike, and are worth what the first of the group is
_ALPHAS = (1.0, 0.85, 0.7, 0.55)  # volume against whole lines: each is a bound, the best of them is taken
_PRECISION = 5e-4
_FURTHER = np.arange(1.01, 1.13, 0.01)  # times what was found: of whole cells, a little more time may be worth less


def gemm_bound(
    shape: Shape, rates: Rates, server: Server, *, boxes: bool = False, scheduler_seconds: float = SCHEDULER_SECONDS
) -> tuple[float, str]:
    """Seconds below which no plan can finish a gemm of this shape alone, and the resource that says so."""
    free, alpha = 0.0, 1.0
    for tried in _ALPHAS if shape.kind == "gemm" else (1.0,):
        found = _by_devices(_Worth(shape, rates, tried, boxes), slot=0.0, start=free)
        free, alpha = (found, tried) if found > free else (free, alpha)
    slot, worth = scheduler_seconds, _Worth(shape, rates, alpha, boxes)
    by_devices = free
    for groups in _SLOT_GROUPS if slot else ():
        by_devices = _by_devices(worth, slot=slot, start=by_devices, groups=groups)
    if slot and shape.kind not in SIDED:
        longer = (by_devices * _FURTHER).tolist()
        short = [t for t in longer if _in_slots(worth, t, slot, _SLOT_GROUPS[-1]) < shape.volume * (1 - 1e-9)]
        by_devices = max([by_devices, *short])
    by_egress = _least(lambda t: _sent(shape, rates, server, t) / shape.volume, start=by_devices)
    by_ingress = shape.least_up / server.ingress
    found = max(by_devices, by_egress, by_ingress)
    if found == by_devices:
        return found, "scheduler" if by_devices > 1.1 * free else _busiest(shape, rates, found)
    return found, "server egress" if found == by_egress else "server ingress"


def kept_bound(shape: Shape, kept: Sequence[bool], rates: Rates, server: Server) -> tuple[float, str]:
    """The same of a gemm some of whose operands are on the devices already, as much of them as each likes.

    The v products of a device touch at least v / N numbers of A and v / M of B, of which those come down that are not
    there, and add to at least v / K of C: whatever the set, each number is in no more products than that.
    """
    sides = [rates.down / shape.down_bytes * (shape.n, shape.m)[side] for side in fetched(kept)]
    stages = [*sides, rates.flops * shape.volume / shape.flops, rates.up / shape.up_bytes * shape.k]
    names = ["downlink"] * len(sides) + ["compute", "uplink"]
    alone = [shape.volume / float(stage.sum()) for stage in stages]
    by_devices = float(rates.latency.min()) + shape.volume / float(np.min(stages, axis=0).sum())
    by_egress, by_ingress = least_down(shape, kept) / server.egress, shape.least_up / server.ingress
    found = max(by_devices, by_egress, by_ingress)
    if found == by_devices:
        return found, names[int(np.argmax(alone))]
    return found, "server egress" if found == by_egress else "server ingress"


def least_down(shape: Shape, kept: Sequence[bool]) -> float:
    """Bytes that must come down at least: every operand once that is not on the devices already."""
    if not any(kept):
        return shape.least_down
    return sum((shape.m, shape.n)[side] for side in fetched(kept)) * shape.k * shape.down_bytes


@dataclass(frozen=True)
class _Worth:
    """What devices can do at most of a gemm, by the time they have."""

    shape: Shape
    rates: Rates
    alpha: float  # volume against whole lines
    boxes: bool

    def __call__(self, seconds: Floats) -> Floats:
        """Lines of a gemm, whole cells of anything else, that each device can do by `seconds`."""
        left = seconds - self.rates.latency
        if self.shape.kind not in SIDED:
            return np.floor(most(self.shape, self.rates, left)[0] * (1 + 1e-9))
        if self.shape.kind != "gemm":
            return most(self.shape, self.rates, left)[0] * (self.shape.m * self.shape.n / self.shape.volume)
        return lines(self.shape, self.rates, left, self.alpha, boxes=self.boxes)


def _by_devices(worth: _Worth, *, slot: float, start: float, groups: int = 1) -> float:
    """Seconds, more than `start`, below which the devices cannot do a gemm."""
    needed = worth.shape.m * worth.shape.n * (1 - 1e-9)  # a sum that is rounded down may be all the same
    if slot:
        return _least(lambda seconds: _in_slots(worth, seconds, slot, groups) / needed, start=start)
    return _least(lambda seconds: float(worth(np.full(1, seconds)).sum()) / needed, start=start)


def _in_slots(worths: _Worth, seconds: float, slot: float, groups: int) -> float:
    """At least what the fleet can do in `seconds` when the scheduler starts one device per slot.

    Prices as if the most worthy came first: the difference of the prices of two slots is what it costs those who have
    the first of them to wait for the second.
    """
    slots = min(len(worths.rates), int(seconds / slot) + 1)
    firsts = np.unique(np.arange(groups + 1) * slots // groups)[:-1].astype(np.float64)
    sizes = np.diff(np.append(firsts, slots)).astype(np.int64)
    worth = worths((seconds - slot * (firsts + 1))[:, None])
    order = np.argsort(-worth[0], kind="stable")
    group = np.repeat(np.arange(len(firsts)), sizes)
    holders = order[: len(group)]
    later = np.minimum(group + 1, len(firsts) - 1)
    loss = np.bincount(group, worth[group, holders] - worth[later, holders]) / sizes
    last = worth[-1, order[slots]] if slots < len(order) else 0.0
    price = np.cumsum(loss[::-1])[::-1] + last
    return float(sizes @ price + np.maximum((worth - price[:, None]).max(axis=0), 0.0).sum())


def _sent(shape: Shape, rates: Rates, server: Server, seconds: float) -> float:
    """At least the volume that devices can do with what the server can send in `seconds`, the thriftiest first."""
    volume, results = most(shape, rates, seconds - rates.latency)
    budget = server.egress * seconds
    if shape.kind not in SIDED:
        return min(float(volume.sum()), budget / shape.down_bytes)
    if shape.kind != "gemm":
        return float(volume.sum()) if budget >= shape.least_down else 0.0
    thrift = reach(shape, results)
    order = np.argsort(-thrift)
    need = volume[order] * shape.down_bytes / np.maximum(thrift[order], 1e-12)
    spent = np.cumsum(need)
    part = np.clip((budget - (spent - need)) / np.maximum(need, 1e-12), 0.0, 1.0)
    return float((volume[order] * part).sum())


def _busiest(shape: Shape, rates: Rates, seconds: float) -> str:
    """The resource of the devices that limits most of what they can do in `seconds`."""
    now = most(shape, rates, seconds - rates.latency)[0].sum()
    doubled = {
        "downlink": Rates(2 * rates.down, rates.up, rates.flops, rates.memory, rates.latency),
        "uplink": Rates(rates.down, 2 * rates.up, rates.flops, rates.memory, rates.latency),
        "compute": Rates(rates.down, rates.up, 2 * rates.flops, rates.memory, rates.latency),
        "latency": Rates(rates.down, rates.up, rates.flops, rates.memory, rates.latency / 2),
    }
    gains = {name: most(shape, more, seconds - more.latency)[0].sum() - now for name, more in doubled.items()}
    return max(gains, key=lambda name: gains[name])


@dataclass(frozen=True, slots=True)
class _Gap:
    """Two times, one too short and one enough, and how much of what is needed can be done in each."""

    low: float
    below: float
    high: float
    above: float

    @property
    def width(self) -> float:
        """Seconds between the two."""
        return self.high - self.low

    @property
    def crossing(self) -> float:
        """Where all of it is done, if what is done is a power of the time; 0 if the short time does nothing."""
        if self.below <= 0.0:
            return 0.0
        power = log(self.below) / log(self.below / self.above)
        return float(self.low * (self.high / self.low) ** power)

    def narrowed(self, share: Callable[[float], float], seconds: float) -> _Gap:
        """The part of the gap before or after `seconds`, whichever is left; all of it if that lies outside."""
        if not self.low < seconds < self.high:
            return self
        value = share(seconds)
        if value < 1.0:
            return _Gap(seconds, value, self.high, self.above)
        return _Gap(self.low, self.below, seconds, value)


def _least(share: Callable[[float], float], *, start: float = 0.0) -> float:
    """The least number of seconds that is enough, from below: what is returned is not enough, or only just.

    `share` says how much of what is needed can be done in a time. That is about a power of the time, so a line through
    two points in logarithms tells where to look; where it does not, as with whole cells, the middle does.
    """
    low, below = start, share(start) if start else 0.0
    high, above = max(low, 1e-9), below
    while above < 1.0:
        low, below = high, above
        high *= min(4.0, max(1.0 + _PRECISION, 1.02 * max(below, 1e-3) ** -0.7))
        above = share(high)
        if high > 1e18:
            return float("inf")
    gap = _Gap(low, below, high, above)
    while (width := gap.width) > _PRECISION * gap.low:
        crossing = gap.crossing
        for beside in (1 - _PRECISION / 3, 1 + _PRECISION / 3):
            gap = gap.narrowed(share, crossing * beside)
        if gap.width > width / 2:
            gap = gap.narrowed(share, (gap.low + gap.high) / 2)
    return gap.low

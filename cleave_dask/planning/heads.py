"""Tiling of a head by vocabulary: logits are r rows by v words, made where they are needed and never sent.

A device with a rows and b words has (a + b) h numbers down, and up what its results are kept by: rows of sums and of
dX, words of dW. Call that the kept side, the other the summed one. Devices stand in groups, each with a range of the
summed side; within a group the kept side is divided among its devices. One group is all results once and the whole of
the summed side for everybody; G groups are G times the results and 1 / G of that side. What is best depends on the
links, so a few G are tried. For a time T and a range of c, a device can do

    (T - start - c h w / B) / ((d + m c + u) / s + (1 - 1 / s) max(d, m c, u))      of the kept side

in s strips, where d, m c, u are the seconds down, in the multiplier and up of one row of it: all of the range comes
first, then strips follow each other through the three stages. The more a group's range, the less of the kept side its
devices can do: the greatest range for which they do all of it is found by bisection, and so is the least T at which the
ranges of all groups add up to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Server
from cleave_dask.planning.cost import AT_ONCE, Floats, Ints, Rates, Shape
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.slices import turned

_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_STRIPS, _SHORTEST = 8, 0.025  # strips at most, and seconds that one takes at least
_ROOM = 0.9  # of a device's memory that tiles in flight may fill
_LEAST = 0.05  # a device with less than this part of the mean share of its group is left out
_ENOUGH = 0.9999  # of the summed side: bisection comes near to all of it, never there
_ALIGN = 8  # cuts fall on multiples of this where there is enough


class HeadError(PlanError):
    """A head that no device can hold a tile of."""


def tile_head(shape: Shape, rates: Rates, server: Server, *, spare: Rates | None, scheduler_seconds: float) -> Layout:
    """The best layout found of one of the gemms of a head; `spare` is what others leave of the devices, for filler."""
    order = np.argsort(-np.minimum((spare or rates).down, 10.0 * (spare or rates).up), kind="stable")
    found: Layout | None = None

    def cost(layout: Layout) -> float:
        """Of filler, whose gaps others fill, what keeps its busiest device busy."""
        return layout.seconds if spare is None else float(layout.stages.max())

    for count in _GROUPS:
        if count > min(len(rates), shape.sides[1]):
            break
        turns = np.arange(len(rates))
        snake = np.where(turns // count % 2, count - 1 - turns % count, turns % count)
        group = np.empty(len(rates), dtype=np.int64)
        group[order] = snake
        start = np.empty(len(rates))
        start[order] = scheduler_seconds * (turns + 1)
        drawn = _Draft(shape, spare or rates, group, start + rates.latency, count).divided()
        if drawn is None:
            continue
        place = np.empty(len(rates), dtype=np.int64)
        place[order] = turns
        tiles = _cut(shape, rates, group, *drawn)
        layout = lay_out(shape, *tiles, rates, server, scheduler_seconds=scheduler_seconds, place=place)
        if found is not None and cost(layout) > 1.2 * cost(found):
            break
        found = layout if found is None or cost(layout) < cost(found) else found
    if found is None:
        raise HeadError(
            f"no device has the memory for tiles of a head of {shape.sides[0]} x {shape.sides[1]}, {shape.sides[2]}"
            " wide; plan it with by_vocabulary=False"
        )
    return found


@dataclass(frozen=True)
class _Draft:
    """Devices in groups, before it is known how much each does."""

    shape: Shape
    rates: Rates
    group: Ints  # of each device
    start: Floats  # seconds before its first byte moves
    count: int

    def divided(self) -> tuple[Floats, Floats, Floats] | None:
        """How much of the kept side each device does, of the summed one each group has, and the seconds it takes."""
        whole, high = _ENOUGH * self.shape.sides[1], float(self.start.min()) + 1e-3
        while self._ranges(high).sum() < whole:
            high *= 2.0
            if high > 1e12:
                return None
        low = high / 2.0
        while high - low > 2e-3 * high:
            middle = (low + high) / 2.0
            low, high = (low, middle) if self._ranges(middle).sum() >= whole else (middle, high)
        ranges = self._ranges(high)
        return self._kept(high, ranges), ranges, np.full(len(self.group), high)

    def _ranges(self, seconds: float) -> Floats:
        """The most of the summed side that each group can take, if its devices are to do all of the kept one."""
        low, high = np.zeros(self.count), np.full(self.count, float(self.shape.sides[1]))
        for _ in range(20):
            middle = (low + high) / 2.0
            enough = np.bincount(self.group, self._kept(seconds, middle), self.count) >= self.shape.sides[0]
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        return np.where(low < _ENOUGH, 0.0, low)

    def _kept(self, seconds: float, ranges: Floats) -> Floats:
        """What each device can do of the kept side in `seconds`, if its group has these ranges."""
        shape, rates, mine = self.shape, self.rates, ranges[self.group]
        kept, _, depth = shape.sides
        side = depth * shape.down_bytes
        left = seconds - self.start - mine * side / rates.down
        strips = np.clip(left / _SHORTEST, 1.0, _STRIPS)
        stages = np.stack(
            [
                side / rates.down,
                mine * depth * (shape.flops / shape.volume) / rates.flops,
                shape.least_up / kept / rates.up,
            ]
        )
        each = stages.sum(axis=0) / strips + (1.0 - 1.0 / strips) * stages.max(axis=0)
        fits = _strip_rows(shape, rates.memory, mine) >= 1.0
        return np.where(fits, np.clip(left, 0.0, None) / each, 0.0)


def _strip_rows(shape: Shape, memory: Floats, others: Floats) -> Floats:
    """The most of the kept side in a tile beside so much of the summed one: two tiles fit, so would their logits."""
    kept, _, depth = shape.sides
    side = depth * shape.down_bytes
    free = _ROOM * memory / AT_ONCE - others * side
    return np.asarray(free / (2.0 * (side + shape.least_up / kept + others * shape.down_bytes)))


def _cut(shape: Shape, rates: Rates, group: Ints, kept: Floats, ranges: Floats, seconds: Floats) -> tuple[Ints, Ints]:
    """The tiles of all devices, and whose each is."""
    whole, other, depth = shape.sides
    found, owner = list[tuple[int, ...]](), list[int]()
    edges = _edges(ranges, other)
    for number in range(len(ranges)):
        start, stop = int(edges[number]), int(edges[number + 1])
        members = np.flatnonzero(group == number)
        shares = np.where(kept[members] < _LEAST * kept[members].mean(), 0.0, kept[members])
        if start == stop or not shares.sum():
            assert start == stop, "a group that can do nothing has no range"
            continue
        cuts = _edges(shares, whole)
        for device, low, high in zip(members.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            most = float(_strip_rows(shape, rates.memory[[device]], np.array([float(stop - start)]))[0])
            strips = max(int(np.clip(seconds[device] / _SHORTEST, 1, _STRIPS)), -(-(high - low) // max(1, int(most))))
            inner = low + (high - low) * np.arange(strips + 1) // strips
            for first, last in zip(inner[:-1].tolist(), inner[1:].tolist(), strict=True):
                if first < last:
                    found.append((first, last, start, stop, 0, depth))
                    owner.append(device)
    return turned(shape.kind, np.array(found, dtype=np.int64)), np.array(owner, dtype=np.int64)


def _edges(shares: Floats, whole: int) -> Ints:
    """Where parts in these proportions of a whole begin and end."""
    unit = _ALIGN if whole >= 8 * _ALIGN * len(shares) else 1
    edges = unit * np.rint(np.cumsum(shares) / shares.sum() * whole / unit).astype(np.int64)
    edges[-1] = whole
    return np.concatenate([[0], np.minimum(edges, whole)])

"""Queueing: whole cells of a batched op in the scheduler's slots, so that as many as possible are done in a time.

A cell cannot be divided, so most devices have some time left over: whoever could begin later and still do as many can
be behind those who could not. Each device offers its greatest number of cells and the last slot at which it can still
do them. The greatest offers are taken first, each in the last free slot that it allows; one that finds none comes again
with the number of cells that the first free slot leaves it. If devices made one offer each, nothing would do more (jobs
with deadlines are a matroid).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_MOST_CELLS = 1e18  # more than any gemm has
_MOST_SLOTS = 1 << 20  # more than any fleet has devices; slow devices have billions, which nobody could list


@dataclass(frozen=True)
class Cells:
    """What whole cells cost each device: v of them take v times the busiest stage, and the others of the largest tile.

    Up to `tiles` cells each is a tile of its own, beyond that they share so many tiles.
    """

    busiest: Floats
    others: Floats
    tiles: Floats

    def within(self, seconds: Floats) -> Ints:
        """Cells that each device does in `seconds`."""
        alone = (seconds - self.others) / self.busiest
        shared = seconds / (self.busiest + self.others / self.tiles)
        cells = np.where(alone <= self.tiles, alone, shared)
        return np.asarray(np.floor(np.clip(cells, 0.0, _MOST_CELLS) * (1 + 1e-9)), dtype=np.int64)


def queued(left: Floats, cost: Cells, slot: float) -> tuple[Ints, Ints]:
    """Devices in the order of their slots, and the cells of each: as many as can be done by then.

    Devices have `left` seconds but for the slots before them.
    """
    slots = min(int(left.max(initial=0.0) / slot), _MOST_SLOTS)
    free = list(range(slots + 1))  # the last free slot up to each, 0 if there is none
    offers = [(-number, device) for device, number in enumerate(cost.within(left - slot).tolist()) if number > 0]
    heapify(offers)
    columns = (left, cost.busiest, cost.others, cost.tiles)
    devices = list(zip(*(column.tolist() for column in columns), strict=True))
    lowest = 1
    taken: list[tuple[int, int, int]] = []  # slot, device, cells
    while offers and len(taken) < slots:
        number, device = -offers[0][0], offers[0][1]
        time, busiest, others, tiles = devices[device]
        needs = number * busiest + others * max(1.0, number / tiles)
        place = _last(free, min(slots, max(1, int((time - needs) / slot * (1 + 1e-9)))))
        if place:
            heappop(offers)
            taken.append((place, device, number))
            free[place] = place - 1
            continue
        while lowest < slots and _last(free, lowest) == 0:
            lowest += 1
        time -= slot * lowest
        fewer = (time - others) / busiest
        fewer = min(number - 1, int(fewer if fewer <= tiles else time / (busiest + others / tiles)))
        if fewer > 0:
            heapreplace(offers, (-fewer, device))
        else:
            heappop(offers)
    taken.sort()
    found = np.array(taken, dtype=np.int64).reshape(-1, 3)
    return found[:, 1], found[:, 2]


def _last(free: list[int], place: int) -> int:
    """The last free slot up to a place; paths are halved on the way."""
    while free[place] != place:
        free[place] = free[free[place]]
        place = free[place]
    return place

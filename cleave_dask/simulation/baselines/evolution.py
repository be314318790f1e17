"""The evolutionary search of DTFM: which device works on which stage.

A candidate deals n = S D devices to S stages of D replicas. Generations follow Yuan et al. 2022 (DTFM), section 4, and
the partitioning algorithm that its code builds on: two parents are crossed (a device on which they agree keeps its
stage, the others are dealt to the places left), the child is improved by a local search that moves devices round a
cycle of stages, and takes the place of the worst candidate if it is better. Their code uses a population of 100 and
4,900 trials; a fleet of thousands is granted fewer of both, so that all candidates together hold BUDGET devices, but
its first candidate is the fleet in sorted order, which is the best one where bandwidth alone decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Dealt = np.ndarray[Any, np.dtype[np.int64]]
"""Devices by (stage, replica)."""

POPULATION = 100
TRIALS = 4900
BUDGET = 400_000
"""Devices in all candidates that are priced, together: bounds the time of a search to about a second."""

_CYCLE = 3  # stages that a local move goes round
_MOVES = 4  # local moves tried on each child


def evolve(first: Dealt, price: Callable[[Dealt], float], *, seed: int = 0) -> tuple[Dealt, float]:
    """The cheapest way found to deal devices to stages, never worse than the `first`; same seed, same answer."""
    if len(first) == 1 or first.size < 3:
        return first, price(first)
    chance = np.random.default_rng(seed)
    priced = min(TRIALS, BUDGET // first.size)
    size = max(2, min(POPULATION, priced // 10))
    people = [first, *(chance.permutation(first.ravel()).reshape(first.shape) for _ in range(size - 1))]
    costs = np.array([price(each) for each in people])
    for _ in range(max(0, (priced - size) // (1 + _MOVES))):
        one, other = chance.choice(size, 2, replace=False)
        child = _cross(people[one], people[other], chance)
        child, cost = _improve(child, price, chance)
        worst = int(costs.argmax())
        if cost < costs[worst]:
            people[worst], costs[worst] = child, cost
    winner = int(costs.argmin())
    return people[winner], float(costs[winner])


def _cross(one: Dealt, other: Dealt, chance: np.random.Generator) -> Dealt:
    """A child that keeps every device on which its parents agree, and deals the others at random."""
    mine = {int(device): stage for stage, row in enumerate(one) for device in row}
    child = np.full(one.shape, -1, dtype=np.int64)
    loose = []
    filled = [0] * len(one)
    for stage, row in enumerate(other):
        for device in row.tolist():
            if mine[device] == stage:
                child[stage, filled[stage]] = device
                filled[stage] += 1
            else:
                loose.append(device)
    child[child < 0] = chance.permutation(np.array(loose, dtype=np.int64))
    return child


def _improve(child: Dealt, price: Callable[[Dealt], float], chance: np.random.Generator) -> tuple[Dealt, float]:
    """Move one device of each of a few stages to the next of them, as long as that is no worse."""
    cost = price(child)
    stages, replicas = child.shape
    for _ in range(_MOVES):
        chosen = chance.choice(stages, min(stages, int(chance.integers(2, _CYCLE + 1))), replace=False)
        places = chance.integers(0, replicas, len(chosen))
        moved = child.copy()
        moved[chosen, places] = child[np.roll(chosen, 1), np.roll(places, 1)]
        new = price(moved)
        if new <= cost:
            child, cost = moved, new
    return child, cost

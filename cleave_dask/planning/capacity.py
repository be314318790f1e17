"""How much of a gemm a device can do in a given time: the functions that bound and plan both stand on.

A device does some set of multiplications (i, j, k) of a gemm, V in all. It must have received the a numbers of A and
the b numbers of B that they touch, and sends at least the c numbers of C that they add to. Loomis and Whitney: for any
such set V^2 <= a b c, whatever its shape. Besides V <= c K, V <= a N, V <= b M. With D = a + b numbers down:

    V <= D sqrt(c) / 2             when sqrt(c) <= l, the shorter of M and N   (attained by a square cuboid)
    V <= D c l / (l^2 + c)         otherwise                                   (attained by a cuboid l wide)

Both grow with c, so within t seconds, c = min(U t / w, M N) and D = B t / w give the most a device can do when its
transfers overlap perfectly (`most`). One tile alone cannot overlap with itself, so its three stages add up (`alone`).
Links are in bytes/s, w in bytes, the result in multiplications; cells of a batched op cost the same whichever they are.
"""

from __future__ import annotations

import numpy as np

from cleave_dask.planning.cost import IN_FLIGHT, Floats, Rates, Shape

_ROUNDS = 3  # an odd number: the value after an odd number of rounds is never too small


def most(shape: Shape, rates: Rates, seconds: Floats) -> tuple[Floats, Floats]:
    """The largest volume that each device can do in `seconds` of perfect overlap, and the results it then sends."""
    time = np.maximum(seconds, 0.0)
    compute = rates.flops * time * (shape.volume / shape.flops)
    if shape.kind != "gemm":
        stages = cell_seconds(shape, rates)
        cells = np.where(time >= stages.sum(axis=0), 1.0 + (time - stages.sum(axis=0)) / stages.max(axis=0), 0.0)
        volume = np.minimum(cells, shape.volume)
        return volume, volume
    received = rates.down * time / shape.down_bytes
    results = np.minimum(rates.up * time / shape.up_bytes, shape.m * shape.n)
    volume = np.minimum(received * _reach(shape, results), np.minimum(compute, results * shape.k))
    return np.minimum(volume, shape.volume), results


def alone(shape: Shape, rates: Rates, seconds: Floats) -> tuple[Floats, Floats]:
    """The largest single tile that each device can finish in `seconds`, in memory, and the results it then sends."""
    time = np.maximum(seconds, 0.0)
    rate = rates.flops * (shape.volume / shape.flops)  # volume per second
    if shape.kind != "gemm":
        each = shape.down_bytes / rates.down + shape.up_bytes / rates.up + 1.0 / rate
        room = rates.memory / (IN_FLIGHT * (shape.down_bytes + shape.up_bytes))
        volume = np.minimum(np.minimum(time / each, room), shape.volume)
        return volume, volume
    left = time
    for _ in range(_ROUNDS):
        volume, results = _exchanged(shape, rates, left)
        left = np.maximum(time - volume / rate, 0.0)
    room = rates.memory / (IN_FLIGHT * shape.down_bytes)  # numbers; m k + k n + m n <= room gives V <= (room / 3)^1.5
    volume = np.minimum(np.minimum(volume, rate * time), (room / 3.0) ** 1.5)
    return np.minimum(volume, shape.volume), results


def cell_seconds(shape: Shape, rates: Rates) -> Floats:
    """(3, devices): seconds of one cell of a batched op to come down, be computed, go up.

    A cell cannot be divided: v of them take v times the longest stage and one time the others.
    """
    compute = shape.flops / (shape.volume * rates.flops)
    return np.stack([shape.down_bytes / rates.down, compute, shape.up_bytes / rates.up])


def _exchanged(shape: Shape, rates: Rates, time: Floats) -> tuple[Floats, Floats]:
    """The largest tile whose download and upload, one after the other, take `time`; and its results.

    With c results, c w / U seconds go up and the rest is left for D. The product D(c) reach(c) is largest at
    c = t U / 3w (square) or where c^2 + 2 l^2 c = l^2 t U / w (l wide); where that would need k > K, at D reach = c K.
    """
    width = shape.down_bytes
    longest = rates.up * time / shape.up_bytes  # numbers that could go up if nothing came down
    side = float(min(shape.m, shape.n))
    uneven = rates.down / rates.up * (shape.up_bytes / width)
    budget = rates.down * time / width  # numbers that could come down if nothing went up
    square = longest / 3.0
    wide = -(side**2) + np.sqrt(side**4 + side**2 * longest)
    deep = ((np.sqrt(shape.k**2 + uneven * budget) - shape.k) / uneven) ** 2
    deep_wide = np.maximum(budget * side - shape.k * side**2, 0.0) / (shape.k + uneven * side)
    best, best_results = np.zeros_like(time), np.zeros_like(time)
    for candidate in (square, wide, deep, deep_wide):
        results = np.minimum(np.minimum(candidate, longest), shape.m * shape.n)
        received = np.maximum(budget - uneven * results, 0.0)
        volume = np.minimum(received * _reach(shape, results), results * shape.k)
        better = volume > best
        best, best_results = np.where(better, volume, best), np.where(better, results, best_results)
    return best, best_results


def _reach(shape: Shape, results: Floats) -> Floats:
    """Multiplications for each number received, at most, when `results` numbers are sent: V <= D * reach."""
    side = float(min(shape.m, shape.n))
    return np.where(results <= side**2, np.sqrt(results) / 2.0, results * side / (side**2 + results))

"""How much of a gemm a device can do in a given time: the functions that bound and plan both stand on.

A device does some set of multiplications (i, j, k) of a gemm, V in all. It must have received the a numbers of A and
the b numbers of B that they touch, and sends at least the c numbers of C that they add to. Loomis and Whitney: for any
such set V^2 <= a b c, whatever its shape. Besides V <= c K, V <= a N, V <= b M. With D = a + b numbers down:

    V <= D sqrt(c) / 2             when sqrt(c) <= l, the shorter of M and N   (attained by a square cuboid)
    V <= D c l / (l^2 + c)         otherwise                                   (attained by a cuboid l wide)

Both grow with c, so within T seconds, c = min(U T / w, M N) and D = B T / w give the most a device could do if its
transfers overlapped perfectly. Links are in bytes/s, w in bytes, the result in multiplications; cells of a batched op
cost the same whichever they are.

Cause comes before effect (`causal`). A result that is sent before time t can only contain operands that came before t.
Take the plane of one k: of its n products, those sent before t are at most a b <= d^2 / 4, with d = a + b the numbers
of A's column k and B's row k that came before t; those sent after t are at most U (T - t). So d is at least
2 sqrt(n - U (T - t)) for every t, and all planes' d together are at most B t. In units of T for t, of c = U T for n
(nu = n / c), and of D / (2 sqrt(c)) for the number of planes, z = 2 K sqrt(c) / D of them in all:

    sum over planes of sqrt((nu - 1 + t)+) <= t     for 0 <= t <= 1           V = V* sum of nu,   V* = D sqrt(c) / 2

Add these inequalities up with weights (2 / pi) u^(-1/2) at t = s - u, for u from 0 to s: since the integral of
(2 / pi) u^(-1/2) sqrt(x - u) from 0 to x is x (Abel), every plane contributes at least nu - (1 - s), while the right
hand side is 8 s^(3/2) / (3 pi). So V / V* <= (1 - s) z + 8 s^(3/2) / (3 pi) for every s; the best is s = (pi z / 4)^2:

    V <= V* (z - pi^2 z^3 / 48)   if z <= 4 / pi,        else   V <= 8 / (3 pi) V* = 0.849 V*

Boxes. If all that a device does of a gemm is one box, the same rows and columns in every plane, then all n are alike
and z sqrt(nu - 1 + t) <= t for every t: nu <= 1 - z^2 / 4, or 1 / z^2 from z = sqrt(2) on. With the best of planes:

    V <= V* (z - z^3 / 4)   if z <= sqrt(4 / 3),   else   V <= 0.770 V*      (attained in growing order, see `growing`)

A box is no wider than l. From d = 2 l on, d numbers of a plane make l (d - l) products, less than d^2 / 4: a box of
more than k = l B / U planes has at most n = l (B T / k - l) results in each, and V = k n shrinks as k grows. So
k = l B / U, z = 2 l / sqrt(c), is the deepest that counts.

Lines (`lines`). Call the K multiplications behind one number of C a line. Lines are covered by whole numbers of
devices: one alone, or at least two. So a line can be booked as 1 to a device that does all of it, and as 1/2 to each
that does a part; all bookings of a plan are then at least M N, as are all volumes over K, and so is every mean:

    sum over devices of  alpha V / K + (1 - alpha) (c1 + c2 / 2)  >=  M N      0 <= alpha <= 1

with c1 lines that the device does alone and c2 of which it does a part. What is the most that a device can book? In the
plane of one k, v products need at least f(v) numbers of A and B, f(v) = 2 sqrt(v), or l + v / l from l^2 on, which is
concave in v. So it does best with only two sorts of planes: all c = c1 + c2 lines in some, the c1 alone in the others;
and the booking is then convex in f(c1), so the best c1 is the least or the greatest: 0, or f(c1) = D / K.
The lines that a device does alone are in every plane, a box: nu <= 1 - z^2 / 4, or 1 / z^2 from z = sqrt(2) on. So it
books no more than alpha times its causal volume and these, (c + c1) / 2, either. One box books all its lines, or each
of them half.

A head by vocabulary (`_pairs`). Whatever pairs of a row and a word a device does, it has received all a rows and b
words that occur in them, each h numbers wide, and sends a result for each row (sums, dX) or word (dW), say the first of
the two: at most a b pairs, with (a + b) h w <= B T and a at most what U T carries.
"""

from __future__ import annotations

import numpy as np

from cleave_dask.graph.ir import LOGITS
from cleave_dask.planning.cost import Floats, Rates, Shape


def most(shape: Shape, rates: Rates, seconds: Floats, *, boxes: bool = False) -> tuple[Floats, Floats]:
    """More than this volume no device can do in `seconds` (boxes: in one box); and the results that it can send."""
    time = np.maximum(seconds, 0.0)
    compute = rates.flops * time * (shape.volume / shape.flops)
    if shape.kind in LOGITS:
        volume = np.minimum(_pairs(shape, rates, time) * shape.sides[2], np.minimum(compute, shape.volume))
        return volume, volume
    if shape.kind != "gemm":
        stages = cell_seconds(shape, rates)
        cells = np.where(time >= stages.sum(axis=0), 1.0 + (time - stages.sum(axis=0)) / stages.max(axis=0), 0.0)
        volume = np.minimum(cells, shape.volume)
        return volume, volume
    received, sent = rates.down * time / shape.down_bytes, rates.up * time / shape.up_bytes
    side = float(min(shape.m, shape.n))
    volume = np.minimum(causal(received, sent, shape.k, side=side if boxes else None), compute)
    results = np.minimum(sent, shape.m * shape.n)
    wide = sent > side**2  # less than that is bounded by cause and effect alone
    if wide.any():
        volume = np.where(wide, np.minimum(volume, received * reach(shape, results)), volume)
    return np.minimum(volume, shape.volume), results


def _pairs(shape: Shape, rates: Rates, time: Floats) -> Floats:
    """Pairs of the two sides of a head that transfers of so long allow."""
    kept, other, depth = shape.sides
    received = rates.down * time / (depth * shape.down_bytes)  # of both sides together
    sent = np.minimum(rates.up * time / (shape.least_up / kept), kept)
    rows = np.minimum(sent, np.maximum(received / 2.0, received - other))
    return np.asarray(rows * np.clip(received - rows, 0.0, other), dtype=np.float64)


def causal(received: Floats, sent: Floats, depth: int, *, side: float | None = None) -> Floats:
    """Volume that receiving and sending so many numbers allows, since operands come before results.

    With `side` all of it is one box, no wider than that.
    """
    bend = 0.25 if side else np.pi**2 / 48.0
    root = np.sqrt(sent)
    z = np.minimum(2.0 * depth * root / np.maximum(received, 1e-300), (3.0 * bend) ** -0.5)  # where it is greatest
    if side:
        z = np.minimum(z, 2.0 * side / np.maximum(root, 1e-300))
    return np.asarray((0.5 - 0.5 * bend * z * z) * z * received * root, dtype=np.float64)


def lines(shape: Shape, rates: Rates, seconds: Floats, alpha: float, *, boxes: bool = False) -> Floats:
    """The most lines of a gemm that each device can book in `seconds`, by volume (alpha) and whole (1 - alpha)."""
    volume = most(shape, rates, seconds, boxes=boxes)[0] / shape.k
    if alpha == 1.0:
        return volume
    time, side = np.maximum(seconds, 0.0), float(min(shape.m, shape.n))
    received, sent = rates.down * time / (shape.down_bytes * shape.k), rates.up * time / shape.up_bytes
    results = np.minimum(sent, shape.m * shape.n)
    alone = np.minimum(np.where(received <= 2 * side, received**2 / 4.0, side * (received - side)), results)
    parts = alpha * np.minimum(received * reach(shape, results), results) + (1 - alpha) * results / 2.0
    booked = np.maximum(alpha * alone + (1 - alpha) * (results + alone) / 2.0, parts)
    alone = np.minimum(alone, np.maximum(sent / 2.0, sent * (1.0 - sent / np.maximum(received, 1e-100) ** 2)))
    if boxes:
        return np.asarray(np.maximum(np.minimum(alone, volume), alpha * volume + (1 - alpha) * results / 2.0))
    limited = alpha * volume + (1 - alpha) * (results + alone) / 2.0
    return np.asarray(np.minimum(booked, limited), dtype=np.float64)


def cell_seconds(shape: Shape, rates: Rates) -> Floats:
    """(3, devices): seconds of one cell of a batched op to come down, be computed, go up.

    A cell cannot be divided: v of them take v times the longest stage and one time the others.
    """
    compute = shape.flops / (shape.volume * rates.flops)
    return np.stack([shape.down_bytes / rates.down, compute, shape.up_bytes / rates.up])


def reach(shape: Shape, results: Floats) -> Floats:
    """Multiplications for each number received, at most, when `results` numbers are sent: V <= D * reach."""
    side = float(min(shape.m, shape.n))
    return np.where(results <= side**2, np.sqrt(results) / 2.0, results * side / (side**2 + results))

"""Growing order: a device's tiles taken so that the finished part of its box grows from a corner.

A result can be sent only when its operands are there. A box cut into strips shows its first result after the slice that
all strips share: half of a square box. Taken in growing order, by the greater of a tile's distances from the corner,
the finished part is a square, and when its shorter side is complete a growing rectangle: nothing has more results for
what has come down. Let p and q be the seconds in which the slices along the longer and the shorter side of a box come
down, and W those that it spends in the multiplier or the uplink, whichever is more. When d seconds have come down,
d^2 / (4 p q) of it can be sent, and it is finished after

    max over d of  d + (1 - d^2 / (4 p q)) W   =   W + p q / W   if W >= p,      else   p + q

(through all three stages the maximum is the same: the one between them counts only if it is the longest).

Slices. A real box is cut into r row slices and r column slices, which come in turn. While one comes down, only what was
ready before it can be sent. For a square, D = p + q, with parts a of the rows and b of the columns there, all goes well
within time T if

    (a + b) D / 2 <= T - W   for the first two     and then each time     (a' + b) D / 2 <= T - (1 - a b) W

Taking these as equations makes the slices as unequal as they may be: small where the wait matters, larger elsewhere, up
to a limit. The least T at which the last of them reaches 1 is, in units of D, a function of W / D and r alone, kept in
a table: `square_seconds`. With r = 5 it is at most about 5 percent above the formula for endlessly many slices. Another
box is cut like the square of the same area, D = 2 sqrt(p q), as far as its sides go.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]

MOST_SLICES = 12
"""Slices of a box along each side, at most: more bring less than a percent."""

ENDLESS = 0
"""Slices of a box whose first and last tile nobody waits for: tiles of other gemms fill in."""

_LARGEST = 1.75  # times the mean: a slice that makes no one wait could be larger, but a tile keeps its device busy

_RATIOS = np.exp(np.linspace(np.log(1e-3), np.log(1e3), 256))  # of W to D, where the function is tabulated


def box_seconds(rows: Floats, cols: Floats, work: Floats, slices: Integers) -> Floats:
    """Seconds of boxes whose row and column slices take these to come down, and `work` in the longer of the others."""
    return np.maximum(rows + cols, square_seconds(2.0 * np.sqrt(rows * cols), work, slices))


def square_seconds(down: Floats, work: Floats, slices: Integers) -> Floats:
    """The same for squares that take `down` seconds to come down."""
    ratio = np.clip(work / np.maximum(down, 1e-300), _RATIOS[0], _RATIOS[-1])
    place = np.log(ratio / _RATIOS[0]) * ((len(_RATIOS) - 1) / np.log(_RATIOS[-1] / _RATIOS[0]))
    low = np.minimum(place.astype(np.int64), len(_RATIOS) - 2)
    table, part = _table(), place - low
    lag = table[slices, low] * (1.0 - part) + table[slices, low + 1] * part
    return np.asarray(np.maximum(down, work) + down * lag, dtype=np.float64)


def best_ratio(slices: Integers, least: Floats) -> Floats:
    """The ratio of W to D at which boxes do most in a time, among those where (W / D) T / D is at least `least`.

    In time T a box whose results take y T to go up and whose operands take x T to come down has the volume
    x sqrt(y) V*, with V* that of perfect overlap. It is at most z deep, so that x <= z sqrt(y), with least = 1 / z^2.
    """
    found = np.empty(len(least))
    for count in np.unique(slices).tolist():
        here = slices == count
        whole = np.maximum(1.0, _RATIOS) + _table()[count]
        best = _RATIOS[int((np.sqrt(_RATIOS) * whole**-1.5).argmax())]
        found[here] = np.maximum(best, np.interp(least[here], _RATIOS * whole, _RATIOS))
    return found


def fewest_slices(ratio: Floats, slices: Integers, worth: float) -> Ints:
    """At most `slices`, and less where more of them would save less than the part `worth` of a box's time."""
    ones, fewest = np.ones(len(ratio)), slices.astype(np.int64)
    enough = (1.0 + worth) * square_seconds(ones, ratio, slices)
    for fewer in range(MOST_SLICES - 1, 0, -1):
        less = np.minimum(fewer, slices).astype(np.int64)
        fewest = np.where(square_seconds(ones, ratio, less) <= enough, np.minimum(fewest, less), fewest)
    return fewest


def slice_edges(ratio: Floats, slices: Integers) -> Floats:
    """(boxes, 2, MOST_SLICES + 1): where squares of this W / D are cut along rows and columns, as fractions of them."""
    edges = np.empty((len(ratio), 2, MOST_SLICES + 1))
    place = np.clip(np.searchsorted(_RATIOS, ratio), 0, len(_RATIOS) - 1)
    for count in np.unique(slices).tolist():
        here = slices == count
        seconds = np.maximum(1.0, _RATIOS) + _table()[count]
        edges[here] = _edges(count, seconds)[place[here]]
    return edges


def _edges(slices: int, seconds: Floats) -> Floats:
    """(ratios, 2, MOST_SLICES + 1): cuts of a box that must be through in `seconds`, in units of D."""
    reached, most = np.zeros((len(_RATIOS), 2)), _LARGEST / max(1, slices)
    edges = np.ones((len(_RATIOS), 2, MOST_SLICES + 1))
    edges[:, :, 0] = 0.0
    for number in range(1, slices + 1):
        for side in (0, 1):
            ready = seconds - _RATIOS * (1.0 - reached.prod(axis=1))  # of the download, until what is there is sent
            wanted = ready if number == 1 else 2.0 * ready - reached[:, 1 - side]
            reached[:, side] = np.minimum(
                1.0, np.maximum(reached[:, side], np.minimum(wanted, reached[:, side] + most))
            )
            if number == 1:
                reached[:, 1] = reached[:, 0]
        edges[:, :, number] = reached
    return edges


@cache
def _table() -> Floats:
    """(slices, ratios): seconds beyond the longer stage, in units of D. Row 0: endlessly many that nobody waits for."""
    table = np.zeros((MOST_SLICES + 1, len(_RATIOS)))
    longer = np.maximum(1.0, _RATIOS)
    for slices in range(1, MOST_SLICES + 1):
        low, high = longer, 1.0 + _RATIOS
        for _ in range(24):
            middle = (low + high) / 2
            short = _edges(slices, middle)[:, :, slices].min(axis=1) < 1.0
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        table[slices] = high - longer
    return table


def growing_order(ranges: Integers, owner: Integers) -> tuple[Ints, Ints]:
    """Tiles by device, the one with the most to do first, each one's in growing order; and each device's turn.

    `ranges` are (tiles, 6): rows, columns, k, each start and stop. Within a device by k, then as a square grows: by the
    greater of how far a tile's rows and columns are from the first that the device has there. The second result has a
    place for each tile of the first: which device's turn it is. A box in more parts than MOST_SLICES along a side does
    not fit into memory: its tiles come strip by strip, so that at least one slice of each strip stays.
    """
    if not len(owner):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    devices, which = np.unique(owner, return_inverse=True)
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    volume = np.bincount(which, size.prod(axis=1))
    turn = np.empty(len(devices), dtype=np.int64)
    turn[np.argsort(-volume, kind="stable")] = np.arange(len(devices))
    layer = _dense(turn[which], ranges[:, 4])
    row, col = (_distance(layer, ranges[:, 2 * axis]) for axis in (0, 1))
    many = [_parts(layer, distance) for distance in (row, col)]
    strips = np.maximum(*many)[layer] > 2 * MOST_SLICES  # a long box may have so many that fit
    strip, along = np.where((many[0] <= many[1])[layer], (row, col), (col, row))
    first, then = np.where(strips, (strip, along), (np.maximum(row, col), np.minimum(row, col)))
    order = np.lexsort((then, (row < col) & ~strips, first, layer))
    return order, turn[which][order]


def _parts(group: Ints, value: Ints) -> Ints:
    """How many different values each group has."""
    pairs = np.unique(np.stack([group, value]), axis=1)
    return np.bincount(pairs[0])


def _dense(first: Integers, second: Integers) -> Ints:
    """A number for each pair, in the order of the pairs."""
    pair = first.astype(np.int64) * (int(second.max()) + 1) + second
    found: Ints = np.unique(pair, return_inverse=True)[1].astype(np.int64)
    return found


def _distance(group: Ints, value: Integers) -> Ints:
    """How far each value is from the least of its group."""
    least = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, group, value.astype(np.int64))
    return np.asarray(value - least[group], dtype=np.int64)

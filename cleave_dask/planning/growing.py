"""Growing order: a device's tiles taken so that the finished part of its box grows from a corner.

A result can be sent only when its operands are there. A box cut into strips shows its first result after the slice that
all strips share: half of a square box. Taken in growing order, by the greater of a tile's distances from the corner,
the finished part is a square, and when its shorter side is complete a growing rectangle: nothing has more results for
what has come down. Let p and q be the seconds in which the slices along the longer and the shorter side of a box come
down, and W those that it spends in the multiplier or the uplink, whichever is more. When d seconds have come down,
d^2 / (4 p q) of it can be sent, and it is finished after

    max over d of  d + (1 - d^2 / (4 p q)) W   =   W + p q / W   if W >= p,      else   p + q

(through all three stages the maximum is the same: the one between them counts only if it is the longest).

Strips. A real box is cut into a number of strips. The first tile is a square in the corner, or a strip as long as the
box; each strip after it extends the shorter side of what is there over the whole of the other side, as long as that is
not complete. So r slices along each side make 2 r - 1 tiles, not r^2. Of a strip only the slice along its short side
comes down: the other has come before. While it does, only what was ready before it can be sent. With x and y seconds of
rows and columns there, all goes well within time T if each strip dx is so narrow that

    x + y + dx + l y dx   <=   T - (1 - x y / (p q)) W

where l y dx are the seconds that the strip spends in the stage that is not the longer. Taking these as equations makes
strips as unequal as they may be: narrow where the wait matters, up to a limit elsewhere. The least T at which the last
of them completes the box is found by bisection: `strip_edges`. For a square with l = 0 it is, in units of D = p + q, a
function of W / D and the number of strips alone, kept in a table: `square_seconds`. Nine strips (five slices along each
side) are at most about 6 percent above endlessly many.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]

MOST_STRIPS = 23
"""Strips of a box at most: twelve slices along each side; more bring less than a percent."""

STREAMED = 4
"""Tiles of a box that does not fit into memory, for each strip that it would have."""

ENDLESS = 0
"""Strips of a box whose first and last tile nobody waits for: tiles of other gemms fill in."""

_LARGEST = 3.5  # times the mean: a strip that makes no one wait could be larger, but a tile keeps its device busy

_RATIOS = np.exp(np.linspace(np.log(1e-2), np.log(1e2), 256))  # of W to D, where the function is tabulated


def box_seconds(rows: Floats, cols: Floats, work: Floats, strips: Integers) -> Floats:
    """Seconds of boxes whose row and column slices take these to come down, and `work` in the longer of the others."""
    return np.maximum(rows + cols, square_seconds(2.0 * np.sqrt(rows * cols), work, strips))


def square_seconds(down: Floats, work: Floats, strips: Integers) -> Floats:
    """The same for squares that take `down` seconds to come down."""
    ratio = np.clip(work / np.maximum(down, 1e-200), _RATIOS[0], _RATIOS[-1])
    place = np.log(ratio / _RATIOS[0]) * ((len(_RATIOS) - 1) / np.log(_RATIOS[-1] / _RATIOS[0]))
    low = np.minimum(place.astype(np.int64), len(_RATIOS) - 2)
    table, part, cell = _table().ravel(), place - low, strips * len(_RATIOS) + low
    lag = table.take(cell) * (1.0 - part) + table.take(cell + 1) * part
    return np.asarray(np.maximum(down, work) + down * lag, dtype=np.float64)


def best_ratio(strips: Integers, least: Floats) -> Floats:
    """The ratio of W to D at which boxes do most in a time, among those where (W / D) T / D is at least `least`.

    In time T a box whose results take y T to go up and whose operands take x T to come down has the volume
    x sqrt(y) V*, with V* that of perfect overlap. It is at most z deep, so that x <= z sqrt(y), with least = 1 / z^2.
    """
    found = np.empty(len(least))
    for count in np.unique(strips).tolist():
        here = strips == count
        whole = np.maximum(1.0, _RATIOS) + _table()[count]
        best = _RATIOS[int((np.sqrt(_RATIOS) * whole**-1.5).argmax())]
        found[here] = np.maximum(best, np.interp(least[here], _RATIOS * whole, _RATIOS))
    return found


def fewest_strips(down: Floats, work: Floats, lesser: Floats, most: Integers, price: float) -> Ints:
    """At most so many strips of squares, and less where one more would save less than `price` seconds.

    The lesser of the two stages behind the download overlaps with the longer but for the largest strip.
    """
    counts = np.arange(1, MOST_STRIPS + 1)[:, None]
    seconds = square_seconds(
        down, work + lesser * largest_strip(counts), np.broadcast_to(counts, (MOST_STRIPS, len(down)))
    )
    seconds = np.where(counts <= np.maximum(most, 1), seconds + price * counts, np.inf)
    return np.asarray(1 + np.argmin(seconds, axis=0), dtype=np.int64)


def largest_strip(strips: Integers) -> Floats:
    """The area of a box's largest strip at most, as a part of the box."""
    return np.asarray(np.minimum(1.0, _LARGEST / (1.0 + strips)), dtype=np.float64)


def strip_edges(rows: Floats, cols: Floats, work: Floats, lesser: Floats, strips: Ints, grain: Floats) -> Floats:
    """(boxes, 2, strips + 1): seconds of rows and columns that are there before the first and after each strip.

    Boxes come down in `rows` + `cols` seconds, and spend `work` in the longer and `lesser` in the other stage. Of the
    two beginnings, a square and a strip as long as the box, the one with which it is done first. Cuts are on multiples
    of `grain` seconds.
    """
    found = np.zeros((len(rows), 2, int(strips.max(initial=1)) + 1))
    widest = _between(rows, cols, work, lesser)
    near = (widest[1] - widest[0]) / 16
    roughly = [_least(rows, cols, work, lesser, strips, widest, along=along, precision=5) for along in (False, True)]
    for along, better in ((False, roughly[0] <= roughly[1]), (True, roughly[0] > roughly[1])):
        if better.any():
            box = rows[better], cols[better], work[better], lesser[better], strips[better]
            nearer = (roughly[along] - near)[better], (roughly[along] + near)[better]
            time = _least(*box, nearer, along=along, grain=grain[better], precision=6)
            grown = np.array(_grown(*box, time, along=along, grain=grain[better])).transpose(2, 1, 0)
            found[better, :, 1 : grown.shape[2] + 1] = grown
            found[better, :, grown.shape[2] + 1 :] = grown[:, :, -1:]
    return found


def _between(rows: Floats, cols: Floats, work: Floats, lesser: Floats) -> tuple[Floats, Floats]:
    """Seconds of boxes if all overlaps, and if nothing does."""
    return np.maximum(rows + cols, work), rows + cols + work + lesser


def _least(
    rows: Floats,
    cols: Floats,
    work: Floats,
    lesser: Floats,
    strips: Ints,
    between: tuple[Floats, Floats],
    *,
    along: bool,
    precision: int,
    grain: Floats | None = None,
) -> Floats:
    """The least seconds `between` two in which boxes are done in so many strips, to one part in 2^precision of them."""
    low, high = between
    for _ in range(precision):
        middle = (low + high) / 2
        x, y = _grown(rows, cols, work, lesser, strips, middle, along=along, grain=grain)[-1]
        short = (x < rows * (1 - 1e-9)) | (y < cols * (1 - 1e-9))
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return high


def _grown(
    rows: Floats,
    cols: Floats,
    work: Floats,
    lesser: Floats,
    strips: Ints,
    seconds: Floats,
    *,
    along: bool,
    grain: Floats | None = None,
) -> list[tuple[Floats, Floats]]:
    """Seconds of rows and columns that are there after each strip, at most, if boxes are to be done in `seconds`.

    With a grain they are multiples of it, and the last strips complete the box, whatever it takes.
    """
    area = np.maximum(rows * cols, 1e-200)
    second, most = lesser / area, largest_strip(strips) * area
    slack = np.maximum(seconds - work, 0.0)
    if along:
        y = np.minimum(np.minimum(rows, cols), slack)
        x = np.clip((slack - y) / (1.0 + second * y), 0.0, most / np.maximum(y, 1e-200))
        x, y = np.where(rows < cols, y, x), np.where(rows < cols, x, y)
    else:
        x = y = np.minimum(slack / (1.0 + np.sqrt(1.0 + second * slack)), np.sqrt(most))
    x, y = _grained(x, rows, grain), _grained(y, cols, grain)
    found, rate = [(x, y)], work / area
    for number in range(2, int(strips.max(initial=1)) + 1):
        slack = np.maximum(seconds - work + rate * x * y - x - y, 0.0) * (number <= strips)
        down = (x <= y) & (x < rows) | (y >= cols)  # rows are what is extended
        length = np.where(down, y, x)
        wide = np.minimum(slack / (1.0 + second * length), most / np.maximum(length, 1e-200))
        x, y = (
            np.where(down, _grained(x + wide, rows, grain), x),
            np.where(down, y, _grained(y + wide, cols, grain)),
        )
        found.append((x, y))
    return found


def _grained(reached: Floats, whole: Floats, grain: Floats | None) -> Floats:
    """At most the whole; on a multiple of the grain, or all of it if little is missing."""
    if grain is None:
        return np.minimum(reached, whole)
    reached = np.rint(reached / grain) * grain
    return np.where(reached > whole - 0.75 * grain, whole, reached)


@cache
def _table() -> Floats:
    """(strips, ratios): seconds beyond the longer stage, in units of D. Row 0: endlessly many that nobody waits for."""
    strips, ratio = np.repeat(np.arange(1, MOST_STRIPS + 1), len(_RATIOS)), np.tile(_RATIOS, MOST_STRIPS)
    half, none = np.full(len(ratio), 0.5), np.zeros(len(ratio))
    widest = _between(half, half, ratio, none)
    found = [_least(half, half, ratio, none, strips, widest, along=along, precision=16) for along in (False, True)]
    lag = (np.minimum(*found) - np.maximum(1.0, ratio)).reshape(MOST_STRIPS, len(_RATIOS))
    return np.concatenate([np.zeros((1, len(_RATIOS))), np.minimum.accumulate(lag, axis=0)])


def growing_order(ranges: Integers, owner: Integers, place: Integers | None = None) -> tuple[Ints, Ints]:
    """Tiles by device, in the order of `place` or else the one with the most to do first, each one's in growing order.

    `ranges` are (tiles, 6): rows, columns, k, each start and stop. Within a device by k, then as a square grows: by the
    greater of how far a tile's rows and columns are from the first that the device has there. The second result has a
    number for each tile of the first: whose turn it is. What streams past all rows or all columns comes when those are
    there. A grid of more parts than MOST_STRIPS along a side does not fit into memory: its tiles come row by row, or
    column by column, so that at least one slice of each stays.
    """
    if not len(owner):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    devices, which = np.unique(owner, return_inverse=True)
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    first = -np.bincount(which, size.prod(axis=1)) if place is None else place[devices]
    turn = np.empty(len(devices), dtype=np.int64)
    turn[np.argsort(first, kind="stable")] = np.arange(len(devices))
    layer = _dense(turn[which], ranges[:, 4])
    row, col = (_distance(layer, ranges[:, 2 * axis]) for axis in (0, 1))
    nearest, then, below = np.maximum(row, col), np.minimum(row, col), row < col
    count = np.bincount(layer)
    if (count > MOST_STRIPS).any():
        many = [_parts(layer, distance) for distance in (row, col)]
        grid = ((count == many[0] * many[1]) & (np.maximum(*many) > MOST_STRIPS))[layer]
        strip, along = np.where((many[0] <= many[1])[layer], (row, col), (col, row))
        past = [_after_all(layer, ranges[:, 2 * axis + 1], distance) for axis, distance in enumerate((row, col))]
        row, col = np.where(col > 0, past[0], row), np.where(row > 0, past[1], col)
        nearest, then, below = np.maximum(row, col), np.minimum(row, col), row < col
        nearest, then, below = np.where(grid, strip, nearest), np.where(grid, along, then), below & ~grid
    order = np.lexsort((then, below, nearest, layer))
    return order, turn[which][order]


def _parts(group: Ints, value: Ints) -> Ints:
    """How many different values each group has."""
    width = int(value.max()) + 1
    return np.bincount(np.unique(group * width + value) // width)


def _after_all(group: Ints, stop: Integers, distance: Ints) -> Ints:
    """The distance of each range; of one that covers all of its group, the greatest distance in the group."""
    farthest, last = (np.zeros(int(group.max()) + 1, dtype=np.int64) for _ in range(2))
    np.maximum.at(farthest, group, stop)
    np.maximum.at(last, group, distance)
    return np.where((distance == 0) & (stop == farthest[group]), last[group], distance)


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

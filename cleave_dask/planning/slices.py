"""Operand slices that a device's tiles share: what each tile, in turn, needs that the ones before it did not have.

A device keeps what it has fetched, so of a tile's range of rows (or columns) only the part comes down that none of its
tiles before covered. Tiles in growing order cover a range that grows at one end: then that part is what lies beyond the
end. Otherwise ranges are cut at everybody's edges into segments, and a segment comes down with the first that needs it.

A gemm's tile has a slice of A by its rows and one of B by its columns, both as deep as its k. Kinds that make logits
have slices of two sides in the same way, but only the first keeps k as the depth (`turned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cleave_dask.graph.ir import LOGITS

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]

SIDED = ("gemm", *LOGITS)
"""Kinds whose tiles share slices of two sides; tiles of the others share nothing."""


def turned(kind: str, columns: Any) -> Any:
    """Columns of tiles, starts and stops or sizes of rows, columns and k, as the two sides and the depth."""
    if kind not in ("logit_dx", "logit_dw"):
        return columns
    return columns[:, [0, 1, 4, 5, 2, 3]] if columns.shape[1] == 6 else columns[:, [0, 2, 1]]


def fetched(kept: Sequence[bool]) -> list[int]:
    """The sides whose slices come down, if some are `kept` on their devices from gemms before."""
    return [side for side in (0, 1) if not (kept and kept[side])]


def results(kind: str, size: Any) -> Any:
    """Of how many `up_bytes` the result of each tile is, by its rows, columns and k."""
    return size[:, 0] if kind == "logit_sums" else size[:, 0] * size[:, 1]


def newly(group: Integers, starts: Integers, stops: Integers) -> Floats:
    """How much of each range, in the order given, no range of its group before it has covered."""
    found = np.zeros(len(group))
    if not len(group):
        return found
    order = np.argsort(group, kind="stable")
    start, stop = starts[order].astype(np.int64), stops[order].astype(np.int64)
    first = np.concatenate([[True], group[order][1:] != group[order][:-1]])
    number = np.cumsum(first) - 1
    lift = number * (int(stop.max()) + 1)  # so that a running maximum never looks back into another group
    reach = np.maximum.accumulate(stop + lift) - lift
    before = np.where(first, start, np.concatenate([[0], reach[:-1]]))
    gaps = np.bincount(number, (start > before) | (start < start[first][number])) > 0
    fresh = np.maximum(stop - before, 0).astype(np.float64)
    odd = gaps[number]
    if odd.any():
        place, segment, length = segments(number[odd], start[odd], stop[odd])
        _, earliest = np.unique(segment, return_index=True)
        fresh[odd] = np.bincount(place[earliest], length[earliest], minlength=int(odd.sum()))
    found[order] = fresh
    return found


def segments(group: Integers, starts: Integers, stops: Integers) -> tuple[Ints, Ints, Ints]:
    """Ranges cut at all edges of their group: whose range each piece is, the segment that it covers, and its length.

    Pieces come range after range; a segment's number is the same wherever it is covered.
    """
    base = group.astype(np.int64) * (int(stops.max(initial=0)) + 1)
    edges = np.unique(np.concatenate([base + starts, base + stops]))
    first, last = (np.searchsorted(edges, base + ends) for ends in (starts, stops))
    count = last - first
    place = np.repeat(np.arange(len(group)), count)
    segment = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count) + first[place]
    return place, segment, edges[segment + 1] - edges[segment]

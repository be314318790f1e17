"""Even grids: every device an equal share of each gemm, whatever it can do. The scheme to compare with.

An even grid of near-square tiles, made finer where a tile would not fit into the smallest device; or a grid of a given
number of parts.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, prod

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.formatting import quantity
from cleave_dask.graph.ir import LOGITS, Range
from cleave_dask.planning.cost import AT_ONCE, Ints, Rates, Shape
from cleave_dask.planning.cutting import MOST_TILES
from cleave_dask.planning.layout import footprint

ALIGN = 8
"""Cuts fall on multiples of this where the extent allows: kernels like full vectors."""

Grid = tuple[int, int, int]
"""How many parts rows, columns and k are cut into."""


def cut(length: int, parts: int) -> list[Range]:
    """`length` in `parts` ranges of nearly equal size, on multiples of ALIGN where there are enough."""
    unit = ALIGN if length >= parts * ALIGN else 1
    units = ceil(length / unit)
    edges = [min(length, unit * (units * part // parts)) for part in range(parts + 1)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop]


def grid_tiles(shape: Shape, grid: Grid, devices: int) -> tuple[Ints, Ints]:
    """The tiles of a grid, dealt out so that neighbours, which share operands, go to the same device."""
    cuts = _cuts(shape, grid)
    if (tiles := prod(map(len, cuts))) > MOST_TILES:
        raise PlanError(
            f"{shape.kind} of {shape.m} x {shape.n} x {shape.k} would be cut evenly into {tiles:.2g} tiles, more than"
            f" {MOST_TILES:,}; leave out the devices with the least memory, or ask for a coarser grid"
        )
    rows, cols, ks = (np.array(spans, dtype=np.int64) for spans in cuts)
    i, j, k = (index.ravel() for index in np.indices((len(rows), len(cols), len(ks))))
    ranges = np.concatenate([rows[i], cols[j], ks[k]], axis=1)
    return ranges, np.arange(len(ranges)) * devices // len(ranges)


def even_grid(shape: Shape, rates: Rates, *, label: str = "", smallest_name: str = "") -> Grid:
    """The coarsest grid with a tile for each device whose tiles fit into the smallest device."""
    room = float(rates.memory.min())
    grid = _squarest(shape, len(rates))
    while (need := 2 * AT_ONCE * largest_bytes(shape, grid)) > room:
        finer = _finer(shape, grid)
        if finer is None:
            raise PlanError(
                f"gemm '{label}' needs {quantity(need, 'B')} for its smallest tiles in flight on '{smallest_name}', "
                f"which has {quantity(room, 'B')}; leave that device out or lower the batch"
            )
        grid = finer
    return grid


def largest_bytes(shape: Shape, grid: Grid) -> float:
    """Bytes of operands and result of the largest tile of a grid."""
    largest = [max(stop - start for start, stop in spans) for spans in _cuts(shape, grid)]
    return float(footprint(shape, np.array([largest], dtype=np.float64))[0])


def _cuts(shape: Shape, grid: Grid) -> list[list[Range]]:
    """The ranges of rows, columns and k; the width of a head is never cut."""
    parts = [1 if axis == _uncut(shape) else parts for axis, parts in enumerate(grid)]
    return [cut(length, min(length, many)) for length, many in zip(shape.extents, parts, strict=True)]


def _uncut(shape: Shape) -> int | None:
    """The axis along which tiles are always whole."""
    return None if shape.kind not in LOGITS else 2 if shape.kind == "logit_sums" else 1


def _squarest(shape: Shape, parts: int) -> Grid:
    """At least `parts` tiles (or all there can be) with the least operand bytes; rows before columns on a tie."""
    choices: list[tuple[float, Grid]] = []
    m, n, _ = shape.sides
    for rows in range(1, min(m, parts) + 1):
        cols = min(n, ceil(parts / rows))
        waste = max(0, parts - rows * cols) + (rows * cols) % parts
        grid = (rows, 1, cols) if _uncut(shape) == 1 else (rows, cols, 1)
        choices.append((waste * (m + n) + m / rows + n / cols, grid))
    return min(choices)[1]


def _finer(shape: Shape, grid: Grid) -> Grid | None:
    """The grid with its longest tile edge halved, or None if nothing is left to cut."""
    extents = [length / parts for length, parts in zip(shape.extents, grid, strict=True)]
    extents = [1.0 if axis == _uncut(shape) else length for axis, length in enumerate(extents)]
    axis = max(range(3), key=lambda index: extents[index])
    if extents[axis] <= 1:
        return None
    finer = list(grid)
    finer[axis] = min(shape.extents[axis], 2 * grid[axis])
    return finer[0], finer[1], finer[2]

"""A plan on a grid that is given: tiles stay as they were cut, and find devices among those that are there now.

For a step that was interrupted and whose finished tiles are still good: only on its own grid can they be used. A tile
stays with its device if that is here; the others go, largest first, to whoever has the least to do for its links.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import quantity
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.cost import AT_ONCE, Floats, Ints, Rates, Shape
from cleave_dask.planning.layout import Layout, footprint, lay_out
from cleave_dask.planning.pricing import priced
from cleave_dask.planning.values import Plan, Tiles


def plan_on_grid(graph: StepGraph, fleet: Fleet, grid: Mapping[str, Tiles]) -> Plan:
    """The plan whose gemms are cut as `grid` says, on the devices of `fleet`."""
    gemms = {gemm.name: gemm for gemm in graph.gemms}
    rates = Rates.of(fleet)
    layouts: dict[str, Layout] = {}
    known: dict[tuple[Shape, bytes, bytes], Layout] = {}
    for name, tiles in grid.items():
        if name not in gemms:
            raise PlanError(f"the grid has tiles of '{name}', and the step has no such gemm; plan anew")
        shape, ranges = Shape.of(gemms[name]), tiles.ranges.astype(np.int64)
        key = shape, tiles.ranges.tobytes(), tiles.owner.tobytes()
        if key not in known:
            _check(name, shape, ranges)
            known[key] = lay_out(shape, ranges, _owners(tiles, shape, fleet, rates), rates, fleet.server)
        layouts[name] = known[key]
    return priced(graph, fleet, layouts, tiling="given")


def _check(name: str, shape: Shape, ranges: Ints) -> None:
    """Refuse tiles that do not fill the gemm: the grid is of another one."""
    size = ranges[:, 1::2] - ranges[:, 0::2]
    inside = (
        (size > 0).all() and (ranges[:, 0::2] >= 0).all() and (ranges[:, 1::2] <= (shape.m, shape.n, shape.k)).all()
    )
    if not inside or size.prod(axis=1).sum() != shape.m * shape.n * shape.k:
        raise PlanError(f"the grid's {len(ranges)} tiles do not fill gemm '{name}'; plan anew")


def _owners(tiles: Tiles, shape: Shape, fleet: Fleet, rates: Rates) -> Ints:
    """The device of each tile, by its position in the fleet."""
    here = {device.name: place for place, device in enumerate(fleet.devices)}
    moved = np.array([*(here.get(name, -1) for name in tiles.names), -1], dtype=np.int64)
    owner = moved[np.minimum(tiles.owner, len(tiles.names))]
    size = footprint(shape, (tiles.ranges[:, 1::2] - tiles.ranges[:, 0::2]).astype(np.float64))
    owner[size * AT_ONCE > rates.memory[owner]] = -1  # a device may have come back with less
    homeless = np.flatnonzero(owner < 0)
    if len(homeless):
        pace = 1.0 / np.sqrt(rates.down * rates.up)
        _settle(tiles.gemm, owner, size, homeless[np.argsort(-size[homeless], kind="stable")], pace, rates.memory)
    return owner


def _settle(gemm: str, owner: Ints, size: Floats, homeless: Ints, pace: Floats, memory: Floats) -> None:
    """Give each of these tiles to the device that would then be through first, among those that can hold it."""
    busy = np.bincount(owner[owner >= 0], size[owner >= 0], minlength=len(pace)) * pace
    queue = [(seconds, place) for place, seconds in enumerate(busy.tolist())]
    heapify(queue)
    for tile in homeless.tolist():
        passed: list[tuple[float, int]] = []
        while queue and memory[queue[0][1]] < size[tile] * AT_ONCE:
            passed.append(heappop(queue))
        if not queue:
            needed = quantity(float(size[tile] * AT_ONCE), "B")
            raise PlanError(f"a tile of '{gemm}' needs {needed} in flight, and no device has that much; plan anew")
        seconds, place = heappop(queue)
        owner[tile] = place
        passed.append((seconds + float(size[tile] * pace[place]), place))
        for entry in passed:
            heappush(queue, entry)

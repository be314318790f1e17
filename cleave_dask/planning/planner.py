"""Planning a step: which tiles each gemm is cut into, and which device gets which.

Every device gets an equal share of each gemm: an even grid of near-square tiles, made finer where a tile would not
fit into the smallest device. Gemms below `min_flops` stay on the server, where they cost less than their transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import ceil

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Device, Fleet
from cleave_dask.formatting import quantity
from cleave_dask.graph.ir import Gemm, Range, StepGraph
from cleave_dask.planning.cost import result_bytes, slice_bytes, tile_flops, tile_memory
from cleave_dask.planning.values import Plan, Tile

MIN_FLOPS = 1e6
"""Gemms with fewer operations than this are not worth a task, let alone a transfer."""

IN_FLIGHT = 3
"""Tiles that a device holds at once: one coming down, one in the multiplier, one going up."""

ALIGN = 8
"""Cuts fall on multiples of this where the extent allows: kernels like full vectors."""

Grid = tuple[int, int, int]
"""How many parts rows, columns and k are cut into."""


def plan(graph: StepGraph, fleet: Fleet, *, min_flops: float = MIN_FLOPS, grid: Grid | None = None) -> Plan:
    """Cut every gemm of `graph` that is worth it into an even grid over the devices of `fleet`.

    `grid` fixes the number of parts in (rows, columns, k) for every gemm instead, as far as each gemm allows.
    """
    tiles: list[Tile] = []
    for gemm in graph.gemms:
        if gemm.flops >= min_flops:
            tiles.extend(_cut(gemm, fleet, grid or _even_grid(gemm, fleet)))
    return _priced(graph, fleet, tuple(tiles))


def cut(length: int, parts: int) -> list[Range]:
    """`length` in `parts` ranges of nearly equal size, on multiples of ALIGN where there are enough."""
    unit = ALIGN if length >= parts * ALIGN else 1
    units = ceil(length / unit)
    edges = [min(length, unit * (units * part // parts)) for part in range(parts + 1)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop]


def _even_grid(gemm: Gemm, fleet: Fleet) -> Grid:
    """The coarsest grid with a tile for each device whose tiles fit into the smallest device."""
    smallest = min(fleet.devices, key=lambda device: device.memory)
    parts = len(fleet.devices)
    grid = _squarest(gemm, parts)
    while not _fits(gemm, grid, smallest):
        finer = _finer(gemm, grid)
        if finer is None:
            raise PlanError(_too_small(gemm, grid, smallest))
        grid = finer
    return grid


def _squarest(gemm: Gemm, parts: int) -> Grid:
    """At least `parts` tiles (or all there can be) with the least operand bytes; rows before columns on a tie."""
    choices: list[tuple[float, Grid]] = []
    for rows in range(1, min(gemm.m, parts) + 1):
        cols = min(gemm.n, ceil(parts / rows))
        waste = max(0, parts - rows * cols) + (rows * cols) % parts
        choices.append((waste * (gemm.m + gemm.n) + gemm.m / rows + gemm.n / cols, (rows, cols, 1)))
    return min(choices)[1]


def _finer(gemm: Gemm, grid: Grid) -> Grid | None:
    """The grid with its longest tile edge halved, or None if nothing is left to cut."""
    extents = (gemm.m / grid[0], gemm.n / grid[1], gemm.k / grid[2])
    axis = max(range(3), key=lambda index: extents[index])
    if extents[axis] <= 1:
        return None
    limit = (gemm.m, gemm.n, gemm.k)[axis]
    finer = list(grid)
    finer[axis] = min(limit, 2 * grid[axis])
    return finer[0], finer[1], finer[2]


def _fits(gemm: Gemm, grid: Grid, device: Device) -> bool:
    """Whether a device can hold the tiles in flight of this grid."""
    return IN_FLIGHT * tile_memory(gemm, *_largest(gemm, grid)) <= device.memory


def _largest(gemm: Gemm, grid: Grid) -> tuple[Range, Range, Range]:
    """The largest tile of a grid, as ranges from zero."""
    lengths = [
        max(stop - start for start, stop in cut(length, min(length, parts)))
        for length, parts in zip((gemm.m, gemm.n, gemm.k), grid, strict=True)
    ]
    return (0, lengths[0]), (0, lengths[1]), (0, lengths[2])


def _too_small(gemm: Gemm, grid: Grid, device: Device) -> str:
    need = IN_FLIGHT * tile_memory(gemm, *_largest(gemm, grid))
    return (
        f"gemm '{gemm.name}' needs {quantity(need, 'B')} for its smallest tiles in flight on '{device.name}', "
        f"which has {quantity(device.memory, 'B')}; leave that device out or lower the batch"
    )


def _cut(gemm: Gemm, fleet: Fleet, grid: Grid) -> Iterator[Tile]:
    """The tiles of a grid, dealt out so that neighbours, which share operands, go to the same device."""
    rows, cols, ks = (
        cut(length, min(length, parts)) for length, parts in zip((gemm.m, gemm.n, gemm.k), grid, strict=True)
    )
    cells = list(product(rows, cols, ks))
    for number, (row, col, k) in enumerate(cells):
        device = fleet.devices[number * len(fleet.devices) // len(cells)]
        yield Tile(gemm=gemm.name, rows=row, cols=col, ks=k, device=device.name)


def _priced(graph: StepGraph, fleet: Fleet, tiles: tuple[Tile, ...]) -> Plan:
    """The plan of these tiles with its bytes, memory and predicted seconds."""
    gemms = {gemm.name: gemm for gemm in graph.gemms}
    devices = {device.name: device for device in fleet.devices}
    busy: dict[tuple[int, str], dict[str, float]] = {}
    memory = dict.fromkeys(devices, 0)
    sent: dict[str, set[tuple[object, ...]]] = {}
    counts = dict.fromkeys(devices, 0)
    down_bytes = up_bytes = 0
    for tile in tiles:
        gemm, device = gemms[tile.gemm], devices[tile.device or ""]
        keys = ((tile.gemm, 0, tile.rows, tile.ks), (tile.gemm, 1, tile.ks, tile.cols))
        slices = slice_bytes(gemm, tile.rows, tile.cols, tile.ks)
        known = sent.setdefault(device.name, set())
        down = (
            sum(size for key, size in zip(keys, slices, strict=True) if key not in known)
            if gemm.kind == "gemm"
            else sum(slices)
        )
        known.update(keys)
        up = result_bytes(gemm, tile.rows, tile.cols)
        down_bytes, up_bytes = down_bytes + down, up_bytes + up
        counts[device.name] += 1
        memory[device.name] = max(memory[device.name], IN_FLIGHT * tile_memory(gemm, tile.rows, tile.cols, tile.ks))
        spent = busy.setdefault((gemm.level, device.name), {"downlink": 0.0, "uplink": 0.0, "compute": 0.0})
        spent["downlink"] += down / device.down.bandwidth
        spent["uplink"] += up / device.up.bandwidth
        spent["compute"] += tile_flops(gemm, tile) / device.flops
    seconds, binding = _makespan(busy)
    flops = sum(device.flops for device in fleet.devices)
    return Plan(
        tiles=tiles,
        seconds=seconds,
        bound_seconds=min(seconds, sum(gemms[name].flops for name in {tile.gemm for tile in tiles}) / flops),
        binding=binding,
        down_bytes=down_bytes,
        up_bytes=up_bytes,
        peak_memory=memory,
        reasons={name: f"an equal share of every gemm: {count} tiles" for name, count in counts.items()},
    )


def _makespan(busy: dict[tuple[int, str], dict[str, float]]) -> tuple[float, str]:
    """Levels one after another, each as long as its slowest device on its slowest resource; and which that was."""
    slowest: dict[int, tuple[float, str]] = {}
    for (level, _), spent in busy.items():
        resource = max(spent, key=lambda name: spent[name])
        slowest[level] = max(slowest.get(level, (0.0, resource)), (spent[resource], resource))
    totals: dict[str, float] = {}
    for seconds, resource in slowest.values():
        totals[resource] = totals.get(resource, 0.0) + seconds
    return sum(totals.values()), max(totals, key=lambda name: totals[name], default="server")

"""Sharing: gemms of a layer on the same boxes, so that each device gets its part of their operands once.

A box of the forward gemm is a box of dX and of dW too, with its axes in another order (`graph.sharing`). Of dX then
only dY comes down, and of dW nothing: X and W are on the device since the forward gemm. The price is that results of dX
and dW are sums of as many parts as boxes lie along their k, and each part goes up. Where uplinks are as fast as
downlinks fewer bytes move in all; where they are ten times slower it is a loss, so plans are made both ways, and the
shorter is taken.

What stays is in memory from the forward gemm until the gradient of the weight is sent: up to `_KEPT` of a device's
memory, families in the order in which their gradients come, as those stay for the shortest time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import StepGraph
from cleave_dask.graph.sharing import Member, families
from cleave_dask.planning.cost import Floats, Ints, Rates, Shape
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.tiling import Grain

_KEPT = 0.25
"""Of a device's memory, what slices may fill that stay for later gemms; half of it is for slices in all."""

_SECONDS = 0.05
"""Seconds of a tile at least."""

_MOST_TILES = 8
"""Tiles of a box at most: more bring no more overlap, and each costs the server its time."""


def share(
    graph: StepGraph, fleet: Fleet, layouts: Mapping[str, Layout], *, scheduler_seconds: float
) -> dict[str, Layout] | None:
    """The layouts with dX and dW of every layer that memory allows on the boxes of its forward gemm; None: of none."""
    rates = Rates.of(fleet)
    shortest = Grain.of(len(rates), fleet.server).shortest
    room, found, known = _room(rates, layouts), dict(layouts), dict[tuple[object, ...], Layout]()
    for family in _sent(graph, layouts):
        forward = layouts[family[0].gemm.name]
        boxes = _boxes(forward)
        if boxes is None:
            continue
        kept, shared = _kept_bytes(boxes, forward, family), dict[str, Layout]()
        for member in family[1:]:
            key = Shape.of(member.gemm), id(forward), member.axes, member.kept
            if key not in known:
                own = boxes[:, [2 * axis + side for axis in member.axes for side in (0, 1)]]
                tiles = _cut(key[0], own, forward, rates, None if member.gemm.role == "dW" else shortest)
                known[key] = lay_out(
                    key[0], *tiles, rates, fleet.server, scheduler_seconds=scheduler_seconds, kept=member.kept
                )
            shared[member.gemm.name] = known[key]
        fits = all((layout.memory <= (1 - _KEPT) * rates.memory[layout.devices]).all() for layout in shared.values())
        if fits and (kept <= room[forward.devices]).all():
            room[forward.devices] -= kept
            found |= shared
    return found if any(layout.kept for layout in found.values()) else None


def _room(rates: Rates, layouts: Mapping[str, Layout]) -> Floats:
    """Bytes that may stay on each device beside what the gemms need anyway."""
    needed = np.zeros(len(rates))
    for layout in layouts.values():
        np.maximum.at(needed, layout.devices, layout.memory)
    return np.minimum(_KEPT * rates.memory, rates.memory - needed)


def staying(graph: StepGraph, layouts: Mapping[str, Layout], count: int) -> Floats:
    """Bytes of operands that stay on each of `count` devices for later gemms, at most."""
    found = np.zeros(count)
    if any(any(layout.kept) for layout in layouts.values()):
        for family in _sent(graph, layouts):
            forward = layouts[family[0].gemm.name]
            if any(any(layouts[member.gemm.name].kept) for member in family) and (boxes := _boxes(forward)) is not None:
                found[forward.devices] += _kept_bytes(boxes, forward, family)
    return found


def _sent(graph: StepGraph, layouts: Mapping[str, Layout]) -> Iterable[tuple[Member, ...]]:
    """Families of which all are sent out, those first whose gradients come first."""
    sent = [family for family in families(graph) if all(member.gemm.name in layouts for member in family)]
    return sorted(sent, key=lambda family: -family[0].gemm.level)


def _boxes(layout: Layout) -> Ints | None:
    """The box of each device of a layout, as (rows, cols, ks), each start and stop; None if tiles make up no boxes."""
    which = np.searchsorted(layout.devices, layout.owner)
    boxes = np.empty((len(layout.devices), 6), dtype=np.int64)
    boxes[:, 0::2], boxes[:, 1::2] = np.iinfo(np.int64).max, 0
    for axis in range(3):
        np.minimum.at(boxes[:, 2 * axis], which, layout.ranges[:, 2 * axis])
        np.maximum.at(boxes[:, 2 * axis + 1], which, layout.ranges[:, 2 * axis + 1])
    return boxes if (boxes[:, 1::2] - boxes[:, 0::2]).prod(axis=1).sum() == layout.shape.volume else None


def _kept_bytes(boxes: Ints, layout: Layout, family: tuple[Member, ...]) -> Floats:
    """Bytes of the operands of a family that each device holds at most: X and W, and dY if two gemms need it."""
    rows, cols, ks = (boxes[:, 1::2] - boxes[:, 0::2]).astype(np.float64).T
    slope = rows * cols if len(family) > 2 else 0.0
    return np.asarray((rows * ks + ks * cols + slope) * layout.shape.down_bytes)


def _cut(shape: Shape, boxes: Ints, forward: Layout, rates: Rates, shortest: float | None) -> tuple[Ints, Ints]:
    """Boxes in strips along their rows, and whose each is; `shortest`: seconds of a tile at least, None of filler."""
    here, size = rates.take(forward.devices), (boxes[:, 1::2] - boxes[:, 0::2]).astype(np.float64)
    results, work = size[:, 0] * size[:, 1] * shape.up_bytes, size.prod(axis=1) * shape.flops / shape.volume
    seconds = np.maximum(results / here.up, work / here.flops)
    if shortest is not None:
        seconds = np.maximum(seconds, size[:, 0] * size[:, 2] * shape.down_bytes / here.down)
    count = np.clip(np.rint(seconds / max(_SECONDS, shortest or 0.0)), 1, np.minimum(_MOST_TILES, size[:, 0])).astype(
        np.int64
    )
    box = np.repeat(np.arange(len(boxes)), count)
    place = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    ranges, rows = boxes[box], size[box, 0].astype(np.int64)
    ranges[:, 0], ranges[:, 1] = (boxes[box, 0] + rows * (place + side) // count[box] for side in (0, 1))
    return ranges, forward.devices[box]

"""Planning a step: which tiles each gemm is cut into, and which device gets which.

Gemms on the critical path (forward, dX) get the whole fleet, one after another (`tiling`); gradients of weights are
filler beside them (`filling`). Gemms of one shape are planned once. Gemms below `min_flops` stay on the server, where
they cost less than their transfer, and so do attentions that it has done long before their operands would have
travelled. `pricing` says what the step then takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Literal, get_args

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import quantity
from cleave_dask.graph.ir import LOGITS, Gemm, StepGraph
from cleave_dask.graph.vocabulary import by_vocabulary as rewritten
from cleave_dask.planning.cost import SCHEDULER_SECONDS, Rates, Shape, smallest_bytes
from cleave_dask.planning.filling import place_filler
from cleave_dask.planning.grid import ALIGN, Grid, cut, even_grid, grid_tiles
from cleave_dask.planning.heads import HeadError
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.pricing import priced
from cleave_dask.planning.sharing import share
from cleave_dask.planning.tiling import tile_gemm
from cleave_dask.planning.values import Plan
from cleave_dask.resources import expect, is_number, shown

__all__ = ["ALIGN", "MIN_FLOPS", "Grid", "Tiling", "cut", "plan"]

MIN_FLOPS = 1e6
"""Gemms with fewer operations than this are not worth a task, let alone a transfer."""

_LONG_BEFORE = 10.0
"""How much sooner the server must be done with an attention than its operands and results could travel."""

_FEW = 128
"""Up to so many devices the simpler tilings are tried too: rounding can make one of them better, and they are cheap."""

_FILLED = 1.25
"""How much longer than its critical levels a step takes from where filler runs beside them, for a first guess."""

Tiling = Literal["3d", "2d", "even"]
"""3d: boxes shaped by each device's links, k split where it pays. 2d: k never split. even: equal shares on a grid."""


def plan(
    graph: StepGraph,
    fleet: Fleet,
    *,
    tiling: Tiling = "3d",
    min_flops: float = MIN_FLOPS,
    grid: Grid | None = None,
    scheduler_seconds: float = SCHEDULER_SECONDS,
    by_vocabulary: bool | None = False,
) -> Plan:
    """Cut every gemm of `graph` that is worth it into tiles for the devices of `fleet`.

    `min_flops=0` sends out everything. `grid` fixes the number of parts in (rows, columns, k) for every gemm instead,
    as far as each gemm allows. `by_vocabulary`: whether the head of a language model keeps its logits on the devices;
    None: if the step is then shorter, except where `grid` or a simpler tiling is asked for. Its tiles are checked by
    samples, so it must be asked for. The plan's `graph` is the step as it is planned, whose gemms have the names and
    cuboids of those of the step that was given.
    """
    check_arguments(graph, fleet)
    _check_options(tiling, min_flops, grid)
    known: dict[tuple[Shape, bool], Layout] = {}  # what both forms of the step have in common is tiled once
    make = partial(
        _plan,
        fleet=fleet,
        tiling=tiling,
        min_flops=min_flops,
        grid=grid,
        scheduler_seconds=scheduler_seconds,
        known=known,
    )
    asked = by_vocabulary if by_vocabulary is not None else grid is None and tiling == "3d"
    head = rewritten(graph) if asked else None
    if head is None:
        if by_vocabulary:
            raise PlanError(f"step '{graph.name}' has no head whose logits are for a plain cross-entropy alone")
        return make(graph)
    if by_vocabulary:
        return make(head)
    plans = [make(graph)]
    if all(gemm.name in plans[0].by_gemm for gemm in head.gemms if gemm.kind in LOGITS):
        with suppress(HeadError):
            plans.append(make(head))
    return min(plans, key=lambda plan: plan.seconds)


def check_arguments(graph: StepGraph, fleet: Fleet) -> None:
    """A step and a fleet, and every gemm of the step has something to multiply."""
    expect(graph, StepGraph, what="the step", remedy="give a StepGraph: cd.capture(module, batch)", error=PlanError)
    expect(fleet, Fleet, what="the fleet", remedy="give a Fleet, such as cd.Fleet.load('lab-8')", error=PlanError)
    for gemm in graph.gemms:
        if min(gemm.m, gemm.n, gemm.k) < 1 or gemm.flops <= 0:
            size = f"{gemm.m} x {gemm.n} x {gemm.k}"
            raise PlanError(f"gemm '{gemm.name}' is {size} with {gemm.flops:g} flop: give every extent at least 1")


def _check_options(tiling: object, min_flops: object, grid: object) -> None:
    """Options of a plan that can be."""
    if tiling not in get_args(Tiling):
        raise PlanError(f"tiling is {shown(tiling)}; choose one of {', '.join(map(repr, get_args(Tiling)))}")
    if min_flops != inf and not is_number(min_flops, least=0):
        raise PlanError(f"min_flops is {shown(min_flops)}; give a number of operations, 0 to send out every gemm")
    parts = grid if isinstance(grid, Sequence) else ()
    whole = [part for part in parts if isinstance(part, int | np.integer) and part > 0]
    if grid is not None and not len(whole) == len(parts) == 3:
        raise PlanError(f"grid is {shown(grid)}; give the number of parts in (rows, columns, k), each 1 or more")


def _plan(
    graph: StepGraph,
    fleet: Fleet,
    *,
    tiling: Tiling,
    min_flops: float,
    grid: Grid | None,
    scheduler_seconds: float,
    known: dict[tuple[Shape, bool], Layout],
) -> Plan:
    """The best plan of a step as it stands."""
    sent = [gemm for gemm in graph.gemms if gemm.flops >= min_flops and not (min_flops and _stays(gemm, fleet))]
    tried: tuple[Tiling, ...] = (tiling,)
    if grid is not None:
        tried = ("even",)
    elif tiling == "3d" and len(fleet) <= _FEW:
        tried = get_args(Tiling)
    plans: list[Plan] = []
    for choice in tried:
        try:
            if choice == "even":
                layouts = _even(sent, fleet, grid, scheduler_seconds)
            else:
                layouts = _shaped(sent, fleet, known, split_k=choice == "3d", scheduler_seconds=scheduler_seconds)
        except PlanError:
            if not plans:
                raise
            continue  # a simpler tiling, only tried: equal shares need every device to have the memory
        plans.append(priced(graph, fleet, layouts, tiling=choice, scheduler_seconds=scheduler_seconds))
        may = tiling == "3d" and grid is None and len(fleet) <= _FEW
        shared = share(graph, fleet, layouts, scheduler_seconds=scheduler_seconds) if may else None
        if shared is not None:
            plans.append(priced(graph, fleet, shared, tiling=choice, scheduler_seconds=scheduler_seconds))
    return min(plans, key=lambda plan: plan.seconds)


def _stays(gemm: Gemm, fleet: Fleet) -> bool:
    """Whether an attention costs next to nothing on the server, and much on the way: it has few operations per byte."""
    if not gemm.kind.startswith("attention"):
        return False
    shape, rates = Shape.of(gemm), Rates.of(fleet)
    down, up = shape.volume * shape.down_bytes / rates.down.sum(), shape.volume * shape.up_bytes / rates.up.sum()
    return bool(_LONG_BEFORE * gemm.flops / fleet.server.flops < max(down, up))


def _shaped(
    sent: list[Gemm],
    fleet: Fleet,
    known: dict[tuple[Shape, bool], Layout],
    *,
    split_k: bool,
    scheduler_seconds: float,
) -> dict[str, Layout]:
    """A layout for each gemm, shaped by the devices' links; `known` has those of the critical path made so far."""
    rates = Rates.of(fleet)
    critical = [gemm for gemm in sent if gemm.role != "dW"]
    filler = [gemm for gemm in sent if gemm.role == "dW"] if critical else []
    for gemm in {Shape.of(gemm): gemm for gemm in reversed(sent)}.values():
        _require_memory(gemm, fleet)
    for gemm in critical or sent:
        key = Shape.of(gemm), split_k
        if key not in known:
            known[key] = tile_gemm(key[0], rates, fleet.server, split_k=split_k, scheduler_seconds=scheduler_seconds)
    layouts = {gemm.name: known[Shape.of(gemm), split_k] for gemm in critical or sent}
    first = min((gemm.level for gemm in filler), default=0)
    beside = [layouts[gemm.name] for gemm in critical if gemm.level >= first]
    filled = place_filler(
        filler,
        rates,
        fleet.server,
        spare=_spare(rates, beside),
        split_k=split_k,
        scheduler_seconds=scheduler_seconds,
        level_seconds=sum(layout.seconds for layout in layouts.values()) / max(1, len(layouts)),
    )
    return {gemm.name: (layouts | filled)[gemm.name] for gemm in sent}


def _require_memory(gemm: Gemm, fleet: Fleet) -> None:
    """Somebody can hold the smallest tiles of this gemm."""
    largest = max(fleet.devices, key=lambda device: device.memory)
    if (need := smallest_bytes(Shape.of(gemm))) > largest.memory:
        raise (HeadError if gemm.kind in LOGITS else PlanError)(
            f"the smallest tiles of gemm '{gemm.name}' of {gemm.m} x {gemm.n} x {gemm.k} need {quantity(need, 'B')} in "
            f"flight, and '{largest.name}', the largest device, has {quantity(largest.memory, 'B')}; add larger "
            f"devices or lower the batch"
        )


def _spare(rates: Rates, beside: list[Layout]) -> Rates:
    """What gemms of the critical path leave of each device's links and speed to the filler that runs beside them."""
    seconds = _FILLED * sum(layout.seconds for layout in beside)
    busy = np.zeros((3, len(rates)))
    for layout in beside:
        busy[:, layout.devices] += layout.stages
    down, compute, up = np.clip(1.0 - busy / max(seconds, 1e-12), 0.1, 1.0)
    return Rates(rates.down * down, rates.up * up, rates.flops * compute, rates.memory, rates.latency)


def _even(sent: list[Gemm], fleet: Fleet, grid: Grid | None, scheduler_seconds: float) -> dict[str, Layout]:
    """A layout for each gemm with equal shares for all devices."""
    rates = Rates.of(fleet)
    smallest = fleet.devices[int(rates.memory.argmin())].name
    known: dict[Shape, Layout] = {}
    for gemm in sent:
        shape = Shape.of(gemm)
        if shape not in known:
            cuts = grid or even_grid(shape, rates, label=gemm.name, smallest_name=smallest)
            ranges, owner = grid_tiles(shape, cuts, len(fleet))
            known[shape] = lay_out(shape, ranges, owner, rates, fleet.server, scheduler_seconds=scheduler_seconds)
    return {gemm.name: known[Shape.of(gemm)] for gemm in sent}

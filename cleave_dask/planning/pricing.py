"""What a planned step takes: the critical path, the filler beside it, and the resource that decides.

Levels wait for each other only as data flows. Before the first gradient of a weight can be computed, a level takes
the time of its gemms alone. From then on filler keeps links busy, so the step from any level on takes as long as its
critical levels or as its busiest resource with what can begin there, whichever is longer: some device's downlink,
uplink or multiplier, the server's links and processes, cores that all share, the scheduler; and, at each change of
level, as long as filler that is under way is in the way. Never less than the longest chain of gemms, the last gradients
included. All of it with what a step costs beside the gemms themselves (`overhead`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from cleave_dask.fleet.devices import Fleet, Server
from cleave_dask.formatting import duration, quantity
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.graph.keeping import kept_bytes
from cleave_dask.graph.sharing import numbered
from cleave_dask.planning.bound import gemm_bound, kept_bound
from cleave_dask.planning.chain import Alone, longest_chain, step_bound
from cleave_dask.planning.cost import LEVEL_SECONDS, SCHEDULER_SECONDS, Floats, Rates, Shape, smallest_bytes
from cleave_dask.planning.layout import STAGES, Layout
from cleave_dask.planning.overhead import InStep, in_the_way
from cleave_dask.planning.sharing import staying
from cleave_dask.planning.values import LevelCost, Plan, Tiles

BOXED = ("3d", "2d")
"""Tilings that give each device one box of a gemm; their bound is that of all such plans."""


@dataclass(frozen=True)
class _Load:
    """Seconds that some gemms keep every resource busy."""

    stages: Floats  # (3, devices)
    middle: Mapping[str, float]  # of scheduler and server

    @property
    def busiest(self) -> tuple[float, str]:
        """The busiest resource and its seconds."""
        stage, seconds = int(self.stages.max(axis=1).argmax()), float(self.stages.max())
        return max([(seconds, STAGES[stage]), *((time, name) for name, time in self.middle.items())])

    def plus(self, other: _Load) -> _Load:
        """Both of them."""
        names = {**self.middle, **other.middle}
        middle = {name: self.middle.get(name, 0.0) + other.middle.get(name, 0.0) for name in names}
        return _Load(self.stages + other.stages, middle)


def priced(
    graph: StepGraph,
    fleet: Fleet,
    layouts: Mapping[str, Layout],
    *,
    tiling: str,
    scheduler_seconds: float = SCHEDULER_SECONDS,
) -> Plan:
    """The plan that these layouts make, by gemm, with everything that it is predicted to cost."""
    rates = Rates.of(fleet)
    alone = _alone(rates, fleet.server, boxes=tiling in BOXED, scheduler_seconds=scheduler_seconds)
    kept = {name: layout.kept for name, layout in layouts.items()}
    bound = step_bound(graph, fleet, kept, alone, scheduler_seconds=scheduler_seconds)
    parts = _in_step(graph, layouts, rates, fleet.server)
    levels = _levels(graph, parts, bound.by_gemm)
    seconds, binding = _step_seconds(graph, fleet, parts, levels)
    total = _load(list(parts.values()), len(fleet))
    names = tuple(device.name for device in fleet.devices)
    return Plan(
        graph=graph,
        fleet=fleet,
        by_gemm=_tables(graph, layouts, names),
        seconds=seconds,
        bound_seconds=bound.seconds,
        binding=binding,
        down_bytes=round(sum(layout.down_bytes for layout in layouts.values())),
        up_bytes=round(sum(layout.up_bytes for layout in layouts.values())),
        peak_memory=_peaks(layouts, names, staying(graph, layouts, len(names))),
        reasons=_reasons(fleet, layouts, total),
        levels=levels,
        tiling=tiling,
        server_memory=kept_bytes(graph),
        busy=dict(zip(names, total.stages.max(axis=0).tolist(), strict=True)),
    )


def _in_step(graph: StepGraph, layouts: Mapping[str, Layout], rates: Rates, server: Server) -> dict[str, InStep]:
    """Each gemm as the step has it; devices have begun those that come after others of the critical path."""
    first = min((gemm.level for gemm in graph.gemms if gemm.name in layouts and gemm.role != "dW"), default=0)
    known: dict[tuple[int, bool], InStep] = {}
    found: dict[str, InStep] = {}
    for gemm in graph.gemms:
        if gemm.name in layouts:
            key = id(layouts[gemm.name]), gemm.role != "dW" and gemm.level > first
            if key not in known:
                known[key] = InStep.of(layouts[gemm.name], rates, server, begun=key[1])
            found[gemm.name] = known[key]
    return found


def _tables(graph: StepGraph, layouts: Mapping[str, Layout], names: tuple[str, ...]) -> dict[str, Tiles]:
    """The tiles of each gemm; gemms of one layout share their columns."""
    ranges = {id(layout.ranges): layout.ranges.astype(np.int32) for layout in layouts.values()}
    owners = {id(layout.owner): layout.owner.astype(np.int32) for layout in layouts.values()}
    places = {id(layout): layout.places(len(names)) for layout in _distinct(layouts.values())}
    values = numbered(graph, [gemm for gemm, layout in layouts.items() if any(layout.kept)])
    return {
        gemm: Tiles(
            gemm,
            ranges[id(layout.ranges)],
            owners[id(layout.owner)],
            names,
            layout.together,
            places[id(layout)],
            values.get(gemm, ()),
            layout.kept,
        )
        for gemm, layout in layouts.items()
    }


def _alone(rates: Rates, server: Server, *, boxes: bool, scheduler_seconds: float) -> Alone:
    """The bounds of gemms by themselves; those of one shape have one."""

    @cache
    def bound(shape: Shape, kept: tuple[bool, ...], told: bool) -> float:
        here = rates.told if told else rates
        if any(kept):
            return kept_bound(shape, kept, here, server)[0]
        return gemm_bound(shape, here, server, boxes=boxes, scheduler_seconds=scheduler_seconds)[0]

    return lambda shape, kept, told: bound(shape, tuple(kept), told)


def _peaks(layouts: Mapping[str, Layout], names: tuple[str, ...], stays: Floats) -> dict[str, int]:
    """Bytes that each device needs at most, whichever gemms it works on at once, beside what `stays` there."""
    peak = np.zeros(len(names))
    for layout in _distinct(layouts.values()):
        np.maximum.at(peak, layout.devices, layout.memory)
    return dict(zip(names, np.ceil(peak + stays).astype(np.int64).tolist(), strict=True))


def _distinct(layouts: Iterable[Layout]) -> list[Layout]:
    """Each layout once."""
    return list({id(layout): layout for layout in layouts}.values())


def _levels(graph: StepGraph, parts: Mapping[str, InStep], bounds: Mapping[str, float]) -> tuple[LevelCost, ...]:
    """A row for each level and, apart, for the filler that becomes ready with it."""
    grouped: dict[tuple[int, bool], list[Gemm]] = defaultdict(list)
    for gemm in graph.gemms:
        if gemm.name in parts:
            grouped[gemm.level, gemm.role == "dW"].append(gemm)
    rows = []
    for (level, filler), gemms in sorted(grouped.items()):
        here = [parts[gemm.name].layout for gemm in gemms]
        slowest = max((parts[gemm.name] for gemm in gemms), key=lambda part: part.seconds)
        rows.append(
            LevelCost(
                level=level,
                gemms=tuple(gemm.name for gemm in gemms),
                seconds=sum(parts[gemm.name].seconds for gemm in gemms) + (0.0 if filler else LEVEL_SECONDS),
                bound_seconds=sum(bounds[gemm.name] for gemm in gemms),
                binding=slowest.binding,
                devices=max(len(layout.devices) for layout in here),
                tiles=sum(len(layout.owner) for layout in here),
                down_bytes=round(sum(layout.down_bytes for layout in here)),
                up_bytes=round(sum(layout.up_bytes for layout in here)),
                filler=filler,
            )
        )
    return tuple(rows)


def _step_seconds(
    graph: StepGraph, fleet: Fleet, parts: Mapping[str, InStep], levels: Sequence[LevelCost]
) -> tuple[float, str]:
    """Predicted seconds of the step and what decides them."""
    first = min((row.level for row in levels if row.filler), default=1 + max((row.level for row in levels), default=0))
    kept = [gemm for gemm in graph.gemms if gemm.name not in parts]
    spent: defaultdict[str, float] = defaultdict(float)
    critical: defaultdict[int, float] = defaultdict(float)
    for level, seconds, binding in [
        *((row.level, row.seconds, row.binding) for row in levels if not row.filler),
        *((gemm.level, gemm.flops / fleet.server.flops, "server compute") for gemm in kept),
    ]:
        spent[binding] += seconds
        critical[level] += seconds
    ready: defaultdict[int, list[InStep]] = defaultdict(list)
    for row in levels:
        ready[row.level] += [parts[name] for name in row.gemms]
    after, load, more, resource = 0.0, _load([], len(fleet)), 0.0, "latency"
    for level in sorted((level for level in critical.keys() | ready.keys() if level >= first), reverse=True):
        after += critical[level]  # from here on, and what keeps a resource busy from here on
        load = load.plus(_load(ready[level], len(fleet)))
        busiest, what = load.busiest
        if busiest - after > more:
            more, resource = busiest - after, what
    spent[resource] += more
    chain = longest_chain(graph, fleet, {name: part.seconds + LEVEL_SECONDS for name, part in parts.items()})
    filler = [parts[name] for row in levels if row.filler for name in row.gemms]
    later = [parts[row.gemms[0]] for row in levels if row.level > first and not row.filler]
    waits = {id(part): in_the_way(filler, part) for part in {id(part): part for part in later}.values()}
    seconds = max(sum(critical.values()) + more + sum(waits[id(part)] for part in later), chain)
    spent["latency"] += 1e-12
    return seconds, max(spent, key=lambda name: spent[name])


def _load(parts: Sequence[InStep], devices: int) -> _Load:
    """How long each resource is busy with these gemms."""
    stages = np.zeros((3, devices))
    middle: defaultdict[str, float] = defaultdict(float)
    times = Counter(map(id, parts))
    for part in {id(part): part for part in parts}.values():
        count = times[id(part)]
        stages[:, part.layout.devices] += count * part.stages
        for name, seconds in part.middle.items():
            middle[name] += count * seconds
    return _Load(stages, middle)


def _reasons(fleet: Fleet, layouts: Mapping[str, Layout], total: _Load) -> dict[str, str]:
    """Why each device has the work it has, or none."""
    tiles, volume = np.zeros(len(fleet), dtype=np.int64), np.zeros(len(fleet))
    times = Counter(map(id, layouts.values()))
    for layout in _distinct(layouts.values()):
        tiles[layout.devices] += times[id(layout)] * layout.tiles
        volume[layout.devices] += times[id(layout)] * layout.stages[1]
    work = volume * Rates.of(fleet).flops
    share = work / max(float(work.sum()), 1e-300)
    stage = total.stages.argmax(axis=0)
    reasons = {
        device.name: f"{share[place]:.2%} of the work in {tiles[place]:,} tiles: its {STAGES[stage[place]]} binds"
        for place, device in enumerate(fleet.devices)
        if tiles[place]
    }
    if len(reasons) < len(fleet) and layouts:
        idle = np.flatnonzero(tiles == 0)
        reasons |= _left_out(fleet, max(_distinct(layouts.values()), key=lambda layout: layout.shape.flops), idle)
    return {device.name: reasons.get(device.name, "no gemm is sent out") for device in fleet.devices}


def _left_out(fleet: Fleet, layout: Layout, idle: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, str]:
    """What keeps each idle device from taking over the smallest share that a device has of the largest gemm."""
    rates = Rates.of(fleet)
    least = int((layout.stages[1] * rates.flops[layout.devices]).argmin())
    giver = layout.devices[least]
    seconds = np.stack(
        [
            layout.stages[0][least] * rates.down[giver] / rates.down[idle],
            layout.stages[1][least] * rates.flops[giver] / rates.flops[idle],
            layout.stages[2][least] * rates.up[giver] / rates.up[idle],
            rates.latency[idle],
        ]
    )
    extra = seconds.sum(axis=0) - layout.seconds
    need, found = smallest_bytes(layout.shape), {}
    for place, late, column in zip(idle.tolist(), extra.tolist(), seconds.T, strict=True):
        device = fleet.devices[place]
        if device.memory < need:
            has, wanted = quantity(device.memory, "B"), quantity(need, "B")
            found[device.name] = (
                f"left out: its memory of {has} is less than the {wanted} of the smallest tiles in flight"
            )
            continue
        why = (
            f"its downlink of {quantity(device.down.bandwidth, 'B/s')}",
            f"its speed of {quantity(device.flops, 'FLOP/s')}",
            f"its uplink of {quantity(device.up.bandwidth, 'B/s')}",
            f"its latency of {duration(device.down.latency)}",
        )[int(column.argmax())]
        found[device.name] = (
            f"left out: {why} would add {duration(late)}"
            if late > 0
            else "left out: its share would not be worth the scheduler's time for another parcel"
        )
    return found

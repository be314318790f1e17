"""A plan and a trace as the few numbers that people look at: shares, busy seconds, sums, predictions. No I/O."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.cost import Floats, Shape
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.trace import ACCEPTED, DUPLICATE, Column, Trace

SUMS = ("tiles", "duplicates", "rejected", "down_bytes", "up_bytes")
"""What `device_sums` counts: attempts that were accepted, came twice, were rejected; bytes."""

STAGES = ("download", "compute", "upload", "verify")


def device_sums(rows: Trace) -> dict[str, list[float]]:
    """Sums over all attempts, by device, in the order of SUMS."""
    kinds = np.array([{ACCEPTED: 0, DUPLICATE: 1}.get(name, 2) for name in rows.names["outcome"]] or [0])
    outcome, owner, count = kinds[rows.columns["outcome"]], rows.columns["device"], len(rows.names["device"])
    table = [np.bincount(owner, outcome == kind, count) for kind in range(3)]
    table += [np.bincount(owner, rows.columns[name], count) for name in SUMS[3:]]
    return {device: [float(column[place]) for column in table] for place, device in enumerate(rows.names["device"])}


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan as plain numbers: what it predicts as a whole and for each device."""
    devices = plan.fleet.devices
    place = {device.name: number for number, device in enumerate(devices)}
    tiles, flops = np.zeros(len(devices)), np.zeros(len(devices))
    sizes = _flops_of(plan.graph, plan.by_gemm)
    for name, table in plan.by_gemm.items():
        where = np.array([place.get(device, -1) for device in table.names], dtype=np.int64)[table.owner]
        known = where >= 0
        tiles += np.bincount(where[known], minlength=len(devices))
        flops += np.bincount(where[known], (_volumes(table.ranges) * sizes[name])[known], minlength=len(devices))
    return {
        "seconds": plan.seconds,
        "bound_seconds": plan.bound_seconds,
        "binding": plan.binding,
        "tiles": len(plan.tiles),
        "down_bytes": plan.down_bytes,
        "up_bytes": plan.up_bytes,
        "server": {"egress": plan.fleet.server.egress, "ingress": plan.fleet.server.ingress},
        "devices": {
            "name": [device.name for device in devices],
            "tiles": tiles.astype(int).tolist(),
            "share": (flops / max(float(flops.sum()), 1.0)).tolist(),
            "busy": [float(plan.busy.get(device.name, 0.0)) for device in devices],
            "why": [plan.reasons.get(device.name, "") for device in devices],
            "flops": [float(device.flops) for device in devices],
            "down": [float(device.down.bandwidth) for device in devices],
            "up": [float(device.up.bandwidth) for device in devices],
            "latency": [float(device.down.latency) for device in devices],
        },
    }


def step_summary(plan: Plan, rows: Trace) -> dict[str, Any]:
    """Of one step, by device: share of the work, tiles taken over from others, busy seconds of each stage."""
    taken = rows.where(rows.accepted)
    count, columns = len(rows.names["device"]), rows.columns
    flops, planned = _flops(plan, taken), planned_devices(plan, taken)
    own = np.array([*rows.names["device"], ""], dtype=object)[taken.columns["device"]]
    work = np.bincount(taken.columns["device"], flops, minlength=count)
    start = columns["start"] + columns["queued"]
    busy = {}
    for stage in STAGES:
        seconds = columns[stage].astype(np.float64)
        busy[stage] = busy_seconds(start, seconds, columns["device"], count).tolist()
        start = start + seconds
    return {
        "device": list(rows.names["device"]),
        "share": (work / max(float(work.sum()), 1.0)).tolist(),
        "taken_over": np.bincount(taken.columns["device"], (planned != own) & (planned != ""), count).tolist(),
        "busy": busy,
        "began": float(columns["start"].min()) if len(rows) else 0.0,
        "ended": float(rows.end.max()) if len(rows) else 0.0,
    }


def busy_seconds(start: Floats, seconds: Floats, owner: Column, count: int) -> Floats:
    """Seconds in which each owner had at least one interval open: overlaps count once."""
    if not len(start):
        return np.zeros(count)
    first = float(start.min())
    span = float((start + seconds).max()) - first + 1.0
    begin = start - first + owner * span  # one stretch of the line for each owner: they never overlap
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], (begin + seconds)[order]
    reached = np.concatenate([[-1.0], np.maximum.accumulate(end)[:-1]])
    alone = np.maximum(0.0, end - np.maximum(begin, reached))
    return np.bincount(owner[order], alone, minlength=count).astype(np.float64)


def with_predictions(
    rows: Trace, plans: Sequence[tuple[int, Plan]], first: int
) -> tuple[dict[str, Column], dict[str, tuple[str, ...]]]:
    """The rows with what was predicted for each, and the device that each was planned for.

    `first` is the number of the first row; each plan comes with the number of the first row that was made by it.
    Predicted are transfers of the bytes that really moved, and the multiplication; NaN where no plan knows the row.
    """
    starts = [max(0, start - first) for start, _ in plans]
    planned, seconds = np.full(len(rows), "", dtype=object), np.full((3, len(rows)), np.nan)
    for (_, plan), start, stop in zip(plans, starts, [*starts[1:], len(rows)], strict=True):
        if start < stop:
            span = slice(start, stop)
            planned[span] = planned_devices(plan, rows.where(span))
            seconds[:, span] = predicted_seconds(plan, rows.where(span))
    places = {name: place for place, name in enumerate(dict.fromkeys(planned.tolist()))}
    numbers = np.array([places[name] for name in planned.tolist()], dtype=np.int32)
    predictions = {f"predicted_{stage}": part.astype(np.float32) for stage, part in zip(STAGES, seconds, strict=False)}
    return {**rows.columns, "planned": numbers, **predictions}, {**rows.names, "planned": tuple(places)}


def predicted_seconds(plan: Plan, rows: Trace) -> Floats:
    """(3, rows): seconds to download, multiply and upload each row's tile by the figures of the plan's fleet."""
    devices = {device.name: device for device in plan.fleet.devices}
    figures = np.full((4, len(rows.names["device"]) + 1), np.nan)
    for place, name in enumerate(rows.names["device"]):
        if (device := devices.get(name)) is not None:
            figures[:, place] = device.down.bandwidth, device.up.bandwidth, device.flops, device.down.latency
    down, up, speed, latency = figures[:, rows.columns["device"]]
    flops, moved = _flops(plan, rows), rows.columns["down_bytes"]
    compute = np.where(flops > 0, flops, np.nan) / speed
    return np.stack([moved / down + 2 * latency * (moved > 0), compute, rows.columns["up_bytes"] / up + latency])


def planned_devices(plan: Plan, rows: Trace) -> np.ndarray[Any, np.dtype[Any]]:
    """The device that each row's tile was planned for; "" where the plan does not know the tile."""
    found = np.full(len(rows), "", dtype=object)
    for name, where, numbers in _by_gemm(plan, rows):
        table = plan.by_gemm[name]
        found[where] = np.array(table.names, dtype=object)[table.owner[numbers]]
    return found


def _flops(plan: Plan, rows: Trace) -> Floats:
    """Operations of each row's tile; 0 where the plan does not know it."""
    found, sizes = np.zeros(len(rows)), _flops_of(plan.graph, set(rows.names["gemm"]))
    for name, where, numbers in _by_gemm(plan, rows):
        found[where] = _volumes(plan.by_gemm[name].ranges[numbers]) * sizes[name]
    return found


def _by_gemm(plan: Plan, rows: Trace) -> list[tuple[str, Column, Column]]:
    """For each gemm of the plan that occurs: where, and the numbers of its tiles."""
    found = []
    for place, name in enumerate(rows.names["gemm"]):
        table = plan.by_gemm.get(name)
        if table is not None:
            where = np.flatnonzero((rows.columns["gemm"] == place) & (rows.columns["tile"] < len(table)))
            found.append((name, where, rows.columns["tile"][where]))
    return found


def _flops_of(graph: StepGraph, names: Container[str]) -> Mapping[str, float]:
    """Operations for each unit of volume of these gemms' cuboids."""
    shapes = {gemm.name: Shape.of(gemm) for gemm in graph.gemms if gemm.name in names}
    return {name: shape.flops / (shape.m * shape.n * shape.k) for name, shape in shapes.items()}


def _volumes(ranges: Column) -> Floats:
    volumes: Floats = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64).prod(axis=1)
    return volumes

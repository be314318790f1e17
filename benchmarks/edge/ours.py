"""Our own rows: real scheduler, server and devices in namespaces, and where the time of a step goes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch

from benchmarks import memory
from benchmarks.edge.rows import Row
from benchmarks.edge.settings import Setting, require_memory
from benchmarks.edge.timing import LEARNING_RATE, Effort, Timed, timed
from benchmarks.pace import pace
from benchmarks.trace import row_seconds
from cleave_dask.planning.bound import gemm_bound
from cleave_dask.planning.cost import Rates, Shape
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.trace import PARTS, Column, Trace
from cleave_dask.runtime.trainer import Planner, Trainer
from cleave_dask.simulation.local import LocalFleet, Shaping

STATES = ("upload", "compute", "download", "queued", "nothing")
"""What a device is doing at an instant: the first of these that any of its tiles is in."""


def run(system: str, setting: Setting, effort: Effort, shaping: Shaping = "namespaces") -> Row:
    """One of our systems on one setting."""
    module = setting.llama.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    checking = "trust" if system == "cleave-trust" else "always"
    with (
        _told(verify=checking, server__pace=f"{pace():.2f}"),
        LocalFleet(setting.fleet, shaping=shaping) as local,
        local.get_client() as client,
    ):
        names = [device.name for device in setting.fleet.devices]
        before = {name: memory.resident(pid) for name, pid in local.pids.items()}
        for pid in local.pids.values():
            memory.reset_peak(pid)

        def counters() -> tuple[int, ...]:
            carried = () if local.network is None else (local.network.carried(name) for name in names)
            return (_busy(), *(count for both in carried for count in both))

        wire = "bfloat16" if system == "cleave-bf16" else None
        with Trainer(module, optimizer, client, plan=_planner(system), replan=False, wire=wire) as trainer:
            seen = timed(lambda batch: trainer.step(**batch), setting.llama, effort, counters=counters)
            peaks = tuple(memory.peak(local.pids[name]) - before[name] for name in names)
            require_memory(max(peaks), setting.cap)
            last = trainer.trace.of_step(len(seen.losses))
            return Row(
                setting.name,
                system,
                seconds=median(seen.seconds),
                steps=len(seen.seconds),
                warm=seen.warm,
                losses=tuple(loss for loss in seen.losses if loss is not None),
                down=seen.counted[1::2],
                up=seen.counted[2::2],
                memory=peaks,
                plan_seconds=trainer.plan.seconds,
                bound_seconds=trainer.plan.bound_seconds,
                apart_seconds=apart(trainer.plan),
                spent=spent(last, seen.seconds[-1]),
                note=_note(trainer, last, seen, local.shaping),
            )


def apart(made: Plan) -> float:
    """Seconds of the gemms that a plan sends out, one after another, each at the bound that it has by itself."""
    shapes = Counter(Shape.of(gemm) for gemm in made.graph.gemms if gemm.name in made.by_gemm)
    rates, server = Rates.of(made.fleet), made.fleet.server
    return sum(count * gemm_bound(shape, rates, server)[0] for shape, count in shapes.items())


@contextmanager
def _told(**settings: str) -> Iterator[None]:
    """Processes that start meanwhile have these settings."""
    told = {f"DASK_CLEAVE__{name.upper()}": value for name, value in settings.items()}
    with patch.dict(os.environ, told):
        yield


def _planner(system: str) -> Planner:
    others: dict[str, Planner] = {
        "cleave-even": partial(plan, tiling="even"),
        "cleave-head": partial(plan, by_vocabulary=None),
    }
    return others.get(system, plan)


def _busy() -> int:
    """Microseconds of all cores of this machine that were used so far."""
    times = psutil.cpu_times()
    return int(1e6 * (times.user + times.system + getattr(times, "softirq", 0.0)))


def _note(trainer: Trainer, last: Trace, seen: Timed, shaping: Shaping | None) -> str:
    """The plan in a line, how many cores were busy, and what checks and the trace cost the server: CPU over seconds."""
    made, seconds = trainer.plan, seen.seconds[-1]
    cores = seen.counted[0] / 1e6 / fmean(seen.seconds)
    checks, rows = trainer.records[-1]["spent"]["verify"] / seconds, row_seconds(2000) * len(last) / seconds
    held = "; links held by token buckets, not by the kernel" if shaping == "buckets" else ""
    return (
        f"{len(made.tiles)} tiles, {made.tiling}, {made.binding} binds; {cores:.2f} of {os.cpu_count()} cores busy; "
        f"CPU of checking tiles {checks:.1%}, of the trace {rows:.2%} of a step; pace {made.fleet.server.pace:g}{held}"
    )


def spent(trace: Trace, seconds: float) -> dict[str, float]:
    """Seconds of a step by what its devices were doing, on average over them; `nothing`: they had no tile."""
    sums = dict.fromkeys(STATES, 0.0)
    devices = np.unique(trace["device"].astype(str))
    for device in devices:
        mine = trace.where(trace["device"] == device)
        for state, lasted in _states(mine).items():
            sums[state] += lasted / len(devices)
    sums["nothing"] = max(0.0, seconds - sum(sums.values()))
    return sums


def _states(trace: Trace) -> dict[str, float]:
    """Seconds in which some tile of a device was in each state, and none in one that comes before it."""
    start = trace["start"].astype("float64")
    spans: dict[str, list[Column]] = {}
    for part in PARTS:
        end = start + trace[part].astype("float64")
        spans[part] = [start, end]
        start = end
    taken: dict[str, float] = {}
    covered, before = [np.empty(0), np.empty(0)], 0.0
    for state in STATES[:-1]:
        covered = [np.concatenate(pair) for pair in zip(covered, spans[state], strict=True)]
        union = union_seconds(covered[0], covered[1])
        taken[state], before = union - before, union
    return taken


def union_seconds(starts: Any, ends: Any) -> float:
    """How long at least one of the spans lasts."""
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    if not len(starts):
        return 0.0
    gaps = np.maximum(0.0, starts[1:] - ends[:-1]).sum()
    return float(ends[-1] - starts[0] - gaps)

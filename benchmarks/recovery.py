"""What a lost device costs: one of eight emulated devices is killed in the middle of a step.

    python benchmarks/recovery.py [--kills 3] [--stops 3] [--json out.json]
    python benchmarks/recovery.py --simulated

Devices are real processes behind links of 40 and 4 Mbit/s, so that a step takes about a minute. For each kill:
seconds of the step beyond the calm one; how much of that is only that one device is less, which a second step tells in
which the same device is paused at the same instant: it finishes what it has and takes no more; what is left is the
recovery. Beside it, what a restart of the step from the last checkpoint would lose: everything done since the step
began, and the time to read the checkpoint (measured).

With --simulated steps of about 1, 3 and 9 minutes on such devices on virtual time, where nothing else happens, with a
loss at each of 15 instants, of one device after another; and what published systems pay for a lost device by their
formulas (`simulation/baselines/faults.py`): what a rare loss adds to their batch, over the losses of a batch. They are
not charged for having one device less. A column more says what it costs ours that the rest of the step keeps the grid
that was cut for eight (so that the loss stays the same bit for bit): beyond the same rest in a step planned for seven.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from distributed import Client, Scheduler
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from cleave_dask.fleet.churn import HARMFUL, Churn, Event
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trace import PARTS, Trace
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.baselines.comparison import SYSTEMS, compare
from cleave_dask.simulation.device import SimulatedDevice
from cleave_dask.simulation.local import LocalFleet
from cleave_dask.simulation.simulator import Simulator, simulate

DEVICES = 8
INSTANTS = 15
LEAST = 0.01  # seconds: a recovery that is shorter, or none, counts as this where something is divided by it
LLAMA = Llama(hidden=384, intermediate=1024, layers=4, heads=8, vocabulary=1024, batch=13, length=128)
LONGER = (
    LLAMA,
    Llama(hidden=512, intermediate=1408, layers=8, heads=8, vocabulary=2048, batch=14, length=128),
    Llama(hidden=768, intermediate=2048, layers=12, heads=12, vocabulary=4096, batch=18, length=128),
)
DOWN, UP = Link(5e6, 5e-3), Link(5e5, 5e-3)


def in_flight(dask_scheduler: Scheduler, device: str) -> list[float]:
    """Predicted seconds of each parcel that a device has."""
    steering: Any = dask_scheduler.plugins["cleave-steering"]
    dispatcher = steering.dispatcher
    return [dispatcher.expected(parcel, device) for parcel in dispatcher.flying(device)]


def pause(dask_scheduler: Scheduler, device: str, *, paused: bool) -> None:
    """Give a device no more parcels, or give it some again."""
    steering: Any = dask_scheduler.plugins["cleave-steering"]
    steering.dispatcher.device_paused(device, paused)


VICTIM = f"device-{DEVICES - 1}"


def killed_step(fleet: LocalFleet, client: Client, trainer: Trainer, batch: Any, after: float) -> dict[str, float]:
    """One step in which a device is killed `after` seconds; the device is back when it returns."""
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(trainer.step, **batch)
        sleep(after)
        parcels = client.run_on_scheduler(in_flight, device=VICTIM)
        os.kill(fleet.pids[VICTIM], signal.SIGKILL)
        step.result()
    fleet.restart(VICTIM)
    while VICTIM not in facts_of(client)["device"]:
        sleep(0.1)
    return {"seconds": trainer.records[-1]["seconds"], "parcels": len(parcels), "own": sum(parcels)}


def paused_step(client: Client, trainer: Trainer, batch: Any, after: float) -> float:
    """Seconds of a step in which a device takes no more parcels `after` seconds; it takes them again afterwards."""
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(trainer.step, **batch)
        sleep(after)
        client.run_on_scheduler(pause, device=VICTIM, paused=True)
        step.result()
    client.run_on_scheduler(pause, device=VICTIM, paused=False)
    return float(trainer.records[-1]["seconds"])


def stopped_step(fleet: LocalFleet, client: Client, trainer: Trainer, batch: Any, after: float) -> dict[str, float]:
    """One step in which a device is stopped for a while when it has work: how soon that is noticed, and the limit."""
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(trainer.step, **batch)
        sleep(after)
        while not client.run_on_scheduler(in_flight, device=VICTIM):
            sleep(0.01)
        before = facts_of(client)["late"].get(VICTIM, 0)
        os.kill(fleet.pids[VICTIM], signal.SIGSTOP)
        start, longest = monotonic(), max(client.run_on_scheduler(in_flight, device=VICTIM), default=0.0)
        try:
            while facts_of(client)["late"].get(VICTIM, 0) == before:
                sleep(0.01)
            noticed = monotonic() - start
        finally:
            os.kill(fleet.pids[VICTIM], signal.SIGCONT)
        step.result()
    return {"stopped after": after, "longest parcel": longest, "noticed after": noticed, "limit": 2 * longest + 1}


def lost_at(planned: Plan, calm: float, after: float, number: int, rest: float) -> dict[str, float]:
    """What it costs that a device leaves at an instant of a simulated step; `rest` is how long it goes on for seven."""
    leaves = Churn((Event(after, f"device-{number % DEVICES}", "leave"),))
    losing = LosingSimulator(planned, leaves)
    extra, fewer = losing.run().seconds - calm, PausingSimulator(planned, leaves).run().seconds - calm
    return {
        "lost after": after,
        "extra": extra,
        "one device less": fewer,
        "recovery": extra - fewer,
        "grid of eight": fewer - (after + rest - calm),
        "tiles lost": losing.tiles_lost,
        "their own time": losing.own,
        "restart": after,
        "restart / recovery": after / max(extra - fewer, LEAST),
    }


class LosingSimulator(Simulator):
    """Notes what a device had in flight, and how long it would have taken, when it leaves."""

    tiles_lost, own = 0, 0.0

    def _left(self, name: str, device: SimulatedDevice) -> None:
        for number in self.dispatcher.flying(name):
            self.tiles_lost += len(self.parcels[number].cut.tiles)
            self.own += self.dispatcher.expected(number, name)
        super()._left(name, device)


class PausingSimulator(Simulator):
    """Devices that leave do what they have before they do."""

    def _left(self, name: str, device: SimulatedDevice) -> None:
        self.dispatcher.device_paused(name, True)


def levels_end(graph: StepGraph, trace: Trace) -> list[float]:
    """When the step began, when each gemm that others wait for was through, and when the step was."""
    last = np.zeros(len(trace.names["gemm"]))
    np.maximum.at(last, trace.columns["gemm"], trace["start"] + sum(trace[part].astype(float) for part in PARTS))
    ends = dict(zip(trace.names["gemm"], last.tolist(), strict=True))
    critical = [ends[gemm.name] for gemm in graph.gemms if gemm.role != "dW" and gemm.name in ends]
    return [0.0, *critical, trace.seconds]


def losses(llama: Llama) -> dict[str, float]:
    """What a lost device costs a step of a model, at each of some instants of it."""
    fleet, graph = fleet_of(), capture(llama.module(), **llama.tokens(0))
    planned = plan(graph, fleet)
    eight, seven = simulate(planned), simulate(plan(graph, Fleet(fleet.server, fleet.devices[1:])))
    ends = levels_end(graph, eight), levels_end(graph, seven)
    kills = []
    for number in range(1, INSTANTS + 1):
        after = eight.seconds * number / (INSTANTS + 1)
        rest = seven.seconds - float(np.interp(after, *ends))
        kills.append(lost_at(planned, eight.seconds, after, number, rest))
    show(f"{llama}; one of {DEVICES} devices lost, on virtual time; seconds", kills, None)
    columns = ("extra", "one device less", "recovery", "grid of eight", "restart / recovery")
    extra, fewer, recovery, grid, factor = ([kill[column] for kill in kills] for column in columns)
    return {
        "step": eight.seconds,
        "planned for one less": seven.seconds,
        "extra": median(extra),
        "one device less": median(fewer),
        "of which grid of eight": median(grid),
        "recovery": median(recovery),
        "worst": max(recovery),
        "restart in mid-step": eight.seconds / 2,
        "restart / recovery": median(factor),
        "within own + 0.5 s": sum(kill["recovery"] <= kill["their own time"] + 0.5 for kill in kills),
        "100x below restart": sum(each >= 100 for each in factor),
        "of": INSTANTS,
    }


def simulated() -> list[dict[str, Any]]:
    """What a lost device costs each system, on virtual time or by its formulas."""
    ours = [losses(llama) for llama in LONGER]
    show("a lost device, by the length of the step: medians, and at how many instants; seconds", ours, None)
    fleet, rate, first = fleet_of(), 1e-3, ours[0]
    graph = capture(LONGER[0].module(), **LONGER[0].tokens(0))
    step, half = first["step"], first["step"] / 2
    rows: list[dict[str, Any]] = [
        {"system": "ours, simulated", "step": step, "a lost device": first["extra"], "recovery": first["recovery"]},
        {"system": "restart of our step", "step": step, "a lost device": half, "recovery": half},
    ]
    others = [name for name in SYSTEMS if name in ("dtfm", "ddp", "fsdp")]
    for before, under in zip(
        compare(graph, fleet, systems=others), compare(graph, fleet, systems=others, churn=rate), strict=True
    ):
        if before.seconds is None or under.seconds is None:
            what = f"{before.system}: {before.why}"
            rows.append({"system": what, "step": nan, "a lost device": nan, "recovery": nan})
            continue
        lost = before.devices_used * rate * HARMFUL / 3600 * before.seconds
        cost = (under.seconds - before.seconds) / lost
        rows.append({"system": before.system, "step": before.seconds, "a lost device": cost, "recovery": cost})
    for row in rows:
        row["over ours"] = row["recovery"] / max(rows[0]["recovery"], LEAST)
    return rows


def fleet_of() -> Fleet:
    """Eight equal devices, and a server that has one core for what it makes itself."""
    return Fleet(Server(flops=5e10), tuple(Device(f"device-{n}", 2e10, 1e9, DOWN, UP) for n in range(DEVICES)))


def show(title: str, rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print a table; write it too if there is a file for it."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)
    if file:
        file.write_text(json.dumps(rows, indent=1))


def main() -> None:
    """Print the table; with --json write it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.simulated:
        show(f"one of {DEVICES} devices lost; seconds", simulated(), options.json)
        return
    batch = LLAMA.tokens(0)
    rows: list[dict[str, float]] = []
    with (
        TemporaryDirectory() as folder,
        LocalFleet(fleet_of()) as fleet,
        fleet.get_client() as client,
    ):
        module = LLAMA.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        with Trainer(module, optimizer, client, checkpoint=folder, replan=False) as trainer:
            for _ in range(3):
                trainer.step(**batch)
                print(f"a calm step: {trainer.records[-1]['seconds']:.1f} s", flush=True)
            calm = median(record["seconds"] for record in trainer.records[1:])
            trainer.save()
            start = monotonic()
            trainer.resume()
            reading = monotonic() - start
            for number in range(options.kills):
                after = calm * (number + 1) / (options.kills + 1)
                found = killed_step(fleet, client, trainer, batch, after)
                extra = found["seconds"] - calm
                fewer = paused_step(client, trainer, batch, after) - calm
                recovery = extra - fewer
                restart = after + reading
                rows.append(
                    {
                        "calm step": calm,
                        "killed after": after,
                        "extra": extra,
                        "one device less": fewer,
                        "recovery": recovery,
                        "parcels lost": found["parcels"],
                        "their own time": found["own"],
                        "restart": restart,
                        "restart / recovery": restart / max(recovery, LEAST),
                    }
                )
                print(rows[-1], flush=True)
            stops = []
            for number in range(options.stops):
                stops.append(stopped_step(fleet, client, trainer, batch, calm * (number + 1) / (options.stops + 1)))
                print(stops[-1], flush=True)
    show(f"one of {DEVICES} devices killed; seconds", rows, options.json)
    if stops:
        show("one device stopped (SIGSTOP) while it had work; seconds", stops, None)


if __name__ == "__main__":
    main()

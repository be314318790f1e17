"""What a lost device costs: one of eight emulated devices is killed in the middle of a step.

    python benchmarks/recovery.py [--kills 3] [--stops 3] [--json out.json]
    python benchmarks/recovery.py --simulated

Devices are real processes behind links of 40 and 4 Mbit/s, so that a step takes about a minute. For each kill:
seconds of the step beyond the calm one; how much of that is only that seven devices do the rest of the work of eight;
what is left is the recovery. Beside it, what a restart of the step from the last checkpoint would lose: everything done
since the step began, and the time to read the checkpoint (measured).

With --simulated the same step on the same devices on virtual time, where nothing else happens, with a loss at each of
31 instants, of one device after another; and what published systems pay for a lost device by their formulas
(`simulation/baselines/faults.py`): what a rare loss adds to their batch, over the losses of a batch. They are not
charged for having one device less. What that costs ours is the rest of the step times what a step planned for seven
takes longer than one planned for eight.
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

import torch
from distributed import Client, Scheduler
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from cleave_dask.fleet.churn import HARMFUL, Churn, Event
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.capture import capture
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.baselines.comparison import SYSTEMS, compare
from cleave_dask.simulation.device import SimulatedDevice
from cleave_dask.simulation.local import LocalFleet
from cleave_dask.simulation.simulator import Simulator, simulate

DEVICES = 8
INSTANTS = 31
LLAMA = Llama(hidden=384, intermediate=1024, layers=4, heads=8, vocabulary=1024, batch=8, length=128)
DOWN, UP = Link(5e6, 5e-3), Link(5e5, 5e-3)


def in_flight(dask_scheduler: Scheduler, device: str) -> list[float]:
    """Predicted seconds of each parcel that a device has."""
    steering: Any = dask_scheduler.plugins["cleave-steering"]
    dispatcher = steering.dispatcher
    return [dispatcher.expected(parcel, device) for parcel in dispatcher.flying(device)]


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


def lost_at(planned: Plan, calm: float, after: float, number: int, fewer: float) -> dict[str, float]:
    """What it costs that a device leaves at an instant of a simulated step; `fewer` is what one less costs anyway."""
    name = f"device-{number % DEVICES}"
    simulator = LosingSimulator(planned, Churn((Event(after, name, "leave"),)))
    extra = simulator.run().seconds - calm
    return {
        "lost after": after,
        "extra": extra,
        "one device less": fewer,
        "recovery": extra - fewer,
        "tiles lost": simulator.tiles_lost,
        "their own time": simulator.own,
        "restart": after,
        "restart / recovery": after / max(extra - fewer, 1e-3),
    }


class LosingSimulator(Simulator):
    """Notes what a device had in flight, and how long it would have taken, when it leaves."""

    tiles_lost, own = 0, 0.0

    def _left(self, name: str, device: SimulatedDevice) -> None:
        for number in self.dispatcher.flying(name):
            self.tiles_lost += len(self.parcels[number].cut.tiles)
            self.own += self.dispatcher.expected(number, name)
        super()._left(name, device)


def simulated() -> list[dict[str, Any]]:
    """What a lost device costs each system, on virtual time or by its formulas."""
    fleet, batch, rate = fleet_of(), LLAMA.tokens(0), 1e-3
    graph = capture(LLAMA.module(), **batch)
    planned = plan(graph, fleet)
    calm = simulate(planned).seconds
    seven = simulate(plan(graph, Fleet(fleet.server, fleet.devices[1:]))).seconds
    print(f"a step of {calm:.2f} s takes {seven:.2f} s if it is planned for one device less")
    instants = [(number, calm * number / (INSTANTS + 1)) for number in range(1, INSTANTS + 1)]
    kills = [lost_at(planned, calm, after, number, (calm - after) * (seven / calm - 1)) for number, after in instants]
    show(f"one of {DEVICES} devices lost, on virtual time; seconds", kills, None)
    extra, recovery = ([kill[column] for kill in kills] for column in ("extra", "recovery"))
    within = sum(kill["recovery"] <= kill["their own time"] + 0.5 for kill in kills)
    hundredth = sum(kill["restart / recovery"] >= 100 for kill in kills)
    print(f"of {INSTANTS}: {within} within the lost tiles' own time + 0.5 s, {hundredth} at a hundredth of a restart")
    rows: list[dict[str, Any]] = [
        {"system": "ours, simulated", "step": calm, "a lost device": median(extra), "recovery": median(recovery)},
        {"system": "ours, the worst instant", "step": calm, "a lost device": max(extra), "recovery": max(recovery)},
        {"system": "restart of our step", "step": calm, "a lost device": calm / 2, "recovery": calm / 2},
    ]
    others = [name for name in SYSTEMS if name in ("dtfm", "ddp", "fsdp")]
    for before, under in zip(
        compare(graph, fleet, systems=others), compare(graph, fleet, systems=others, churn=rate), strict=True
    ):
        if before.seconds is None or under.seconds is None:
            what = f"{before.system}: {before.why}"
            rows.append({"system": what, "step": nan, "a lost device": nan, "recovery": nan})
            continue
        losses = before.devices_used * rate * HARMFUL / 3600 * before.seconds
        cost = (under.seconds - before.seconds) / losses
        rows.append({"system": before.system, "step": before.seconds, "a lost device": cost, "recovery": cost})
    for row in rows:
        row["over ours"] = row["recovery"] / max(rows[0]["recovery"], 1e-3)
    return rows


def fleet_of() -> Fleet:
    """Eight equal devices."""
    return Fleet(Server(), tuple(Device(f"device-{n}", 2e10, 1e9, DOWN, UP) for n in range(DEVICES)))


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
                fewer = (calm - after) / (DEVICES - 1)
                recovery = max(extra - fewer, 0.0)
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
                        "restart / recovery": restart / max(recovery, 1e-3),
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

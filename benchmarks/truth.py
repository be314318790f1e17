"""How true predictions are: seconds of a step as planned, as simulated, and as measured on emulated devices.

    python benchmarks/truth.py [--steps 3] [--setting NAME] [--shaping buckets] [--json out.json] [--write]

Each setting is a fleet of real worker processes on this machine whose links and kernels are held to their figures, and
a model that is trained on it. The plan that it is trained by is simulated too. Links are slow enough that this machine
is not what decides. The first step of each setting is not counted. In the setting with a kill, a device is killed half
way through each step, and joins again before the next. Below the table stands what the processes in the middle cost,
from which `cleave_dask.simulation.measured` has its figures. With --write the ratios go into the package, where
`cleave simulate` and others read them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from os import cpu_count, getloadavg
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.edge.systems import commit
from benchmarks.models import Llama
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.accuracy import Accuracy
from cleave_dask.simulation.local import LocalFleet
from cleave_dask.simulation.measured import MEASURED
from cleave_dask.simulation.simulator import simulate

LLAMA = Llama(hidden=256, intermediate=512, layers=2, heads=4, vocabulary=1024, batch=8, length=64)
MBIT, GFLOPS = 1e6 / 8, 1e9
KILLED = "device-1"


@dataclass(frozen=True)
class Setting:
    """Devices by speed in GFLOP/s, downlink and uplink in Mbit/s; what else is unlike the others."""

    speeds: tuple[float, ...]
    downs: tuple[float, ...]
    ups: tuple[float, ...]
    latency: float = 0.005  # seconds, one way
    kill: bool = False
    wire: str | None = None  # dtype of numbers on their way

    @property
    def fleet(self) -> Fleet:
        """The devices."""
        rows = enumerate(zip(self.speeds, self.downs, self.ups, strict=True))
        return Fleet(
            Server(),
            tuple(
                Device(
                    f"device-{n}", speed * GFLOPS, 1e9, Link(down * MBIT, self.latency), Link(up * MBIT, self.latency)
                )
                for n, (speed, down, up) in rows
            ),
        )


SETTINGS = {
    "even, 2x": Setting((2,) * 4, (20,) * 4, (10,) * 4),
    "even, 10x": Setting((2,) * 4, (40,) * 4, (4,) * 4),
    "uneven speed, 2x": Setting((1, 0.5, 0.2, 0.1), (40,) * 4, (20,) * 4),
    "uneven links, 10x": Setting((2,) * 4, (60, 40, 20, 10), (6, 4, 2, 1)),
    "uneven both, 2x": Setting((1, 0.5, 0.2, 0.1), (10, 20, 30, 40), (5, 10, 15, 20)),
    "30 ms latency, 2x": Setting((2,) * 4, (20,) * 4, (10,) * 4, latency=0.03),
    "kill, 2x": Setting((2,) * 4, (20,) * 4, (10,) * 4, kill=True),
    "bfloat16, 2x": Setting((2,) * 4, (20,) * 4, (10,) * 4, wire="bfloat16"),
}


def measure(name: str, steps: int, shaping: Any) -> dict[str, Any]:
    """One setting: the same plan simulated and trained by."""
    setting = SETTINGS[name]
    with LocalFleet(setting.fleet, shaping=shaping) as local, local.get_client() as client:
        module = LLAMA.module()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        with Trainer(module, optimizer, client, replan=False, wire=setting.wire) as trainer:
            trainer.step(**LLAMA.tokens(0))
            plan = trainer.plan
            churn = Churn((Event(plan.seconds / 2, KILLED, "leave"),)) if setting.kill else Churn()
            before = used(local)
            for number in range(steps):
                with local.under(churn):
                    trainer.step(**LLAMA.tokens(number + 1))
                if churn:
                    local.restart(KILLED)
                    while KILLED not in facts_of(client)["device"]:
                        sleep(0.1)
            spent = {what: (after - before[what]) / steps for what, after in used(local).items()}
            records = trainer.records[1:]
        simulated, seconds = simulate(plan, churn), median(record["seconds"] for record in records)
        return {
            "setting": name,
            **asdict(setting),
            "shaping": local.shaping,
            "bound_seconds": plan.bound_seconds,
            "plan_seconds": plan.seconds,
            "simulated_seconds": simulated.seconds,
            "seconds": seconds,
            "each": [record["seconds"] for record in records],
            "error": seconds / simulated.seconds - 1,
            "binding": plan.binding,
            "tiling": plan.tiling,
            "tiles": len(plan.tiles),
            "down_bytes": plan.down_bytes,
            "up_bytes": plan.up_bytes,
            "load": getloadavg()[0],
            **spent,
        }


def used(local: LocalFleet) -> dict[str, float]:
    """CPU seconds of scheduler and server so far; bytes that links have carried, where the kernel counts them."""
    pids = {"scheduler": local.scheduler_pid, "server": local.pid(local.server_name)}
    seconds = {f"{name}_cpu": sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
    network = local.network
    carried = [network.carried(device.name) for device in local.fleet.devices] if network is not None else []
    return {**seconds, "carried_down": sum(down for down, _ in carried), "carried_up": sum(up for _, up in carried)}


def costs(rows: list[dict[str, Any]]) -> list[str]:
    """What the middle costs, from settings without a kill: server seconds fitted as a + b tiles."""
    calm = [row for row in rows if not row["kill"]]
    tiles = [row["tiles"] for row in calm]
    lines = [f"scheduler: {1e3 * sum(row['scheduler_cpu'] for row in calm) / sum(tiles):.2f} ms of CPU per tile"]
    if len(set(tiles)) > 1:
        slope, fixed = np.polyfit(tiles, [row["server_cpu"] for row in calm], 1)
        lines.append(f"server: {1e3 * slope:.2f} ms of CPU per tile, and {fixed:.2f} s a step")
    for way, other in (("down", "up"), ("up", "down")):
        shaped = [row for row in calm if row[f"carried_{way}"]]
        beside = [
            row[f"carried_{way}"] - row[f"{way}_bytes"] - MEASURED.confirmation * row[f"{other}_bytes"]
            for row in shaped
        ]
        if shaped:
            each = sum(beside) / sum(row["tiles"] for row in shaped)
            lines.append(f"{way}: {each:,.0f} bytes per tile beside its numbers, headers included")
    return lines


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows, to look at."""
    heads = ("setting", "bound", "plan", "simulated", "measured", "measured / simulated", "measured / plan", "binding")
    shown = Table(*heads, "tiles", title=f"{LLAMA}, 4 emulated devices; seconds a step")
    for row in rows:
        seconds = [row[name] for name in ("bound_seconds", "plan_seconds", "simulated_seconds", "seconds")]
        ratios = [row["seconds"] / row[name] for name in ("simulated_seconds", "plan_seconds")]
        shown.add_row(
            row["setting"], *(f"{cell:.2f}" for cell in (*seconds, *ratios)), row["binding"], str(row["tiles"])
        )
    return shown


def main() -> None:
    """Measure every setting, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--setting", choices=SETTINGS, action="append")
    parser.add_argument("--shaping", choices=("auto", "namespaces", "buckets"), default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the ratios into the package")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    console = Console()
    for name in options.setting or SETTINGS:
        row = measure(name, options.steps, options.shaping)
        rows.append(row)
        console.print(
            f"{name}: planned {row['plan_seconds']:.2f} s, simulated {row['simulated_seconds']:.2f} s, "
            f"measured {row['seconds']:.2f} s ({row['error']:+.0%})"
        )
    console.print(table(rows))
    for line in costs(rows):
        console.print(line)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    accuracy = Accuracy.of(rows, f"{commit()}, {cpu_count()} cores, load {_loads(rows)}")
    console.print(str(accuracy))
    if options.write:
        accuracy.write()


def _loads(rows: list[dict[str, Any]]) -> str:
    loads = [row["load"] for row in rows]
    return f"{min(loads):.0f} to {max(loads):.0f}"


if __name__ == "__main__":
    main()

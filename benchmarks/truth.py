"""How true predictions are: seconds of a step as planned, as simulated, and as measured on emulated devices.

    python benchmarks/truth.py [--steps 3] [--setting NAME] [--shaping buckets] [--json out.json]

Each setting is a fleet of real worker processes on this machine whose links and kernels are held to their figures, and
a model that is trained on it. The plan that it is trained by is simulated too. Links are slow enough that this machine
is not what decides. The first step of each setting is not counted. In the setting with a kill, a device is killed half
way through each step, and joins again before the next.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from cleave_dask.simulation.simulator import simulate

LLAMA = Llama(hidden=256, intermediate=512, layers=2, heads=4, vocabulary=1024, batch=8, length=64)
MBIT, GFLOPS = 1e6 / 8, 1e9


@dataclass(frozen=True)
class Setting:
    """Devices by speed in GFLOP/s, downlink and uplink in Mbit/s; what else is unlike the others."""

    speeds: tuple[float, ...]
    downs: tuple[float, ...]
    ups: tuple[float, ...]
    latency: float = 0.005  # seconds, one way
    kill: bool = False

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
}


def measure(name: str, steps: int, shaping: Any) -> dict[str, Any]:
    """One setting: the same plan simulated and trained by."""
    setting = SETTINGS[name]
    with LocalFleet(setting.fleet, shaping=shaping) as local, local.get_client() as client:
        module = LLAMA.module()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        with Trainer(module, optimizer, client, replan=False) as trainer:
            trainer.step(**LLAMA.tokens(0))
            plan = trainer.plan
            churn = _kill(plan.seconds / 2) if setting.kill else Churn()
            simulated = simulate(plan, churn)
            start = monotonic()
            for number in range(steps):
                with local.under(churn):
                    trainer.step(**LLAMA.tokens(number + 1))
                if churn:
                    local.restart(churn.events[0].device)
                    client.wait_for_workers(len(setting.speeds) + 1)
            elapsed = (monotonic() - start) / steps
            trace, records = trainer.trace, trainer.records[1:]
        seconds = median(record["seconds"] for record in records)
        return {
            "setting": name,
            **asdict(setting),
            "shaping": local.shaping,
            "bound_seconds": plan.bound_seconds,
            "plan_seconds": plan.seconds,
            "simulated_seconds": simulated.seconds,
            "seconds": seconds,
            "each": [record["seconds"] for record in records],
            "elapsed": elapsed,
            "error": seconds / simulated.seconds - 1,
            "binding": plan.binding,
            "tiling": plan.tiling,
            "tiles": len(plan.tiles),
            "spent": records[-1]["spent"],
            "by_device": trace.of_step(steps + 1).by_device(),
            "simulated_by_device": simulated.by_device(),
        }


def _kill(seconds: float) -> Churn:
    return Churn((Event(seconds, "device-1", "leave"),))


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
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

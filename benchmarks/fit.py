"""How well predictions fit emulated devices: seconds of a step as planned and as measured, beside an even split.

    python benchmarks/fit.py [--steps 3] [--setting NAME] [--json out.json]

Each setting is a fleet of four real worker processes on this machine whose links and kernels are held to their
figures. The default planner and an even split train the same model in turn; the first step of each is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

LLAMA = Llama(hidden=256, intermediate=512, layers=2, heads=4, vocabulary=1024, batch=8, length=64)
MB, GFLOPS = 1e6, 1e9


def fleet(speeds: Sequence[float], downs: Sequence[float], ups: Sequence[float], latency: float = 0.005) -> Fleet:
    """Devices by speed in GFLOP/s, downlink and uplink in MB/s."""
    rows = enumerate(zip(speeds, downs, ups, strict=True))
    return Fleet(
        Server(),
        tuple(
            Device(f"device-{n}", speed * GFLOPS, 1e9, Link(down * MB, latency), Link(up * MB, latency))
            for n, (speed, down, up) in rows
        ),
    )


SETTINGS = {
    "equal": fleet([8] * 4, [32] * 4, [8] * 4),
    "uneven speed": fleet([8, 4, 0.8, 0.4], [40] * 4, [40] * 4),
    "uneven links": fleet([8] * 4, [64, 32, 6.4, 3.2], [32, 16, 3.2, 1.6]),
    "uneven both": fleet([8, 4, 2, 0.8], [64, 32, 6.4, 3.2], [16, 4, 3.2, 1.6]),
    "long latency": fleet([8] * 4, [64, 32, 16, 8], [32, 16, 8, 4], latency=0.03),
}


def measure(name: str, steps: int) -> dict[str, Any]:
    """One setting: both planners, step by step in turn, so that noise hits them alike."""
    with LocalFleet(SETTINGS[name]) as local, local.get_client() as client:
        trainers = []
        for planner in (plan, partial(plan, tiling="even")):
            module = LLAMA.module()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            trainers.append(Trainer(module, optimizer, client, plan=planner, replan=False))
        for number in range(steps + 1):
            for trainer in trainers:
                trainer.step(**LLAMA.tokens(number))
        planned, even = trainers
        seconds, even_seconds = (median(r["seconds"] for r in trainer.records[1:]) for trainer in trainers)
        return {
            "setting": name,
            "plan_seconds": planned.plan.seconds,
            "seconds": seconds,
            "ratio": seconds / planned.plan.seconds,
            "even_plan_seconds": even.plan.seconds,
            "even_seconds": even_seconds,
            "binding": planned.plan.binding,
            "tiles": len(planned.plan.tiles),
            "tiling": planned.plan.tiling,
        }


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows, to look at."""
    title = f"{LLAMA}, 4 emulated devices; seconds a step"
    shown = Table("setting", "plan", "measured", "ratio", "even", "even / measured", "binding", "tiles", title=title)
    for row in rows:
        gain = row["even_seconds"] / row["seconds"]
        cells = (row["plan_seconds"], row["seconds"], row["ratio"], row["even_seconds"], gain)
        shown.add_row(row["setting"], *(f"{cell:.2f}" for cell in cells), row["binding"], str(row["tiles"]))
    return shown


def main() -> None:
    """Measure every setting, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--setting", choices=SETTINGS, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    console = Console()
    for name in options.setting or SETTINGS:
        rows.append(measure(name, options.steps))
        console.print(f"{name}: planned {rows[-1]['plan_seconds']:.2f} s, measured {rows[-1]['seconds']:.2f} s")
    console.print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

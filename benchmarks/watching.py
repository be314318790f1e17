"""What an open page costs a run: seconds of a step, and CPU of scheduler and server, /cleave seen and hidden in turn.

    python -m benchmarks.watching [--pairs 40] [--browser] [--json out.json] [--add earlier.json ...]

A real training on eight emulated devices whose links bind, so that the processes of this machine do not wait for its
cores. Single steps are made with the page before somebody's eyes and behind another tab, when it is sent nothing and
nothing is asked for it, as if it was closed; each pair in the other order than the one before, so that whatever drifts
meets both alike. The page is read by a process that takes all that it is sent and draws nothing: people look at a fleet
from other machines. With --browser it is Chromium, which draws here. Each figure is the median of pairs, with the
interval that holds the true one in 95 of 100 such runs, whatever the distribution.
"""

from __future__ import annotations

import argparse
import json
import os
from math import sqrt
from pathlib import Path
from statistics import median
from time import clock_gettime, sleep
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from benchmarks.viewer import viewer
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

LLAMA = Llama(hidden=128, intermediate=384, layers=1, heads=4, vocabulary=256, batch=8, length=128)
DEVICES = 8
FLEET = Fleet(
    Server(), tuple(Device(f"device-{n}", 2e9, 1e9, Link(5e6, 0.005), Link(1.5e6, 0.005)) for n in range(DEVICES))
)
STATES = ("hidden", "open")
SETTLE = 0.5  # seconds between a change and a step
WARM_UP = 3  # steps that are not counted

Pair = dict[str, tuple[float, float]]
"""Seconds of a step, and CPU seconds of scheduler and server in it, by state."""


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has had: the clock that Linux has for it."""
    return clock_gettime((~pid << 3) | 2)


def measure(pairs: int, *, browser: bool) -> list[Pair]:
    """Steps with the page open and hidden in turn."""
    module, found = LLAMA.module(), []
    with LocalFleet(FLEET, shaping="buckets") as fleet, fleet.get_client() as client:
        url = f"{client.dashboard_link.removesuffix('/status')}/cleave"
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        with Trainer(module, optimizer, client, replan=False) as trainer, viewer(url, browser=browser) as somebody:
            pids = fleet.scheduler_pid, fleet.server_pid

            def step(state: str) -> tuple[float, float]:
                somebody.turn(state)
                sleep(SETTLE)
                before = sum(map(cpu_of, pids))
                trainer.step(**LLAMA.tokens(0))
                return trainer.records[-1]["seconds"], sum(map(cpu_of, pids)) - before

            for _ in range(WARM_UP):
                step("open")
            for number in range(pairs):
                found.append({state: step(state) for state in STATES[:: 1 if number % 2 else -1]})
    return found


def middle(values: list[float]) -> dict[str, float]:
    """The median, and the interval that holds it by how many of so many values lie above it."""
    ordered, count = sorted(values), len(values)
    away = round(0.98 * sqrt(count) + 0.5)
    low, high = max(0, count // 2 - away), min(count - 1, (count - 1) // 2 + away)
    return {"median": median(ordered), "low": ordered[low], "high": ordered[high]}


def summarise(pairs: list[Pair]) -> dict[str, Any]:
    """Medians by state, the ratio of seconds, and the CPU that the page takes, of one core."""
    cores = [2 * (pair["open"][1] - pair["hidden"][1]) / (pair["open"][0] + pair["hidden"][0]) for pair in pairs]
    return {
        **{
            state: {key: median(pair[state][place] for pair in pairs) for place, key in enumerate(("seconds", "cpu"))}
            for state in STATES
        },
        "pairs": len(pairs),
        "ratio": middle([pair["open"][0] / pair["hidden"][0] for pair in pairs]),
        "cores": middle(cores),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--browser", action="store_true", help="Chromium on this machine instead of a reader")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="what earlier runs wrote, to be counted too")
    options = parser.parse_args()
    pairs = [pair for file in options.add for pair in json.loads(file.read_text())["measured"]]
    pairs += measure(options.pairs, browser=options.browser)
    found = summarise(pairs)
    title = f"{LLAMA}; {DEVICES} emulated devices; load {found['load']:.0f}"
    table = Table("page", "steps", "seconds of a step, median", "CPU of scheduler and server, median", title=title)
    for state in STATES:
        row = found[state]
        table.add_row(state, str(found["pairs"]), f"{row['seconds']:.3f}", f"{row['cpu']:.3f}")
    console = Console()
    console.print(table)
    ratio, cores = found["ratio"], found["cores"]
    around = f"{ratio['low']:.4f} to {ratio['high']:.4f}"
    console.print(f"seconds, open / hidden: {ratio['median']:.4f}, 95% interval {around}")
    around = f"{cores['low']:.2%} to {cores['high']:.2%}"
    console.print(f"CPU of the page: {cores['median']:.2%} of a core, 95% interval {around}")
    if options.json:
        options.json.write_text(json.dumps({**found, "measured": pairs}, indent=2))


if __name__ == "__main__":
    main()

"""What an open page costs a run: seconds of a step, and CPU of scheduler and server, /cleave open and closed in turn.

    python -m benchmarks.watching [--rounds 6] [--steps 6] [--browser] [--json out.json]

A real training on eight emulated devices whose links bind, so that the processes of this machine do not wait for its
cores. In each round some steps are made with the page open and as many with it closed, and every other round begins
with the other; the first step after a change is not counted. The page is read by a process that takes all that it is
sent and draws nothing: people look at a fleet from other machines. With --browser it is Chromium, which draws here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

LLAMA = Llama(hidden=256, intermediate=768, layers=2, heads=4, vocabulary=1024, batch=8, length=128)
DEVICES = 8
FLEET = Fleet(
    Server(), tuple(Device(f"device-{n}", 2e9, 1e9, Link(5e6, 0.005), Link(1.5e6, 0.005)) for n in range(DEVICES))
)


@contextmanager
def viewer(url: str, *, browser: bool) -> Iterator[None]:
    """Somebody who looks at the page while the block runs."""
    program = [sys.executable, str(Path(__file__).with_name("viewer.py")), url, *(["--browser"] if browser else [])]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"nobody could open {url}")
        yield
        process.stdin.close()


class Measured:
    """A run, and what its steps took."""

    def __init__(self, trainer: Trainer, pids: list[int]) -> None:
        self.trainer, self.processes = trainer, [psutil.Process(pid) for pid in pids]

    def cpu(self) -> float:
        """Seconds of CPU that scheduler and server have had."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(time.user + time.system for time in times))

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Seconds and CPU seconds of so many steps, after one that is not counted."""
        self.trainer.step(**LLAMA.tokens(0))
        rows = []
        for number in range(count):
            before = self.cpu()
            self.trainer.step(**LLAMA.tokens(number))
            rows.append((self.trainer.records[-1]["seconds"], self.cpu() - before))
        return rows


def measure(rounds: int, steps: int, *, browser: bool) -> dict[str, Any]:
    """Rounds with the page open and closed in turn."""
    module = LLAMA.module()
    rows: dict[str, list[list[tuple[float, float]]]] = {"open": [], "closed": []}
    with LocalFleet(FLEET, shaping="buckets") as fleet, fleet.get_client() as client:
        url = f"{client.dashboard_link.removesuffix('/status')}/cleave"
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        with Trainer(module, optimizer, client, replan=False) as trainer:
            measured = Measured(trainer, [fleet.scheduler_pid, fleet.server_pid])
            measured.steps(2)
            for number in range(rounds):
                for state in ("open", "closed")[:: 1 if number % 2 == 0 else -1]:
                    if state == "closed":
                        rows[state].append(measured.steps(steps))
                        continue
                    with viewer(url, browser=browser):
                        rows[state].append(measured.steps(steps))
    return {state: _medians(blocks) for state, blocks in rows.items()} | {
        "ratios": [_ratio(a, b, 0) for a, b in zip(rows["open"], rows["closed"], strict=True)],
        "cpu_ratios": [_ratio(a, b, 1) for a, b in zip(rows["open"], rows["closed"], strict=True)],
        "load": os.getloadavg()[0],
    }


def _medians(blocks: list[list[tuple[float, float]]]) -> dict[str, float]:
    flat = [row for block in blocks for row in block]
    return {"seconds": median(row[0] for row in flat), "cpu": median(row[1] for row in flat), "steps": len(flat)}


def _ratio(page: list[tuple[float, float]], without: list[tuple[float, float]], which: int) -> float:
    return median(row[which] for row in page) / median(row[which] for row in without)


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--browser", action="store_true", help="Chromium on this machine instead of a reader")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.rounds, options.steps, browser=options.browser)
    title = f"{LLAMA}; {DEVICES} emulated devices; load {found['load']:.0f}"
    table = Table("page", "steps", "seconds per step, median", "CPU of scheduler and server per step", title=title)
    for state in ("closed", "open"):
        row = found[state]
        table.add_row(state, str(row["steps"]), f"{row['seconds']:.3f}", f"{row['cpu']:.3f}")
    console = Console()
    console.print(table)
    for name, key in (("seconds", "ratios"), ("CPU", "cpu_ratios")):
        least, most = min(found[key]), max(found[key])
        console.print(f"{name}, open / closed by rounds: median {median(found[key]):.3f}, {least:.3f} to {most:.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

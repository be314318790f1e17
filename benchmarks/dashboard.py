"""What an open page costs the scheduler: CPU of a look at the page /cleave, for several fleets.

    python -m benchmarks.dashboard --devices 8 64 1000

The scheduler is a real one without work; the page is fed with made-up facts, 200 tiles and a new step at every look,
so that the size of the fleet is an argument. Somebody in another process reads all that the page is sent. Here it looks
ten times a second, so that its cost stands out from all else that the process does, page closed; the last columns
tell how often it would look by what it counts itself, and what share of a core that is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any

import numpy as np
from distributed import Scheduler
from rich.console import Console
from rich.table import Table

from benchmarks.viewer import viewer
from cleave_dask.views import dashboard
from cleave_dask.views.dashboard import LONGEST, SHARE, SHORTEST, Live

TILES = 200
STAGES = ("download", "compute", "upload", "verify")


class MadeUp:
    """Facts of a run on so many devices, new ones at every look."""

    def __init__(self, devices: int, live: Live) -> None:
        self.names = [f"device-{number:04d}" for number in range(devices)]
        self.looks = 0
        self.counted: list[float] = []  # seconds of CPU of each look, as the page counts them
        self._live = live
        self._chance = np.random.default_rng(0)

    async def look(self) -> dict[str, Any]:
        """What a feed would say."""
        self.looks += 1
        self.counted.append(self._live.spent)
        here = {name: {"running": True} for name in self.names}
        return {"devices": here, "silent": [], "late": {}, "scheduler": 0.1, "cpu": 0.0, "run": self._run()}

    def _run(self) -> dict[str, Any]:
        step, count, chance = self.looks, len(self.names), self._chance
        rows: dict[str, Any] = {name: np.zeros(TILES, np.int32) for name in ("step", "gemm", "tile", "outcome")}
        rows["device"] = rows["planned"] = chance.integers(0, count, TILES)
        rows["start"] = 1e9 + step + np.sort(chance.random(TILES))
        for name in ("queued", *STAGES, *(f"predicted_{stage}" for stage in STAGES[:3])):
            rows[name] = chance.random(TILES) * 0.05
        names = {"gemm": ("up",), "outcome": ("accepted",), "device": tuple(self.names), "planned": tuple(self.names)}
        record = {"step": step, "loss": 5 / step, "seconds": 1.0, "down_bytes": 1, "up_bytes": 1, "ended": 1e9 + step}
        busy = {stage: chance.random(count).tolist() for stage in STAGES}
        shares = {"share": chance.random(count).tolist(), "taken_over": [0] * count}
        return {
            "run": "made up",
            "records": [record],
            "rows": rows,
            "names": names,
            "sums": {name: [float(step)] * 5 for name in self.names},
            "summary": {"device": self.names, "busy": busy, "figures": {}, **shares},
        }


async def share_of_a_core(seconds: float) -> float:
    """CPU of this process over the next seconds, of one core."""
    began, spent = monotonic(), process_time()
    await asyncio.sleep(seconds)
    return (process_time() - spent) / (monotonic() - began)


async def measure(devices: int, seconds: float) -> dict[str, Any]:
    """One fleet: first with the page open, then hidden."""
    preload = "cleave_dask.views.dashboard"
    async with Scheduler(dashboard_address="127.0.0.1:0", host="127.0.0.1", preload=preload) as scheduler:
        live = dashboard.live_of(scheduler)
        facts = MadeUp(devices, live)
        live.feed = facts  # type: ignore[assignment]
        with viewer(f"http://127.0.0.1:{scheduler.http_server.port}/cleave") as somebody:
            await asyncio.to_thread(somebody.turn, "open")
            await asyncio.sleep(2)  # what is built once is not measured
            facts.counted.clear()
            shown = await share_of_a_core(seconds)
            counted = tuple(facts.counted)
            await asyncio.to_thread(somebody.turn, "hidden")
            await asyncio.sleep(1)
            closed = await share_of_a_core(seconds)
    look = (shown - closed) * seconds / len(counted)
    own = median(counted)
    pause = min(max(SHORTEST, own / SHARE), LONGEST)
    return {"devices": devices, "look": look, "counted": own, "pause": pause, "share": look / pause}


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dashboard.SHARE, dashboard.SHORTEST, dashboard.CHECK = 1.0, 0.1, 0.02
    rows = [asyncio.run(measure(devices, options.seconds)) for devices in options.devices]
    title = f"CPU of the scheduler's process; load {os.getloadavg()[0]:.0f}"
    head = ("devices", "CPU of a look", "as the page counts it", "seconds between looks", "of a core")
    table = Table(*head, title=title)
    for row in rows:
        costs = (f"{1e3 * row[key]:.1f} ms" for key in ("look", "counted"))
        table.add_row(str(row["devices"]), *costs, f"{row['pause']:.1f}", f"{row['share']:.2%}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

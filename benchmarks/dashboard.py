"""What an open page costs the scheduler: CPU of its process with the page /cleave open and closed, for several fleets.

    python benchmarks/dashboard.py --devices 8 64 1000

The scheduler is a real one without work; the page is fed with made-up facts, 200 tiles and a new step at every look,
so that the size of the fleet is an argument. Somebody in another process reads all that the page is sent. CPU says what
a page can take from a run also on a machine that is busy with other things; seconds of a step do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import numpy as np
from distributed import Scheduler
from rich.console import Console
from rich.table import Table

from cleave_dask.views.dashboard import live_of

TILES = 200
STAGES = ("download", "compute", "upload", "verify")


class MadeUp:
    """Facts of a run on so many devices, new ones at every look."""

    def __init__(self, devices: int) -> None:
        self.names = [f"device-{number:04d}" for number in range(devices)]
        self.looks = 0
        self._chance = np.random.default_rng(0)

    async def look(self) -> dict[str, Any]:
        """What a feed would say."""
        self.looks += 1
        here = {name: {"running": True} for name in self.names}
        return {"devices": here, "silent": [], "late": {}, "scheduler": 0.1, "run": self._run()}

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
    """One fleet: first with the page open, then closed."""
    preload = "cleave_dask.views.dashboard"
    async with Scheduler(dashboard_address="127.0.0.1:0", host="127.0.0.1", preload=preload) as scheduler:
        live, facts = live_of(scheduler), MadeUp(devices)
        live._feed = facts  # type: ignore[assignment]
        url = f"http://127.0.0.1:{scheduler.http_server.port}/cleave"
        program, pipe = str(Path(__file__).with_name("viewer.py")), asyncio.subprocess.PIPE
        viewer = await asyncio.create_subprocess_exec(sys.executable, program, url, stdin=pipe, stdout=pipe)
        assert viewer.stdin is not None
        assert viewer.stdout is not None
        await viewer.stdout.readline()
        await asyncio.sleep(4)  # what is built once is not measured
        looks, shown = facts.looks, await share_of_a_core(seconds)
        looks = facts.looks - looks
        viewer.stdin.close()
        await viewer.wait()
        while live.viewers:
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)
        closed = await share_of_a_core(seconds)
    return {"devices": devices, "open": shown, "closed": closed, "seconds_between_looks": seconds / max(1, looks)}


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [asyncio.run(measure(devices, options.seconds)) for devices in options.devices]
    title = f"CPU of the scheduler's process, of one core; load {os.getloadavg()[0]:.0f}"
    table = Table("devices", "page closed", "page open", "the page", "seconds between looks", title=title)
    for row in rows:
        shares = (row["closed"], row["open"], row["open"] - row["closed"])
        table.add_row(str(row["devices"]), *(f"{share:.2%}" for share in shares), f"{row['seconds_between_looks']:.1f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

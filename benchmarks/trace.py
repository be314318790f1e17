"""What the trace and tiles on disk cost a step, on an unshaped local fleet.

    python benchmarks/trace.py [--steps 5] [--devices 2] [--json out.json]

The trace is always on: its cost is the time that its own calls take, row by row, over the time of a step. Tiles on disk
are measured against steps without: each in turn starts from a save, once with tiles kept and once without. Wall times
of a shared machine are noisy, so the server's CPU seconds stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import dask
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from cleave_dask.formatting import duration, quantity
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.trace import Recorder, Trace
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

LLAMA = Llama(hidden=512, intermediate=1408, layers=2, heads=8, vocabulary=2048, batch=4, length=256)
GRID = (3, 3, 1)


def row_seconds(rows: int = 20_000) -> float:
    """Seconds that one row costs the server: taken down, then packed into columns at the end of its step."""
    recorder = Recorder()
    start = perf_counter()
    for number in range(rows):
        name = f"layers.{number % 20}.mlp"
        recorder.add((1, name, number, f"device-{number % 4}", 1e9, 0.1, 0.1, 0.1, 0.1, 0.1, "accepted", 1000, 1000))
        if number % 500 == 499:
            recorder.seal()
    return (perf_counter() - start) / rows


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, as Linux counts them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(steps: int, devices: int) -> dict[str, Any]:
    """Steps with tiles on disk and without, in turn; the first of each is not counted."""
    module = LLAMA.module()
    seconds: dict[str, list[float]] = {"kept": [], "none": []}
    cpu: dict[str, list[float]] = {"kept": [], "none": []}
    tiles: list[tuple[int, int]] = []
    with LocalFleet(devices) as local, local.get_client() as client, TemporaryDirectory() as folder:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        trainer = Trainer(module, optimizer, client, checkpoint=folder, plan=partial(plan, min_flops=0, grid=GRID))
        trainer.step(**LLAMA.tokens(0))
        for number in range(2 * (steps + 1)):
            kind = "none" if number % 2 else "kept"
            with dask.config.set({"cleave.checkpoint.tiles": "0" if kind == "none" else "4 GB"}):
                trainer.save()
            before, start = cpu_seconds(local.server_pid), perf_counter()
            trainer.step(**LLAMA.tokens(number))
            seconds[kind].append(perf_counter() - start)
            cpu[kind].append(cpu_seconds(local.server_pid) - before)
            if kind == "kept":
                found = list(Path(folder).glob("inflight-*/tiles/*/*/c.*"))
                whole = sum(path.parent.name == "0" for path in found)  # a tile may have several outputs
                tiles.append((whole, sum(path.stat().st_size for path in found)))
        start = perf_counter()
        trace = trainer.trace
        fetching = perf_counter() - start
        start = perf_counter()
        trace.save(Path(folder) / "copy")
        saving = perf_counter() - start
        assert len(Trace.load(Path(folder) / "copy")) == len(trace)
        record = trainer.records[-1]
    row, rows = row_seconds(), len(trace) / len(trainer.records)
    step = median(seconds["none"][1:])
    return {
        "setting": f"{LLAMA}, {devices} devices",
        "step_seconds": step,
        "rows": rows,
        "row_seconds": row,
        "trace_share": row * rows / step,
        "fetch_seconds": fetching,
        "trace_save_seconds": saving,
        "tiles": record["tiles"],
        "up_bytes": record["up_bytes"],
        "tiles_on_disk": median(count for count, _ in tiles[1:]),
        "bytes_on_disk": median(size for _, size in tiles[1:]),
        "kept_seconds": median(seconds["kept"][1:]),
        "kept_cpu": median(cpu["kept"][1:]),
        "none_cpu": median(cpu["none"][1:]),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result, to look at."""
    trace = Table("trace", "", title=result["setting"])
    trace.add_row("rows per step", f"{result['rows']:.0f}")
    trace.add_row("one row", duration(result["row_seconds"]))
    trace.add_row("share of a step", f"{result['trace_share']:.3%}")
    trace.add_row("fetching all rows of the run, once", duration(result["fetch_seconds"]))
    trace.add_row("writing them, once", duration(result["trace_save_seconds"]))
    kept = Table("step after a save", "seconds", "server's CPU seconds", "tiles on disk", title="Tiles on disk")
    kept.add_row("no tiles kept", f"{result['step_seconds']:.2f}", f"{result['none_cpu']:.2f}", "0")
    written = f"{result['tiles_on_disk']:.0f} of {result['tiles']}, {quantity(result['bytes_on_disk'], 'B')}"
    kept.add_row("tiles kept", f"{result['kept_seconds']:.2f}", f"{result['kept_cpu']:.2f}", written)
    return [trace, kept]


def main() -> None:
    """Measure, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.steps, options.devices)
    console = Console()
    for table in tables(result):
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

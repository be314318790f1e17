"""What a tile costs the scheduler: the plugin beside stock Dask, on the same graph, with many light workers.

    python benchmarks/scheduler.py [--levels 20] [--devices 8 64 256] [--runs 3] [--json out.json]

The scheduler runs in a process of its own and its CPU time is taken from the operating system. Workers and server are
Dask workers inside this process whose tasks return at once, so only bookkeeping is measured. A level has four tiles for
each worker; between levels stands one task of the server. Stock Dask gets the same levels with one collecting task per
tile, pinned to the server, as a graph of plain tasks; ours goes as tiles alone and in parcels of four.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask
import psutil
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Worker
from rich.console import Console
from rich.table import Table

from cleave_dask.runtime.refusing import take_orders
from cleave_dask.runtime.tasks import OrderedTask
from cleave_dask.runtime.tiles import ParcelSpec

TILES = 4  # per worker and level
QUIET = {
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "1h",  # each worker's looks at the files of all of them
    "distributed.admin.system-monitor.disk": False,
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.comm.timeouts.connect": "300s",  # hundreds of workers join at once, on cores that do other things too
}


async def nothing(*_: Any) -> int:
    """A task without work."""
    return 0


def steered(run: int, devices: int, levels: int, together: int) -> tuple[dict[Any, Any], Any]:
    """The graph as cleave_dask sends it: parcels, and a round of the server after each level."""
    graph: dict[Any, Any] = {}
    after: list[Any] = []
    for level in range(levels):
        keys = []
        for parcel in range(devices * TILES // together):
            key = (f"parcel-{run}", level, parcel)
            name = f"device-{parcel % devices}"
            options: dict[str, Any] = {"place": "device", "device": name, "rank": level}
            tiles = tuple(
                (tile, 0, 1, tile, tile + 1, 0, 1) for tile in range(parcel * together, (parcel + 1) * together)
            )
            kind = ("gemm", "float32", False, None, level, False)
            spec = ParcelSpec(f"run-{run}", 0, level, *kind, tiles)
            graph[key] = OrderedTask(key, nothing, spec, after=after, **options)
            keys.append(key)
        last = (f"round-{run}", level)
        graph[last] = OrderedTask(last, nothing, after=keys, rank=level)
        after = [last]
    return graph, after[0]


def stock(run: int, devices: int, levels: int, server: str) -> tuple[HighLevelGraph, Any]:
    """The same levels as plain tasks: each tile with a task of the server that collects it."""
    tiles: dict[Any, Any] = {}
    collects: dict[Any, Any] = {}
    before: Any = None
    for level in range(levels):
        collected = []
        for tile in range(devices * TILES):
            key, collect = (f"tile-{run}", level, tile), (f"collect-{run}", level, tile)
            tiles[key] = Task(key, nothing, *([] if before is None else [TaskRef(before)]))
            collects[collect] = Task(collect, nothing, TaskRef(key))
            collected.append(collect)
        before = (f"round-{run}", level)
        collects[before] = Task(before, nothing, *(TaskRef(key) for key in collected))
    layers = {
        "tiles": MaterializedLayer(tiles),
        "collects": MaterializedLayer(collects, annotations={"workers": [server]}),
    }
    return HighLevelGraph(layers, {"tiles": {"collects"}, "collects": {"tiles"}}), before


@contextmanager
def scheduler(*options: str) -> Iterator[tuple[str, psutil.Process]]:
    """A scheduler process: its address and itself."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        command = [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        settings = {
            f"DASK_{key.replace('.', '__').replace('-', '_').upper()}": str(value) for key, value in QUIET.items()
        }
        process = subprocess.Popen(
            [*command, "--scheduler-file", str(file), *options],
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not file.exists() or not file.read_text():
                assert process.poll() is None, "the scheduler did not start"
            yield json.loads(file.read_text())["address"], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _told(facts: dict[str, Any], _: Worker) -> dict[str, Any]:
    return facts


@asynccontextmanager
async def fleet(address: str, devices: int, *, steered: bool) -> Any:
    """Light workers in this process, and a client; steered ones take parcels as devices do."""
    figures = {"role": "device", "flops": 1e12, "memory": 1e9, "down": 1e9, "up": 1e9, "latency": 1e-4}
    workers = []
    for name in ["server", *(f"device-{number}" for number in range(devices))]:
        worker = Worker(address, nthreads=3, name=name, dashboard=False, heartbeat_interval="60s")
        facts = {"role": "server"} if name == "server" else figures
        worker.startup_information["cleave"] = partial(_told, facts)
        if steered and name != "server":
            take_orders(worker, nothing)
        workers.append(worker)
    for first in range(0, len(workers), 32):
        await asyncio.gather(*workers[first : first + 32])
    client = await Client(address, asynchronous=True, set_as_default=False)
    try:
        yield client, workers[0].address
    finally:
        await client.close()
        await asyncio.gather(*(worker.close() for worker in workers))


async def measure(system: str, devices: int, levels: int, together: int = 1, *, runs: int = 3) -> dict[str, Any]:
    """CPU seconds of the scheduler per tile, the best of some runs after one that does not count."""
    options = ("--preload", "cleave_dask.runtime.scheduler") if system == "cleave" else ()
    with scheduler(*options) as (address, process):
        async with fleet(address, devices, steered=system == "cleave") as (client, server):
            spent = []
            for run in range(1 + runs):
                before = sum(process.cpu_times()[:2])
                if system == "cleave":
                    graph, last = steered(run, devices, levels, together)
                    result = client.get(graph, last, sync=False)
                else:
                    result = client.get(*stock(run, devices, levels, server), sync=False)
                await result
                spent.append(sum(process.cpu_times()[:2]) - before)
                del result
            tiles = devices * TILES * levels
            memory = process.memory_info().rss
    return {
        "system": system if system == "stock Dask" else f"cleave, parcels of {together}",
        "devices": devices,
        "tiles": tiles,
        "ms_per_tile": 1e3 * min(spent[1:]) / tiles,
        "scheduler_MB": memory / 1e6,
    }


def main() -> None:
    """Print the table; with --json write it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", type=int, default=20)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    timed = partial(measure, runs=options.runs)
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with dask.config.set(QUIET):
        for devices in options.devices:
            stocked = asyncio.run(timed("stock Dask", devices, options.levels))
            found = [asyncio.run(timed("cleave", devices, options.levels, together)) for together in (1, 4)]
            for row in (stocked, *found):
                row["ratio"] = row["ms_per_tile"] / stocked["ms_per_tile"]
                rows.append(row)
                print(row, flush=True)
    table = Table(title=f"CPU of the scheduler, {options.levels} levels of {TILES} tiles per worker")
    for key in rows[0]:
        table.add_column(key, justify="left" if key == "system" else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

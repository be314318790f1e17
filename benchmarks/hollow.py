"""The real scheduler and the real server under hundreds of hollow devices: CPU per tile, memory, leaks.

    python benchmarks/hollow.py [--recipe opt-1.3b] [--devices 512] [--batch 1] [--steps 1] [--json out.json]

Steps of a recipe's captured graph, planned for `Fleet.sample(devices)`, on a hollow fleet: scheduler and server are
processes of their own and do all of their bookkeeping; nothing is multiplied and no payload moves. For each step: wall
seconds, CPU of the scheduler and of the server per tile and per parcel, resident memory of both, tasks that the
scheduler holds after it, parcels that went to another device for being late. A machine that is too slow for the fleet
shows it: steps take longer than planned, and parcels are late.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import torch
from distributed import Client
from rich.console import Console
from rich.table import Table

import cleave_dask as cd
from cleave_dask.graph.building import build_model, example_batch
from cleave_dask.runtime.cluster import facts_of


def measure(recipe: cd.Recipe, devices: int, steps: int) -> list[dict[str, Any]]:
    """A row for each step."""
    module, batch = build_model(recipe, device="meta"), example_batch(recipe)
    optimizer = torch.optim.AdamW(module.parameters())
    rows: list[dict[str, Any]] = []
    with cd.HollowFleet(cd.Fleet.sample(devices)) as fleet, fleet.get_client() as client:
        trainer = cd.Trainer(module, optimizer, client, clip_norm=recipe.train.clip_norm, replan=False)
        processes = {"scheduler": fleet.scheduler_pid, "server": fleet.server_pid, "devices": fleet.devices_pid}
        watched = {name: psutil.Process(pid) for name, pid in processes.items()}
        for _ in range(steps):
            before, start = _cpu(watched), monotonic()
            trainer.step(**batch)
            seconds = monotonic() - start
            spent = {name: after - before[name] for name, after in _cpu(watched).items()}
            rows.append(_row(trainer, client, seconds, spent, watched))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _row(
    trainer: cd.Trainer,
    client: Client,
    seconds: float,
    spent: dict[str, float],
    watched: dict[str, psutil.Process],
) -> dict[str, Any]:
    record, plan = trainer.records[-1], trainer.plan
    parcels = sum(len(tiles.parcels()) for tiles in plan.by_gemm.values())
    return {
        "step": record["step"],
        "seconds": seconds,
        "planned_seconds": plan.seconds,
        "devices_used": plan.devices_used,
        "tiles": record["tiles"],
        "parcels": parcels,
        "scheduler_ms_per_tile": 1e3 * spent["scheduler"] / record["tiles"],
        "scheduler_ms_per_parcel": 1e3 * spent["scheduler"] / parcels,
        "server_ms_per_tile": 1e3 * spent["server"] / record["tiles"],
        "devices_ms_per_parcel": 1e3 * spent["devices"] / parcels,
        "scheduler_MB": watched["scheduler"].memory_info().rss / 1e6,
        "server_MB": watched["server"].memory_info().rss / 1e6,
        "tasks_left": _tasks_left(client),
        "handovers": facts_of(client)["handovers"],
        "up_bytes_over_plan": record["up_bytes"] / plan.up_bytes,
        "load": psutil.getloadavg()[0],
    }


def _tasks_left(client: Client) -> int:
    """Tasks that the scheduler holds once what the client let go of has reached it: two equal counts in a row."""

    def held() -> int:
        number: int = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        return number

    deadline, last = monotonic() + 30, held()
    while last and monotonic() < deadline:
        last = held()
    return last


def _cpu(watched: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}


def main() -> None:
    """Print a row for each step and the table; with --json write it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="opt-1.3b")
    parser.add_argument("--devices", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step: more of them make more tiles")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence; by default the recipe's")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = cd.Recipe.load(options.recipe)
    length = options.sequence or recipe.data.sequence
    recipe = replace(recipe, data=replace(recipe.data, batch=options.batch, sequence=length))
    rows = measure(recipe, options.devices, options.steps)
    columns: tuple[str, ...] = ("step", "seconds", "planned_seconds", "tiles", "parcels")
    columns += ("scheduler_ms_per_tile", "server_ms_per_tile", "scheduler_MB", "server_MB", "tasks_left", "handovers")
    table = Table(*columns, title=f"{options.recipe}, {options.batch} x {length} tokens, {options.devices} devices")
    for row in rows:
        table.add_row(*(f"{row[name]:.3g}" if isinstance(row[name], float) else f"{row[name]:,}" for name in columns))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

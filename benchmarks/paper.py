"""The grid of the published evaluation: models x devices x fleets, every system at its best.

    python benchmarks/paper.py [--quick] [--models M ...] [--sizes N ...] [--fleets F ...] [--share 1/2]
    python benchmarks/paper_tables.py              # the tables and pictures of docs/paper.md, from what was run

Every cell is appended to a file (--cells) as one line of JSON as soon as it is done, and a cell that is there already
is skipped: stop it and start it again at will, or run `--share 1/2` and `--share 2/2` side by side. Models: OPT 1.3B to
66B and Llama-2 7B to 70B, 128 x 1024 tokens, bfloat16. Fleets of 64 to 8,192 devices:

    phones    512 MB each, 5 TFLOP/s, 50 MB/s down, 7.5 MB/s up, 20 ms: the device of home-1024
    laptops   the same with 8 GB, so that memory alone differs
    mixed     Fleet.sample: phones, laptops and mini PCs on links of 5 to 100 MB/s

On 64 and 256 laptops a step of opt-1.3b is played on virtual time, counting what plans count, calm and with one device
that leaves in the middle (`recovery`). And on 256 laptops there are two sweeps of llama2-7b: how uneven the two links
of a device are (`asymmetry`), and how unlike the devices (`spread`). Every other number is a prediction: of the plan
for `cleave` and `cleave-2d`, of its formulas for any other system. Servers feed all links, so that devices bind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from benchmarks.planner import MODELS, step_graph
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.planner import plan
from cleave_dask.simulation.baselines.comparison import compare

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FLEETS = ("phones", "laptops", "mixed")
QUICK_MODELS, QUICK_SIZES = ("opt-1.3b", "llama2-13b"), (64, 512, 1024)
LOST, LOST_DEVICES = "opt-1.3b", (64, 256)
SWEPT, SWEPT_DEVICES = "llama2-7b", 256
ASYMMETRY = (1.0, 2.0, 4.0, 7.0, 10.0, 20.0)
"""Downlink over uplink; the downlink stays."""
SPREAD = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Standard deviation of the logarithm of every figure of a device; the sums over the fleet stay."""

Cell = tuple[str, str, float]
"""Model, fleet and number of devices; of a sweep, the swept figure."""


def make_fleet(kind: str, count: int) -> Fleet:
    """A fleet of the grid."""
    if kind == "mixed":
        return Fleet.sample(count)
    memory = {"phones": 512e6, "laptops": 8e9}[kind]
    devices = (
        Device(f"{kind[:-1]}-{number:04d}", 5e12, memory, Link(50e6, 0.02), Link(7.5e6, 0.02))
        for number in range(1, count + 1)
    )
    server = Server(egress=2 * 50e6 * count, ingress=2 * 50e6 * count, flops=50e9 * max(1000, count), memory=16e12)
    return Fleet(server, tuple(devices))


def uneven_links(ratio: float) -> Fleet:
    """Laptops whose uplink is `ratio` times slower than their downlink."""
    fleet = make_fleet("laptops", SWEPT_DEVICES)
    up = Link(50e6 / ratio, 0.02)
    return replace(fleet, devices=tuple(replace(device, up=up) for device in fleet.devices))


def unlike_devices(spread: float) -> Fleet:
    """Laptops whose speed and links vary, while the fleet has as much of each together."""
    fleet, chance = make_fleet("laptops", SWEPT_DEVICES), np.random.default_rng(0)
    factors = np.exp(spread * chance.standard_normal((3, SWEPT_DEVICES)))
    factors /= factors.mean(axis=1, keepdims=True)
    devices = (
        replace(device, flops=5e12 * speed, down=Link(50e6 * down, 0.02), up=Link(7.5e6 * up, 0.02))
        for device, speed, down, up in zip(fleet.devices, *factors.tolist(), strict=True)
    )
    return replace(fleet, devices=tuple(devices))


def fleet_of(cell: Cell) -> Fleet:
    """The fleet of a cell."""
    _, kind, figure = cell
    if kind == "recovery":
        return make_fleet("laptops", int(figure))
    if kind == "asymmetry":
        return uneven_links(figure)
    return unlike_devices(figure) if kind == "spread" else make_fleet(kind, int(figure))


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """What is to be run, the telling ones first: sweeps and small fleets are quick."""
    if "sweeps" in options.fleets and not options.quick:
        yield from ((LOST, "recovery", float(count)) for count in LOST_DEVICES)
        yield from ((SWEPT, "asymmetry", ratio) for ratio in ASYMMETRY)
        yield from ((SWEPT, "spread", spread) for spread in SPREAD)
    for size in options.sizes:
        for model in options.models:
            yield from ((model, kind, float(size)) for kind in options.fleets if kind != "sweeps")


def read_cells(file: Path) -> dict[Cell, dict[str, Any]]:
    """Every cell that was run."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(row["model"], row["fleet"], float(row["figure"])): row for row in rows}


@cache
def graph_of(model: str) -> StepGraph:
    """The step of a model."""
    return step_graph(model)


def run(cell: Cell) -> dict[str, Any]:
    """All systems on one cell."""
    model, kind, figure = cell
    start, fleet = process_time(), fleet_of(cell)
    results = compare(graph_of(model), fleet)
    head: dict[str, Any] = {"model": model, "fleet": kind, "figure": figure, "devices": len(fleet)}
    if kind == "recovery":
        head |= lose_one(model, fleet)
    return {**head, "cpu_seconds": round(process_time() - start, 1), "results": [asdict(each) for each in results]}


def lose_one(model: str, fleet: Fleet) -> dict[str, float]:
    """Seconds of a simulated step: calm, with a device that leaves in the middle, and planned for one device less."""
    # Here, because they bring torch and transformers, which take seconds to import: the tables need neither.
    from cleave_dask.graph.building import build_graph
    from cleave_dask.graph.recipes import Recipe
    from cleave_dask.simulation.measured import PLANNED
    from cleave_dask.simulation.simulator import Simulator

    def simulated(fleet: Fleet, left: float | None = None) -> float:
        churn = None if left is None else Churn((Event(left, gone, "leave"),))
        return Simulator(plan(graph, fleet), churn, costs=PLANNED).run().seconds

    graph, gone = build_graph(Recipe.load(model)), fleet.devices[0].name
    calm = simulated(fleet)
    fewer = replace(fleet, devices=fleet.devices[1:])
    return {"calm": calm, "left": simulated(fleet, calm / 2), "without": simulated(fewer)}


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, three sizes, no sweeps: a few minutes")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--fleets", nargs="+", default=[*FLEETS, "sweeps"], choices=[*FLEETS, "sweeps"])
    parser.add_argument("--share", default="1/1", help="which part of the cells: 1/2 and 2/2 may run side by side")
    parser.add_argument("--cells", type=Path, default=Path("docs/paper/cells.jsonl"))
    options = parser.parse_args()
    if options.quick:
        options.models, options.sizes = QUICK_MODELS, QUICK_SIZES
    part, parts = (int(number) for number in options.share.split("/"))
    options.cells.parent.mkdir(parents=True, exist_ok=True)
    wanted = list(cells_of(options))[part - 1 :: parts]
    for number, cell in enumerate(wanted, start=1):
        if cell in read_cells(options.cells):
            continue
        row = run(cell)
        with options.cells.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{number} of {len(wanted)}: {cell[0]} on {cell[1]} {cell[2]:g}, {row['cpu_seconds']} s of CPU", flush=True
        )


if __name__ == "__main__":
    main()

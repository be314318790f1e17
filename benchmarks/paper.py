"""The grid of the published evaluation: models x devices x fleets, every system at its best, as markdown tables.

    python benchmarks/paper.py [--quick] [--out tables.md] [--json rows.json]

Models: OPT 1.3B to 66B and Llama-2 7B to 70B, 128 x 1024 tokens, bfloat16. Fleets of 64 to 8,192 devices:

    phones    512 MB each, 5 TFLOP/s, 50 MB/s down, 7.5 MB/s up, 20 ms: the device of home-1024
    laptops   the same with 8 GB, so that memory alone differs
    mixed     Fleet.sample: phones, laptops and mini PCs on links of 5 to 100 MB/s

Every number is a prediction: of the plan for `cleave` and `cleave-2d`, of its formulas for any other system. "-" means
that the system cannot run; the reasons are below the tables. Servers feed all links at once, so that devices bind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from benchmarks.planner import MODELS, step_graph
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.simulation.baselines.comparison import SYSTEMS, compare
from cleave_dask.simulation.baselines.values import Result

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FLEETS = ("phones", "laptops", "mixed")
QUICK_MODELS, QUICK_SIZES = ("opt-1.3b", "llama2-13b"), (64, 512, 1024)


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


def grid(models: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, str, int, list[Result]]]:
    """Results of each model, kind of fleet and number of devices."""
    for model in models:
        graph = step_graph(model)
        for kind in FLEETS:
            for count in sizes:
                start = perf_counter()
                results = compare(graph, make_fleet(kind, count))
                print(f"{model} on {count:,} {kind}: {perf_counter() - start:.1f} s", flush=True)
                yield model, kind, count, results


def table(title: str, rows: list[tuple[int, list[Result]]]) -> str:
    """One model on one kind of fleet: a row for each number of devices, a column for each system."""
    names = [result.system for result in rows[0][1]]
    lines = [f"### {title}", "", f"| devices | {' | '.join(names)} | best edge baseline / cleave |"]
    lines.append("|" + "---:|" * (len(names) + 2))
    for count, results in rows:
        cells = ["-" if result.seconds is None else f"{result.seconds:.4g}" for result in results]
        lines.append(f"| {count:,} | {' | '.join(cells)} | {_ratio(results)} |")
    return "\n".join([*lines, ""])


def _ratio(results: list[Result]) -> str:
    """How many times faster cleave is than the fastest other system that can run on the fleet."""
    seconds = {result.system: result.seconds for result in results if result.seconds is not None}
    others = {name: seconds[name] for name in ("dtfm", "ddp", "fsdp") if name in seconds}
    if not others:
        return "no other can run"
    best = min(others, key=lambda name: others[name])
    return f"{others[best] / seconds['cleave']:.3g} ({best})"


def main() -> None:
    """Price the grid; print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, three sizes: two minutes")
    parser.add_argument("--out", type=Path, help="write the markdown tables here")
    parser.add_argument("--json", type=Path, help="write all results here")
    options = parser.parse_args()
    models = QUICK_MODELS if options.quick else tuple(MODELS)
    found: dict[tuple[str, str], list[tuple[int, list[Result]]]] = {}
    for model, kind, count, results in grid(models, QUICK_SIZES if options.quick else SIZES):
        found.setdefault((model, kind), []).append((count, results))
    parts = ["## Seconds per batch of 128 x 1024 tokens", ""]
    parts += [f"- `{name}`: {what}" for name, what in SYSTEMS.items()] + [""]
    parts += [table(f"{model} on {kind}", rows) for (model, kind), rows in found.items()]
    whys = {
        f"- {model}, {count:,} {kind}, {result.system}: {result.why}"
        for (model, kind), rows in found.items()
        for count, results in rows[-1:]
        for result in results
        if not result.feasible
    }
    text = "\n".join([*parts, "### Why not, on the largest fleet of each table", "", *sorted(whys), ""])
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    if options.json:
        rows = [
            {"model": model, "fleet": kind, "devices": count, **asdict(result)}
            for (model, kind), entries in found.items()
            for count, results in entries
            for result in results
        ]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

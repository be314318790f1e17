"""How close plans come to their bounds, and what planning costs: shapes x fleets, and growth.

    python benchmarks/planner.py [--quick] [--models opt-1.3b ...] [--gemms | --steps] [--json out.json]

For every gemm shape of the models and every fleet: predicted seconds, the bound of any plan, that of plans with one box
for each device, the ratio to both, what binds, devices, tiles, tiles of a parcel, CPU seconds. Then whole steps,
against k never split and equal shares, and how planning grows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time

from rich.console import Console
from rich.table import Table

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import Gemm, Operand, Role, StepGraph, Value
from cleave_dask.planning.bound import gemm_bound
from cleave_dask.planning.cost import Rates, Shape
from cleave_dask.planning.planner import Tiling, plan
from cleave_dask.planning.replanning import replan
from cleave_dask.planning.tiling import tile_gemm

BATCH, LENGTH = 128, 1024
TOKENS = BATCH * LENGTH


@dataclass(frozen=True)
class Model:
    """Published dimensions."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    groups: int = 0  # of key and value heads; 0: as many as heads
    gated: bool = False


MODELS = {
    "opt-1.3b": Model(2048, 24, 32, 8192, 50272),
    "opt-6.7b": Model(4096, 32, 32, 16384, 50272),
    "opt-13b": Model(5120, 40, 40, 20480, 50272),
    "opt-66b": Model(9216, 64, 72, 36864, 50272),
    "llama2-7b": Model(4096, 32, 32, 11008, 32000, gated=True),
    "llama2-13b": Model(5120, 40, 40, 13824, 32000, gated=True),
    "llama2-70b": Model(8192, 80, 64, 28672, 32000, groups=8, gated=True),
}


def step_graph(name: str) -> StepGraph:
    """One training step of a model: QKV and gate/up merged, forward, dX and dW, bfloat16."""
    model, parts, level = MODELS[name], [], 0
    products = layer_products(model)
    value = "x"
    for layer in range(model.layers):
        for label, n, k in products:
            level += 1
            out = f"{layer}.{label}"
            parts.append(_attention(out, model, level, value) if n == 0 else _gemm(out, TOKENS, n, k, level, value))
            value = out
    parts.append(_gemm("head", TOKENS, model.vocab, model.hidden, level + 1, value))
    level, grad = level + 1, "head"
    for back in range(model.layers, -1, -1):
        chain = [("head", model.vocab, model.hidden)] if back == model.layers else list(reversed(products))
        for label, n, k in chain:
            level, out = level + 1, f"{back}.{label}"
            if n == 0:
                parts.append(_attention(f"{out}.dX", model, level, grad, backward=True))
            else:
                parts.append(_gemm(f"{out}.dX", TOKENS, k, n, level, grad, "dX"))
                parts.append(_gemm(f"{out}.dW", n, k, TOKENS, level, grad, "dW"))
            grad = f"{out}.dX"
    return StepGraph(name, (), tuple(parts), loss="", grads=(), buffers=(), batch="")


def layer_products(model: Model) -> list[tuple[str, int, int]]:
    """(label, n, k) of a layer's gemms in order; attention has n = 0."""
    kv = model.hidden * (model.groups or model.heads) // model.heads
    up = model.ffn * (2 if model.gated else 1)
    return [
        ("qkv", model.hidden + 2 * kv, model.hidden),
        ("attention", 0, 0),
        ("out", model.hidden, model.hidden),
        ("up", up, model.hidden),
        ("down", model.hidden, model.ffn),
    ]


def _gemm(name: str, m: int, n: int, k: int, level: int, reads: str, role: Role = "forward") -> Gemm:
    a, b, c = Value(reads, (m, k), (k, 1), "bfloat16"), Value(f"{name}.w", (k, n), (n, 1), "bfloat16"), (m, n)
    return Gemm(
        *(name, "gemm", role, level, m, n, k, 2.0 * m * n * k, "bfloat16"),
        inputs=(Operand((a,)), Operand((b,))),
        outputs=(Value(name, c, (n, 1), "bfloat16"),),
    )


def _attention(name: str, model: Model, level: int, reads: str, *, backward: bool = False) -> Gemm:
    groups, width = model.groups or model.heads, model.hidden // model.heads
    q = Value(reads, (BATCH, model.heads, LENGTH, width), (1, 1, 1, 1), "bfloat16")
    kv = Value(f"{name}.kv", (BATCH, groups, LENGTH, width), (1, 1, 1, 1), "bfloat16")
    flops = 2.0 * BATCH * LENGTH * LENGTH * model.hidden * (2.5 if backward else 1.0)
    inputs = (q, q, kv, kv, q) if backward else (q, kv, kv)
    outputs = (Value(name, q.shape, q.strides, "bfloat16"), *((kv, kv) if backward else ()))
    kind, role = ("attention_backward", "dX") if backward else ("attention", "forward")
    return Gemm(
        *(name, kind, role, level, BATCH, groups, 1, flops, "bfloat16"),  # type: ignore[arg-type]
        inputs=tuple(Operand((value,)) for value in inputs),
        outputs=outputs,
    )


def shapes_of(name: str) -> list[Shape]:
    """The different shapes of a model's step."""
    return list(dict.fromkeys(Shape.of(gemm) for gemm in step_graph(name).gemms))


def measure(model: str, shape: Shape, label: str, fleet: Fleet) -> dict[str, object]:
    """One row: a shape on a fleet."""
    rates = Rates.of(fleet)
    start = process_time()
    found = tile_gemm(shape, rates, fleet.server)
    cpu = process_time() - start
    bound, boxes = (gemm_bound(shape, rates, fleet.server, boxes=boxes)[0] for boxes in (False, True))
    return {
        "model": model,
        "shape": f"{shape.kind} {shape.m} x {shape.n} x {shape.k}",
        "fleet": label,
        "seconds": found.seconds,
        "bound": bound,
        "boxes": boxes,
        "ratio": found.seconds / bound,
        "to boxes": found.seconds / boxes,
        "binding": found.binding,
        "devices": len(found.devices),
        "tiles": len(found.owner),
        "together": found.together,
        "cpu": cpu,
    }


def step_row(model: str, label: str, fleet: Fleet, tiling: Tiling) -> dict[str, object]:
    """One row: a whole step on a fleet; with the time to replan after a device left."""
    graph = step_graph(model)
    _ = graph.gemms
    start = process_time()
    made = plan(graph, fleet, tiling=tiling)
    cpu = process_time() - start
    smaller = Fleet(fleet.server, fleet.devices[1:])
    again = []
    for _ in range(5):
        start = process_time()
        replan(made, graph, smaller)
        again.append(process_time() - start)
    return {
        "model": model,
        "fleet": label,
        "tiling": tiling,
        "seconds": made.seconds,
        "bound": made.bound_seconds,
        "ratio": made.seconds / made.bound_seconds,
        "binding": made.binding,
        "devices": made.devices_used,
        "tiles": len(made.tiles),
        "cpu": cpu,
        "replan_ms": 1e3 * median(again),
    }


def gemm_rows(models: list[str], *, quick: bool) -> list[dict[str, object]]:
    """Every shape of the models on every fleet, each once."""
    fleets = {
        f"sample-{n}": Fleet.sample(n, seed) for seed, n in enumerate((64, 1024) if quick else (64, 256, 1024, 8192))
    }
    fleets["mixed-1024"] = Fleet.load("mixed-1024")
    rows, seen = [], set()
    for label, fleet in fleets.items():
        for model in models:
            for shape in shapes_of(model):
                if (label, shape) not in seen:
                    seen.add((label, shape))
                    rows.append(measure(model, shape, label, fleet))
    return rows


def summaries(rows: list[dict[str, object]]) -> Iterator[str]:
    """A line for each fleet and each bound."""
    labels = dict.fromkeys(str(row["fleet"]) for row in rows)
    for key, label in product(("ratio", "to boxes"), (*labels, "")):
        values = sorted(float(str(row[key])) for row in rows if row["fleet"] == label or not label)
        tenth, many = values[int(0.9 * len(values))], sum(value > 1.10 for value in values)
        summary = f"median {median(values):.3f}, 90% {tenth:.3f}, worst {values[-1]:.3f}"
        yield f"{key}, {label or 'all'}: {summary}, above 1.10: {many} of {len(values)}"


def show(title: str, rows: list[dict[str, object]], console: Console) -> None:
    """A table of rows that share their keys."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def step_rows(models: list[str], *, quick: bool) -> list[dict[str, object]]:
    """Whole steps: against simpler tilings, and growing with devices and with models."""
    tilings: tuple[Tiling, ...] = ("3d", "2d", "even")
    steps = [step_row("opt-1.3b", "lab-8", Fleet.load("lab-8"), tiling) for tiling in tilings]
    steps += [step_row("llama2-13b", "home-1024", Fleet.load("home-1024"), tiling) for tiling in tilings]
    steps += [step_row("llama2-13b", "mixed-1024", Fleet.load("mixed-1024"), tiling) for tiling in tilings]
    if not quick:
        steps.append(step_row("llama2-13b", "home-8192", Fleet.load("home-8192"), "3d"))
    growth = (64, 256, 1024) if quick else (64, 256, 1024, 4096, 8192)
    steps += [step_row("llama2-13b", f"sample-{n}", Fleet.sample(n), "3d") for n in growth]
    return steps + [step_row(model, "sample-256", Fleet.sample(256), "3d") for model in models]


def main() -> None:
    """Print the tables; with --json write them too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, two fleets")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="these models instead of all")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--gemms", action="store_true", help="single gemms alone, no whole steps")
    alone.add_argument("--steps", action="store_true", help="whole steps alone, no single gemms")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    console = Console(width=160)
    models = options.models or (["opt-1.3b", "llama2-13b"] if options.quick else list(MODELS))
    gemms = [] if options.steps else gemm_rows(models, quick=options.quick)
    if gemms:
        show("one gemm", gemms, console)
        for line in summaries(gemms):
            console.print(line)
    steps = [] if options.gemms else step_rows(models, quick=options.quick)
    if steps:
        show("one step, and growth", steps, console)
    if options.json:
        models_used = {name: asdict(MODELS[name]) for name in models}
        options.json.write_text(json.dumps({"models": models_used, "gemms": gemms, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()

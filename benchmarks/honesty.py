"""Whether plans keep their word: seconds on the simulator over the seconds that the plan predicts.

    python benchmarks/honesty.py [--steps] [--settings] [--json out.json]

Single gemms on uneven fleets, where nothing but the plan decides; with --steps also whole steps, where the dispatcher
has its part. The simulator counts what the plan counts: not the server's own work on each tile. With --settings instead
the steps that benchmarks/edge and benchmarks/truth.py measure, on links as the kernel leaves them and with one server
process, as there; plan and simulator count its work too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import process_time

from rich.console import Console

from benchmarks import truth
from benchmarks.edge.settings import SETTINGS
from benchmarks.models import Llama
from benchmarks.planner import TOKENS, show
from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.building import build_graph
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import Gemm, Operand, StepGraph, Value
from cleave_dask.graph.recipes import Recipe
from cleave_dask.planning.planner import plan
from cleave_dask.simulation.accuracy import measured_accuracy
from cleave_dask.simulation.local import as_shaped
from cleave_dask.simulation.measured import PLANNED
from cleave_dask.simulation.simulator import Simulator, simulate

SHAPES = [(TOKENS, 6144, 2048), (TOKENS, 2048, 8192), (TOKENS, 13824, 5120), (5120, 5120, TOKENS)]
STEPS = [("opt-1.3b", "sample-64"), ("opt-1.3b", "lab-8"), ("llama2-13b", "home-1024")]


def fleet_of(label: str) -> Fleet:
    """A fleet by its name; sample-N is drawn."""
    return Fleet.sample(int(label.split("-")[1])) if label.startswith("sample-") else Fleet.load(label)


def one_gemm(m: int, n: int, k: int) -> StepGraph:
    """A step of one gemm."""
    a, b = Value("a", (m, k), (k, 1), "bfloat16"), Value("b", (k, n), (n, 1), "bfloat16")
    gemm = Gemm(
        *("g", "gemm", "forward", 1, m, n, k, 2.0 * m * n * k, "bfloat16"),
        inputs=(Operand((a,)), Operand((b,))),
        outputs=(Value("c", (m, n), (n, 1), "bfloat16"),),
    )
    return StepGraph("one", (), (gemm,), loss="", grads=(), buffers=(), batch="")


def whole_step(model: str) -> StepGraph:
    """The captured step of a recipe."""
    return build_graph(Recipe.load(model))


def measure(what: str, graph: StepGraph, label: str) -> dict[str, object]:
    """One row: a step on a fleet."""
    fleet = fleet_of(label)
    made = plan(graph, fleet)
    start = process_time()
    simulator = Simulator(made, costs=PLANNED)
    seconds = simulator.run().seconds
    return {
        "step": what,
        "fleet": label,
        "plan": made.seconds,
        "simulated": seconds,
        "ratio": seconds / made.seconds,
        "down": simulator.down_bytes / made.down_bytes,
        "tiles": len(made.tiles),
        "tiles/s/device": len(made.tiles) / made.seconds / made.devices_used,
        "handovers": simulator.handovers,
        "cpu": process_time() - start,
    }


def measured_steps() -> Iterator[tuple[str, Llama, str | None, Fleet]]:
    """Name, model, dtype on the wire and fleet of every step that is measured on shaped links."""
    for setting in SETTINGS.values():
        for wire in (None, "bfloat16"):
            yield setting.name, setting.llama, wire, setting.fleet
    for name, kind in truth.SETTINGS.items():
        if not kind.kill:
            yield name, truth.LLAMA, kind.wire, kind.fleet


@cache
def captured(llama: Llama) -> StepGraph:
    """The step of a model, numbers as they are."""
    return capture(llama.module(), **llama.tokens(0))


def as_measured(name: str, llama: Llama, wire: str | None, fleet: Fleet) -> dict[str, object]:
    """One row: a step as it is measured, but on virtual time."""
    links = Fleet(replace(fleet.server, processes=1), tuple(as_shaped(device) for device in fleet.devices))
    made = plan(captured(llama).over(wire), links)
    seconds = simulate(made).seconds
    return {
        "setting": name,
        "wire": wire or "float32",
        "bound": made.bound_seconds,
        "plan": made.seconds,
        "simulated": seconds,
        "ratio": seconds / made.seconds,
        "binding": made.binding,
        "tiling": made.tiling,
        "tiles": len(made.tiles),
    }


def main() -> None:
    """Print the table; with --json write it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--steps", action="store_true", help="whole steps too, which takes minutes")
    parser.add_argument("--settings", nargs="*", metavar="NAME", help="steps that are measured: all, or these")
    options = parser.parse_args()
    console = Console(width=160)
    if options.settings is not None:
        rows = []
        for step in measured_steps():
            if not options.settings or step[0] in options.settings:
                rows.append(as_measured(*step))
                show(step[0], rows[-1:], console)  # a look at what is there already: all of them take minutes
        show("simulated over planned", rows, console)
        _write(options.json, rows)
        return
    rows = [
        measure(" x ".join(map(str, shape)), one_gemm(*shape), label)
        for label in ("lab-8", "sample-8", "sample-64", "sample-1024", "home-1024")
        for shape in SHAPES
    ]
    rows += [measure(model, whole_step(model), label) for model, label in STEPS if options.steps]
    show("simulated over planned", rows, console)
    print(measured_accuracy())
    _write(options.json, rows)


def _write(file: Path | None, rows: list[dict[str, object]]) -> None:
    if file is not None:
        file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

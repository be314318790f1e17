"""The tables and pictures of docs/paper.md, from the cells that `benchmarks/paper.py` has run.

    python benchmarks/paper_tables.py [--cells docs/paper/cells.jsonl] [--out docs/paper.md]

A cell that was not run has no row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import FLEETS, SIZES, Cell, read_cells
from benchmarks.planner import MODELS
from cleave_dask.formatting import quantity
from cleave_dask.simulation.accuracy import measured_accuracy
from cleave_dask.simulation.baselines.comparison import SYSTEMS
from cleave_dask.views.sweeps import Points, draw_curves

EDGE = ("dtfm", "ddp", "fsdp")
"""Systems that run on a fleet and are not ours; the published cost of DTFM is no run: it knows no memory."""

Rows = dict[Cell, dict[str, Any]]


def seconds_tables(cells: Rows) -> Iterable[str]:
    """For each model and kind of fleet: seconds per batch of every system, and how many times faster ours is."""
    for model in MODELS:
        for kind in FLEETS:
            sizes = [size for size in SIZES if (model, kind, float(size)) in cells]
            if not sizes:
                continue
            yield f"### {model} on {kind}\n"
            head = (*SYSTEMS, "binds ours", "dtfm / cleave", "published / cleave", "cleave / 8 A100")
            yield _row("devices", *head) + "\n" + "|" + "---:|" * (len(head) + 1)
            for size in sizes:
                found = _by_system(cells[model, kind, float(size)])
                figures = [_shown(found[name]["seconds"]) for name in SYSTEMS]
                ratios = [_ratio(found, one, other) for one, other in _RATIOS]
                yield _row(f"{size:,}", *figures, found["cleave"]["binding"], *ratios)
            yield ""


_RATIOS = (("dtfm", "cleave"), ("dtfm-published", "cleave"), ("cleave", "alpa-8xA100-80"))


def device_table(cells: Rows) -> Iterable[str]:
    """On the largest fleet that was run: devices that each system can use, and what it needs on each."""
    yield _row("model", "fleet", "devices", *(f"{name}: used, memory" for name in ("cleave", *EDGE)))
    yield "|---|---|---:|" + "---:|" * (1 + len(EDGE))
    for model in MODELS:
        for kind in FLEETS:
            sizes = [size for size in SIZES if (model, kind, float(size)) in cells]
            if sizes:
                found = _by_system(cells[model, kind, float(sizes[-1])])
                used = [_used(found[name]) for name in ("cleave", *EDGE)]
                yield _row(model, kind, f"{sizes[-1]:,}", *used)


def recovery_table(cells: Rows) -> Iterable[str]:
    """What one device that leaves in the middle of a step costs."""
    head = ("devices", "calm step, s", "one leaves, s", "of which one device less, s", "recovery, s")
    yield _row("model", *head, "DTFM restarts, s", "DTFM recomputes a layer, s", "restart / recovery")
    yield "|---|" + "---:|" * (len(head) + 3)
    for (model, kind, figure), cell in sorted(cells.items()):
        if kind != "recovery":
            continue
        extra = cell["left"] - cell["calm"]
        fewer = min(max(0.0, extra), max(0.0, cell["without"] - cell["calm"]) / 2)
        recovery, pipeline = max(0.0, extra - fewer), _by_system(cell)["dtfm"]
        times = f"{pipeline['restart'] / recovery:,.0f}" if recovery > 1e-3 else "> 1,000"
        seconds = (cell["calm"], cell["left"], fewer, recovery, pipeline["restart"], pipeline["repair"])
        yield _row(model, f"{figure:,.0f}", *(_shown(each, "-") for each in seconds), times)


def sweep_table(cells: Rows, kind: str, label: str) -> Iterable[str]:
    """One sweep: seconds of the systems that run on the fleet."""
    rows = sorted((figure, cell) for (_, swept, figure), cell in cells.items() if swept == kind)
    names = ("cleave", "cleave-2d", "dtfm", "dtfm-published", "fsdp")
    if rows:
        yield _row(label, *names, "binds ours")
        yield "|---:|" + "---:|" * len(names) + "---|"
    for figure, cell in rows:
        found = _by_system(cell)
        yield _row(f"{figure:g}", *(_shown(found[name]["seconds"]) for name in names), found["cleave"]["binding"])


def reasons(cells: Rows) -> Iterable[str]:
    """Why systems cannot run, once for each model, kind of fleet and system, on the largest fleet."""
    for model in MODELS:
        for kind in FLEETS:
            sizes = [size for size in SIZES if (model, kind, float(size)) in cells]
            for result in cells[model, kind, float(sizes[-1])]["results"] if sizes else ():
                if result["seconds"] is None:
                    yield f"- {model}, {sizes[-1]:,} {kind}, {result['system']}: {result['why']}"


def pictures(cells: Rows) -> Iterable[tuple[str, str, str]]:
    """(file, alternative text, SVG) of each picture."""
    for model in MODELS:
        for kind in FLEETS:
            if sum((model, kind, float(size)) in cells for size in SIZES) < 3:
                continue
            where = f"{model} on {kind}"
            names = ("cleave", "cleave-2d", "dtfm", "dtfm-published", "fsdp", "alpa-8xA100-80")
            curves: dict[str, Points] = {}
            for name in names:
                points = _curve(cells, model, kind, name, lambda result: result["seconds"])
                runs = any(seconds is not None for _, seconds in points)
                curves[name if runs else f"{name}: cannot run"] = points
            text = f"Seconds per batch against the number of devices, {where}"
            svg = draw_curves(f"{where}: seconds per batch", curves, x="devices", y="seconds")
            yield f"{model}-{kind}-seconds.svg", text, svg
    moved: dict[str, Points] = {}
    for model in ("opt-1.3b", "llama2-13b"):
        for name in ("cleave", "dtfm"):
            points = _curve(cells, model, "laptops", name, lambda result: result["moved"] / 1e9)
            if any(y is not None for _, y in points):
                moved[f"{name}, {model}"] = points
    if moved:
        svg = draw_curves("Bytes that a device sends and gets per batch, laptops", moved, x="devices", y="GB")
        yield "moved.svg", "Gigabytes per device and batch against the number of devices", svg


def _curve(cells: Rows, model: str, kind: str, system: str, figure: Callable[[dict[str, Any]], Any]) -> Points:
    points: list[tuple[float, float | None]] = []
    for size in SIZES:
        cell = cells.get((model, kind, float(size)))
        if cell is not None:
            result = _by_system(cell)[system]
            points.append((float(size), figure(result) if result["seconds"] is not None else None))
    return points


def _by_system(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["system"]: result for result in cell["results"]}


def _shown(seconds: float | None, missing: str = "-") -> str:
    return missing if seconds is None else f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def _used(result: dict[str, Any]) -> str:
    return "-" if result["seconds"] is None else f"{result['devices_used']:,}, {quantity(result['memory'], 'B')}"


def _ratio(found: dict[str, dict[str, Any]], one: str, other: str) -> str:
    first, second = found[one]["seconds"], found[other]["seconds"]
    return "-" if first is None or second is None else f"{first / second:.3g}"


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def document(cells: Rows, drawn: Sequence[tuple[str, str, str]]) -> str:
    """The whole page."""
    count = sum(kind in FLEETS for _, kind, _ in cells)
    whole = len(MODELS) * len(FLEETS) * len(SIZES)
    parts = [
        "# The published evaluation, cell by cell\n",
        f"From the {count} of {whole} cells that `benchmarks/paper.py` has run (docs/paper/cells.jsonl), by",
        "`python benchmarks/paper_tables.py`: 128 x 1024 tokens, bfloat16. phones: 512 MB, 5 TFLOP/s, 50 MB/s down,",
        "7.5 MB/s up, 20 ms; laptops: the same with 8 GB; mixed: `Fleet.sample`. Seconds are predictions: of its plan",
        'for ours, of its formulas at its best configuration for any other; "-" cannot run, for the reasons below.\n',
        *(f"- `{name}`: {what}" for name, what in SYSTEMS.items()),
        "\n## Seconds per batch\n",
        *(f"![{text}](paper/{file})\n" for file, text, _ in drawn),
        *seconds_tables(cells),
        "## Devices that can be used, and memory on each\n",
        *device_table(cells),
        "\n## After a loss\n",
        *recovery_table(cells),
        f"\n{measured_accuracy()}",
        "\n## Uneven links: downlink over uplink, 256 laptops, llama2-7b\n",
        *sweep_table(cells, "asymmetry", "down / up"),
        "\n## Unlike devices: spread of speeds and links, 256 laptops, llama2-7b\n",
        *sweep_table(cells, "spread", "spread"),
        "\n## Why not\n",
        *reasons(cells),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=Path, default=Path("docs/paper/cells.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/paper.md"))
    options = parser.parse_args()
    cells = read_cells(options.cells)
    drawn = list(pictures(cells))
    for file, _, svg in drawn:
        (options.cells.parent / file).write_text(svg + "\n")
    options.out.write_text(document(cells, drawn))


if __name__ == "__main__":
    main()

"""The same model, batch and seed on shaped links, through this package and its peers.

    python -m benchmarks.edge [--settings edge-8 ...] [--systems cleave ddp ...] [--steps 3] [--quick]

Needs root: every device is a network namespace whose links the kernel shapes. Rows go to a JSON file as they come, in
the place of earlier ones of the same system and setting; --write puts the tables of that file into docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.edge import report, rows
from benchmarks.edge.rows import Row
from benchmarks.edge.settings import OURS, SETTINGS, Setting
from benchmarks.edge.systems import measure, reference, systems
from benchmarks.edge.timing import Effort
from cleave_dask.simulation.local import Shaping
from cleave_dask.simulation.network import Network, remove_leftovers

DOCUMENT, PICTURE, FILE = Path("docs/results.md"), Path("docs/edge.svg"), Path("docs/edge.json")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.edge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = systems()
    made.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    made.add_argument("--systems", nargs="+", choices=names, metavar="SYSTEM", help=f"of {', '.join(names)}")
    made.add_argument("--steps", type=int, default=3, help="steps that count, after one that warms up")
    made.add_argument("--budget", type=float, default=300, help="seconds for them, per system and variant")
    made.add_argument("--quick", action="store_true", help="a tiny model and one step: does everything run?")
    made.add_argument("--buckets", action="store_true", help="without root: ours alone, links as token buckets")
    made.add_argument("--json", type=Path, help=f"where rows go and come from (default: {FILE}; with --quick none)")
    made.add_argument("--write", action="store_true", help=f"write the file's tables into {DOCUMENT}, measure nothing")
    return made


def main() -> int:
    """Measure, or write down what was measured."""
    options = parser().parse_args()
    console = Console(width=150, markup=False, highlight=False)
    torch.set_num_threads(os.cpu_count() or 1)
    if options.steps < 1:
        console.print(f"--steps is {options.steps}; give 1 or more")
        return 2
    file: Path | None = options.json or (None if options.quick else FILE)
    if options.write:
        return write(rows.load(file or FILE), console)
    shaping: Shaping = "buckets" if options.buckets else "namespaces"
    if shaping == "namespaces" and (why := Network.why_not()) is not None:
        console.print(
            f"The peers share this machine's network with everything else unless every device has a namespace of its "
            f"own, and there can be none here: {why}.\nRun it as root, or measure this package alone with token "
            "buckets in its devices' own transfers: python -m benchmarks.edge --buckets"
        )
        return 2
    if shaping == "namespaces" and (left := remove_leftovers()):
        console.print(f"removed {len(left)} namespaces that an earlier run left behind")
    for ending in (signal.SIGINT, signal.SIGTERM):  # both clean up, also where the shell had them ignored
        signal.signal(ending, signal.default_int_handler)
    effort = Effort(1 if options.quick else options.steps, options.budget)
    try:
        for name in options.settings:
            setting = SETTINGS[name].quick() if options.quick else SETTINGS[name]
            asked = options.systems or setting.systems
            wanted = [system for system in asked if shaping == "namespaces" or system in OURS]
            measure_setting(setting, wanted, effort, shaping, file, console)
    except KeyboardInterrupt:
        console.print(
            "stopped; everything that was started has ended" + (f"; rows so far are in {file}" if file else "")
        )
        return 130
    return 0


def measure_setting(
    setting: Setting, wanted: Sequence[str], effort: Effort, shaping: Shaping, file: Path | None, console: Console
) -> None:
    """One system after another; each row is shown and kept as soon as it is there."""
    known = systems(shaping)
    titles = {name: system.title for name, system in known.items()}
    true = reference(setting, effort.steps + 1, rows.load(file) if file else ())
    done: list[Row] = []
    for name in wanted:
        console.print(f"{setting.name}: {titles[name]} ...")
        row = measure(name, known[name], setting, effort)
        done.append(row)
        if file is not None:
            rows.save(file, rows.replaced(rows.load(file), row))
        said = f"{row.seconds:.3g} s a step" if row.seconds is not None else "none"
        console.print(f"  {said}; {row.note}")
    console.print(report.table(setting, done, titles, true))


def write(known: Sequence[Row], console: Console) -> int:
    """Tables and plot of the rows of a file."""
    titles = {name: system.title for name, system in systems().items()}
    order = list(titles)
    parts = []
    for setting in SETTINGS.values():
        mine = sorted((row for row in known if row.setting == setting.name), key=lambda row: order.index(row.system))
        if mine:
            true = reference(setting, 1, known) if any(row.losses for row in mine) else ()
            parts.append(report.markdown(setting, mine, titles, true))
            if setting is next(iter(SETTINGS.values())):
                report.plot(setting, mine, titles, PICTURE)
    DOCUMENT.write_text(report.written(DOCUMENT.read_text(), report.section(parts)))
    console.print(f"{len(known)} rows are in {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Progress of a training loop: a bar and the loss so far, in a notebook or on a terminal.

    for batch in cd.track(batches, trainer, total=100):
        trainer.step(**batch)

In a notebook one output cell is redrawn in place; on a terminal one line; on a pipe nothing is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from html import escape
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from cleave_dask.errors import InputError
from cleave_dask.formatting import duration, quantity
from cleave_dask.views.scalars import Scalars

if TYPE_CHECKING:
    from cleave_dask.runtime.trainer import Trainer

Batch = TypeVar("Batch")
Show = Callable[[str, str], None]
"""Shows a state of things, given as HTML and as one line of text."""

_REDRAW = 0.25  # seconds between two drawings
_WIDE, _TALL = 420.0, 90.0  # points of the curve


def track(
    batches: Iterable[Batch], trainer: Trainer, *, total: int | None = None, tensorboard: str | Path | None = None
) -> Iterator[Batch]:
    """The batches one by one, at most `total` of them, with progress shown as the trainer takes its steps.

    `tensorboard` is a folder that the figures of each step are written to as well, for TensorBoard to read.
    """
    if total is None and isinstance(batches, Sized):
        total = len(batches)
    if total is not None and total < 1:
        raise InputError(f"total is {total}; give the number of steps, 1 or more")
    first, show, drawn = len(trainer.records), _chosen(), 0.0
    scalars = None if tensorboard is None else Scalars(tensorboard)
    told = first
    try:
        for batch in islice(batches, total):
            yield batch
            records = trainer.records[first:]
            if scalars is not None:
                scalars.write(trainer.records[told:])
                told = len(trainer.records)
            over = total is not None and len(records) >= total
            if records and (over or monotonic() - drawn >= _REDRAW):
                drawn = monotonic()
                show(render(records, total), line(records, total))
    finally:
        if scalars is not None:
            scalars.close()
        if len(trainer.records) > first:
            show(render(trainer.records[first:], total), line(trainer.records[first:], total, end=True))


def line(records: Sequence[Mapping[str, Any]], total: int | None, *, end: bool = False) -> str:
    """Progress as one line of text."""
    latest = records[-1]
    of = f"/{total}" if total else ""
    facts = [f"step {len(records)}{of}", f"loss {latest['loss']:.4f}", duration(latest["seconds"])]
    if latest["retries"]:
        facts.append(f"{latest['retries']:,} tiles twice")
    return "  ".join(facts) + ("\n" if end else "")


def render(records: Sequence[Mapping[str, Any]], total: int | None) -> str:
    """Progress as HTML: a bar, the curve of the loss, and what the latest step moved."""
    latest, done = records[-1], len(records)
    moved = sum(record["down_bytes"] + record["up_bytes"] for record in records)
    spent = sum(record["seconds"] for record in records)
    left = f", {duration(spent / done * (total - done))} left" if total and done < total else ""
    facts = f"{duration(spent)} gone{left}; {latest['tiles']:,} tiles a step, {quantity(moved, 'B')} moved"
    retries = sum(record["retries"] for record in records)
    if retries:
        facts += f", {retries:,} tiles came twice"
    bar = f'<progress value="{done}" max="{total}" style="width:{_WIDE:.0f}px"></progress><br/>' if total else ""
    head = f"step {done:,}{f' of {total:,}' if total else ''}: <b>loss {latest['loss']:.4f}</b>"
    curve = draw_curve([record["loss"] for record in records])
    return f'<div style="font-family:sans-serif;font-size:13px">{bar}{head}<br/>{curve}<br/>{escape(facts)}</div>'


def draw_curve(losses: Sequence[float]) -> str:
    """The loss over the steps as an SVG; its first and lowest values are written beside it."""
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0
    steps = max(1, len(losses) - 1)
    every = max(1, len(losses) // int(_WIDE))
    places = [*range(0, len(losses), every), len(losses) - 1]
    points = " ".join(f"{n / steps * _WIDE:.1f},{(high - losses[n]) / span * _TALL + 4:.1f}" for n in places)
    marks = (
        f'<text x="{_WIDE + 6:.0f}" y="14">{high:.3g}</text><text x="{_WIDE + 6:.0f}" y="{_TALL:.0f}">{low:.3g}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE + 60:.0f}" height="{_TALL + 8:.0f}" '
        f'font-family="sans-serif" font-size="11" fill="#777">'
        f'<polyline points="{points}" fill="none" stroke="#2b6cb0" stroke-width="2"/>{marks}</svg>'
    )


def _chosen() -> Show:
    """Where this process can show something: the cell of a notebook, a terminal, or nowhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        return _cell()
    if sys.stderr.isatty():
        return lambda _, text: print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
    return lambda _, text: None


def _cell() -> Show:
    display = import_module("IPython.display")
    handle = display.display(display.HTML(""), display_id=True)

    def show(html: str, text: str) -> None:
        handle.update({"text/html": html, "text/plain": text.strip()}, raw=True)

    return show

"""Tables on the terminal, the plot, and the generated part of docs/results.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.edge.rows import Row, loss_difference, same_loss
from benchmarks.edge.settings import Setting
from cleave_dask.formatting import quantity
from cleave_dask.views.bars import draw_bars

BEGIN, END = "<!-- benchmarks.edge: begin -->", "<!-- benchmarks.edge: end -->"
COLUMNS = ("system", "s/step", "of", "/ plan", "/ bound", "/ gemms", "down", "up", "memory", "loss", "commit")
NOTES = 160
"""Characters of a note that are shown; the JSON has all of it."""


def cells(row: Row, titles: Mapping[str, str], reference: Sequence[float]) -> tuple[str, ...]:
    """A row, to look at."""
    title = titles.get(row.system, row.system)
    if row.seconds is None:
        return (title, "none", *[""] * (len(COLUMNS) - 3), row.commit)
    return (
        title,
        f"{row.seconds:.3g}",
        f"{row.steps}" if row.warm else f"{row.steps}, cold",
        _ratio(row.seconds, row.plan_seconds),
        _ratio(row.seconds, row.bound_seconds),
        _ratio(row.seconds, row.apart_seconds),
        _most(row.down),
        _most(row.up),
        _most(row.memory),
        _loss(row, reference),
        row.commit,
    )


def table(setting: Setting, rows: Iterable[Row], titles: Mapping[str, str], reference: Sequence[float]) -> Table:
    """The rows of a setting for the terminal."""
    shown = Table(*COLUMNS, title=f"{setting.name}: {setting.what}; {setting.llama}")
    for row in rows:
        shown.add_row(*cells(row, titles, reference))
    return shown


def notes(rows: Iterable[Row], titles: Mapping[str, str]) -> list[str]:
    """What is said of each system: its variant, or why it has no figures."""
    return [f"{titles.get(row.system, row.system)}: {_short(row.note)}" for row in rows if row.note]


def markdown(setting: Setting, rows: Sequence[Row], titles: Mapping[str, str], reference: Sequence[float]) -> str:
    """The rows of a setting for the results."""
    lines = [f"### {setting.name}: {setting.what}", "", f"{setting.llama}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row, titles, reference))} |" for row in rows]
    lines += ["", *(f"- {note}" for note in notes(rows, titles)), *_time_line(rows, titles), *_checks_line(rows), ""]
    return "\n".join(lines)


def _time_line(rows: Iterable[Row], titles: Mapping[str, str]) -> list[str]:
    """Where the time of our steps goes."""
    lines = []
    for row in rows:
        if row.spent:
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.spent.items())
            lines.append(f"- {titles[row.system]}, seconds of a device in its last step: {parts}")
    return lines


def _checks_line(rows: Iterable[Row]) -> list[str]:
    """How much longer a step is because every tile is checked."""
    known = {row.system: row for row in rows}
    checked, few = known.get("cleave"), known.get("cleave-trust")
    if not checked or not few or not checked.seconds or not few.seconds or checked.commit != few.commit:
        return []  # rows of unlike code say nothing of checks
    more = (checked.seconds - few.seconds) / checked.seconds
    return [f"- checking every tile instead of few: {more:.1%} of a step's seconds, fp32"]


def section(parts: Iterable[str]) -> str:
    """All settings, as it stands between the marks."""
    return "\n".join([BEGIN, "", *parts, END])


def written(document: str, text: str) -> str:
    """The document with `text` in the place of what is between the marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for the results: {BEGIN} and {END} are not both in the document")
    return before + text + after


def plot(setting: Setting, rows: Iterable[Row], titles: Mapping[str, str], path: Path) -> None:
    """Seconds per step side by side."""
    bars = [(titles.get(row.system, row.system), row.seconds) for row in rows]
    path.write_text(draw_bars(setting.what, bars).svg + "\n")


def _ratio(seconds: float, other: float | None) -> str:
    return f"{seconds / other:.2f}" if other else ""


def _most(values: Sequence[float]) -> str:
    return quantity(max(values), "B") if values else ""


def _loss(row: Row, reference: Sequence[float]) -> str:
    difference = loss_difference(row, reference)
    if difference is None:
        return ""
    return f"{'same' if same_loss(row, reference) else 'DIFFERS'} ({difference:.0e})"


def _short(note: str) -> str:
    return note if len(note) <= NOTES else note[: NOTES - 1].rstrip() + "…"

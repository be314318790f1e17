"""Bars for systems side by side: one bar each, as long as its seconds on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from cleave_dask.formatting import duration
from cleave_dask.views.picture import Box, Picture, Words

_LEFT, _WIDE, _RIGHT, _ROW, _TOP = 140.0, 440.0, 190.0, 28.0, 56.0  # points: of names at least, bars, labels, row, head
_LETTER = 6.6  # points of a letter of a name, about
_OURS, _OTHERS, _GRID, _FAINT = "#2b6cb0", "#a0aec0", "#e2e8f0", "#718096"


class Bar(NamedTuple):
    """One system: None seconds is one that cannot run."""

    name: str
    seconds: float | None
    note: str = ""  # beside its seconds: what binds


Row = Bar | tuple[str, float | None]


def draw_bars(title: str, rows: Sequence[Row]) -> Picture:
    """A bar for each system."""
    bars = [Bar(*row) for row in rows]
    left = max([_LEFT, *(26 + _LETTER * len(bar.name) for bar in bars)])
    return Picture(left + _WIDE + _RIGHT, _TOP + len(bars) * _ROW + 44, _parts(title, bars, left))


def _parts(title: str, rows: Sequence[Bar], left: float) -> list[Box | Words]:
    """Everything that is drawn; `left` points are for names."""
    known = [row.seconds for row in rows if row.seconds]
    low = floor(log10(min(known, default=1.0)) - 0.3)
    high = max(ceil(log10(max(known, default=10.0))), low + 1)
    bottom = _TOP + len(rows) * _ROW

    def place(seconds: float) -> float:
        return left + _WIDE * (log10(seconds) - low) / (high - low)

    parts: list[Box | Words] = [
        Words(16, 24, title, size=15, bold=True),
        Words(16, 43, "seconds per batch, logarithmic; shorter is better", fill=_FAINT),
    ]
    for power in range(low, high + 1):
        across = place(10.0**power)
        parts.append(Box(across, _TOP, 1, bottom - _TOP, _GRID))
        parts.append(Words(across, bottom + 18, f"{10.0**power:,g} s", "middle", _FAINT, 11))
    for number, row in enumerate(rows):
        top, ours = _TOP + number * _ROW, row.name.startswith("cleave")
        parts.append(Words(left - 10, top + 18, row.name, "end", bold=row.name == "cleave"))
        if not row.seconds:
            parts.append(Words(left + 8, top + 18, "cannot run here", fill=_FAINT))
            continue
        parts.append(Box(left, top + 4, place(row.seconds) - left, _ROW - 9, _OURS if ours else _OTHERS))
        label = duration(row.seconds) + (f", {row.note}" if row.note else "")
        parts.append(Box(place(row.seconds) + 4, top + 5, 6.0 * len(label) + 6, _ROW - 11, "white"))
        parts.append(Words(place(row.seconds) + 7, top + 18, label))
    return parts

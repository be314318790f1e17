"""Bars for systems side by side, as a plain SVG: one bar each, as long as its seconds on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

from cleave_dask.formatting import duration

_LEFT, _WIDE, _ROW = 130.0, 420.0, 26.0  # points: of names, of the longest bar, of a row


def draw_bars(title: str, rows: Sequence[tuple[str, float | None]]) -> str:
    """Names with their seconds per batch as an SVG document; None, which has no bar, is a system that cannot run."""
    known = [seconds for _, seconds in rows if seconds]
    low = 10 ** int(log10(min(known, default=1.0)) - 1.0)
    span = max(log10(max(known, default=10.0) / low), 1.0)
    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    for number, (name, seconds) in enumerate(rows):
        top = 28 + number * _ROW
        parts.append(f'<text x="{_LEFT - 8:.0f}" y="{top + 14:.1f}" text-anchor="end">{escape(name)}</text>')
        wide = _WIDE * log10(seconds / low) / span if seconds else 0.0
        if seconds:
            fill = "#2b6cb0" if name.startswith("cleave") else "#a0aec0"
            parts.append(f'<rect x="{_LEFT:.0f}" y="{top:.1f}" width="{wide:.1f}" height="18" fill="{fill}"/>')
        label = duration(seconds) if seconds else "cannot run"
        parts.append(f'<text x="{_LEFT + wide + 6:.1f}" y="{top + 14:.1f}">{label}</text>')
    height = 44 + len(rows) * _ROW
    parts.append(
        f'<text x="{_LEFT:.0f}" y="{height - 8:.0f}">seconds per batch, logarithmic from {duration(low)}</text>'
    )
    width = _LEFT + _WIDE + 110
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )

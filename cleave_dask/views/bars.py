"""Bars for systems side by side, as SVG or PNG: one bar each, as long as its seconds on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from math import ceil, floor, log10
from typing import NamedTuple

from cleave_dask.formatting import duration

_LEFT, _WIDE, _RIGHT, _ROW, _TOP = 140.0, 440.0, 190.0, 28.0, 56.0  # points: of names, bars, labels, a row, the head
_OURS, _OTHERS, _GRID, _TEXT, _FAINT = "#2b6cb0", "#a0aec0", "#e2e8f0", "#1a202c", "#718096"
_SCALE = 2  # pixels of a PNG for each point


class Bar(NamedTuple):
    """One system: None seconds is one that cannot run."""

    name: str
    seconds: float | None
    note: str = ""  # beside its seconds: what binds


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    wide: float
    tall: float
    fill: str


@dataclass(frozen=True, slots=True)
class _Words:
    x: float
    y: float  # of the baseline
    text: str
    anchor: str = "start"  # or "middle", "end"
    fill: str = _TEXT
    size: int = 12
    bold: bool = False


Part = _Box | _Words
Row = Bar | tuple[str, float | None]


def draw_bars(title: str, rows: Sequence[Row]) -> str:
    """The bars as an SVG document."""
    wide, tall = _size(rows)
    body = "".join(_as_svg(part) for part in _parts(title, rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {tall:.0f}" width="{wide:.0f}" '
        f'height="{tall:.0f}" font-family="Helvetica, Arial, sans-serif">'
        f'<rect width="{wide:.0f}" height="{tall:.0f}" fill="white"/>{body}</svg>'
    )


def paint_bars(title: str, rows: Sequence[Row]) -> bytes:
    """The same bars as a PNG."""
    from PIL import Image, ImageDraw, ImageFont

    wide, tall = _size(rows)
    image = Image.new("RGB", (round(wide * _SCALE), round(tall * _SCALE)), "white")
    canvas = ImageDraw.Draw(image)
    for part in _parts(title, rows):
        if isinstance(part, _Box):
            corner = (part.x + part.wide) * _SCALE, (part.y + part.tall) * _SCALE
            canvas.rectangle((part.x * _SCALE, part.y * _SCALE, *corner), fill=part.fill)
            continue
        font = ImageFont.load_default(part.size * _SCALE)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
        canvas.text((part.x * _SCALE, part.y * _SCALE), part.text, fill=part.fill, font=font, anchor=anchor)
    buffer = BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _size(rows: Sequence[Row]) -> tuple[float, float]:
    return _LEFT + _WIDE + _RIGHT, _TOP + len(rows) * _ROW + 44


def _parts(title: str, given: Sequence[Row]) -> list[Part]:
    rows = [Bar(*row) for row in given]
    known = [row.seconds for row in rows if row.seconds]
    low = floor(log10(min(known, default=1.0)) - 0.3)
    high = max(ceil(log10(max(known, default=10.0))), low + 1)
    bottom = _TOP + len(rows) * _ROW

    def place(seconds: float) -> float:
        return _LEFT + _WIDE * (log10(seconds) - low) / (high - low)

    parts: list[Part] = [
        _Words(16, 24, title, size=15, bold=True),
        _Words(16, 43, "seconds per batch, logarithmic; shorter is better", fill=_FAINT),
    ]
    for power in range(low, high + 1):
        across = place(10.0**power)
        parts.append(_Box(across, _TOP, 1, bottom - _TOP, _GRID))
        parts.append(_Words(across, bottom + 18, f"{10.0**power:,g} s", "middle", _FAINT, 11))
    for number, row in enumerate(rows):
        top, ours = _TOP + number * _ROW, row.name.startswith("cleave")
        parts.append(_Words(_LEFT - 10, top + 18, row.name, "end", bold=row.name == "cleave"))
        if not row.seconds:
            parts.append(_Words(_LEFT + 8, top + 18, "cannot run here", fill=_FAINT))
            continue
        parts.append(_Box(_LEFT, top + 4, place(row.seconds) - _LEFT, _ROW - 9, _OURS if ours else _OTHERS))
        label = duration(row.seconds) + (f", {row.note}" if row.note else "")
        parts.append(_Box(place(row.seconds) + 4, top + 5, 6.0 * len(label) + 6, _ROW - 11, "white"))
        parts.append(_Words(place(row.seconds) + 7, top + 18, label))
    return parts


def _as_svg(part: Part) -> str:
    if isinstance(part, _Box):
        place = f'x="{part.x:.1f}" y="{part.y:.1f}" width="{part.wide:.1f}" height="{part.tall:.1f}"'
        return f'<rect {place} fill="{part.fill}"/>'
    look = f'text-anchor="{part.anchor}" fill="{part.fill}" font-size="{part.size}"'
    weight = ' font-weight="bold"' if part.bold else ""
    return f'<text x="{part.x:.1f}" y="{part.y:.1f}" {look}{weight}>{escape(part.text)}</text>'

"""Curves on logarithmic axes, as a plain SVG: how systems grow with a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

Points = Sequence[tuple[float, float | None]]
"""x and y; a y of None leaves a gap: that system cannot run there."""

_COLOURS = ("#2b6cb0", "#dd6b20", "#38a169", "#805ad5", "#d53f8c", "#718096")
_WIDE, _TALL, _LEFT, _TOP = 420.0, 240.0, 70.0, 30.0  # points
_RIGHT, _BELOW = 160.0, 44.0


def draw_curves(title: str, curves: Mapping[str, Points], *, x: str, y: str) -> str:
    """Named curves as an SVG document, both axes logarithmic, with a legend beside them."""
    seen = [(a, b) for points in curves.values() for a, b in points if b is not None]
    if not seen:
        seen = [(1.0, 1.0)]
    left, right = (end(log10(a) for a, _ in seen) for end in (min, max))
    low, high = floor(min(log10(b) for _, b in seen)), ceil(max(log10(b) for _, b in seen))
    high = max(high, low + 1)

    def place(a: float, b: float) -> tuple[float, float]:
        across = (log10(a) - left) / ((right - left) or 1.0)
        return _LEFT + across * _WIDE, _TOP + (high - log10(b)) / (high - low) * _TALL

    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    for power in range(low, high + 1):
        _, height = place(10**left, 10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{10.0**power:,g}</text>')
    for a in sorted({a for points in curves.values() for a, _ in points}):
        across, _ = place(a, 10.0**low)
        parts.append(f'<text x="{across:.1f}" y="{_TOP + _TALL + 16:.0f}" text-anchor="middle">{a:,g}</text>')
    below = f"{_TOP + _TALL + 36:.0f}"
    parts.append(f'<text x="{_LEFT + _WIDE / 2:.0f}" y="{below}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="0" y="{below}">{escape(y)}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        height = _TOP + 14 + 18 * number
        parts.append(f'<text x="{_LEFT + _WIDE + 14}" y="{height:.0f}" fill="{colour}">{escape(name)}</text>')
        for run in _runs(points):
            line = [place(a, b) for a, b in run]
            path = " ".join(f"{across:.1f},{down:.1f}" for across, down in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in line]
    width, height = _LEFT + _WIDE + _RIGHT, _TOP + _TALL + _BELOW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _runs(points: Points) -> Iterator[list[tuple[float, float]]]:
    """The pieces of a curve between its gaps."""
    run: list[tuple[float, float]] = []
    for a, b in points:
        if b is not None:
            run.append((a, b))
        elif run:
            yield run
            run = []
    if run:
        yield run

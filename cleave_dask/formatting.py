"""Pretty units and small HTML tables, for reprs and the command line. Inside, everything is in base units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STEPS = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def quantity(number: float, unit: str) -> str:
    """`quantity(5e7, "B/s")` is '50 MB/s'."""
    for prefix, factor in _STEPS:
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def duration(seconds: float) -> str:
    """`duration(0.02)` is '20 ms'."""
    if seconds >= 60:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> str:
    """A plain HTML table, every cell escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

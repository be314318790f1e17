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


class Markup(str):
    """HTML that goes into a table as it is."""


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> str:
    """A plain HTML table in the look of the notebook that shows it; every cell but Markup is escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    style = "text-align:left;white-space:nowrap;font-weight:bold;padding:4px 0"
    title = f'<caption style="{style}">{escape(caption)}</caption>' if caption else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f"<table>{title}{top}<tbody>{body}</tbody></table>"


def html_bar(parts: Iterable[tuple[str, float, str]], *, width: int = 160) -> Markup:
    """A bar of coloured parts, each with its share of the width and what it says under the mouse."""
    cells = "".join(
        f'<span title="{escape(tip)}" style="display:inline-block;height:11px;background:{colour};'
        f'width:{max(0.0, min(1.0, share)) * width:.1f}px"></span>'
        for colour, share, tip in parts
    )
    style = f"display:inline-block;width:{width}px;background:#8882;text-align:left;line-height:0;white-space:nowrap"
    return Markup(f'<span style="{style}">{cells}</span>')


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))

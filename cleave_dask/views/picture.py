"""Pictures of boxes and words, as SVG or PNG: the same parts for both. Sizes are points, y grows downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO

_SCALE = 2  # pixels of a PNG for each point


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    wide: float
    tall: float
    fill: str
    edge: str = ""  # colour of a thin line around it
    note: str = ""  # what an SVG shows under the mouse


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text."""

    x: float
    y: float  # of the baseline
    text: str
    anchor: str = "start"  # or "middle", "end"
    fill: str = "#1a202c"
    size: int = 12
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Parts on a white page, those that come later above those before."""

    wide: float
    tall: float
    parts: Sequence[Box | Words]

    @property
    def svg(self) -> str:
        """The picture as an SVG document."""
        wide, tall = f"{self.wide:.0f}", f"{self.tall:.0f}"
        body = "".join(_box(part) if isinstance(part, Box) else _words(part) for part in self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" '
            f'font-family="Helvetica, Arial, sans-serif">'
            f'<rect width="{wide}" height="{tall}" fill="white"/>{body}</svg>'
        )

    @property
    def png(self) -> bytes:
        """The same picture as a PNG."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (round(self.wide * _SCALE), round(self.tall * _SCALE)), "white")
        canvas = ImageDraw.Draw(image)
        fonts = {
            part.size: ImageFont.load_default(part.size * _SCALE) for part in self.parts if isinstance(part, Words)
        }
        for part in self.parts:
            place = part.x * _SCALE, part.y * _SCALE
            if isinstance(part, Box):
                corner = (part.x + part.wide) * _SCALE, (part.y + part.tall) * _SCALE
                canvas.rectangle((*place, *corner), fill=part.fill, outline=part.edge or None)
                continue
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
            canvas.text(place, part.text, fill=part.fill, font=fonts[part.size], anchor=anchor)
        buffer = BytesIO()
        image.save(buffer, "PNG", optimize=True)
        return buffer.getvalue()


def _box(part: Box) -> str:
    place = f'x="{part.x:.2f}" y="{part.y:.2f}" width="{part.wide:.2f}" height="{part.tall:.2f}"'
    edge = f' stroke="{part.edge}" stroke-width="0.4"' if part.edge else ""
    if not part.note:
        return f'<rect {place} fill="{part.fill}"{edge}/>'
    return f'<rect {place} fill="{part.fill}"{edge}><title>{escape(part.note)}</title></rect>'


def _words(part: Words) -> str:
    look = f'text-anchor="{part.anchor}" fill="{part.fill}" font-size="{part.size}"'
    weight = ' font-weight="bold"' if part.bold else ""
    return f'<text x="{part.x:.1f}" y="{part.y:.1f}" {look}{weight}>{escape(part.text)}</text>'

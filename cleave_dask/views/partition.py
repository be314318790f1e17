"""A picture of how one gemm is cut: its layers in k side by side, every tile in the colour of its device. Plain SVG."""

from __future__ import annotations

from html import escape

from cleave_dask.planning.values import Plan

_SIZE = 320.0  # points of a layer's longer side
_GAP = 24.0
_LAYERS = 6  # pictures of layers; a gemm with more is sampled


def draw_partition(plan: Plan, gemm: str) -> str:
    """The tiles of `gemm` as an SVG document: a panel for each layer in k, rows down, columns across."""
    if gemm not in plan.by_gemm:
        known = ", ".join(list(plan.by_gemm)[:5])
        raise KeyError(f"'{gemm}' is not sent out; gemms that are: {known}, ...")
    tiles = plan.by_gemm[gemm]
    rows, cols, depth = (int(tiles.ranges[:, column].max()) for column in (1, 3, 5))
    scale = _SIZE / max(rows, cols)
    tall, wide = max(40.0, rows * scale), max(40.0, cols * scale)
    starts = sorted({int(start) for start in tiles.ranges[:, 4]})
    shown = starts[:: -(-len(starts) // _LAYERS)]
    panels = []
    for number, start in enumerate(shown):
        shift = number * (wide + _GAP)
        panels.append(
            f'<g transform="translate({shift:.1f},20)"><text x="0" y="-6">k from {start:,} of {depth:,}</text>'
        )
        for (r0, r1, c0, c1, k0, k1), owner in zip(tiles.ranges.tolist(), tiles.owner.tolist(), strict=True):
            if k0 <= start < k1:
                spans = f"rows {r0:,}-{r1:,}, columns {c0:,}-{c1:,}, k {k0:,}-{k1:,}"
                place = f'x="{c0 / cols * wide:.2f}" y="{r0 / rows * tall:.2f}"'
                size = f'width="{(c1 - c0) / cols * wide:.2f}" height="{(r1 - r0) / rows * tall:.2f}"'
                title = f"<title>{escape(tiles.names[owner])}: {spans}</title>"
                panels.append(f'<rect {place} {size} fill="{_colour(owner)}">{title}</rect>')
        panels.append("</g>")
    width, height = len(shown) * (wide + _GAP), tall + 30.0
    title = f"{escape(gemm)}: {rows:,} x {cols:,} x {depth:,} in {len(tiles):,} tiles"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11" stroke="white" stroke-width="0.4">'
        f"<title>{title}</title><style>text{{stroke:none;fill:#555}}</style>{''.join(panels)}</svg>"
    )


def _colour(device: int) -> str:
    """A colour for each device, neighbours far apart (steps of the golden angle)."""
    return f"hsl({device * 137.508 % 360:.0f},{50 + device * 7 % 30}%,{45 + device * 13 % 25}%)"

"""A picture of how one gemm is cut: its layers in k side by side, every tile in the colour of its device."""

from __future__ import annotations

from cleave_dask.planning.values import Plan, Tiles
from cleave_dask.views.picture import Box, Picture, Words

_SIZE = 420.0  # points of a layer's longer side
_LEAST = 120.0  # points of its shorter side, stretched if it must be
_EDGED = 3.0  # points of a tile's shorter side, from which on a line around it does not hide it
_GAP, _TOP = 24.0, 78.0
_LAYERS = 6  # pictures of layers; a gemm with more is sampled
_LETTER = 8.5  # points of a letter of the title
_NAMED = 12  # devices that are named below, if there are no more
_LINE = 18.0  # points of such a name
_FAINT = "#718096"


def draw_partition(plan: Plan, gemm: str) -> Picture:
    """The tiles of `gemm`: a panel for each layer in k, rows down, columns across."""
    if gemm not in plan.by_gemm:
        known = ", ".join(list(plan.by_gemm)[:5])
        raise KeyError(f"'{gemm}' is not sent out; gemms that are: {known}, ...")
    tiles = plan.by_gemm[gemm]
    rows, cols, depth = (int(tiles.ranges[:, column].max()) for column in (1, 3, 5))
    scale = _SIZE / max(rows, cols)
    tall, wide = max(_LEAST, rows * scale), max(_LEAST, cols * scale)
    starts = sorted({int(start) for start in tiles.ranges[:, 4]})
    shown = starts[:: -(-len(starts) // _LAYERS)]
    owners = sorted(set(tiles.owner.tolist()))
    layers = "all of k" if len(starts) == 1 else f"{len(shown)} of the {len(starts)} depths in k where tiles begin"
    title = f"{gemm}: {rows:,} x {cols:,} x {depth:,}"
    parts: list[Box | Words] = [
        Words(_GAP, 24, title, size=15, bold=True),
        Words(_GAP, 43, f"{len(tiles):,} tiles, a colour for each of {len(owners):,} devices", fill=_FAINT),
        Words(_GAP, 58, f"rows down, columns across; {layers}", fill=_FAINT, size=11),
    ]
    for number, start in enumerate(shown):
        parts += _layer(tiles, start, (_GAP + number * (wide + _GAP), wide / cols), (_TOP, tall / rows))
    named = owners if len(owners) <= _NAMED else []
    for line, owner in enumerate(named):
        below = _TOP + tall + _GAP + line * _LINE
        parts += [Box(_GAP, below - 10, 12, 12, _colour(owner)), Words(_GAP + 18, below, tiles.names[owner], size=11)]
    page = max(len(title) * _LETTER + 2 * _GAP, _GAP + len(shown) * (wide + _GAP), 3 * _LEAST)
    return Picture(page, _TOP + tall + _GAP + len(named) * _LINE, parts)


def _layer(tiles: Tiles, depth: int, across: tuple[float, float], down: tuple[float, float]) -> list[Box | Words]:
    """The tiles at one depth: from where, and how many points a number takes, across and down."""
    (left, wide), (top, tall) = across, down
    parts: list[Box | Words] = [Words(left, top - 6, f"k = {depth:,}", fill=_FAINT, size=11)]
    for (r0, r1, c0, c1, k0, k1), owner in zip(tiles.ranges.tolist(), tiles.owner.tolist(), strict=True):
        if k0 <= depth < k1:
            spans = f"rows {r0:,}-{r1:,}, columns {c0:,}-{c1:,}, k {k0:,}-{k1:,}"
            place = left + c0 * wide, top + r0 * tall, (c1 - c0) * wide, (r1 - r0) * tall
            edge = "white" if min(place[2:]) >= _EDGED else ""
            parts.append(Box(*place, _colour(owner), edge=edge, note=f"{tiles.names[owner]}: {spans}"))
    return parts


def _colour(device: int) -> str:
    """A colour for each device, neighbours far apart (steps of the golden angle)."""
    return f"hsl({device * 137.508 % 360:.0f},{50 + device * 7 % 30}%,{45 + device * 13 % 25}%)"

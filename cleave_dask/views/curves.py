"""The parts of the page that are drawn over time: the loss, step by step, and the tiles of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.layouts import row
from bokeh.models import ColumnDataSource, DataRange1d, Dodge, HoverTool, Range1d
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from cleave_dask.views import theme
from cleave_dask.views.story import GONE, Story

MOST_POINTS = 2_000
"""Points of the loss curve; of more steps, evenly many are shown."""

MOST_DEVICES = 64
"""Rows of the timeline."""

MOST_BARS = 2_500
SMOOTH = 0.08  # weight of the newest loss in the smooth curve, once there are many

_LANES = {"download": -0.27, "compute": 0.0, "upload": 0.27, "verify": 0.27}
_THICK, _THIN = 0.19, 0.05
_ROW, _SHORT, _TALL = 34, 230, 780  # points: of a device's row, of all rows at least and at most
_HEAD, _FRAME = 22, 110  # points: above the first row, for the numbers of steps; of title, legend and axis
_LABEL = 0.07  # of the timeline's width, for the number of a step
TILE_COLUMNS = (
    *("y", "d0", "d1", "c1", "u1", "v1", "pd", "pc", "pu", "alpha", "line"),
    *("device", "gemm", "tile", "outcome", "planned", "download", "compute", "upload", "verify"),
    *("p_download", "p_compute", "p_upload"),
)
_TOOLTIP = """
<div style="font: 12px Helvetica, Arial, sans-serif; line-height: 17px">
<b>@gemm</b>, tile @tile on <b>@device</b>: @outcome<br>planned for @planned<br>
<span style="color:#2a7fb8">download</span> @download{0.[0]} ms, predicted @p_download{0.[0]}<br>
<span style="color:#b37b00">compute</span> @compute{0.[0]} ms, predicted @p_compute{0.[0]}<br>
<span style="color:#00795a">upload</span> @upload{0.[0]} ms, predicted @p_upload{0.[0]}<br>
<span style="color:#a0527d">verify</span> @verify{0.[0]} ms</div>
"""


class LossCurve:
    """The loss of every step, and a smooth curve through them."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({"step": [], "loss": [], "smooth": [], "seconds": []})
        self._run, self._sent, self._smooth = -1, 0, float("nan")
        self.root: Any = figure(
            title="Loss: no step is done yet",
            name="loss",
            sizing_mode="stretch_both",
            tools="pan,wheel_zoom,box_zoom,reset",
            toolbar_location="above",
            x_axis_label="step",
            min_height=180,
        )
        pale = self.root.line("step", "loss", source=self.source, color=theme.LOSS_PALE, line_width=1.5)
        self.root.scatter("step", "loss", source=self.source, color=theme.LOSS_PALE, size=3)
        self.root.line("step", "smooth", source=self.source, color=theme.LOSS, line_width=2.5)
        hover = HoverTool(
            tooltips=[("step", "@step"), ("loss", "@loss{0.0000}"), ("seconds", "@seconds{0.00}")],
            renderers=[pale],
            mode="vline",
        )
        self.root.add_tools(hover)
        self.root.ygrid.grid_line_alpha = self.root.xgrid.grid_line_alpha = 0.6

    def show(self, story: Story) -> None:
        """Show a run as it is now: new steps are added."""
        new = story.records[self._sent :] if self._run == story.runs else story.records
        fresh = self._run != story.runs
        if not new and not fresh:
            return
        smooth = self._smoothed([float(record["loss"]) for record in new], fresh=fresh)
        columns: dict[str, Any] = {
            "step": [record["step"] for record in new],
            "loss": [record["loss"] for record in new],
            "smooth": smooth,
            "seconds": [record["seconds"] for record in new],
        }
        if fresh:
            every: list[int] = np.unique(np.linspace(0, len(new) - 1, MOST_POINTS).astype(int)).tolist() if new else []
            self.source.data = {name: [values[place] for place in every] for name, values in columns.items()}
        else:
            self.source.stream(columns, rollover=MOST_POINTS)
        self._run, self._sent = story.runs, len(story.records)
        if story.records:
            self.root.title.text = f"Loss: {story.last['loss']:.4f} at step {story.last['step']:,}"

    def _smoothed(self, losses: Sequence[float], *, fresh: bool) -> list[float]:
        value, found = float("nan") if fresh else self._smooth, []
        for place, loss in enumerate(losses, start=0 if fresh else self._sent):
            weight = max(SMOOTH, 1 / (1 + place / 8))
            value = loss if np.isnan(value) else value + weight * (loss - value)
            found.append(value)
        self._smooth = value
        return found


class Timeline:
    """For each device a row with three lanes: what came down, was multiplied, went up; predicted below measured."""

    def __init__(self, *, follow: bool = True, fill: bool = False) -> None:
        self.devices: list[str] | None = None  # whom to show; None: everybody, as far as there is room
        self.source = ColumnDataSource({name: [] for name in TILE_COLUMNS})
        self.labels = ColumnDataSource({"y": [], "name": [], "colour": []})
        self.steps = ColumnDataSource({"x": [], "text": [], "y": []})
        self._drawn: tuple[Any, ...] = ()
        self._seen = 0
        span = DataRange1d(follow="end", follow_interval=4.0, range_padding=0.0) if follow else DataRange1d()
        self._top = _top(0)
        rows = Range1d(start=0.5, end=self._top)
        self.plot: Any = figure(
            title="Tiles: none yet",
            sizing_mode="stretch_both" if fill else "stretch_width",
            height=timeline_height(0),
            x_range=span,
            y_range=rows,
            tools="xpan,xwheel_zoom,box_zoom,reset",
            toolbar_location="above",
            x_axis_label="seconds since the run began",
            output_backend="canvas",
        )
        self._draw_bars()
        names: Any = figure(
            width=120, sizing_mode="stretch_height", y_range=rows, x_range=Range1d(start=0, end=1), tools=""
        )
        names.text(1, "y", "name", source=self.labels, color="colour", text_align="right", text_font_size="12px")
        self.names = names
        self._plain(names)
        self.root = row(names, self.plot, sizing_mode="stretch_both" if fill else "stretch_width", name="timeline")

    def _plain(self, names: Any) -> None:
        """The figure of names has the same frame as the plot, and nothing but names."""
        names.renderers[0].glyph.text_baseline = "middle"
        names.title.text = " "
        names.toolbar_location = None
        names.xaxis.axis_label = " "
        names.xaxis.major_tick_line_color = names.xaxis.minor_tick_line_color = names.xaxis.axis_line_color = None
        names.xaxis.major_label_text_alpha = 0
        names.yaxis.visible = self.plot.yaxis.visible = False
        names.xgrid.visible = names.ygrid.visible = self.plot.ygrid.visible = False
        names.outline_line_color = None
        names.background_fill_color = names.border_fill_color = theme.PAPER

    def _draw_bars(self) -> None:
        """The glyphs, all on one source."""
        plot, items, bars = self.plot, [], []
        plot.vspan("x", source=self.steps, line_color=theme.GREY, line_dash="dotted")
        plot.text("x", "y", "text", source=self.steps, text_font_size="11px", color=theme.PALE, x_offset=3, y_offset=12)
        edges = {"download": ("d0", "d1"), "compute": ("d1", "c1"), "upload": ("c1", "u1"), "verify": ("u1", "v1")}
        for stage, (left, right) in edges.items():
            lane = {"field": "y", "transform": Dodge(value=_LANES[stage])}
            colour = theme.STAGE_COLOURS[stage]
            looks = {"fill_color": colour, "fill_alpha": "alpha", "line_color": "line", "line_width": 1}
            bar = plot.hbar(y=lane, left=left, right=right, height=_THICK, source=self.source, **looks)
            bars.append(bar)
            items.append(_swatch(plot, stage, colour))
        for stage, (left, right) in {"download": ("d0", "pd"), "compute": ("d1", "pc"), "upload": ("c1", "pu")}.items():
            lane = {"field": "y", "transform": Dodge(value=_LANES[stage] + (_THICK + _THIN) / 2 + 0.01)}
            plot.hbar(
                y=lane, left=left, right=right, height=_THIN, source=self.source, color=theme.PALE, line_color=None
            )
        items.append(_swatch(plot, "predicted", theme.PALE))
        items.append(_swatch(plot, "done for another device", "white", theme.INK))
        plot.x_range.renderers = bars
        legend: Any = Legend(items=items, orientation="horizontal", border_line_color=None, background_fill_alpha=0)
        legend.label_text_font_size, legend.padding, legend.margin, legend.spacing = "12px", 2, 0, 12
        plot.add_layout(legend, "above")
        plot.add_tools(HoverTool(tooltips=_TOOLTIP, renderers=bars, point_policy="follow_mouse"))

    def show(self, story: Story) -> None:
        """Show a run as it is now: new tiles are added; everything is sent again when rows change."""
        names = self.devices if self.devices is not None else story.names[:MOST_DEVICES]
        states = tuple(story.state(name) for name in names)
        layout = (story.runs, tuple(names), states)
        fresh = layout != self._drawn
        count = min(story.tiles_seen - (0 if fresh else self._seen), len(story.tiles.get("step", ())))
        if fresh:
            self._lay_out(names, states)
        if count or fresh:
            bars = tile_bars(story, names, states, -count) if count else {name: [] for name in TILE_COLUMNS}
            if fresh:
                self.source.data = bars
            elif len(bars["y"]):
                self.source.stream(bars, rollover=MOST_BARS)
            self._mark_steps(story)
        self._drawn, self._seen = layout, story.tiles_seen
        if story.tiles:
            more = f", {len(names)} of {len(story.names):,} devices" if len(names) < len(story.names) else ""
            self.plot.title.text = f"Tiles: lanes of a device are downlink, multiplier, uplink{more}"

    def _lay_out(self, names: Sequence[str], states: Sequence[str]) -> None:
        shown = [
            f"{name} ({state})" if state not in ("here", "measuring") else name
            for name, state in zip(names, states, strict=True)
        ]
        colours = [theme.STATE_COLOURS.get(state, theme.INK) for state in states]
        self.labels.data = {"y": list(range(len(names))), "name": shown, "colour": colours}
        self._top = _top(len(names))
        self.plot.y_range.start, self.plot.y_range.end = max(1, len(names)) - 0.5, self._top
        self.plot.height = self.names.height = timeline_height(len(names))
        size = "12px" if len(names) <= 24 else "9px"
        self.names.renderers[0].glyph.text_font_size = size

    def _mark_steps(self, story: Story) -> None:
        """Dotted lines where steps ended, of those steps that have tiles here."""
        if not story.tiles:
            return
        first = float(story.tiles["start"][0])
        ends = [record for record in story.records[-64:] if record.get("ended", 0.0) >= first]
        last = None if self.plot.x_range.follow else story.last  # of a run that is over
        places = [float(record["ended"] - story.base) for record in ends]
        shown = legible(places, self._span(story))
        marks = {
            "x": places,
            "text": [
                f"step {record['step'] + 1:,}" if record is not last and room else ""
                for record, room in zip(ends, shown, strict=True)
            ],
            "y": [self._top] * len(ends),
        }
        if marks != self.steps.data:
            self.steps.data = marks
        if self.plot.x_range.follow and story.records:
            wide = float(np.clip(3.2 * story.last["seconds"], 2.0, 300.0))
            if abs(wide / self.plot.x_range.follow_interval - 1) > 0.25:
                self.plot.x_range.follow_interval = wide

    def _span(self, story: Story) -> float:
        """Seconds from the left edge of the plot to its right one, until somebody zooms."""
        if self.plot.x_range.follow:
            return float(self.plot.x_range.follow_interval)
        return float((story.tiles["start"] + story.tiles["queued"]).max() - story.tiles["start"].min())


def legible(places: Sequence[float], span: float) -> list[bool]:
    """Which of these places, left to right, can be labelled so that no label covers the next one."""
    shown, free = [], float("-inf")
    for place in places:
        shown.append(place >= free)
        if place >= free:
            free = place + _LABEL * span
    return shown


def timeline_height(devices: int) -> int:
    """Points of the timeline's height."""
    return _FRAME + min(max(_SHORT, _ROW * devices), _TALL)


def _top(devices: int) -> float:
    """Where the rows begin, counted in rows; the first one is at 0."""
    return -0.5 - _HEAD * max(1, devices) / (timeline_height(devices) - _FRAME)


def _swatch(plot: Any, label: str, colour: str, line: str | None = None) -> LegendItem:
    """An entry of the legend, with a bar of its own that is nowhere: those of tiles are pale when devices are gone."""
    bar = plot.hbar(y=[-99], left=[0], right=[0], height=0, fill_color=colour, line_color=line)
    return LegendItem(label=label, renderers=[bar])


def tile_bars(story: Story, names: Sequence[str], states: Sequence[str], since: int) -> dict[str, Any]:
    """The newest tiles of these devices as bars, from position `since` of the story's tiles on."""
    place = {name: number for number, name in enumerate(names)}
    tiles: Mapping[str, Any] = {name: column[since:] for name, column in story.tiles.items()}
    y = np.array([place.get(name, -1) for name in tiles["device"].tolist()])
    mine = np.flatnonzero(y >= 0)[-MOST_BARS:]
    tiles, y = {name: column[mine] for name, column in tiles.items()}, y[mine]
    gone = np.array([state in GONE for state in states] or [False])[y]
    d0 = tiles["start"] - story.base + tiles["queued"]
    d1 = d0 + tiles["download"]
    c1 = d1 + tiles["compute"]
    u1 = c1 + tiles["upload"]
    moved = (tiles["planned"] != tiles["device"]) & (tiles["planned"] != "")
    bad = ~np.isin(tiles["outcome"], ["accepted", "duplicate"])
    line = np.where(bad, theme.ALARM, np.where(moved, theme.FRAME, "rgba(0,0,0,0)"))
    parts = {name: 1e3 * tiles[name] for name in ("download", "compute", "upload", "verify")}
    predicted = {f"p_{name}": 1e3 * tiles[f"predicted_{name}"] for name in ("download", "compute", "upload")}
    return {
        "y": y,
        "d0": d0,
        "d1": d1,
        "c1": c1,
        "u1": u1,
        "v1": u1 + tiles["verify"],
        "pd": d0 + tiles["predicted_download"],
        "pc": d1 + tiles["predicted_compute"],
        "pu": c1 + tiles["predicted_upload"],
        "alpha": np.where(gone, 0.25, np.where(tiles["outcome"] == "duplicate", 0.5, 1.0)),
        "line": line.tolist(),
        **{name: tiles[name].tolist() for name in ("device", "gemm", "outcome", "planned")},
        "tile": tiles["tile"].astype(np.float64),
        **parts,
        **predicted,
    }

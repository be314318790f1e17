"""The parts of the page that are text, bars and tables: headline, what binds, progress, events, devices."""

from __future__ import annotations

from datetime import datetime
from html import escape
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, CustomJS, InlineStyleSheet
from bokeh.models.widgets import DataTable, Div, HTMLTemplateFormatter, TableColumn

from cleave_dask.views import theme
from cleave_dask.views.story import DEVICE_COLUMNS, Story

SHOWN_EVENTS = 60


class Panel:
    """A piece of HTML that is sent again only when it changes."""

    def __init__(self, name: str) -> None:
        style = InlineStyleSheet(css=theme.STYLE)
        self.root = Div(text="", name=name, sizing_mode="stretch_both", stylesheets=[style])

    def show(self, story: Story) -> None:
        """Show a run as it is now."""
        text = self.html(story)
        if text != self.root.text:
            self.root.text = text

    def html(self, story: Story) -> str:
        """What it says."""
        raise NotImplementedError


class Headline(Panel):
    """The most important numbers, or why there are none."""

    def __init__(self) -> None:
        super().__init__("headline")

    def html(self, story: Story) -> str:
        """A card for each number."""
        if story.run is None:
            return f'<div class="empty">{escape(story.why)}</div>'
        cards = "".join(
            f'<div class="card" data-card="{escape(label)}"><div class="label">{escape(label)}</div>'
            f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
            for label, value, note in story.headline()
        )
        missing = f'<div class="empty">{escape(story.why)}</div>' if story.why else ""
        return f'{missing}<div class="cards">{cards}</div>'


class Binding(Panel):
    """The resource that binds now, how busy each one is, and how far the step is."""

    def __init__(self, *, live: bool = True) -> None:
        super().__init__("binding")
        self.live = live

    def html(self, story: Story) -> str:
        """Bars, the busiest resource first and coloured."""
        loads, (resource, why) = story.loads(), story.binding()
        bars = "".join(
            f'<div class="name" title="{escape(load.note)}">{_bold(load.resource, load.resource == resource)}</div>'
            f'<div class="track" title="{escape(load.note)}"><div class="fill{" binds" * (load.resource == resource)}" '
            f'style="width:{100 * load.share:.1f}%"></div></div><div class="number">{load.share:.0%}</div>'
            for load in loads
        )
        says = f"{resource[0].upper()}{resource[1:]} binds" if resource else "What binds"
        head = f'<h2 class="says">{escape(says)}</h2><div class="why">{escape(why)}</div>'
        return f'{head}<div class="bars">{bars}</div>{self._progress(story) if self.live else ""}'

    def _progress(self, story: Story) -> str:
        known = story.progress
        if "all_tiles" not in known:
            return ""
        step = known["step"] if known.get("running") else known["step"] - 1
        rows = [
            ("levels", known["levels"], known["all_levels"]),
            ("gemms", known["gemms"], known["all_gemms"]),
            ("tiles", known["tiles"], known["all_tiles"]),
        ]
        if not known.get("running"):
            rows = [(name, total, total) for name, _, total in rows]
        title = f"<h2>Step {step:,}{'' if known.get('running') else ' is done'}</h2>"
        lines = "".join(
            f'<div class="name">{name}</div><div class="track"><div class="fill" '
            f'style="width:{100 * done / max(1, total):.1f}%"></div></div>'
            f'<div class="number">{done:,} of {total:,}</div>'
            for name, done, total in rows
        )
        return f'<div class="progress" style="margin-top:12px">{title}<div class="steps">{lines}</div></div>'


class Events(Panel):
    """What happened to the fleet, newest first."""

    def __init__(self) -> None:
        super().__init__("events")

    def html(self, story: Story) -> str:
        """A line for each event."""
        if not story.events:
            return '<h2>Churn</h2><div class="empty">no device has joined, left or been late yet</div>'
        lines = []
        for event in reversed(story.events[-SHOWN_EVENTS:]):
            more = event.text
            redone = story.redone.get(event.device, 0)
            if event.kind == "left" and redone and story.state(event.device) == "left":
                more = f"{redone:,} of its tiles done by others"
            colour = theme.EVENT_COLOURS.get(event.kind, theme.PALE)
            verb = {"late": "is late", "quarantined": "is quarantined"}.get(event.kind, f"has {event.kind}")
            lines.append(
                f'<li data-kind="{escape(event.kind)}"><span class="dot" style="background:{colour}"></span>'
                f'<span class="time">{datetime.fromtimestamp(event.when):%H:%M:%S}</span>'
                f"<b>{escape(event.device)}</b> {escape(verb)}"
                f"{f' <span class=more>· {escape(more)}</span>' if more else ''}</li>"
            )
        return f'<h2>Churn</h2><ul class="events">{"".join(lines)}</ul>'


def _bold(text: str, bold: bool) -> str:
    return f"<b>{escape(text)}</b>" if bold else escape(text)


_STATE = "state === 'here' ? '● here' : state === 'measuring' ? '◌ measuring' : '○ ' + state"
_COLUMNS = {
    "device": ("device", theme.cell("_.escape(value)", align="left"), 110),
    "state": ("state", theme.cell(_STATE, align="left"), 80),
    "down": ("downlink", theme.cell(theme.si("B/s")), 80),
    "up": ("uplink", theme.cell(theme.si("B/s")), 80),
    "flops": ("speed", theme.cell(theme.si("FLOP/s")), 95),
    "latency": ("latency", theme.cell(theme.milliseconds()), 65),
    "planned": ("share planned", theme.cell(theme.percent()), 110),
    "share": ("share done", theme.cell(theme.percent()), 88),
    "tiles": ("tiles", theme.cell(theme.count()), 60),
    "taken_over": ("for others", theme.cell(theme.count()), 82),
    "down_bytes": ("down", theme.cell(theme.si("B")), 75),
    "up_bytes": ("up", theme.cell(theme.si("B")), 75),
    "late": ("late", theme.cell(theme.count()), 45),
    "rejected": ("rejected", theme.cell(theme.count()), 72),
    "why": ("why this share", theme.cell("_.escape(value)", align="left", title="_.escape(value)"), 640),
}


class Devices:
    """A row for each device; only columns that changed are sent."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in DEVICE_COLUMNS})
        self._sent: dict[str, list[Any]] = {}
        columns = [
            TableColumn(field=name, title=title, width=width, formatter=HTMLTemplateFormatter(template=template))
            for name, (title, template, width) in _COLUMNS.items()
        ]
        self.root = DataTable(
            source=self.source,
            columns=columns,
            name="devices",
            sizing_mode="stretch_both",
            index_position=None,
            autosize_mode="none",
            reorderable=False,
            row_height=22,
            stylesheets=[InlineStyleSheet(css=theme.TABLE_STYLE)],
        )
        # A table draws itself anew when rows come or go, but not when only their values change.
        redraw = CustomJS(args={"table": self.root}, code="table.view.change.emit()")
        self.source.js_on_change("data", redraw)

    def show(self, story: Story) -> None:
        """Show a run as it is now."""
        table = story.devices()
        changed = {name: _numbers(values) for name, values in table.items() if values != self._sent.get(name)}
        if table["device"] != self._sent.get("device"):
            self.source.data = {name: _numbers(values) for name, values in table.items()}
        elif changed:
            self.source.data.update(changed)
        self._sent = table


def _numbers(values: list[Any]) -> Any:
    """Numbers travel as bytes, texts as they are."""
    return np.array(values, dtype=np.float64) if values and not isinstance(values[0], str) else values

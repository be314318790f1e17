"""The page as a whole: its parts, where they are, and how they get into a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import distributed
from bokeh.document import Document
from bokeh.models import CustomJS
from bokeh.models.widgets import Select
from distributed.dashboard.components.scheduler import BOKEH_THEME
from jinja2 import ChoiceLoader, Environment, FileSystemLoader

from cleave_dask.views.curves import MOST_DEVICES, LossCurve, Timeline
from cleave_dask.views.panels import Binding, Devices, Events, Headline
from cleave_dask.views.story import Story

_HERE = Path(__file__).parent / "templates"
_DASK = Path(distributed.__file__).parent / "http" / "templates"
TEMPLATES = Environment(loader=ChoiceLoader([FileSystemLoader(_HERE), FileSystemLoader(_DASK)]), autoescape=False)

SLOWEST, TROUBLED = "the slowest", "late, left, quarantined"


_HIDDEN = "hidden"
_TELL_HIDDEN = f"""
const tell = () => root.tags = document.hidden ? ["{_HIDDEN}"] : []
document.addEventListener("visibilitychange", tell)
tell()
"""


class Part(Protocol):
    """Something on the page."""

    root: Any

    def show(self, story: Story) -> None:
        """Show a run as it is now."""


_MAKE: Mapping[str, Callable[[bool], Part]] = {
    "headline": lambda live: Headline(),
    "loss": lambda live: LossCurve(),
    "binding": lambda live: Binding(live=live),
    "timeline": lambda live: Timeline(follow=live),
    "devices": lambda live: Devices(),
    "events": lambda live: Events(),
}


class Page:
    """Some parts of a story in one browser; `live`: of a run that goes on."""

    def __init__(self, parts: tuple[str, ...], *, live: bool = True) -> None:
        self.parts: dict[str, Part] = {part: _MAKE[part](live) for part in parts}
        if parts == ("timeline",):
            self.parts["timeline"] = Timeline(fill=True)
        self.chooser: Any = Select(title="", options=[], name="chooser", visible=False, width=230)
        self._chosen = ""

    def fill(self, document: Document, extra: Mapping[str, Any]) -> None:
        """Put it into a document: with Dask's navigation bar, or a part alone."""
        document.title = "Dask: Cleave"
        document.js_on_event("document_ready", CustomJS(args={"root": self._root}, code=_TELL_HIDDEN))
        document.theme = BOKEH_THEME
        for part in self.parts.values():
            document.add_root(part.root)
        if len(self.parts) > 1:
            document.add_root(self.chooser)
            document.template = TEMPLATES.get_template("cleave.html")
            document.template_variables.update(extra)

    @property
    def hidden(self) -> bool:
        """Whether the browser shows another tab."""
        return _HIDDEN in self._root.tags

    @property
    def _root(self) -> Any:
        return next(iter(self.parts.values())).root

    def show(self, story: Story) -> None:
        """Show a run as it is now."""
        self._choose(story)
        for part in self.parts.values():
            part.show(story)

    def _choose(self, story: Story) -> None:
        """Which devices the timeline shows, if it has no room for all."""
        timeline = self.parts.get("timeline")
        if not isinstance(timeline, Timeline):
            return
        names = story.names
        options = choices(len(names))
        if options != self.chooser.options:
            self.chooser.options, self.chooser.visible = options, bool(options)
            self.chooser.value = options[0] if options else ""
        timeline.devices = chosen(story, str(self.chooser.value)) if options else None


def choices(devices: int) -> list[str]:
    """What the timeline can show of so many devices; nothing to choose if it has room for all."""
    if devices <= MOST_DEVICES:
        return []
    ranges = [f"{first + 1} to {min(first + MOST_DEVICES, devices)}" for first in range(0, devices, MOST_DEVICES)]
    return [SLOWEST, TROUBLED, *ranges]


def chosen(story: Story, choice: str) -> list[str]:
    """The devices of a choice."""
    names = story.names
    if choice == TROUBLED:
        return [name for name in names if story.state(name) not in ("here", "measuring")][:MOST_DEVICES]
    if choice == SLOWEST or not choice:
        return slowest(story)
    first = int(choice.split()[0]) - 1
    return names[first : first + MOST_DEVICES]


def slowest(story: Story) -> list[str]:
    """The devices that were busy longest in the last step, by name."""
    busy = story.summary.get("busy", {})
    totals = dict.fromkeys(story.summary.get("device", ()), 0.0)
    for stage in busy.values():
        for name, seconds in zip(totals, stage, strict=True):
            totals[name] = max(totals[name], seconds)
    most = set(sorted(totals, key=lambda name: -totals[name])[:MOST_DEVICES])
    return [name for name in story.names if name in most] or story.names[:MOST_DEVICES]

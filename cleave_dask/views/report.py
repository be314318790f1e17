"""A run as one HTML file that needs neither a server nor a network: the dashboard's page, made from a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bokeh.embed import file_html
from bokeh.resources import INLINE
from distributed.dashboard.components.scheduler import BOKEH_THEME

from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.formatting import duration
from cleave_dask.runtime.history import read_events, read_records, read_story
from cleave_dask.runtime.summaries import device_sums
from cleave_dask.runtime.trace import Trace
from cleave_dask.views.layout import TEMPLATES, Page
from cleave_dask.views.story import GONE, Story

PARTS = ("headline", "loss", "binding", "events", "timeline", "devices")


def read_run(checkpoint: str | Path) -> Story:
    """The story of a run from what it left beside its checkpoint."""
    folder = Path(checkpoint)
    records, (standing, latest) = read_records(folder), read_story(folder)
    if not records or latest is None:
        raise InputError(
            f"there are no records of a run in {folder}; give a checkpoint folder that was saved to, "
            "such as checkpoints/tiny-llama"
        )
    story = Story()
    events = read_events(folder)
    for when, event in events:
        story.tell(when, event)
    try:
        sums = device_sums(Trace.load(folder / "trace"))
    except CheckpointError:
        sums = {}  # the story can be told without
    rows, names = latest
    run = {"run": standing.get("run", folder.name), "records": records, "rows": rows, "names": names, "sums": sums}
    story.take_run({**run, **{part: standing.get(part, {}) for part in ("plan", "summary")}})
    late: Counter[str] = Counter()
    for _, event in events:
        if event.get("action") == "late":
            late[str(event.get("device"))] += int(event.get("parcels", 1))
        elif event.get("action") == "quarantined":
            story.quarantined[str(event.get("device"))] = str(event.get("why", ""))
    story.late = dict(late)
    story.present = {name: {} for name in story.names if story.gone.get(name) not in GONE}
    story.why = ""
    return story


def render_report(story: Story, title: str) -> str:
    """The story as one HTML document that has everything in it."""
    page = Page(PARTS, live=False)
    page.show(story)
    steps = len(story.records)
    seconds = sum(record["seconds"] for record in story.records)
    note = f"{steps:,} step{'s' * (steps != 1)} in {duration(seconds)}; tiles and loads are those of the last steps"
    return file_html(
        [part.root for part in page.parts.values()],
        resources=INLINE,
        title=f"cleave: {title}",
        template=TEMPLATES.get_template("report.html"),
        template_variables={"heading": title, "note": note},
        theme=BOKEH_THEME,
    )

"""A run as it can be shown: facts in, tables out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cleave_dask.views.curves import MOST_BARS, TILE_COLUMNS, LossCurve, Timeline, legible
from cleave_dask.views.layout import SLOWEST, TROUBLED, Page, choices, chosen
from cleave_dask.views.panels import Devices, Events, Headline
from cleave_dask.views.story import MOST_TILES, Story

STAGES = ("download", "compute", "upload", "verify")


def tiles(devices: list[str], planned: list[str] | None = None, *, start: float = 100.0) -> dict[str, Any]:
    """One tile on each of these devices, as the feed has them."""
    count, wanted = len(devices), planned or devices
    names = {"gemm": ("up",), "device": tuple(dict.fromkeys(devices)), "outcome": ("accepted",)}
    names["planned"] = tuple(dict.fromkeys(wanted))
    rows: dict[str, Any] = {name: np.zeros(count, np.int32) for name in ("step", "gemm", "tile", "outcome")}
    rows["device"] = np.array([names["device"].index(name) for name in devices], np.int32)
    rows["planned"] = np.array([names["planned"].index(name) for name in wanted], np.int32)
    rows["start"] = start + np.arange(count, dtype=np.float64)
    parts = ("queued", *STAGES, "predicted_download", "predicted_compute", "predicted_upload")
    return {"rows": rows | {name: np.full(count, 0.1, np.float32) for name in parts}, "names": names}


def record(step: int, seconds: float = 2.0) -> dict[str, Any]:
    moved = {"down_bytes": 4_000_000, "up_bytes": 1_000_000, "tiles": 4}
    spent = {"rounds": 0.1, "update": 0.1, "gather": 0.05}
    return {"step": step, "loss": 4.0 / step, "seconds": seconds, "spent": spent, "ended": 100.0 + step, **moved}


def run(devices: list[str], *, name: str = "a", steps: tuple[int, ...] = (1,), **more: Any) -> dict[str, Any]:
    busy = {stage: [0.2] * len(devices) for stage in STAGES} | {"upload": [1.6] * len(devices)}
    count = len(devices)
    plan = {
        "seconds": 1.5,
        "binding": "compute",
        "server": {"egress": 1e9, "ingress": 1e9},
        "devices": {
            "name": devices,
            "share": [1 / count] * count,
            "why": ["its compute binds"] * count,
            **{figure: [1e6] * count for figure in ("flops", "down", "up", "latency")},
        },
    }
    summary = {"device": devices, "share": [1 / count] * count, "taken_over": [0] * count, "busy": busy, "figures": {}}
    sums = {device: [5.0, 0.0, 0.0, 1e6, 1e5] for device in devices}
    facts = {"run": name, "plan": plan, "summary": summary, "sums": sums, "records": [record(step) for step in steps]}
    return {**facts, **tiles(devices), **more}


def present(*devices: str, **more: Any) -> dict[str, Any]:
    return {"devices": {name: {"running": True, **more} for name in devices}}


def test_before_a_plan_nobody_has_come_too_late_for_it() -> None:
    story = Story()
    story.take(present("d-1"))
    assert story.devices()["why"] == ["nothing is planned yet"]
    story.take({**present("d-1", "d-2"), "run": run(["d-1"])})
    assert story.devices()["why"] == ["its compute binds", "joined after the plan was made"]


def test_labels_of_short_steps_do_not_cover_each_other() -> None:
    assert legible([1.0, 1.5, 8.1, 20.0, 99.0], 100.0) == [True, False, True, True, True]
    story, timeline = Story(), Timeline(follow=False)
    quick = [record(1), *(record(step) | {"ended": 101.0 + step / 100} for step in range(2, 30))]
    story.take({**present("d"), "run": run(["d"], records=quick, **tiles(["d"] * 50))})
    timeline.show(story)
    assert [text for text in timeline.steps.data["text"] if text] == ["step 2"]
    assert len(timeline.steps.data["x"]) == len(quick)


def test_a_device_that_left_stays_in_the_table() -> None:
    story = Story()
    story.take(
        {
            **present("d-2", "d-10"),
            "events": [(1.0, {"action": "joined", "device": "d-2"})],
            "run": run(["d-2", "d-10"]),
        }
    )
    assert story.names == ["d-2", "d-10"]
    left = {"action": "left", "device": "d-2"}
    story.take({**present("d-10"), "events": [(2.0, left)], "run": run(["d-2", "d-10"], steps=(2,))})
    table = story.devices()
    assert table["device"] == ["d-2", "d-10"]
    assert table["state"] == ["left", "here"]
    assert story.headline()[3] == ("devices", "1", "1 gone")
    story.take({**present("d-2", "d-10"), "events": [(3.0, {"action": "joined", "device": "d-2"})]})
    assert story.devices()["state"] == ["here", "here"]


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"running": False}, "paused"),
        ({"running": True, "measuring": True}, "measuring"),
        ({"running": True}, "here"),
    ],
)
def test_states_of_a_device(facts: dict[str, Any], state: str) -> None:
    story = Story()
    story.take({"devices": {"d": facts}})
    assert story.state("d") == state
    story.take({"devices": {"d": {"running": True}}, "silent": ["d"]})
    assert story.state("d") == "late"
    story.take({"devices": {}, "quarantined": {"d": "tile 3 is wrong"}})
    assert story.state("d") == "quarantined"
    assert story.devices()["why"] == ["tile 3 is wrong"]


def test_the_busiest_resource_binds_and_idle_ones_do_not() -> None:
    story = Story()
    assert story.binding()[0] == ""
    story.take({**present("a", "b"), "run": run(["a", "b"])})
    assert story.binding() == ("uplink", "busy for 80% of a step; planned: compute")
    idle = {stage: [0.1, 0.1] for stage in STAGES}
    quiet = run(["a", "b"], steps=(2,))
    quiet["summary"]["busy"] = idle
    story.take({**present("a", "b"), "run": quiet})
    assert story.binding()[0] == "latency"


def test_another_run_begins_a_new_story() -> None:
    story, curve = Story(), LossCurve()
    story.take({**present("a"), "run": run(["a"], steps=(1, 2, 3))})
    curve.show(story)
    story.take({**present("a"), "run": run(["a"], steps=(4,))})
    curve.show(story)
    assert list(curve.source.data["step"]) == [1, 2, 3, 4]
    story.take({**present("a"), "run": run(["a"], name="b", steps=(1,))})
    curve.show(story)
    assert list(curve.source.data["step"]) == [1]


def test_tiles_of_another_device_are_outlined_and_counted() -> None:
    story, timeline = Story(), Timeline()
    facts = run(["a", "b", "b"])
    facts |= tiles(["a", "b", "b"], planned=["a", "b", "a"])
    facts["plan"]["devices"]["name"] = ["a", "b"]
    story.take({**present("a", "b"), "run": facts})
    timeline.show(story)
    lines = list(timeline.source.data["line"])
    assert lines[2] != lines[0] == lines[1]
    assert story.redone == {"a": 1}
    story.take({**present("b"), "events": [(1.0, {"action": "left", "device": "a"})]})
    events = Events()
    events.show(story)
    assert "1 of its tiles done by others" in events.root.text
    timeline.show(story)
    assert list(timeline.labels.data["name"]) == ["a (left)", "b"]
    alpha = list(timeline.source.data["alpha"])
    assert alpha[0] < alpha[1]


def test_what_is_kept_and_sent_is_bounded() -> None:
    story, timeline = Story(), Timeline()
    for turn in range(8):
        facts = run(["a"], steps=(turn + 1,)) | tiles(["a"] * 1500, start=1500.0 * turn)
        story.take({**present("a"), "run": facts})
        timeline.show(story)
    assert len(story.tiles["step"]) == MOST_TILES
    assert {len(timeline.source.data[name]) for name in TILE_COLUMNS} == {MOST_BARS}


def test_a_thousand_devices_are_shown_some_at_a_time() -> None:
    names = [f"d-{number}" for number in range(1000)]
    story, page = Story(), Page(("timeline", "devices"))
    facts = run(names)
    facts["summary"]["busy"]["compute"][777] = 2.0
    story.take({**present(*names[1:]), "events": [(1.0, {"action": "left", "device": "d-0"})], "run": facts})
    page.show(story)
    timeline, table = page.parts["timeline"], page.parts["devices"]
    assert isinstance(timeline, Timeline)
    assert isinstance(table, Devices)
    assert len(timeline.labels.data["name"]) == 64
    assert "d-777" in timeline.labels.data["name"]
    assert len(table.source.data["device"]) == 1000
    options = choices(len(names))
    assert options[:2] == [SLOWEST, TROUBLED]
    assert chosen(story, TROUBLED) == ["d-0"]
    ranges = [name for option in options[2:] for name in chosen(story, option)]
    assert ranges == names, "every device can be found"


def test_names_of_devices_cannot_smuggle_html() -> None:
    story, bad = Story(), "<script>alert(1)</script>"
    story.take({**present(bad), "events": [(1.0, {"action": "joined", "device": bad})], "run": run([bad])})
    for panel in (Events(), Headline()):
        panel.show(story)
        assert "<script>" not in panel.root.text

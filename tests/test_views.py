"""What a person looks at: progress as text and as HTML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import cleave_dask as cd
from cleave_dask.views.sweeps import Points, draw_curves
from cleave_dask.views.tracking import draw_curve, line, render


def record(step: int, **more: Any) -> dict[str, Any]:
    facts = {"step": step, "loss": 5.0 / step, "seconds": 0.5, "down_bytes": 2_000_000, "up_bytes": 1000, "tiles": 12}
    return {**facts, "retries": 0, "rejected": 0, **more}


def test_progress_as_html_is_well_formed_and_says_how_long() -> None:
    html = render([record(1), record(2, retries=3)], 8)
    root = ElementTree.fromstring(html)
    text = "".join(root.itertext())
    assert "step 2 of 8: loss 2.5000" in text
    assert "1 s gone, 3 s left; 12 tiles a step, 4 MB moved, 3 tiles came twice" in text
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 1
    assert "left" not in render([record(1)], None)


@pytest.mark.parametrize("losses", [[1.0], [2.0, 2.0], [float(n % 7) for n in range(5000)]], ids=len)
def test_a_curve_stays_inside_its_frame(losses: list[float]) -> None:
    svg = ElementTree.fromstring(draw_curve(losses))
    wide, tall = float(svg.attrib["width"]), float(svg.attrib["height"])
    points = [tuple(map(float, point.split(","))) for point in svg[0].attrib["points"].split()]
    assert len(points) <= 1000
    assert all(0 <= x <= wide and 0 <= y <= tall for x, y in points)


def test_a_line_for_terminals() -> None:
    assert line([record(1), record(2, retries=1)], 4) == "step 2/4  loss 2.5000  500 ms  1 tiles twice"


def test_track_gives_every_batch_once_and_is_silent_on_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(records=[record(1)])
    seen = []
    for batch in cd.track(iter("abcdef"), trainer, total=4):
        seen.append(batch)
        trainer.records.append(record(len(trainer.records) + 1))
    assert seen == list("abcd")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(cd.InputError, match="total is 0; give the number of steps"):
        list(cd.track([], trainer))


def test_curves_are_drawn_with_gaps_where_a_system_cannot_run() -> None:
    curves: dict[str, Points] = {"one": [(1.0, 5.0), (10.0, None), (100.0, 0.5)], "<none>": [(1.0, None)]}
    svg = ElementTree.fromstring(draw_curves("t", curves, x="devices", y="seconds"))
    assert len([part for part in svg if part.tag.endswith("polyline")]) == 2
    assert len([part for part in svg if part.tag.endswith("circle")]) == 2
    assert {"one", "<none>", "devices", "seconds", "100"} <= {part.text for part in svg}
    assert draw_curves("t", {"none": []}, x="", y="")

"""What planning costs: python -m pytest tests/bench/test_planner.py, half a minute of a quiet machine."""

from __future__ import annotations

import pytest

from benchmarks.planner import step_row
from cleave_dask.fleet.devices import Fleet


@pytest.mark.parametrize(
    ("fleet", "seconds", "replan_ms"), [("home-1024", 3.0, 20.0), ("mixed-1024", 3.0, 20.0), ("home-8192", 20.0, None)]
)
def test_planning_and_replanning_a_step_of_13b_are_quick(fleet: str, seconds: float, replan_ms: float | None) -> None:
    row = step_row("llama2-13b", fleet, Fleet.load(fleet), "3d")
    assert float(str(row["cpu"])) <= seconds, row
    assert replan_ms is None or float(str(row["replan_ms"])) <= replan_ms, row

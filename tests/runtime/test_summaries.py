"""A plan and a trace as the few numbers that people look at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.summaries import busy_seconds, device_sums, plan_facts, step_summary, with_predictions
from cleave_dask.runtime.trace import ACCEPTED, Trace
from tests import models

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 2)), max_size=30)


@given(intervals)
def test_seconds_in_which_something_was_open(given: list[tuple[int, int, int]]) -> None:
    start = np.array([begin for begin, _, _ in given], dtype=np.float64)
    seconds = np.array([length for _, length, _ in given], dtype=np.float64)
    owner = np.array([who for _, _, who in given], dtype=np.int32)
    found = busy_seconds(start, seconds, owner, 3)
    for who in range(3):
        open_at = {second for begin, length, one in given if one == who for second in range(begin, begin + length)}
        assert found[who] == pytest.approx(len(open_at))


@pytest.fixture(scope="module")
def made() -> Plan:
    from cleave_dask.graph.capture import capture

    link = Link(bandwidth=1e6, latency=0.01)
    devices = tuple(Device(name, 1e9 * (1 + place), 1e9, link, link) for place, name in enumerate("ab"))
    graph = capture(models.llama(), **models.tokens())
    return plan(graph, Fleet(Server(), devices), min_flops=0)


def rows_of(made: Plan, *, shift: int = 0) -> Trace:
    """Every tile of the plan where it was planned, or on the device after that."""
    names = [device.name for device in made.fleet.devices]
    rows = []
    for gemm, tiles in made.by_gemm.items():
        for number, tile in enumerate(tiles):
            assert tile.device is not None
            device = names[(names.index(tile.device) + shift) % len(names)]
            rows.append((1, gemm, number, device, 0.0, 0.0, 0.5, 0.25, 0.125, 0.01, ACCEPTED, 1000, 100))
    return Trace.of(rows)


def test_a_step_as_planned_has_the_shares_of_the_plan(made: Plan) -> None:
    planned, done = plan_facts(made)["devices"], step_summary(made, rows_of(made))
    shares = dict(zip(done["device"], done["share"], strict=True))
    assert [shares[name] for name in planned["name"]] == pytest.approx(planned["share"])
    assert sum(done["taken_over"]) == 0
    moved = step_summary(made, rows_of(made, shift=1))
    assert sum(moved["taken_over"]) == len(made.tiles)


def test_every_tile_has_its_prediction_from_the_plan_that_made_it(made: Plan) -> None:
    rows = rows_of(made)
    columns, names = with_predictions(rows, [(0, made)], 0)
    planned = np.array(names["planned"], dtype=object)[columns["planned"]]
    assert planned.tolist() == rows["device"].tolist()
    assert columns["predicted_download"] == pytest.approx(np.full(len(rows), 1000 / 1e6 + 0.02), rel=1e-5)
    assert np.isfinite(columns["predicted_compute"]).all()
    late, names = with_predictions(rows, [(3, made)], 0)
    planned = np.array(names["planned"], dtype=object)[late["planned"]]
    assert planned[:3].tolist() == ["", "", ""], "no plan is known that made the first rows"
    assert np.isnan(late["predicted_compute"][:3]).all()
    assert planned[3:].tolist() == rows["device"].tolist()[3:]


def test_attempts_are_counted_by_what_became_of_them() -> None:
    head, tail = (1, "up", 0), (0.0, 0.0, 0.1, 0.1, 0.1, 0.1)
    outcomes = [("a", ACCEPTED), ("a", "duplicate"), ("b", "a wrong shape"), ("a", ACCEPTED)]
    trace = Trace.of([(*head, device, *tail, outcome, 10, 1) for device, outcome in outcomes])
    assert device_sums(trace) == {"a": [2.0, 1.0, 0.0, 30.0, 3.0], "b": [0.0, 0.0, 1.0, 10.0, 1.0]}

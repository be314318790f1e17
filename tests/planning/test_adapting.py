"""A plan is kept while it holds, moved when devices come and go, and made anew when that pays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.adapting import REST, Adapter, seconds_on
from cleave_dask.planning.calibration import corrected
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from tests.strategies import make_gemm

LINK = Link(1e8, 1e-3)
FLEET = Fleet(Server(), tuple(Device(f"d{n}", 2e9, 1e9, LINK, LINK) for n in range(4)))
GEMMS = tuple(make_gemm(512, 512, 512, name=f"g{n}", level=n) for n in range(1, 5))
GRAPH = StepGraph("four", (), GEMMS, loss="", grads=(), buffers=(), batch="")
SLOW = corrected(FLEET, {"d0": {"flops": 2e8}})


def grid(plan: Plan) -> dict[str, bytes]:
    return {name: tiles.ranges.tobytes() for name, tiles in plan.by_gemm.items()}


def share(plan: Plan, device: str) -> float:
    volume = sum(
        (t.rows[1] - t.rows[0]) * (t.cols[1] - t.cols[0]) * (t.ks[1] - t.ks[0])
        for t in plan.tiles
        if t.device == device
    )
    return volume / sum(gemm.m * gemm.n * gemm.k for gemm in GEMMS)


def test_a_plan_costs_on_its_own_fleet_what_it_says() -> None:
    made = plan(GRAPH, FLEET)
    assert seconds_on(made, GRAPH, FLEET) == pytest.approx(made.seconds)
    assert seconds_on(made, GRAPH, SLOW) > 3 * made.seconds


def test_small_changes_change_nothing() -> None:
    adapter = Adapter(GRAPH, plan, FLEET)
    before = adapter.plan
    assert not adapter.step_begins(FLEET)
    assert not adapter.step_begins(corrected(FLEET, {"d0": {"flops": 1.5e9}}))
    assert adapter.plan is before


def test_a_device_that_is_slower_than_it_said_gets_less_at_once() -> None:
    adapter = Adapter(GRAPH, plan, FLEET)
    before = share(adapter.plan, "d0")
    assert adapter.step_begins(SLOW)
    assert share(adapter.plan, "d0") < before / 3


def test_new_grids_are_some_steps_apart() -> None:
    calls: list[Fleet] = []

    def counted(graph: StepGraph, fleet: Fleet) -> Plan:
        calls.append(fleet)
        return plan(graph, fleet)

    adapter = Adapter(GRAPH, counted, FLEET)
    flips = [adapter.step_begins(SLOW if number % 2 == 0 else FLEET) for number in range(4 * REST)]
    assert len(calls) - 1 <= len(flips) / REST + 1
    assert not any(one and other for one, other in pairwise(flips))


def test_without_new_grids_only_placement_moves() -> None:
    adapter = Adapter(GRAPH, plan, FLEET, new_grids=False)
    before = grid(adapter.plan)
    assert not adapter.step_begins(SLOW)
    assert adapter.step_begins(Fleet(Server(), FLEET.devices[1:]))
    assert grid(adapter.plan) == before
    assert share(adapter.plan, "d0") == 0
    assert adapter.step_begins(FLEET)
    assert grid(adapter.plan) == before
    assert share(adapter.plan, "d0") > 0


def test_a_planner_with_a_grid_of_its_own_keeps_it() -> None:
    adapter = Adapter(GRAPH, partial(plan, grid=(2, 2, 1)), FLEET)
    before = grid(adapter.plan)
    adapter.step_begins(SLOW)
    for _ in range(REST):
        adapter.step_begins(Fleet(Server(), SLOW.devices[1:]))
    assert grid(adapter.plan) == before


def test_tiles_that_no_device_can_hold_any_more_are_cut_anew() -> None:
    small = tuple(replace(device, name=f"s{n}", memory=2e6) for n, device in enumerate(FLEET.devices))
    adapter = Adapter(GRAPH, plan, Fleet(Server(), FLEET.devices[:1]), new_grids=False)
    assert adapter.step_begins(Fleet(Server(), small))
    assert max(adapter.plan.peak_memory.values()) <= 2e6

"""The bound of a step: what has been asked for ahead may be there, what is not made yet cannot."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.bound import gemm_bound
from cleave_dask.planning.chain import StepBound, step_bound
from cleave_dask.planning.cost import Rates, Shape
from cleave_dask.planning.planner import plan
from cleave_dask.simulation.measured import IDEAL
from cleave_dask.simulation.simulator import simulate
from tests.planning.test_overhead import chained
from tests.strategies import fleets, graph_of, make_gemm

DOWN, UP, LATENCY = 1e6, 1e5, 0.01


def fleet(count: int = 1, *, latency: float = LATENCY, server: Server | None = None) -> Fleet:
    links = Link(DOWN, latency), Link(UP, latency)
    return Fleet(server or Server(), tuple(Device(f"d{n}", 1e15, 1e12, *links) for n in range(count)))


def bound(graph: StepGraph, some: Fleet) -> StepBound:
    """Of a step that sends out everything, the scheduler left out."""
    rates = Rates.of(some)
    alone = {g.name: gemm_bound(Shape.of(g), rates, some.server, scheduler_seconds=0.0)[0] for g in graph.gemms}
    sent: dict[str, tuple[bool, ...]] = {gemm.name: () for gemm in graph.gemms}
    return step_bound(graph, some, sent, gemm_bounds=alone, scheduler_seconds=0.0)


def test_of_a_gemm_that_follows_only_what_is_not_made_yet_must_come_down() -> None:
    """One device, 10:1: the first gemm at its own bound, the second once its rows are down and its results up."""
    first, second = chained(make_gemm(300, 40, 500, name="x0"), make_gemm(300, 800, 40, name="x1", level=2))
    found, some = bound(graph_of(first, second), fleet()), fleet()
    alone = gemm_bound(Shape.of(first), Rates.of(some), some.server, scheduler_seconds=0.0)[0]
    assert found.by_gemm["x0"] == pytest.approx(alone)
    assert found.by_gemm["x1"] == pytest.approx(300 * 800 * 4 / UP + 2 * LATENCY)
    assert found.seconds == pytest.approx(found.by_gemm["x0"] + found.by_gemm["x1"])
    rows_bind = make_gemm(300, 2, 40, name="x1", level=2)
    first, second = chained(first, rows_bind)
    assert bound(graph_of(first, second), some).by_gemm["x1"] == pytest.approx(300 * 40 * 4 / DOWN + 2 * LATENCY)


def test_what_cannot_begin_before_takes_its_time_after() -> None:
    """Eight gradients of weights that wait for the same gemm share the uplinks, however many devices there are."""
    first = make_gemm(300, 40, 500, name="x0")
    later = [chained(first, make_gemm(300, 800, 40, name=f"w{n}", role="dW", level=2))[1] for n in range(8)]
    found = bound(graph_of(first, *later), fleet(4))
    assert found.seconds >= found.by_gemm["x0"] + 8 * 300 * 800 * 4 / (4 * UP)


def test_latency_is_waited_for_once_by_whoever_follows() -> None:
    def seconds(latency: float) -> float:
        return bound(
            graph_of(*chained(*(make_gemm(30, 30, 30, name=f"x{n}") for n in range(6)))), fleet(latency=latency)
        ).seconds

    assert seconds(1.0) == pytest.approx((2 + 5) * 2.0, rel=0.02), "twice from the begin of the step"


@given(fleets(most=6, least_memory=1e8), st.lists(st.integers(1, 600), min_size=2, max_size=5), st.booleans())
@settings(deadline=None, max_examples=40)
def test_no_step_beats_its_bound(some: Fleet, sizes: list[int], filler: bool) -> None:
    """Neither as planned nor as simulated, where nothing but links and multipliers takes time."""
    pairs = pairwise(sizes)
    parts: list[Gemm] = [make_gemm(64, n, k, name=f"x{i}", level=i + 1) for i, (k, n) in enumerate(pairs)]
    chain = chained(*parts)
    if filler:
        gradient = make_gemm(chain[0].n, 128, 64, name="w", role="dW", level=2)
        chain.append(replace(gradient, inputs=(chained(chain[0], gradient)[1].inputs[0], gradient.inputs[1])))
    made = plan(graph_of(*chain), some, min_flops=0)
    assert made.seconds >= made.bound_seconds * (1 - 1e-9)
    assert simulate(made, costs=IDEAL).seconds >= made.bound_seconds * (1 - 2e-3)
    assert all(row.seconds >= row.bound_seconds * (1 - 1e-9) for row in made.levels)

"""The bound of a step: gemms that wait for each other add up, and what cannot begin before counts from there on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.bound import gemm_bound
from cleave_dask.planning.chain import Alone, StepBound, step_bound
from cleave_dask.planning.cost import SCHEDULER_SECONDS, Rates, Shape
from cleave_dask.planning.planner import plan
from cleave_dask.simulation.measured import Costs
from cleave_dask.simulation.simulator import simulate
from tests.planning.test_overhead import chained
from tests.strategies import fleets, graph_of, make_gemm

DOWN, UP, LATENCY = 1e6, 1e5, 0.01


def fleet(count: int = 1, *, latency: float = LATENCY, server: Server | None = None) -> Fleet:
    links = Link(DOWN, latency), Link(UP, latency)
    return Fleet(server or Server(), tuple(Device(f"d{n}", 1e15, 1e12, *links) for n in range(count)))


def alone(some: Fleet) -> Alone:
    """The bounds of gemms by themselves, the scheduler left out."""

    def found(shape: Shape, kept: Sequence[bool], told: bool) -> float:
        rates = Rates.of(some).told if told else Rates.of(some)
        return gemm_bound(shape, rates, some.server, scheduler_seconds=0.0)[0]

    return found


def bound(graph: StepGraph, some: Fleet) -> StepBound:
    """Of a step that sends out everything."""
    return step_bound(graph, some, {gemm.name: () for gemm in graph.gemms}, alone(some), scheduler_seconds=0.0)


def test_gemms_that_wait_for_each_other_add_up() -> None:
    parts = chained(make_gemm(300, 40, 500, name="x0"), make_gemm(300, 800, 40, name="x1", level=2))
    found, by_itself = bound(graph_of(*parts), fleet()), alone(fleet())
    assert found.by_gemm == {part.name: by_itself(Shape.of(part), (), n > 0) for n, part in enumerate(parts)}
    assert found.seconds == pytest.approx(sum(found.by_gemm.values()))


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
    """Neither as planned nor as simulated, where nothing but links, multipliers and the scheduler takes time."""
    pairs = pairwise(sizes)
    parts: list[Gemm] = [make_gemm(64, n, k, name=f"x{i}", level=i + 1) for i, (k, n) in enumerate(pairs)]
    chain = chained(*parts)
    if filler:
        gradient = make_gemm(chain[0].n, 128, 64, name="w", role="dW", level=2)
        chain.append(replace(gradient, inputs=(chained(chain[0], gradient)[1].inputs[0], gradient.inputs[1])))
    made = plan(graph_of(*chain), some, min_flops=0)
    assert made.seconds >= made.bound_seconds * (1 - 1e-9)
    assert simulate(made, costs=Costs(parcel=SCHEDULER_SECONDS)).seconds >= made.bound_seconds * (1 - 2e-3)
    assert all(row.seconds >= row.bound_seconds * (1 - 1e-9) for row in made.levels)

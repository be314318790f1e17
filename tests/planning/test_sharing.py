"""Gemms of a layer on the same boxes: fewer bytes where links are even, nothing where they are not, memory kept to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.bound import gemm_bound, kept_bound
from cleave_dask.planning.cost import Rates, Shape
from cleave_dask.planning.planner import plan
from cleave_dask.planning.replanning import replan
from cleave_dask.planning.sharing import share
from cleave_dask.planning.values import Plan
from cleave_dask.simulation.simulator import simulate
from tests.strategies import fleets

MBIT = 125_000.0


def fleet(down: float, up: float, *, memory: float = 1e9, count: int = 8) -> Fleet:
    links = Link(down * MBIT, 1e-3), Link(up * MBIT, 1e-3)
    devices = tuple(Device(f"d{n}", 5e10, memory, *links) for n in range(count))
    return Fleet(Server(), devices)


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    torch.manual_seed(0)
    layers = [nn.Linear(384, 1024), nn.ReLU(), nn.Linear(1024, 384), nn.ReLU(), nn.Linear(384, 512)]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(384, 384), *layers)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layers(inputs).square().mean()
            return loss

    return capture(Stack(), torch.zeros(1024, 384))


def keeping(made: Plan) -> list[str]:
    return [name for name, tiles in made.by_gemm.items() if any(tiles.kept)]


def test_even_links_share_and_uneven_ones_do_not(graph: StepGraph) -> None:
    even, uneven = plan(graph, fleet(100, 100)), plan(graph, fleet(100, 10))
    assert {graph.gemm(name).role for name in keeping(even)} == {"dX", "dW"}
    assert not keeping(uneven)
    apart = plan(graph, fleet(100, 100), tiling="2d")
    assert not keeping(apart)
    assert even.down_bytes < 0.75 * apart.down_bytes
    assert even.seconds < apart.seconds
    assert even.bound_seconds <= even.seconds
    assert "where they are" in str(even)


def test_tiles_of_a_family_are_the_same_boxes(graph: StepGraph) -> None:
    """Whoever has a part of the forward gemm's cuboid has the same part of the cuboid of both gradients."""
    made = plan(graph, fleet(100, 100))
    for name in keeping(made):
        gemm, tiles = graph.gemm(name), made.by_gemm[name]
        assert _volume(tiles.ranges) == gemm.m * gemm.n * gemm.k
        forward = made.by_gemm[name.split(":")[0]]
        mine, theirs = ({d: _volume(t.ranges[t.owner == d]) for d in range(8)} for t in (tiles, forward))
        assert mine == theirs


def _volume(ranges: np.ndarray) -> int:
    return int((ranges[:, 1::2] - ranges[:, 0::2]).astype(np.int64).prod(axis=1).sum())


def test_simulated_bytes_are_the_planned_ones_and_time_is_near(graph: StepGraph) -> None:
    made = plan(graph, fleet(100, 100))
    trace = simulate(made)
    assert trace.columns["down_bytes"].sum() == pytest.approx(made.down_bytes, rel=1e-6)
    assert 0.75 * made.seconds < trace.seconds < 1.25 * made.seconds


def test_what_stays_fits_into_memory(graph: StepGraph) -> None:
    """With less memory fewer layers share; what a plan says that a device holds is never more than it has."""
    counts = []
    for memory in (2.5e6, 8e6, 20e6, 1e9):
        made = plan(graph, fleet(100, 100, memory=memory))
        counts.append(len(keeping(made)))
        assert max(made.peak_memory.values()) <= memory
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@given(fleets(most=9, least_memory=1e7))
@settings(deadline=None, max_examples=15)
def test_shared_plans_keep_to_their_bound(graph: StepGraph, some: Fleet) -> None:
    made = plan(graph, some)
    assert made.seconds >= made.bound_seconds * (1 - 1e-9)
    assert max(made.peak_memory[device.name] / device.memory for device in some.devices) <= 1.0


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500), fleets(most=6))
@settings(deadline=None, max_examples=40)
def test_what_is_there_already_never_raises_a_bound(m: int, n: int, k: int, some: Fleet) -> None:
    shape, rates = Shape("gemm", m, n, k, 2.0 * m * n * k, 4.0, 4.0), Rates.of(some)
    full = gemm_bound(shape, rates, some.server, scheduler_seconds=0.0)[0]
    one = kept_bound(shape, (False, True), rates, some.server)[0]
    both = kept_bound(shape, (True, True), rates, some.server)[0]
    assert both <= one * (1 + 1e-9)
    assert one <= full * 1.01  # both are found by halving intervals


def test_whoever_takes_over_a_tile_fetches_all_of_it(graph: StepGraph) -> None:
    made = plan(graph, fleet(100, 100))
    left = replace(made.fleet, devices=made.fleet.devices[1:])
    moved = replan(made, graph, left, left=["d0"])
    assert not keeping(moved)
    assert moved.by_gemm[keeping(made)[0]].values


def test_nothing_to_share_is_none(graph: StepGraph) -> None:
    assert share(graph, fleet(100, 100), {}, scheduler_seconds=0.0) is None

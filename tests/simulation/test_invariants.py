"""What holds of every simulated step, however large and whatever goes wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.fleet.churn import Churn
from cleave_dask.fleet.devices import Fleet
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.trace import HERE
from cleave_dask.simulation.measured import IDEAL, MEASURED, PLANNED
from cleave_dask.simulation.simulator import Simulator, simulate
from tests.strategies import graph_of, make_gemm


def one_gemm(m: int, n: int, k: int, devices: int, *, seed: int = 0, grid: tuple[int, int, int] | None = None) -> Plan:
    return plan(graph_of(make_gemm(m, n, k)), Fleet.sample(devices, seed), grid=grid)


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([512, 1024, 4096])] * 3),
    devices=st.integers(1, 16),
    seed=st.integers(0, 1000),
)
def test_no_step_is_below_its_bound_and_what_costs_more_takes_longer(
    sizes: tuple[int, int, int], devices: int, seed: int
) -> None:
    made = one_gemm(*sizes, devices, seed=seed)
    ideal, planned, measured = (simulate(made, costs=costs).seconds for costs in (IDEAL, PLANNED, MEASURED))
    assert ideal <= planned <= measured
    assert planned >= made.bound_seconds


@pytest.mark.parametrize("seed", range(2))
def test_each_cost_makes_a_step_longer(seed: int) -> None:
    made = one_gemm(4096, 2048, 8192, 16, seed=seed)
    base = simulate(made, costs=PLANNED).seconds
    for more in ({"level": 0.5}, {"tile": 0.05}, {"byte": 1e-6}, {"message": 1e6}, {"confirmation": 1.0}):
        assert simulate(made, costs=replace(PLANNED, **more)).seconds > base, more


def everything_is_counted(splits: tuple[int, int, int]) -> None:
    """A gemm in so many tiles, while devices leave, come back, stand still and slow down."""
    made = one_gemm(3200, 3200, 3200, 20, grid=splits)
    count = len(made.tiles)
    assert count == splits[0] * splits[1] * splits[2]
    churn = Churn.sample(made.fleet, 3600 / made.seconds, 0, seconds=made.seconds, away=made.seconds / 10)
    assert churn.count("leave") > 2
    simulator = Simulator(made, churn, costs=PLANNED)
    trace = simulator.run()
    taken = trace.where(trace.accepted)
    assert np.array_equal(np.bincount(taken["tile"], minlength=count), np.ones(count))
    travelled = taken.where(taken["device"] != HERE)
    assert 0 < len(taken) - len(travelled) < count / 4, "what lost devices had in flight is made by the server"
    assert (
        travelled["up_bytes"].sum() == taken["up_bytes"].sum() == 4 * 3200 * 3200 * splits[2] * len(travelled) // count
    )
    assert simulator.lost > 0, "nobody had anything when leaving: the test shows less than it could"
    assert trace["up_bytes"].sum() <= simulator.up_bytes
    assert trace["down_bytes"].sum() <= simulator.down_bytes * (1 + 1e-6)
    assert trace.seconds >= made.bound_seconds


def test_every_tile_is_done_once_and_every_byte_counted() -> None:
    everything_is_counted((40, 40, 20))


@pytest.mark.parametrize("seed", range(3))
def test_under_churn_each_tile_is_accepted_once(seed: int) -> None:
    """Also where a device falls silent whose parcel is half in, and which is then shared out tile by tile."""
    fleet = Fleet.sample(40, seed=3)
    graph = graph_of(make_gemm(2048, 4096, 1024, name="a"), make_gemm(2048, 1024, 4096, name="b"))
    made = plan(graph, fleet)
    trace = simulate(made, Churn.sample(fleet, 1000, seed))
    accepted = trace.where(trace["outcome"] == "accepted")
    assert len(accepted) == len(made.tiles)
    assert len(set(zip(accepted["gemm"].tolist(), accepted["tile"].tolist(), strict=True))) == len(made.tiles)

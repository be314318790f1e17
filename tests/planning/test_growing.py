"""Growing order: what the formulas say is what tiles take, one after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Fleet
from cleave_dask.planning.capacity import causal
from cleave_dask.planning.cost import IN_FLIGHT
from cleave_dask.planning.growing import box_seconds, fewest_slices, growing_order, slice_edges, square_seconds
from cleave_dask.planning.planner import plan
from cleave_dask.simulation.simulator import Simulator
from tests.strategies import graph_of, make_gemm

ratios = st.floats(0.05, 20.0)


def square(count: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [[i, i + 1, j, j + 1, 0, 1] for i in range(count) for j in range(count)]
    return np.array(rows, dtype=np.int64), np.zeros(count * count, dtype=np.int64)


def played(down: float, work: float, edges: np.ndarray, count: int) -> float:
    """A square box, tile after tile: its slices come down as they are needed, its results go up."""
    ranges, owner = square(count)
    order, _ = growing_order(ranges, owner)
    size, here = np.diff(edges[:, : count + 1]), [set(), set()]
    arrived = sent = 0.0
    for place in ranges[order][:, [0, 2]].tolist():
        for side in (0, 1):
            if place[side] not in here[side]:
                here[side].add(place[side])
                arrived += down / 2 * size[side, place[side]]
        sent = max(sent, arrived) + work * size[0, place[0]] * size[1, place[1]]
    return sent


@given(ratios, st.integers(1, 12))
def test_the_table_is_what_tiles_take(ratio: float, slices: int) -> None:
    edges = slice_edges(np.array([ratio]), np.array([slices]))[0]
    expected = square_seconds(np.ones(1), np.array([ratio]), np.array([slices]))[0]
    assert played(1.0, ratio, edges, slices) == pytest.approx(expected, rel=0.03)


@given(ratios, st.integers(2, 12))
def test_more_slices_are_never_slower_and_never_beat_endlessly_many(ratio: float, slices: int) -> None:
    ones, work = np.ones(1), np.array([ratio])
    fewer, more = (square_seconds(ones, work, np.array([count]))[0] for count in (slices - 1, slices))
    endless = ratio + 1 / (4 * ratio) if ratio >= 0.5 else 1.0
    assert fewer >= more * (1 - 1e-3)
    assert more >= endless * (1 - 1e-3)
    few = fewest_slices(work, np.array([slices]), 0.01)
    assert 1 <= few[0] <= slices
    assert square_seconds(ones, work, few)[0] <= 1.01 * more * (1 + 1e-9)


def test_five_slices_are_within_nine_percent_of_endlessly_many() -> None:
    work = np.linspace(0.1, 5, 50)
    endless = np.where(work >= 0.5, work + 0.25 / work, 1.0)
    assert (square_seconds(np.ones(50), work, np.full(50, 5)) <= 1.09 * endless).all()


@given(st.floats(0.1, 3.0), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_an_oblong_box_is_never_faster_than_its_stages(rows: float, cols: float, work: float) -> None:
    found = box_seconds(np.array([rows]), np.array([cols]), np.array([work]), np.array([12]))[0]
    longer = max(rows, cols)
    exact = work + rows * cols / work if work >= longer else rows + cols
    assert exact * (1 - 1e-3) <= found <= 1.05 * exact + 1e-9


def test_a_square_grows_from_its_corner() -> None:
    order, turn = growing_order(*square(3))
    tiles = [divmod(number, 3) for number in order.tolist()]
    assert [max(tile) for tile in tiles] == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert turn.tolist() == [0] * 9


@given(st.floats(1e2, 1e6), st.floats(1e2, 1e6), st.integers(1, 10_000))
def test_no_box_in_growing_order_beats_the_causal_bound(received: float, sent: float, depth: int) -> None:
    """The best box in a time: x of the downlink and y of the uplink, x^2 = 4 y (1 - y), as deep as may be."""
    y = np.linspace(0.34, 1.0, 200)
    side = np.sqrt(y * sent)
    deep = np.minimum(depth, np.minimum(1.0, 2.0 * np.sqrt(y * (1 - y))) * received / (2.0 * side))
    reached = float((side**2 * deep)[y >= 0.5].max())
    bound = float(causal(np.array([received]), np.array([sent]), depth)[0])
    assert reached <= bound * (1 + 1e-9)
    assert reached >= 0.85 * bound


@pytest.mark.parametrize("size", [(16384, 4096, 2048), (4096, 2048, 8192), (2048, 2048, 32768)])
@pytest.mark.parametrize("count", [8, 64])
def test_a_gemm_takes_as_long_on_the_simulator_as_planned(count: int, size: tuple[int, int, int]) -> None:
    graph, fleet = graph_of(make_gemm(*size)), Fleet.sample(count, seed=1)
    made = plan(graph, fleet)
    found = Simulator(made).run()
    assert 0.95 <= found.seconds / made.seconds <= 1.10
    assert len(made.by_gemm["g"].parcels()) <= IN_FLIGHT * count

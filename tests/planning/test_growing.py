"""Growing order: what the formulas say is what tiles take, one after another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.capacity import causal
from cleave_dask.planning.cost import IN_FLIGHT, Rates, Shape
from cleave_dask.planning.growing import (
    MOST_STRIPS,
    box_seconds,
    fewest_strips,
    growing_order,
    square_seconds,
    strip_edges,
)
from cleave_dask.planning.planner import plan
from cleave_dask.planning.slices import newly
from cleave_dask.planning.tiling import tile_gemm
from cleave_dask.simulation.measured import PLANNED
from cleave_dask.simulation.simulator import Simulator
from tests.strategies import graph_of, make_gemm

ratios = st.floats(0.05, 20.0)
GRAIN = 1e-4


def square(count: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [[i, i + 1, j, j + 1, 0, 1] for i in range(count) for j in range(count)]
    return np.array(rows, dtype=np.int64), np.zeros(count * count, dtype=np.int64)


def strips_of(rows: float, cols: float, work: float, lesser: float, count: int) -> np.ndarray:
    """The strips of one box as tiles of whole grains, in the order that they were made."""
    down, across, longer, less, grain = (np.array([value]) for value in (rows, cols, work, lesser, GRAIN))
    reached = strip_edges(down, across, longer, less, np.array([count]), grain)
    edges = np.rint(reached[0] / GRAIN).astype(np.int64)
    tiles = []
    for (x0, y0), (x1, y1) in pairwise(edges.T.tolist()):
        if x1 > x0 or y1 > y0:
            tiles.append([x0 if x1 > x0 else 0, x1, y0 if y1 > y0 else 0, y1, 0, 1])
    return np.array(tiles, dtype=np.int64)


def played(tiles: np.ndarray, work: float, lesser: float) -> float:
    """A box, tile after tile: what is new of its slices comes down, then it passes the two stages behind."""
    area = float(tiles[:, 1].max() * tiles[:, 3].max())
    group = np.zeros(len(tiles), dtype=np.int64)
    fresh = newly(group, tiles[:, 0], tiles[:, 1]) + newly(group, tiles[:, 2], tiles[:, 3])
    arrived = multiplied = sent = 0.0
    for down, (r0, r1, c0, c1, _, _) in zip((fresh * GRAIN).tolist(), tiles.tolist(), strict=True):
        part = (r1 - r0) * (c1 - c0) / area
        arrived += down
        multiplied = max(multiplied, arrived) + lesser * part
        sent = max(sent, multiplied) + work * part
    return sent


@given(ratios, st.integers(1, MOST_STRIPS))
def test_the_table_is_what_strips_take(ratio: float, strips: int) -> None:
    expected = square_seconds(np.ones(1), np.array([ratio]), np.array([strips]))[0]
    assert played(strips_of(0.5, 0.5, ratio, 0.0, strips), ratio, 0.0) == pytest.approx(expected, rel=0.03)


@given(*[st.floats(0.05, 2.0)] * 4, st.integers(1, MOST_STRIPS))
def test_strips_fill_the_box_and_their_order_is_known_from_where_they_lie(
    rows: float, cols: float, work: float, part: float, count: int
) -> None:
    tiles = strips_of(rows, cols, work, min(part, 1.0) * work, count)
    assert len(tiles) <= count
    size = np.diff(tiles.reshape(-1, 3, 2), axis=2)
    assert size.prod(axis=1).sum() == tiles[:, 1].max() * tiles[:, 3].max()
    order, _ = growing_order(tiles, np.zeros(len(tiles), dtype=np.int64))
    assert order.tolist() == list(range(len(tiles)))
    assert played(tiles, work, min(part, 1.0) * work) <= (rows + cols + work * (1 + min(part, 1.0))) * (1 + 1e-2)


@given(ratios, st.integers(2, MOST_STRIPS))
def test_more_strips_are_never_slower_and_never_beat_endlessly_many(ratio: float, strips: int) -> None:
    ones, work = np.ones(1), np.array([ratio])
    fewer, more = (square_seconds(ones, work, np.array([count]))[0] for count in (strips - 1, strips))
    endless = ratio + 1 / (4 * ratio) if ratio >= 0.5 else 1.0
    assert fewer >= more * (1 - 1e-3)
    assert more >= endless * (1 - 1e-3)
    few = fewest_strips(ones, work, np.zeros(1), np.array([strips]), 0.01)
    assert 1 <= few[0] <= strips
    assert square_seconds(ones, work, few)[0] <= more + 0.01 * (strips - few[0]) + 1e-9


def test_nine_strips_are_within_seven_percent_of_endlessly_many() -> None:
    work = np.linspace(0.1, 5, 50)
    endless = np.where(work >= 0.5, work + 0.25 / work, 1.0)
    assert (square_seconds(np.ones(50), work, np.full(50, 9)) <= 1.07 * endless).all()


@given(st.floats(0.1, 3.0), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_an_oblong_box_is_never_faster_than_its_stages(rows: float, cols: float, work: float) -> None:
    found = box_seconds(np.array([rows]), np.array([cols]), np.array([work]), np.array([MOST_STRIPS]))[0]
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
    found = Simulator(made, costs=PLANNED).run()
    assert 0.95 * made.seconds <= found.seconds <= 1.12 * made.seconds
    assert len(made.by_gemm["g"].parcels()) <= IN_FLIGHT * count


def test_a_box_that_outgrows_memory_grows_as_far_as_it_fits_and_then_streams() -> None:
    """Every operand comes once all the same, and the first results go up long before a whole side has come down."""
    link = Link(1e6, 0.0)
    device = Device("d", 1e15, 14e6, link, link)
    shape = Shape("gemm", 3000, 1500, 1000, 2.0 * 3000 * 1500 * 1000, 2, 2)
    rates = Rates.of(Fleet(Server(), (device,)))
    found = tile_gemm(shape, rates, Server(), scheduler_seconds=0.0)
    assert found.memory.max() <= device.memory
    assert found.down_bytes == (3000 + 1500) * 1000 * 2 > device.memory / 2
    order, _ = growing_order(found.ranges, found.owner)
    tiles = found.ranges[order]
    assert (tiles[0, [1, 3]] < 1500).all()
    reached = np.maximum.accumulate(tiles[:, [1, 3]], axis=0)
    streaming = (tiles[:, 2] == 0) & (tiles[:, 3] == 1500)  # across all columns
    assert streaming.sum() > 4
    assert (reached[1:][streaming[1:]][:, 1] == 1500).all()
    assert (np.diff(tiles[streaming][:, 0]) > 0).all()
    streamed = 1500 * 1000 * 2 / 1e6 + 3000 * 1500 * 2 / 1e6  # one side first, then all that goes up
    assert found.seconds < 0.95 * streamed

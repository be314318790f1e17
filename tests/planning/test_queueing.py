"""Whole cells in the scheduler's slots: what is promised is kept, and little is lost."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.planning.queueing import Cells, queued

pytestmark = pytest.mark.unit

SLOT = 0.05
seconds = st.floats(0.02, 1.0)
devices = st.lists(st.tuples(st.floats(0.1, 1.0), seconds, seconds, st.integers(1, 6)), min_size=1, max_size=5)


def columns(rows: list[tuple[float, float, float, int]]) -> tuple[np.ndarray, Cells]:
    left, busiest, others, tiles = np.array(rows).T
    return left, Cells(busiest, others, tiles)


@given(devices)
def test_every_device_does_its_cells_in_the_time_that_its_slot_leaves(
    rows: list[tuple[float, float, float, int]],
) -> None:
    left, cost = columns(rows)
    order, cells = queued(left, cost, SLOT)
    assert len(set(order.tolist())) == len(order)
    assert (cells > 0).all()
    slots = SLOT * np.arange(1, len(order) + 1)
    needs = cells * cost.busiest[order] + cost.others[order] * np.maximum(1.0, cells / cost.tiles[order])
    assert (needs + slots <= left[order] + 1e-6).all()


@given(devices)
def test_no_order_of_the_devices_does_many_more(rows: list[tuple[float, float, float, int]]) -> None:
    left, cost = columns(rows)
    best = 0
    for order in permutations(range(len(rows))):
        slots = np.empty(len(rows))
        slots[list(order)] = SLOT * np.arange(1, len(rows) + 1)
        best = max(best, int(cost.within(left - slots).sum()))
    _, cells = queued(left, cost, SLOT)
    assert best - 2 <= cells.sum() <= best


def test_who_could_begin_later_is_behind_who_could_not() -> None:
    cost = Cells(np.array([0.4, 0.45]), np.array([0.0, 0.0]), np.array([np.inf, np.inf]))
    order, cells = queued(np.array([1.0, 0.96]), cost, SLOT)  # 2.375 and 2.02 cells at once
    assert (order.tolist(), cells.tolist()) == ([1, 0], [2, 2])


def test_devices_that_take_years_need_no_list_of_all_their_slots() -> None:
    cost = Cells(np.array([1e7, 2e7]), np.array([1e6, 1e6]), np.array([9.0, 9.0]))
    order, cells = queued(np.array([1e8, 1e8]), cost, 1e-9)
    assert sorted(zip(order.tolist(), cells.tolist(), strict=True)) == [(0, 9), (1, 4)]

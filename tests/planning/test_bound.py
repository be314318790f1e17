"""Bounds: no plan beats them, brute force over all tilings of tiny gemms included."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.bound import gemm_bound
from cleave_dask.planning.capacity import lines, most
from cleave_dask.planning.cost import Rates, Shape
from cleave_dask.planning.layout import lay_out
from cleave_dask.planning.tiling import tile_gemm
from tests.strategies import fleets


def shape(m: int, n: int, k: int, width: int = 4) -> Shape:
    return Shape("gemm", m, n, k, 2.0 * m * n * k, width, width)


@given(fleets(most=4, least_memory=1e8), st.tuples(*[st.integers(1, 4)] * 3), st.sampled_from([0.0, 5e-4]))
@settings(deadline=None)
def test_no_assignment_of_cubes_beats_the_bound(fleet: Fleet, size: tuple[int, int, int], slot: float) -> None:
    """A device may take any set of multiplications: whatever random sets are drawn, none is faster than the bound."""
    what, rates = shape(*(64 * extent for extent in size)), Rates.of(fleet)
    bound, _ = gemm_bound(what, rates, fleet.server, scheduler_seconds=slot)
    cells = np.array(list(product(*(range(extent) for extent in size))))
    chance = np.random.default_rng(len(cells))
    for _ in range(20):
        owner = chance.integers(0, len(fleet), len(cells))
        ranges = np.stack([cells * 64, (cells + 1) * 64], axis=2).reshape(len(cells), 6)
        found = lay_out(what, ranges, owner, rates, fleet.server, scheduler_seconds=slot)
        assert found.seconds >= bound * (1 - 1e-9)


@given(fleets(most=6, least_memory=1e7), st.tuples(*[st.integers(1, 3000)] * 3), st.sampled_from([0.0, 5e-4]))
@settings(deadline=None, max_examples=60)
def test_no_plan_beats_its_bound(fleet: Fleet, size: tuple[int, int, int], slot: float) -> None:
    what, rates = shape(*size), Rates.of(fleet)
    bound, _ = gemm_bound(what, rates, fleet.server, scheduler_seconds=slot)
    boxes, _ = gemm_bound(what, rates, fleet.server, boxes=True, scheduler_seconds=slot)
    found = tile_gemm(what, rates, fleet.server, scheduler_seconds=slot)
    assert bound * (1 - 2e-3) <= boxes <= found.seconds * (1 + 1e-9)
    assert found.seconds >= bound * (1 - 1e-9)
    assert (found.memory <= rates.memory[found.devices]).all()


@given(
    st.tuples(*[st.integers(1, 40)] * 3),
    st.tuples(*[st.integers(1, 500)] * 3),
    fleets(most=1, least_memory=1e10),
)
def test_capacity_holds_for_every_cuboid(box: tuple[int, int, int], size: tuple[int, int, int], fleet: Fleet) -> None:
    m, n, k = (min(extent, whole) for extent, whole in zip(box, size, strict=True))
    what, rates = shape(*size), Rates.of(fleet)
    down = (m + n) * k * 4 / rates.down
    compute, up = 2.0 * m * n * k / rates.flops, m * n * 4 / rates.up
    grown = np.where(down <= 2 * up, up + down**2 / (4 * up), down)  # endlessly many tiles, in growing order
    together = np.maximum(grown, compute)
    assert most(what, rates, together)[0][0] >= m * n * k * (1 - 1e-9)
    assert most(what, rates, together, boxes=True)[0][0] >= m * n * k * (1 - 1e-9)
    whole = m * n if k == what.k else m * n / 2
    for alpha in (0.2, 0.55, 0.85, 1.0):
        booked = alpha * m * n * k / what.k + (1 - alpha) * whole
        assert lines(what, rates, together, alpha)[0] >= booked * (1 - 1e-9)
        assert lines(what, rates, together, alpha, boxes=True)[0] >= booked * (1 - 1e-9)


def uneven(*devices: tuple[float, float]) -> Fleet:
    made = (
        Device(f"d{n}", 1e15, 1e12, Link(down / 1e3, 0.0), Link(up / 1e3, 0.0)) for n, (down, up) in enumerate(devices)
    )
    return Fleet(Server(1e15, 1e15, 1e15, 1e15), tuple(made))


@pytest.mark.parametrize(
    "links",
    [((4e4, 2e4),), ((4e4, 2e4), (4e4, 4e3)), ((6e4, 1e4), (2e4, 5e3)), ((6e4, 1e4), (3e4, 1e4), (2e4, 5e3))],
)
@pytest.mark.parametrize("size", [(12, 12, 12), (24, 6, 12), (6, 6, 48)])
def test_plans_come_close_to_the_best_of_all_guillotine_cuts(
    links: tuple[tuple[float, float], ...], size: tuple[int, int, int]
) -> None:
    """Every way to give each of some devices one box, cut at multiples of 3, in strips of one row or column.

    Of one, two and three boxes every partition is a guillotine cut, so that these are all there are on that grid.
    """
    fleet, what = uneven(*links), shape(*size)
    rates = Rates.of(fleet)
    best = min(
        lay_out(what, np.array(ranges), np.array(owner), rates, fleet.server, scheduler_seconds=0.0).seconds
        for ranges, owner in cuts(size, len(fleet))
    )
    found = tile_gemm(what, rates, fleet.server, scheduler_seconds=0.0).seconds
    assert found <= 1.10 * best
    for boxes in (False, True):
        assert gemm_bound(what, rates, fleet.server, boxes=boxes, scheduler_seconds=0.0)[0] <= best * (1 + 1e-9)


def cuts(size: tuple[int, int, int], devices: int) -> list[tuple[list[list[int]], list[int]]]:
    """Every partition into boxes, as many as some of the devices, and every way to deal them out."""
    whole = [0, size[0], 0, size[1], 0, size[2]]
    found: list[tuple[list[list[int]], list[int]]] = []
    for count in range(1, devices + 1):
        for boxes, owner in product(_partitions(whole, count), permutations(range(devices), count)):
            found += [stripped(boxes, list(owner), axis) for axis in (0, 1)]
    return found


def _partitions(box: list[int], parts: int) -> list[list[list[int]]]:
    """A box in so many, one cut after another."""
    if parts == 1:
        return [[box]]
    found = []
    for axis in range(3):
        for edge in range(box[2 * axis] + 3, box[2 * axis + 1], 3):
            one, other = list(box), list(box)
            one[2 * axis + 1] = other[2 * axis] = edge
            for first in range(1, parts):
                sides = _partitions(one, first), _partitions(other, parts - first)
                found += [[*left, *right] for left, right in product(*sides)]
    return found


def stripped(boxes: list[list[int]], owner: list[int], axis: int) -> tuple[list[list[int]], list[int]]:
    """Boxes cut into strips of one."""
    ranges, whose = [], []
    for box, device in zip(boxes, owner, strict=True):
        for start in range(box[2 * axis], box[2 * axis + 1]):
            ranges.append([*box[: 2 * axis], start, start + 1, *box[2 * axis + 2 :]])
            whose.append(device)
    return ranges, whose

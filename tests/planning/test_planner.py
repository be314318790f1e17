"""Plans: tiles partition their gemm exactly, fit into memory, and are the same for the same input."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import Gemm, Operand, StepGraph, Value
from cleave_dask.planning.cost import AT_ONCE, tile_flops, tile_memory
from cleave_dask.planning.planner import cut, plan
from cleave_dask.planning.values import Plan

LINK = Link(1e7, 0.01)


def gemm(m: int, n: int, k: int, name: str = "g") -> Gemm:
    a, b, c = Value("a", (m, k), (k, 1), "float32"), Value("b", (k, n), (n, 1), "float32"), (m, n)
    return Gemm(
        *(name, "gemm", "forward", 1, m, n, k, 2.0 * m * n * k, "float32"),
        inputs=(Operand((a,)), Operand((b,))),
        outputs=(Value("c", c, (n, 1), "float32"),),
    )


def graph_of(*gemms: Gemm) -> StepGraph:
    return StepGraph("test", (), gemms, loss="", grads=(), buffers=(), batch="")


def fleet_of(count: int, memory: float = 1e9) -> Fleet:
    return Fleet(Server(), tuple(Device(f"d{n}", 1e10, memory, LINK, LINK) for n in range(count)))


def assert_partition(found: Plan, of: Gemm) -> None:
    filled = np.zeros((of.m, of.n, of.k), dtype=np.int8)
    for tile in found.by_gemm[of.name]:
        filled[slice(*tile.rows), slice(*tile.cols), slice(*tile.ks)] += 1
    assert (filled == 1).all()


extents = st.integers(1, 40)


@given(extents, extents, extents, st.integers(1, 9), st.one_of(st.none(), st.tuples(extents, extents, extents)))
def test_tiles_partition_the_cuboid(m: int, n: int, k: int, devices: int, grid: tuple[int, int, int] | None) -> None:
    product = gemm(m, n, k)
    found = plan(graph_of(product), fleet_of(devices), min_flops=0, grid=grid)
    assert_partition(found, product)
    assert sum(tile_flops(product, tile) for tile in found.tiles) == pytest.approx(product.flops)


@given(st.integers(8, 200), st.integers(8, 200), st.integers(8, 200), st.floats(3e3, 1e6))
def test_no_device_is_planned_beyond_its_memory(m: int, n: int, k: int, memory: float) -> None:
    product, fleet = gemm(m, n, k), fleet_of(3, memory)
    found = plan(graph_of(product), fleet, min_flops=0)
    for tile in found.tiles:
        assert AT_ONCE * tile_memory(product, tile.rows, tile.cols, tile.ks) <= memory
    assert all(peak <= memory for peak in found.peak_memory.values())
    assert found == plan(graph_of(product), fleet, min_flops=0)


@given(st.integers(1, 500), st.integers(1, 60))
def test_cuts_cover_a_length_without_gaps(length: int, parts: int) -> None:
    ranges = cut(length, parts)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(ranges))


def test_a_device_too_small_for_one_number_is_named() -> None:
    with pytest.raises(PlanError, match=r"gemm 'g' needs 48 B .* on 'd0', which has 20 B; leave that device out"):
        plan(graph_of(gemm(4, 4, 4)), fleet_of(1, memory=20), min_flops=0, tiling="even")
    with pytest.raises(PlanError, match=r"gemm 'g' of 4 x 4 x 4 need 48 B .*, and 'd0', .* has 20 B; add larger"):
        plan(graph_of(gemm(4, 4, 4)), fleet_of(1, memory=20), min_flops=0)


def test_small_gemms_stay_on_the_server() -> None:
    found = plan(graph_of(gemm(4, 4, 4, "small"), gemm(512, 512, 512, "large")), fleet_of(2), min_flops=1e6)
    assert set(found.by_gemm) == {"large"}
    assert found.devices_used == 2
    twice = graph_of(gemm(64, 64, 64), gemm(64, 64, 64, "h"))
    assert "2 tiles" in plan(twice, fleet_of(2), min_flops=0, tiling="even").why("d1")

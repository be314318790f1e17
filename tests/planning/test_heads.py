"""Heads by vocabulary: their tiles are partitions that fit and respect their bound, and are taken where cheaper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import LOGITS, Gemm, Kind, Operand, StepGraph, Value
from cleave_dask.planning.cost import AT_ONCE, tile_cost, tile_memory
from cleave_dask.planning.planner import Tiling, plan
from cleave_dask.planning.replanning import replan
from cleave_dask.simulation.simulator import simulate
from tests import models
from tests.steps import captured
from tests.strategies import fleets, graph_of


def make_head(kind: Kind, rows: int, words: int, width: int) -> Gemm:
    """One of the gemms of a head."""
    x, w = Value("x", (rows, width), (width, 1), "float32"), Value("w", (words, width), (width, 1), "float32")
    vectors = [Value(name, (rows,), (1,), "float64" if name == "t" else "float32") for name in ("t", "s", "c")]
    sums = tuple(Value(name, (rows,), (1,), "float32") for name in ("lse", "hit"))
    made = {"logit_sums": sums, "logit_dx": (replace(x, name="dx"),), "logit_dw": (replace(w, name="dw"),)}[kind]
    cuboid = {"logit_sums": (rows, words, width), "logit_dx": (rows, width, words), "logit_dw": (words, width, rows)}
    sides = [w, x] if kind == "logit_dw" else [x, w]
    inputs = [*sides, *(vectors if kind != "logit_sums" else vectors[:1])]
    flops = (2.0 if kind == "logit_sums" else 4.0) * rows * words * width
    return Gemm(
        "h",
        kind,
        "forward",
        1,
        *cuboid[kind],
        flops,
        "float32",
        inputs=tuple(Operand((value,)) for value in inputs),
        outputs=made,
    )


@given(
    kind=st.sampled_from(LOGITS),
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40)),
    fleet=fleets(most=9, least_memory=1e7),
    tiling=st.sampled_from(["3d", "2d", "even"]),
)
@settings(deadline=None, max_examples=60)
def test_every_tiling_partitions_fits_and_respects_its_bound(
    kind: Kind, sizes: tuple[int, int, int], fleet: Fleet, tiling: Tiling
) -> None:
    part = make_head(kind, *sizes)
    found = plan(graph_of(part), fleet, min_flops=0, tiling=tiling)
    filled = np.zeros((part.m, part.n, part.k), dtype=np.int8)
    for tile in found.tiles:
        filled[slice(*tile.rows), slice(*tile.cols), slice(*tile.ks)] += 1
        assert (tile.ks == (0, part.k)) if kind == "logit_sums" else (tile.cols == (0, part.n))
        device = fleet.device(tile.device or "")
        assert AT_ONCE * tile_memory(part, tile.rows, tile.cols, tile.ks) <= device.memory
        assert tile_cost(part, tile, device).seconds > 0
    assert (filled == 1).all()
    assert all(found.peak_memory[device.name] <= device.memory for device in fleet)
    assert found.bound_seconds <= found.seconds
    moved = replan(found, found.graph, fleet, left=[fleet.devices[0].name] if len(fleet) > 1 else [])
    assert len(moved.tiles) == len(found.tiles)


def fleet_of(down: float, up: float, flops: float, memory: float = 1e9) -> Fleet:
    links = Link(down, 1e-3), Link(up, 1e-3)
    return Fleet(Server(), tuple(Device(f"device-{n}", flops, memory, *links) for n in range(4)))


@pytest.fixture(scope="module")
def step() -> StepGraph:
    return captured(models.llama(tied=False), models.tokens(batch=4, length=32))


def test_it_is_taken_where_it_is_cheaper_and_only_there(step: StepGraph) -> None:
    uneven, slow = fleet_of(2e6, 2e5, 1e10), fleet_of(1e9, 1e9, 1e8)
    taken, other = (plan(step, uneven, min_flops=0, by_vocabulary=choice) for choice in (None, False))
    assert [gemm.kind for gemm in taken.graph.gemms if gemm.kind in LOGITS]
    assert taken.seconds < other.seconds
    left, other = (plan(step, slow, min_flops=0, by_vocabulary=choice) for choice in (None, True))
    assert left.graph is step
    assert left.seconds <= other.seconds
    cuboids = {gemm.name: (gemm.m, gemm.n, gemm.k) for gemm in step.gemms}
    assert {gemm.name: (gemm.m, gemm.n, gemm.k) for gemm in taken.graph.gemms} == cuboids
    assert simulate(taken).seconds > taken.bound_seconds


def test_a_step_without_a_head_is_told_so() -> None:
    part = make_head("logit_dx", 8, 8, 8)
    with pytest.raises(PlanError, match="no head"):
        plan(graph_of(part), fleet_of(1e6, 1e6, 1e9), by_vocabulary=True)
    with pytest.raises(PlanError, match="largest device"):
        plan(graph_of(make_head("logit_dx", 64, 64, 4096)), fleet_of(1e6, 1e6, 1e9, memory=1e5), min_flops=0)

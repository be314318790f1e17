"""What plans promise: how close they come to their bounds, and what they gain over simpler schemes."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.planner import measure, shapes_of, step_graph
from cleave_dask.fleet.devices import Fleet
from cleave_dask.planning.planner import plan


@pytest.mark.parametrize(
    ("model", "devices", "seed"), [("llama2-13b", 64, 11), ("llama2-70b", 64, 1), ("opt-1.3b", 1024, 13)]
)
def test_every_gemm_of_a_model_is_within_a_tenth_of_its_bound(model: str, devices: int, seed: int) -> None:
    """The bound of plans with one box for each device; `benchmarks/planner.py` has all models and fleets."""
    fleet = Fleet.sample(devices, seed)
    rows = [measure(model, shape, f"sample-{devices}", fleet) for shape in shapes_of(model)]
    ratios = {str(row["shape"]): float(str(row["to boxes"])) for row in rows}
    assert min(ratios.values()) >= 1.0
    assert max(ratios.values()) <= 1.10, ratios
    assert median(ratios.values()) <= 1.05, ratios


def test_a_step_is_much_shorter_than_with_k_never_split_or_equal_shares() -> None:
    step, home, mixed = step_graph("llama2-13b"), Fleet.load("home-1024"), Fleet.load("mixed-1024")
    assert plan(step, home, tiling="2d").seconds >= 1.8 * plan(step, home).seconds
    assert plan(step, mixed, tiling="even").seconds >= 2.0 * plan(step, mixed).seconds

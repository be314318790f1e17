"""A given grid on other devices: tiles stay as they are, and everyone who has one can hold it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import Gemm, Operand, StepGraph, Value
from cleave_dask.planning.planner import plan
from cleave_dask.planning.regridding import plan_on_grid
from cleave_dask.planning.values import Tiles


def graph(m: int = 512, n: int = 384, k: int = 256) -> StepGraph:
    a, b, c = (
        Value(name, shape, (shape[1], 1), "float32") for name, shape in (("a", (m, k)), ("b", (k, n)), ("c", (m, n)))
    )
    shape = {"m": m, "n": n, "k": k, "flops": 2.0 * m * n * k, "dtype": "float32"}
    gemm = Gemm("g", "gemm", "forward", 1, inputs=(Operand((a,)), Operand((b,))), outputs=(c,), **shape)  # type: ignore[arg-type]
    return StepGraph("test", (), (gemm,), loss="", grads=(), buffers=(), batch="")


FLEET = Fleet.sample(6, seed=1)


def test_the_same_fleet_gives_the_same_plan() -> None:
    before = plan(graph(), FLEET)
    after = plan_on_grid(graph(), FLEET, before.by_gemm)
    assert after.by_gemm == before.by_gemm
    assert after.seconds == pytest.approx(before.seconds)


def test_tiles_of_absent_devices_find_others_and_the_rest_stay() -> None:
    before = plan(graph(), FLEET)
    used = sorted({tile.device for tile in before.tiles if tile.device})
    assert len(used) > 1
    present = Fleet(FLEET.server, tuple(device for device in FLEET.devices if device.name != used[0]))
    after = plan_on_grid(graph(), present, before.by_gemm)
    assert np.array_equal(after.by_gemm["g"].ranges, before.by_gemm["g"].ranges)
    for old, new in zip(before.tiles, after.tiles, strict=True):
        assert new.device == old.device or old.device == used[0]
        assert new.device != used[0]
    memory = {device.name: device.memory for device in present.devices}
    assert all(peak <= memory[name] for name, peak in after.peak_memory.items())


def test_all_devices_may_be_others() -> None:
    before = plan(graph(), FLEET)
    others = Fleet(FLEET.server, tuple(replace(device, name=f"new-{device.name}") for device in FLEET.devices))
    after = plan_on_grid(graph(), others, before.by_gemm)
    assert after.devices_used > 1
    assert {tile.device for tile in after.tiles} <= {device.name for device in others.devices}


def test_what_does_not_fit_is_refused() -> None:
    before = plan(graph(), FLEET, grid=(1, 1, 1))
    small = Fleet(FLEET.server, tuple(replace(device, memory=1e5) for device in FLEET.devices))
    with pytest.raises(PlanError, match=r"a tile of 'g' needs .* in flight, and no device has that much; plan anew"):
        plan_on_grid(graph(), small, before.by_gemm)
    with pytest.raises(PlanError, match="1 tiles do not fill gemm 'g'; plan anew"):
        plan_on_grid(graph(m=500), FLEET, before.by_gemm)
    tiles = before.by_gemm["g"]
    with pytest.raises(PlanError, match="has no such gemm"):
        plan_on_grid(graph(), FLEET, {"h": Tiles("h", tiles.ranges, tiles.owner, tiles.names)})

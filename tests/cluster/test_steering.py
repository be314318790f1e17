"""Tiles go where the plan says, on devices that are declared to be unlike."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.cost import tile_flops
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LOOPBACK, LocalFleet
from tests import models

FAST, MEMORY = 20e9, 1e9
SLOW_LINK = Link(LOOPBACK.bandwidth / 20, LOOPBACK.latency)
FAVOURED = Device("favoured", FAST, MEMORY, LOOPBACK, LOOPBACK)
UNEVEN = {
    "speed": Fleet(Server(), (FAVOURED, Device("slow", FAST / 8, MEMORY, LOOPBACK, LOOPBACK))),
    "links": Fleet(Server(), (FAVOURED, Device("far", FAST, MEMORY, SLOW_LINK, SLOW_LINK))),
}


@pytest.mark.parametrize("unlike", UNEVEN)
def test_tile_counts_follow_the_plan(unlike: str) -> None:
    module = models.llama()
    with LocalFleet(UNEVEN[unlike]) as fleet, fleet.get_client() as client:
        every = partial(plan, min_flops=0, scheduler_seconds=0.0)
        with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client, plan=every) as trainer:
            for _ in range(3):
                trainer.step(**models.tokens(batch=16, length=32))
            planned = Counter(tile.device for tile in trainer.plan.tiles)
            done = Counter(trainer.records[-1]["tiles_of"])
            work = {gemm.name: gemm for gemm in trainer.graph.gemms}
            favoured = sum(
                tile_flops(work[tile.gemm], tile) for tile in trainer.plan.tiles if tile.device == "favoured"
            )
    assert favoured > 0.6 * trainer.graph.flops, "the plan does not see that the devices are unlike"
    assert sum(done.values()) == sum(planned.values())
    moved = sum(abs(done[str(device)] - count) for device, count in planned.items()) / 2
    assert moved <= 0.3 * sum(planned.values()), f"planned {planned}, done {done}"

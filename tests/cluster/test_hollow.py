"""A hollow fleet drives the real scheduler and the real server's bookkeeping; nothing is multiplied."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch
from distributed import Client

import cleave_dask as cd
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.wire import hollow, is_hollow, to_wire
from tests import models
from tests.waiting import until, until_tasks

DEVICES = 64


def small_fleet() -> Fleet:
    """Slow enough for a step to take some seconds, all alike so that each gets a share."""
    link = Link(2e6, 0.005)
    return Fleet(Server(), tuple(Device(f"d{number}", 1e9, 1e8, link, link) for number in range(DEVICES)))


def module_without_numbers() -> torch.nn.Module:
    with torch.device("meta"):
        return models.opt().to("meta")


def tasks_of(client: Client) -> int:
    number: int = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
    return number


def test_steps_of_a_hollow_fleet_do_all_but_the_arithmetic() -> None:
    module, batch = module_without_numbers(), models.tokens(batch=16)
    optimizer = torch.optim.AdamW(module.parameters())
    with cd.HollowFleet(small_fleet()) as fleet, fleet.get_client() as client:
        trainer = cd.Trainer(module, optimizer, client, clip_norm=1.0, plan=partial(plan, min_flops=0), replan=False)
        assert trainer.step(**batch) == 0.0
        (record,) = trainer.records
        assert record["tiles"] == len(trainer.plan.tiles)
        assert record["up_bytes"] >= trainer.plan.up_bytes
        assert record["down_bytes"] >= 0.99 * trainer.plan.down_bytes
        assert record["seconds"] >= trainer.plan.bound_seconds
        until_tasks(client, 0)

        gone = next(iter(record["tiles_of"]))
        leave_in_a_step(client, fleet, trainer, gone, batch)
        assert trainer.records[1]["tiles"] == record["tiles"]
        assert trainer.step(**batch) == 0.0
        assert trainer.records[2]["tiles"] == record["tiles"]
        assert gone not in trainer.records[2]["tiles_of"]
        rows = trainer.trace.where(slice(None)).columns["step"]
        assert len(rows) >= 3 * record["tiles"]
        until_tasks(client, 0)


def leave_in_a_step(client: Client, fleet: cd.HollowFleet, trainer: cd.Trainer, gone: str, batch: Any) -> None:
    stepping = Thread(target=lambda: trainer.step(**batch))
    stepping.start()
    until(lambda: tasks_of(client) > 0 or not stepping.is_alive(), "the step to begin")
    fleet.remove(gone)
    stepping.join(120)
    assert not stepping.is_alive(), "the step did not end without the device that left"


def test_arrays_without_numbers_are_known_by_their_strides() -> None:
    sent = to_wire(torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))
    assert sent.shape == (3, 4)
    assert sent.dtype == np.uint16
    assert is_hollow(sent)
    assert is_hollow(hollow((2, 2), "float32"))
    assert not is_hollow(to_wire(torch.zeros(1, 4).expand(3, 4)))
    assert not is_hollow(np.zeros((3, 4)))

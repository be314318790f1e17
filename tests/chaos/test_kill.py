"""Devices are killed while they work: the loss stays what it would have been, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Timer

import pytest
import torch
from distributed import Client, Scheduler

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.trace import HERE
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until, until_tasks

STEPS = 6


def train(client: Client, head: bool, *, on_step: dict[int, Timer] | None = None) -> list[float]:
    """Losses of a short run, its head by vocabulary or not; a timer may go off in the middle of a step."""
    planner = partial(plan, min_flops=0, grid=(2, 2, 2), by_vocabulary=head)
    module = models.llama()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    with Trainer(module, optimizer, client, plan=planner) as trainer:
        for step in range(STEPS):
            if on_step and step in on_step:
                on_step[step].start()
            losses.append(trainer.step(**models.tokens(seed=step)))
    return losses


@pytest.mark.parametrize("head", [False, True], ids=["logits", "by-vocabulary"])
def test_killed_devices_change_nothing_but_the_time(chaos_seed: int, head: bool) -> None:
    chance = random.Random(chaos_seed)
    with LocalFleet(4) as fleet, fleet.get_client() as client:
        calm = train(client, head)
        victims = chance.sample(sorted(fleet.pids.values()), 3)
        steps = chance.sample(range(1, STEPS), 3)
        kills = {
            step: Timer(chance.uniform(0, 0.3), os.kill, (victim, signal.SIGKILL))
            for step, victim in zip(steps, victims, strict=True)
        }
        assert train(client, head, on_step=kills) == calm
        until_tasks(client, 0)


def test_tiles_of_a_lost_device_are_dealt_to_all_others() -> None:
    """Killed in mid-step, and still planned for in the next one: other parcels, the same tiles, the same losses."""
    link = Link(bandwidth=2e6, latency=1e-3)  # slow enough that a step takes seconds, whatever else the machine does
    devices = tuple(Device(f"device-{number}", 1e10, 1e9, link, link) for number in range(4))
    batch = models.tokens(batch=24, length=32)

    def trainer_of(client: Client) -> Trainer:
        module = models.llama()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return Trainer(module, optimizer, client, plan=partial(plan, min_flops=0), replan=False)

    with LocalFleet(Fleet(Server(), devices)) as fleet, fleet.get_client() as client:
        with trainer_of(client) as calm:
            expected = [calm.step(**batch) for _ in range(3)]
        with trainer_of(client) as trainer, ThreadPoolExecutor(1) as thread:
            losses = [trainer.step(**batch)]
            step = thread.submit(trainer.step, **batch)
            until(lambda: client.run_on_scheduler(_works, name="device-3"), "the device works on the step")
            os.kill(fleet.pids["device-3"], signal.SIGKILL)
            losses += [step.result(), trainer.step(**batch)]
            assert losses == expected
            assert trainer.records[1]["tiles_of"].get(HERE, 0) > 0, "what the device had in flight the server made"
            did = trainer.records[-1]["tiles_of"]
            assert set(did) == {"device-0", "device-1", "device-2"}
            assert sum(did.values()) == len(trainer.plan.tiles)
            assert max(did.values()) < 2 * min(did.values())
        until_tasks(client, 0)


def _works(name: str, dask_scheduler: Scheduler) -> bool:
    return any(worker.processing for worker in dask_scheduler.workers.values() if worker.name == name)

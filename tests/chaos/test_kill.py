"""Devices are killed while they work: the loss stays what it would have been, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from threading import Timer

import torch
from distributed import Client

from cleave_dask.planning.planner import plan
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until_tasks

STEPS = 6


def train(client: Client, *, on_step: dict[int, Timer] | None = None) -> list[float]:
    """Losses of a short run; a timer may go off in the middle of a step."""
    module = models.llama()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    with Trainer(module, optimizer, client, plan=partial(plan, min_flops=0, grid=(2, 2, 2))) as trainer:
        for step in range(STEPS):
            if on_step and step in on_step:
                on_step[step].start()
            losses.append(trainer.step(**models.tokens(seed=step)))
    return losses


def test_killed_devices_change_nothing_but_the_time(chaos_seed: int) -> None:
    chance = random.Random(chaos_seed)
    with LocalFleet(4) as fleet, fleet.get_client() as client:
        calm = train(client)
        victims = chance.sample(sorted(fleet.pids.values()), 3)
        steps = chance.sample(range(1, STEPS), 3)
        kills = {
            step: Timer(chance.uniform(0, 0.3), os.kill, (victim, signal.SIGKILL))
            for step, victim in zip(steps, victims, strict=True)
        }
        assert train(client, on_step=kills) == calm
        until_tasks(client, 0)

"""Devices are killed, stopped, slowed and started while they work: the loss stays the same, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from distributed import Client

from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until, until_tasks

STEPS = 12


def trainer_of(client: Client) -> Trainer:
    module = models.llama()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return Trainer(module, optimizer, client, plan=partial(plan, min_flops=0, grid=(2, 2, 2)))


def train(client: Client, steps: int = STEPS) -> list[float]:
    """Losses of a short run on a fixed grid."""
    with trainer_of(client) as trainer:
        return [trainer.step(**models.tokens(seed=step)) for step in range(steps)]


def script(names: list[str], seconds: float, seed: int) -> Churn:
    """Every kind of mishap within `seconds`; one device is left alone, one never gets better."""
    chance = random.Random(seed)
    first, second, third = chance.sample(names, 3)

    def at(share: float) -> float:
        return seconds * share * chance.uniform(0.8, 1.2)

    return Churn(
        (
            Event(at(0.1), first, "stall"),
            Event(at(0.2), second, "leave"),
            Event(at(0.35), first, "resume"),
            Event(at(0.4), third, "slow", 20.0),
            Event(at(0.5), second, "join"),
            Event(at(0.7), first, "leave"),
            Event(at(0.8), first, "join"),
        )
    )


def test_churn_changes_nothing_but_the_time(chaos_seed: int) -> None:
    with LocalFleet(4) as fleet, fleet.get_client() as client:
        calm = train(client)
        churn = script(sorted(fleet.pids), 12.0, chaos_seed)
        losses = []
        with fleet.under(churn) as happened:
            while happened.total() < len(churn):
                losses.append(train(client))
        assert losses
        assert all(run == calm for run in losses)
        assert facts_of(client)["broken"] is None
        until_tasks(client, 0)


def test_a_step_waits_for_a_device_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with LocalFleet(2) as fleet, fleet.get_client() as client, ThreadPoolExecutor(1) as thread:
        calm = train(client, steps=3)
        with trainer_of(client) as trainer:
            losses = [trainer.step(**models.tokens(seed=0))]
            for pid in fleet.pids.values():
                os.kill(pid, signal.SIGKILL)
            until(lambda: not facts_of(client)["device"], "both devices are gone")
            step = thread.submit(trainer.step, **models.tokens(seed=1))
            until(lambda: "No device is left: the step waits" in caplog.text, "it says so")
            assert f"start one with `dask worker {fleet.scheduler_address} --preload" in caplog.text
            assert not step.done()
            fleet.restart("device-0")
            losses.append(step.result())
            assert "device-0 is back: the step goes on" in caplog.text
            fleet.restart("device-1")
            losses.append(trainer.step(**models.tokens(seed=2)))
    assert losses == calm

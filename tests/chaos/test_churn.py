"""Devices are killed, stopped, slowed and started while they work: the loss stays the same, bit for bit."""

from __future__ import annotations

import random
from functools import partial

import torch
from distributed import Client

from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until_tasks

STEPS = 12


def train(client: Client, steps: int = STEPS) -> list[float]:
    """Losses of a short run on a fixed grid."""
    module = models.llama()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with Trainer(module, optimizer, client, plan=partial(plan, min_flops=0, grid=(2, 2, 2))) as trainer:
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
        facts = facts_of(client)
        assert facts["broken"] is None
        assert facts["handovers"] > 0, "a stopped device was never noticed"
        until_tasks(client, 0)


def test_a_step_waits_for_a_device_and_goes_on() -> None:
    with LocalFleet(2) as fleet, fleet.get_client() as client:
        calm = train(client, steps=4)
        everyone = sorted(fleet.pids)
        churn = Churn(
            (*(Event(0.3, name, "leave") for name in everyone), *(Event(4.0, name, "join") for name in everyone))
        )
        with fleet.under(churn) as happened:
            while happened.total() < len(churn):
                assert train(client, steps=4) == calm

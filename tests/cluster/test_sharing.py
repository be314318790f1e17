"""Gemms that share operands on real devices: the same numbers, fewer bytes, and nothing lost with a device."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from threading import Timer

import torch
from torch import nn

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

LINK = Link(8e6, 1e-3)
FLEET = Fleet(Server(), tuple(Device(f"d{n}", 4e9, 1e9, LINK, LINK) for n in range(4)))
STEPS = 3


class Stack(nn.Module):
    """Layers of unlike widths, one of them of two weights with the same input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 256)
        self.gate, self.up = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).relu()
        loss: torch.Tensor = self.last(self.gate(hidden).sigmoid() * self.up(hidden)).square().mean()
        return loss


def batch(step: int) -> torch.Tensor:
    return torch.randn(512, 256, generator=torch.Generator().manual_seed(step))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def alone() -> list[float]:
    """Losses of plain torch."""
    module, losses = Stack(), []
    updates = optimizer(module)
    for step in range(STEPS):
        updates.zero_grad()
        loss = module(batch(step))
        loss.backward()
        updates.step()
        losses.append(float(loss.detach()))
    return losses


@dataclass(frozen=True)
class Run:
    """What a run on the fleet came to."""

    losses: list[float]
    plan: Plan
    down: int  # bytes, of the last step
    who: set[str]  # had tiles in the last step


def trained(victim: str | None = None) -> Run:
    """The same on a fleet; a `victim` is killed in the middle of the second step."""
    module = Stack()
    with (
        LocalFleet(FLEET) as local,
        local.get_client() as client,
        Trainer(module, optimizer(module), client, replan=False) as run,
    ):
        losses = [float(run.step(batch(0)))]
        if victim is not None:
            Timer(run.plan.seconds / 2, os.kill, (local.pids[victim], signal.SIGKILL)).start()
        losses += [float(run.step(batch(step))) for step in range(1, STEPS)]
        down = int(run.trace.of_step(STEPS).columns["down_bytes"].sum())
        return Run(losses, run.plan, down, set(run.records[-1]["tiles_of"]))


def test_shared_operands_give_torchs_losses_and_come_down_once() -> None:
    run = trained()
    kept = [name for name, tiles in run.plan.by_gemm.items() if any(tiles.kept)]
    assert {run.plan.graph.gemm(name).role for name in kept} == {"dX", "dW"}
    torch.testing.assert_close(run.losses, alone(), rtol=1e-5, atol=1e-6)
    assert 0.98 * run.plan.down_bytes < run.down < 1.05 * run.plan.down_bytes


def test_a_device_that_leaves_changes_no_loss() -> None:
    calm, churned = trained(), trained(victim="d2")
    assert churned.losses == calm.losses
    assert "d2" in calm.who
    assert "d2" not in churned.who

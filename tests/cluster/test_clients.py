"""Clients of other kinds: inside an event loop, and around a torch loop that was there before."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client
from torch import nn

import cleave_dask as cd
from cleave_dask.simulation.local import LocalFleet
from cleave_dask.views.scalars import FIGURES


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 32, generator=generator), torch.randint(0, 8, (64,), generator=generator))
        for _ in range(count)
    ]


def test_inside_an_event_loop(fleet: LocalFleet, tmp_path: Path) -> None:
    """With an asynchronous client steps are awaited, and the loop goes on meanwhile; what needs another is told so."""
    module = cd.with_loss(perceptron(), nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ones = da.ones((8, 8), chunks=4, dtype="float32")

    async def ticking(ticks: list[float]) -> None:
        while True:
            ticks.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.001)

    async def session() -> tuple[list[float], int]:
        async with Client(fleet.scheduler_address, asynchronous=True) as client:
            with pytest.raises(cd.InputError, match=r"this client is asynchronous.*use cd.AsyncTrainer"):
                cd.Trainer(module, optimizer, client)
            with pytest.raises(cd.InputError, match="this client is asynchronous"):
                cd.matmul(ones, ones, client=client)
            with pytest.raises(cd.InputError, match="this client is asynchronous"):
                cd.Fleet.from_cluster(client)
            closed = cd.AsyncTrainer(module, optimizer, client)
            with pytest.raises(cd.InputError, match="not open; use it in `async with"):
                await closed.step(*batches(1)[0])
            async with cd.AsyncTrainer(module, optimizer, client, checkpoint=tmp_path) as trainer:
                losses = [await trainer.step(*batches(1)[0])]
                ticks: list[float] = []
                other = asyncio.create_task(ticking(ticks))
                losses += [await trainer.step(*batch) for batch in batches(3)[1:]]
                other.cancel()
                assert await trainer.save() == 3
                assert await trainer.resume() == 3
                assert set(await trainer.state_dict()) == set(module.state_dict())
                assert len(trainer.trainer.records) == 3
        return losses, len(ticks)

    losses, ticks = asyncio.run(session())
    assert losses[0] == pytest.approx(module(*batches(1)[0]).item(), abs=1e-5)
    assert ticks > 5


def test_a_client_that_blocks_is_for_the_trainer_that_does(client: Client) -> None:
    module = cd.with_loss(perceptron(), nn.CrossEntropyLoss())
    with pytest.raises(cd.InputError, match="not asynchronous; give it to Trainer"):
        cd.AsyncTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client)


def test_a_loop_of_torch_moves_to_a_fleet_in_three_lines(client: Client, tmp_path: Path) -> None:
    """As docs/pytorch.md has it; the losses are those of the loop before, and so are the weights."""
    criterion, steps = nn.CrossEntropyLoss(), batches(4)
    before = perceptron()
    optimizer = torch.optim.AdamW(before.parameters(), lr=1e-2)
    expected = []
    for inputs, labels in steps:
        optimizer.zero_grad()
        loss = criterion(before(inputs), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = cd.with_loss(model, criterion)
    with cd.Trainer(wrapped, optimizer, client) as trainer:
        losses = [trainer.step(*batch) for batch in cd.track(steps, trainer, tensorboard=tmp_path)]
        wrapped.load_state_dict(trainer.state_dict())

    np.testing.assert_allclose(losses, expected, atol=1e-5)
    for name, tensor in before.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-5, rtol=1e-4)
    assert scalars(tmp_path)["train/loss"] == pytest.approx(losses)


def scalars(folder: Path) -> dict[str, list[float]]:
    """What TensorBoard itself reads from a folder."""
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder)).Reload()
    assert set(found.Tags()["scalars"]) == set(FIGURES.values())
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4]
    return {tag: [event.value for event in found.Scalars(tag)] for tag in FIGURES.values()}

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


def test_an_asynchronous_client_is_refused_with_the_remedy(fleet: LocalFleet) -> None:
    """The remedy is followed to the letter, beside the asynchronous client."""
    module = cd.with_loss(perceptron(), nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ones = da.ones((8, 8), chunks=4, dtype="float32")

    async def session() -> tuple[float, float]:
        async with Client(fleet.scheduler_address, asynchronous=True) as async_client:
            with pytest.raises(cd.InputError, match=r"asynchronous.*asyncio.to_thread\(trainer.step, batch\)"):
                cd.Trainer(module, optimizer, async_client)
            with pytest.raises(cd.InputError, match="this client is asynchronous"):
                cd.matmul(ones, ones, client=async_client)
            with pytest.raises(cd.InputError, match="this client is asynchronous"):
                cd.Fleet.from_cluster(async_client)
            with Client(async_client.scheduler.address, asynchronous=False, set_as_default=False) as client:
                trainer = await asyncio.to_thread(cd.Trainer, module, optimizer, client)
                losses = [await asyncio.to_thread(trainer.step, *batch) for batch in batches(2)]
                await asyncio.to_thread(trainer.close)
                total = await asyncio.to_thread(lambda: cd.matmul(ones, ones, client=client).sum())
                answer = await asyncio.to_thread(client.compute(total).result)
        return losses[0], float(answer)

    loss, total = asyncio.run(session())
    assert loss == pytest.approx(module(*batches(1)[0]).item(), abs=1e-5)
    assert total == 512


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

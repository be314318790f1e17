"""A head by vocabulary on real processes: loss and gradients are torch's, though no logit leaves a device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from distributed import Client

from cleave_dask.graph.ir import LOGITS
from cleave_dask.planning.planner import Grid, plan
from cleave_dask.runtime.trainer import Trainer
from tests import models
from tests.waiting import until_tasks


@pytest.mark.parametrize("grid", [None, (3, 2, 2)], ids=["shaped", "grid"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_step_equals_torch(client: Client, tied: bool, grid: Grid | None) -> None:
    module, reference, batch = models.llama(tied), models.llama(tied), models.tokens()
    batch["labels"][0, 5] = batch["labels"][1] = -100
    loss = models.loss_of(reference, batch)
    torch.autograd.backward(loss)
    before, planner = copy.deepcopy(module.state_dict()), partial(plan, min_flops=0, grid=grid, by_vocabulary=True)
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=1.0), client, plan=planner) as trainer:
        assert trainer.step(**batch) == pytest.approx(loss.item(), abs=1e-5)
        after, heads = trainer.state_dict(), {gemm.name for gemm in trainer.graph.gemms if gemm.kind in LOGITS}
        assert len(heads) == 3
        assert heads <= trainer.plan.by_gemm.keys()
        assert (trainer.records[-1]["rejected"], trainer.records[-1]["tiles"]) == (0, len(trainer.plan.tiles))
        assert all(array.shape for array in trainer.lowered.arrays.values())
    for name, tensor in reference.named_parameters():
        assert tensor.grad is not None
        torch.testing.assert_close(before[name] - after[name], tensor.grad, atol=1e-5, rtol=1e-4)
    until_tasks(client, 0)


def test_bfloat16_on_the_wire_follows_torch(client: Client) -> None:
    module, batch = models.llama(tied=False), models.tokens()
    loss = models.loss_of(models.llama(tied=False), batch).item()
    planner = partial(plan, min_flops=0, by_vocabulary=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with Trainer(module, optimizer, client, plan=planner, wire="bfloat16") as trainer:
        assert trainer.step(**batch) == pytest.approx(loss, abs=1e-2)
        assert trainer.records[-1]["rejected"] == 0

"""A step on real processes equals plain torch: loss, every gradient, and the curve of a training run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from distributed import Client
from torch import nn

from cleave_dask.errors import BatchError, InputError, StepError
from cleave_dask.planning.planner import Grid, plan
from cleave_dask.runtime.trainer import Planner, Trainer
from tests import models
from tests.graph import small_models
from tests.waiting import until_tasks

Model = Callable[[], nn.Module]
GRIDS = {"even": None, "uneven": (3, 2, 1), "split-k": (2, 1, 3)}
MODELS: dict[str, tuple[Model, models.Batch]] = {
    "opt": (models.opt, models.tokens()),
    "llama-gqa-tied": (models.llama, models.tokens()),
    "gpt2": (models.gpt2, models.tokens()),
    "mlp-batchnorm": (models.mlp, models.points()),
}


def planner(grid: Grid | None) -> Planner:
    """Send out every gemm, however small."""
    return partial(plan, min_flops=0, grid=grid)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("model", MODELS)
def test_one_step_equals_torch(client: Client, model: str, grid: Grid | None) -> None:
    build, batch = MODELS[model]
    module, reference = build(), build()
    loss = models.loss_of(reference, batch)
    torch.autograd.backward(loss)
    before = copy.deepcopy(module.state_dict())
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=1.0), client, plan=planner(grid)) as trainer:
        assert trainer.step(**batch) == pytest.approx(loss.item(), abs=1e-5)
        after = trainer.state_dict()
        assert trainer.records[-1]["tiles"] == len(trainer.plan.tiles) > 0
    for parameter, tensor in reference.named_parameters():
        assert tensor.grad is not None
        torch.testing.assert_close(before[parameter] - after[parameter], tensor.grad, atol=1e-5, rtol=1e-4)
    for name, buffer in reference.named_buffers():
        if name in after:
            torch.testing.assert_close(after[name], buffer, atol=1e-6, rtol=1e-5)
    until_tasks(client, 0)


OTHERS: dict[str, tuple[Model, models.Batch]] = {
    "bert": (small_models.bert, models.tokens()),
    "qwen2": (small_models.qwen2, models.tokens()),
    "mistral-window": (small_models.mistral, models.tokens()),
    "transformer-encoder": (partial(small_models.Encoder, dropout=0.0), small_models.classes(7, 16)),
    "checkpointed-dropout": (small_models.Checkpointed, small_models.classes(16)),
}


@pytest.mark.parametrize("model", OTHERS)
def test_architectures_that_nobody_prepared_for(client: Client, model: str) -> None:
    build, batch = OTHERS[model]
    torch.manual_seed(0)
    module = build()
    reference = copy.deepcopy(module)
    torch.manual_seed(5)
    loss = models.loss_of(reference, batch)
    torch.autograd.backward(loss)
    torch.manual_seed(5)
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=1.0), client, plan=planner((2, 2, 1))) as trainer:
        assert trainer.step(**batch) == pytest.approx(loss.item(), abs=1e-5)
        after = trainer.state_dict()
    for name, tensor in reference.named_parameters():
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.detach() - after[name], tensor.grad, atol=1e-5, rtol=1e-4)


def test_bfloat16_autocast_follows_torch(client: Client) -> None:
    module, reference = small_models.Autocast(models.llama()), small_models.Autocast(models.llama())
    batch = models.tokens()
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client, plan=planner((2, 2, 2))) as trainer:
        assert trainer.step(**batch) == pytest.approx(reference(**batch).item(), abs=2e-2)
        assert "bfloat16" in {gemm.dtype for gemm in trainer.graph.gemms}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=3e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


def test_bfloat16_on_the_wire_halves_the_bytes_and_follows_torch(client: Client) -> None:
    batch, records = models.tokens(), []
    loss = models.loss_of(models.llama(), batch).item()
    for wire in (None, "bfloat16"):
        module = models.llama()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with Trainer(module, optimizer, client, plan=planner((2, 2, 2)), wire=wire) as trainer:
            assert trainer.step(**batch) == pytest.approx(loss, abs=1e-2)
            assert {tensor.dtype for tensor in trainer.state_dict().values()} == {torch.float32}
            records.append(trainer.records[-1])
    wide, half = records
    assert half["rejected"] == 0
    assert half["loss"] != wide["loss"]
    for way in ("down_bytes", "up_bytes"):  # the logsumexp of an attention stays as it is;
        assert 0.45 < half[way] / wide[way] < 0.55, "who makes a tile differs from step to step, and so do slices"
    with pytest.raises(InputError, match="cannot travel as 'int4'"):
        Trainer(module, optimizer, client, wire="int4")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_follow_torch(client: Client, name: str) -> None:
    module, reference = models.llama(), models.llama()
    optimizer, plain = OPTIMIZERS[name](module.parameters()), OPTIMIZERS[name](reference.parameters())
    batches = [models.tokens(seed=seed % 5) for seed in range(20)]
    expected = []
    for batch in batches:
        plain.zero_grad()
        loss = models.loss_of(reference, batch)
        torch.autograd.backward(loss)
        plain.step()
        expected.append(loss.item())
    with Trainer(module, optimizer, client, plan=planner(None)) as trainer:
        losses = [trainer.step(**batch) for batch in batches]
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0]
    until_tasks(client, 0)


def test_clipping_accumulation_and_schedule_follow_torch(client: Client) -> None:
    module, reference = models.opt(), models.opt()

    def pair(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer, schedule = pair(module)
    plain, plain_schedule = pair(reference)
    batches = [models.tokens(batch=4, seed=seed) for seed in range(5)]
    expected = []
    for batch in batches:
        plain.zero_grad()
        halves = [{name: tensor.chunk(2)[half] for name, tensor in batch.items()} for half in range(2)]
        losses = [models.loss_of(reference, half) for half in halves]
        for loss in losses:
            torch.autograd.backward(loss / 2)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain_schedule.step()
        expected.append(sum(loss.item() for loss in losses) / 2)
    with Trainer(
        module, optimizer, client, schedule=schedule, clip_norm=0.5, accumulate=2, plan=planner(None)
    ) as trainer:
        assert [trainer.step(**batch) for batch in batches] == pytest.approx(expected, abs=1e-4)


def test_dropout_draws_the_same_numbers_as_torch(client: Client) -> None:
    module, reference = models.opt(dropout=0.2), models.opt(dropout=0.2)
    batch = models.tokens()
    torch.manual_seed(7)
    expected = [models.loss_of(reference, batch).item() for _ in range(2)]
    torch.manual_seed(7)
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.0), client, plan=planner(None)) as trainer:
        assert [trainer.step(**batch) for _ in range(2)] == pytest.approx(expected, abs=1e-5)


def test_a_batch_of_another_shape_is_refused_and_training_goes_on(client: Client) -> None:
    module = models.llama()
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client) as trainer:
        trainer.step(**models.tokens(length=16))
        with pytest.raises(BatchError, match="input_ids"):
            trainer.step(**models.tokens(length=12))
        trainer.step(**models.tokens(length=16))
        assert len(trainer.records) == 2


def test_a_nan_loss_leaves_the_weights_alone(client: Client) -> None:
    module = models.mlp()
    batch = models.points()
    broken = {**batch, "inputs": batch["inputs"] * float("nan")}
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client, plan=planner(None)) as trainer:
        trainer.step(**batch)
        before = trainer.state_dict()
        with pytest.raises(StepError, match="loss of step 1 is nan; the weights are unchanged"):
            trainer.step(**broken)
        after = trainer.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        trainer.step(**batch)
    until_tasks(client, 0)

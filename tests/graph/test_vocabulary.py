"""Which heads are recognised, and that their other form computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.graph.ir import LOGITS, StepGraph
from cleave_dask.graph.vocabulary import by_vocabulary
from cleave_dask.runtime.interpreter import execute
from tests import models
from tests.graph import small_models

Batch = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Head(nn.Module):
    """A layer, a head, and a loss of one's own."""

    def __init__(self, loss: Loss, *, bias: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.loss = nn.Linear(6, 8), nn.Linear(8, 11, bias=bias), loss
        self.layer.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(torch.tanh(self.layer(x))), labels)


def points() -> Batch:
    return {"x": torch.randn(9, 6), "labels": torch.tensor([0, 10, 3, -100, 5, 5, 1, -100, 2])}


KNOWN: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "llama": (lambda: models.llama(tied=False), models.tokens()),
    "llama-tied": (models.llama, models.tokens()),
    "opt": (models.opt, models.tokens()),
    "mean": (lambda: Head(cross_entropy), points()),
    "sum": (lambda: Head(lambda z, y: cross_entropy(z, y, reduction="sum")), points()),
    "each": (lambda: Head(lambda z, y: (cross_entropy(z, y, reduction="none") ** 2).sum()), points()),
    "ignoring-5": (lambda: Head(lambda z, y: cross_entropy(z, y.clamp(min=0), ignore_index=5)), points()),
    "frozen-body": (lambda: Head(cross_entropy, frozen=True), points()),
    "autocast": (lambda: small_models.Autocast(models.llama(tied=False)), models.tokens()),
}

OTHERS: dict[str, Loss] = {
    "smoothed": lambda z, y: cross_entropy(z, y, label_smoothing=0.1),
    "weighted": lambda z, y: cross_entropy(z, y, torch.arange(11.0)),
    "penalty": lambda z, y: cross_entropy(z, y) + 1e-4 * torch.logsumexp(z, 1).square().mean(),
    "likelihoods": lambda z, y: -torch.log_softmax(z, 1).mean(),
    "scaled": lambda z, y: cross_entropy(2 * z, y),
}


def executed(graph: StepGraph, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    loss, grads, _ = execute(graph, parameters, buffers, flatten_batch(graph, (), batch))
    return loss, grads


@pytest.mark.parametrize("name", KNOWN)
def test_both_forms_compute_the_same(name: str) -> None:
    build, batch = KNOWN[name]
    module = build()
    graph = capture(module, **batch)
    other = by_vocabulary(graph)
    assert other is not None
    kinds = [gemm.kind for gemm in other.gemms if gemm.kind in LOGITS]
    assert sorted(kinds) == ["logit_dw", *(["logit_dx"] if name != "frozen-body" else []), "logit_sums"]
    about: list[Any] = [
        [(gemm.name, gemm.role, gemm.level, gemm.m, gemm.n, gemm.k) for gemm in one.gemms] for one in (graph, other)
    ]
    assert sorted(about[0]) == sorted(about[1])
    assert StepGraph.from_json(other.to_json()) == other
    assert by_vocabulary(other) is None
    half = name == "autocast"
    (loss, grads), (mine, made) = (executed(one, module, batch) for one in (graph, other))
    torch.testing.assert_close(mine, loss, rtol=1e-2 if half else 1e-6, atol=1e-6)
    for parameter, grad in grads.items():
        torch.testing.assert_close(made[parameter], grad, rtol=0.1 if half else 1e-4, atol=1e-2 if half else 1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_left_alone(name: str) -> None:
    assert by_vocabulary(capture(Head(OTHERS[name]), **points())) is None


def test_a_head_with_biases_is_left_alone() -> None:
    assert by_vocabulary(capture(Head(cross_entropy, bias=True), **points())) is None


def test_a_target_out_of_range_is_an_error() -> None:
    module, batch = Head(cross_entropy), points()
    graph = by_vocabulary(capture(module, **batch))
    assert graph is not None
    for wrong in (11, -3):
        batch["labels"][2] = wrong
        with pytest.raises(IndexError, match="out of bounds"):
            executed(graph, module, batch)

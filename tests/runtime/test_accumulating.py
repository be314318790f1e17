"""Updates of several micro-batches that are interrupted: what is saved, and what is left, is the last whole update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cleave_dask.errors import StepError
from tests import models
from tests.steps import Local

BATCHES = [models.points(seed=seed) for seed in range(6)]


def local(dropout: float) -> Local:
    return Local(models.mlp(dropout), BATCHES[0], accumulate=2)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_save_between_two_micro_batches_is_that_of_the_last_update(tmp_path: Path, dropout: float) -> None:
    calm = local(dropout)
    losses = [calm.step(batch)["loss"] for batch in BATCHES]
    cut_short = local(dropout)
    for batch in BATCHES[:3]:
        cut_short.step(batch)
    cut_short.step(BATCHES[3], stop_after=2)
    cut_short.save(tmp_path)
    cut_short.die()
    resumed = local(dropout)
    resumed.restore(tmp_path)
    assert [resumed.step(batch)["loss"] for batch in BATCHES[2:]] == losses[2:]
    for name, tensor in calm.training.weights.items():
        assert torch.equal(tensor, resumed.training.weights[name]), name
    resumed.die()


def test_a_loss_that_is_no_number_undoes_the_micro_batches_before_it() -> None:
    run = local(0.5)
    random_state = run.training.random_state
    weights = {name: tensor.detach().clone() for name, tensor in run.training.weights.items()}
    run.step(BATCHES[0])
    with pytest.raises(StepError, match="the weights are unchanged"):
        run.step({**BATCHES[1], "inputs": BATCHES[1]["inputs"] * float("nan")})
    assert run.training.random_state == random_state
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.training.weights.items())


def test_nothing_is_taken_between_two_steps() -> None:
    """A copy that comes late must not begin to gather the next step's tiles."""
    run = local(0.0)
    run.step(BATCHES[0])
    with pytest.raises(StepError, match="step 0 of 'run' is over; no step is in flight"):
        run.training.wanted(0, 0, [0])

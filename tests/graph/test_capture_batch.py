from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from cleave_dask.errors import BatchError, CaptureError
from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.graph.ir import StepGraph
from tests import models
from tests.graph.small_models import Layer, square

X = torch.ones(2, 4)


def test_the_batch_may_be_nested_and_have_settings() -> None:
    def scaled(self: Any, pair: Any, *, settings: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = square(self, pair[0]) * settings["scale"] + pair[1]["shift"].sum()
        return loss

    graph = capture(Layer(scaled), (X, {"shift": torch.ones(1)}), settings={"scale": 2.0, "name": None})
    assert [entry.source for entry in graph.inputs if entry.kind == "batch"] == ["args[0][0]", "args[0][1]['shift']"]
    assert json.loads(graph.batch) == {
        "args[0][0]": "float32[2, 4]",
        "args[0][1]['shift']": "float32[1]",
        "kwargs['settings']['scale']": "2.0",
        "kwargs['settings']['name']": "None",
    }


def test_an_attention_mask_of_ones_costs_nothing() -> None:
    batch = models.tokens()
    mask = torch.ones_like(batch["input_ids"])
    graph = capture(models.llama(), attention_mask=mask, **batch)
    assert [gemm.name for gemm in graph.gemms] == [gemm.name for gemm in capture(models.llama(), **batch).gemms]
    assert flatten_batch(graph, (), batch | {"attention_mask": mask})["kwargs['attention_mask']"] is not None
    mask = mask.clone()
    mask[0, 15:] = 0
    with pytest.raises(BatchError, match=r"kwargs\['attention_mask'\] hides 2 of 51 tokens.*pack the sequences"):
        flatten_batch(graph, (), batch | {"attention_mask": mask})


@pytest.mark.parametrize("named", [True, False], ids=["named", "positional"])
def test_a_padding_mask_is_refused(named: bool) -> None:
    batch = models.tokens()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 15:] = 0
    args, kwargs = (
        ((), {"input_ids": batch["input_ids"], "attention_mask": mask}) if named else ((batch["input_ids"], mask), {})
    )
    with pytest.raises(CaptureError, match=r"hides 2 of 51 tokens.*set the labels of the padding to -100"):
        capture(models.llama(), *args, **kwargs, labels=batch["labels"])


def test_numpy_arrays_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"args\[0\] is a numpy array float32\[2, 4\].*torch\.from_numpy"):
        capture(Layer(square), X.numpy())


BATCHES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "missing": ((), {"scale": 2}, r"has no args\[0\]; the step was captured with float32\[2, 4\]: pass it"),
    "extra": ((X, X), {"scale": 2}, r"has args\[1\] = float32\[2, 4\], without which.*leave it out"),
    "shape": (
        (X[:1],),
        {"scale": 2},
        r"args\[0\] is float32\[1, 4\].*captured with float32\[2, 4\]: convert, pad or cut",
    ),
    "dtype": ((X.double(),), {"scale": 2}, r"args\[0\] is float64\[2, 4\].*captured with float32\[2, 4\]: convert"),
    "value": ((X,), {"scale": 3}, r"kwargs\['scale'\] is 3, the step was captured with 2: pass that, or capture"),
    "numpy": ((np.ones((2, 4)),), {"scale": 2}, r"args\[0\] is numpy array float64\[2, 4\]"),
}


@pytest.fixture(scope="module")
def scaled() -> StepGraph:
    return capture(Layer(lambda self, x, scale: square(self, x) * scale), X, scale=2)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_does_not_fit(name: str, scaled: StepGraph) -> None:
    args, kwargs, message = BATCHES[name]
    with pytest.raises(BatchError, match=message):
        flatten_batch(scaled, args, kwargs)


def test_a_batch_that_fits_gets_the_captured_strides(scaled: StepGraph) -> None:
    transposed = torch.arange(8.0).reshape(4, 2).t().requires_grad_()
    [tensor] = flatten_batch(scaled, (transposed,), {"scale": 2}).values()
    assert tensor.stride() == (4, 1)
    assert not tensor.requires_grad
    assert torch.equal(tensor, transposed)

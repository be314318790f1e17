"""What the server holds while a step runs."""

from __future__ import annotations

import torch
from torch import nn

from cleave_dask.graph.capture import capture
from cleave_dask.graph.keeping import kept_bytes
from tests import models


class Chain(nn.Module):
    """Two products without biases, and a sum: few enough values to count by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 8, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.second(self.first(inputs)).sum()
        return total


def test_values_are_counted_from_the_op_that_makes_them_to_the_last_that_reads_them() -> None:
    rows = 100
    weights, batch = 4 * (256 * 64 + 8 * 256), 4 * rows * 64
    hidden, gradients = 4 * rows * 256, weights
    found = kept_bytes(capture(Chain(), torch.randn(rows, 64)))
    small = 4 * (rows * 8 * 2 + 16)  # the output and its gradient, or what is left of them; the loss and its gradient
    # at the last product: the gradient of the hidden values, and both gradients of weights; hidden itself is gone
    least = weights + batch + hidden + gradients
    assert least <= found <= least + hidden + small


def test_views_cost_nothing_and_a_larger_batch_costs_more() -> None:
    sizes = [kept_bytes(capture(models.llama(), **models.tokens(batch=batch))) for batch in (2, 4, 8)]
    weights = sum(parameter.nbytes for parameter in models.llama().parameters())
    assert weights < sizes[0] < sizes[1] < sizes[2]
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert 1.9 < second / first < 2.1, "values grow with the batch, weights do not"

"""A model and its criterion as one module: the step that is captured ends in the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class WithLoss(nn.Module):
    """`criterion(model(*inputs), target)`, called with the inputs and then the target; the model is not copied."""

    def __init__(self, model: nn.Module, criterion: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, *inputs_and_target: Any) -> torch.Tensor:
        """The loss of a batch."""
        *inputs, target = inputs_and_target
        return self.criterion(self.model(*inputs), target)


def with_loss(model: nn.Module, criterion: Callable[[Any, Any], torch.Tensor]) -> WithLoss:
    """Make a module that returns its loss of one that returns predictions, as `Trainer` and `capture` want it.

    `with_loss(model, nn.CrossEntropyLoss())` is called with what the model is called with, and the target after that.
    `wrapped.load_state_dict(trainer.state_dict())` puts trained weights back into the model.
    """
    return WithLoss(model, criterion)

"""Steps by the clock, and by counters that are read before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from benchmarks.models import Llama

LEARNING_RATE = 1e-3
"""Of AdamW, which every system trains with."""

LONG = 60.0
"""Seconds of a first step that counts: what warming up takes is nothing beside it."""

Step = Callable[[dict[str, torch.Tensor]], float | None]
"""One update on the batch of all devices; the loss, as far as this process knows it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a system may be measured."""

    steps: int  # after one that warms up, if that is short
    budget: float  # seconds for them; where not even one fits, the first step is what is measured

    def affordable(self, first: float) -> int:
        """Steps to measure after a first one of so many seconds."""
        return int(min(self.steps, self.budget / max(first, 1e-9)))


@dataclass(frozen=True, slots=True)
class Timed:
    """What steps took."""

    losses: tuple[float | None, ...]  # of all steps, the first included
    seconds: tuple[float, ...]  # of those that count
    counted: tuple[float, ...]  # how far each counter went, a step
    warm: bool  # whether a first step was left out


def timed(
    step: Step,
    llama: Llama,
    effort: Effort,
    *,
    counters: Callable[[], tuple[int, ...]] = tuple,
    fence: Callable[[], None] = lambda: None,
    agree: Callable[[int], int] = lambda number: number,
) -> Timed:
    """Steps one after another; `fence` waits until everyone is there, `agree` makes everyone do as many steps."""
    losses: list[float | None] = []

    def one() -> float:
        start = perf_counter()
        losses.append(step(llama.tokens(len(losses))))
        fence()
        return perf_counter() - start

    fence()
    begun = counters()
    seconds = [one()]
    number, long = agree(effort.affordable(seconds[0])), bool(agree(int(seconds[0] >= LONG)))
    if number and not long:
        begun = counters()
        seconds = []
    seconds += [one() for _ in range(min(number, effort.steps - long))]
    counted = tuple((now - before) / len(seconds) for before, now in zip(begun, counters(), strict=True))
    return Timed(tuple(losses), tuple(seconds), counted, warm=bool(number) and not long)


def updates(module: nn.Module) -> Callable[[dict[str, torch.Tensor]], float]:
    """Forward, backward and update of a module as it is, whatever it does inside."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss: torch.Tensor = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step

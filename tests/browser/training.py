"""A training that goes on in a thread of its own while a test looks at its page."""

from __future__ import annotations

from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import Self

import torch
from distributed import Client

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.trainer import Trainer
from tests import models

LINK = Link(bandwidth=2e6, latency=0.02)
FLEET = Fleet(Server(), tuple(Device(f"device-{n}", 1e7, 1e9, LINK, LINK) for n in range(3)))
"""Slow enough that a step takes seconds on any machine, and mostly waits: something can happen in the middle of it."""


class BackgroundTraining:
    """Trains until it is told to stop; says when a step begins."""

    def __init__(self, client: Client, checkpoint: str) -> None:
        self.began = Event()  # set when a step begins; cleared by whoever waits for the next
        self.steps: list[float] = []  # seconds of each
        self._stop = Event()
        self._failed: BaseException | None = None
        self._client, self._checkpoint = client, checkpoint
        self._thread = Thread(target=self._run, name="training", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(240)
        assert not self._thread.is_alive(), "the step in flight did not end"
        if self._failed is not None and error is None:
            raise self._failed

    def _run(self) -> None:
        try:
            module = models.llama()
            optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
            planner = partial(plan, min_flops=0, grid=(2, 2, 1))
            with Trainer(module, optimizer, self._client, self._checkpoint, plan=planner, replan=False) as trainer:
                batch = models.tokens()
                while not self._stop.is_set():
                    self.began.set()
                    trainer.step(**batch)
                    self.steps.append(trainer.records[-1]["seconds"])
                trainer.save()
        except BaseException as error:
            self._failed = error

"""The trainer inside an event loop, beside an asynchronous client.

async with Client(address, asynchronous=True) as client:
async with AsyncTrainer(module, torch.optim.AdamW(module.parameters()), client) as trainer:
loss = await trainer.step(input_ids=ids, labels=ids)
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from distributed import Client

from cleave_dask.errors import InputError
from cleave_dask.runtime.cluster import check_client
from cleave_dask.runtime.trainer import Trainer


class AsyncTrainer:
    """Takes what `Trainer` takes, with an asynchronous client; what takes long is awaited.

    The work is done by a `trainer` with a client of its own, in threads: the event loop goes on during a step.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, client: Client, **options: Any
    ) -> None:
        check_client(client)
        if not client.asynchronous:
            raise InputError("this client is not asynchronous; give it to Trainer, whose calls need no await")
        scheduler: Any = client.scheduler
        self._connect = partial(
            Client, scheduler.address, security=client.security, asynchronous=False, set_as_default=False
        )
        self._build = partial(Trainer, module, optimizer, **options)
        self._open = ExitStack()
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer that does the work: its records, plan and trace."""
        if self._trainer is None:
            raise InputError("this trainer is not open; use it in `async with AsyncTrainer(...) as trainer:`")
        return self._trainer

    async def step(self, *args: Any, **kwargs: Any) -> float:
        """One optimizer update on a batch; returns the loss."""
        return await asyncio.to_thread(self.trainer.step, *args, **kwargs)

    async def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights and buffers as they are now on the server."""
        return await asyncio.to_thread(self.trainer.state_dict)

    async def save(self) -> int:
        """Write weights and optimizer state to the checkpoint; returns the step they belong to."""
        return await asyncio.to_thread(self.trainer.save)

    async def resume(self) -> int:
        """Go on from the newest whole step of the checkpoint; returns its number."""
        return await asyncio.to_thread(self.trainer.resume)

    async def __aenter__(self) -> Self:
        def begin() -> Trainer:
            with ExitStack() as opening:
                client = opening.enter_context(self._connect())
                trainer = opening.enter_context(self._build(client=client))
                self._open = opening.pop_all()
            return trainer

        self._trainer = await asyncio.to_thread(begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trainer = None
        await asyncio.to_thread(self._open.__exit__, kind, error, trace)

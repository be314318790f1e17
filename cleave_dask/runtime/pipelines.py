"""Calls to the server that follow each other over one connection, without waiting for each other's answers.

A connection for each call under way would make them share a slow link as strangers: each starts slowly, they push each
other's packets out of its queue, and what is lost there is noticed a fifth of a second later. Over one connection they
go one after another, at the speed of the link. The server answers in the order in which it was asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from distributed import Worker
from distributed.comm import Comm, CommClosedError

from cleave_dask.errors import CleaveError
from cleave_dask.planning.cost import FILLER_SHARE
from cleave_dask.runtime.gates import Gate
from cleave_dask.runtime.tiles import COMING

AT_LEAST = 2
"""Tiles that ask for operands at once, or send results, however large: one is under way while the other is answered."""


class Announced(Protocol):
    """What is called when the server says that an answer is coming, and when it is here or will not be."""

    def __call__(self, *, coming: bool) -> None:
        """From now on it is, or is not."""
        ...


class Pipeline:
    """One connection of a worker to a server, opened when it is first needed, and again after it broke."""

    def __init__(self, worker: Worker, announced: Announced | None = None) -> None:
        self.worker = worker
        self._announced = announced
        self._coming = False
        self._address = ""
        self._comm: Comm | None = None
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._asked)

    async def call(self, server: str, op: str, **message: Any) -> Any:
        """Ask; the answer, or what the server raised, or OSError if the connection breaks before."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with self._turn:  # questions go out in the order in which their answers are waited for
            comm = await self._connected(server)
            self._asked.append(answer)
            try:
                await comm.write({"op": op, "reply": True, **message}, on_error="raise")
            except BaseException:
                self.close()  # part of it may be under way
                raise
        return await answer

    def close(self, why: Exception | None = None) -> None:
        """Break the connection; whoever waits for an answer hears of it."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
            self.worker.rpc.reuse(self._address, comm)
        if self._reading is not None:
            self._reading.cancel()
        self._hear(coming=False)
        while self._asked:
            waiting = self._asked.popleft()
            if not waiting.done():
                waiting.set_exception(why or CommClosedError(f"the connection to {self._address} broke"))

    def _hear(self, *, coming: bool) -> None:
        if coming != self._coming and self._announced is not None:
            self._announced(coming=coming)
        self._coming = coming

    async def _connected(self, server: str) -> Comm:
        if self._comm is None or self._comm.closed() or server != self._address:
            self.close()
            self._comm, self._address = await self.worker.rpc.connect(server), server
            self._reading = asyncio.ensure_future(self._read(self._comm))
        return self._comm

    async def _read(self, comm: Comm) -> None:
        """Hand answers to those who wait for them, for as long as the connection lasts."""
        while True:
            told, failed = None, None
            try:
                told = await comm.read()
            except CleaveError as error:  # what the server raised, as a guarded connection tells it
                failed = error
            except Exception as error:
                if comm is self._comm:
                    self._reading = None
                    self.close(error)
                return
            self._hear(coming=told == COMING)
            if self._coming:
                continue
            answer = self._asked.popleft()
            if answer.done():
                continue  # whoever asked has been cancelled
            if failed is not None:
                answer.set_exception(failed)
            else:
                answer.set_result(told)


class Ways:
    """Two connections in one direction of a device's link: what others wait for never stands behind filler.

    Filler begins when nothing else is under way; what is under way of it when something comes has half of the link.
    """

    def __init__(self, worker: Worker) -> None:
        self._pipelines = {filler: Pipeline(worker) for filler in (False, True)}
        first = Gate(AT_LEAST, 0)
        self._gates = {False: first, True: Gate(AT_LEAST, 0, behind=first)}

    def widen(self, window: float) -> None:
        """Set how many bytes should be under way at once."""
        for filler, gate in self._gates.items():
            gate.limit = FILLER_SHARE * window if filler else window

    def hold(self) -> None:
        """Something comes that no filler should begin beside."""
        self._gates[False].hold()

    def release(self) -> None:
        """It has come."""
        self._gates[False].leave()

    def turn(self, rank: int, nbytes: float, *, filler: bool) -> AbstractAsyncContextManager[None]:
        """Wait until more may be under way, the smallest rank first."""
        return self._gates[filler].through(rank, nbytes)

    async def call(self, server: str, op: str, *, filler: bool, **message: Any) -> Any:
        """Ask, as `Pipeline.call` does."""
        return await self._pipelines[filler].call(server, op, **message)

    def close(self) -> None:
        """Break both connections."""
        for pipeline in self._pipelines.values():
            pipeline.close()

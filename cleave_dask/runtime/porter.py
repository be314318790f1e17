"""A porter: a process of the server that talks with devices, so that the one that keeps everything need not.

    python -m cleave_dask.runtime.porter HATCH LISTENING      (descriptors; the server starts it, nobody else can)

It encrypts, asks who is there, holds devices to their part and reads their tiles, with the same guard as the server,
straight into memory that the server sees; what the server answers it sends from such memory. It keeps nothing: when it
ends, connections break and are opened again. It ends when the server does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from time import time
from typing import Any

import numpy as np
from distributed.comm import Comm, tcp
from distributed.core import Server
from distributed.protocol import to_serialize
from distributed.security import Security

from cleave_dask.runtime.admission import ServerAdmission
from cleave_dask.runtime.checking import Message
from cleave_dask.runtime.conversations import WithServer
from cleave_dask.runtime.hatches import Hatch
from cleave_dask.runtime.probes import cleave_probe_down, cleave_probe_up
from cleave_dask.runtime.tiles import COMING
from cleave_dask.runtime.trays import Trays

logger = logging.getLogger(__name__)

BLOCK = 256
"""Tiles whose sizes are asked for at once."""

KNOWN = 4096
"""Blocks whose sizes are remembered at most."""


def cleave_clock() -> float:
    """Seconds on the server's clock, which is this machine's."""
    return time()


ANSWERED: dict[str, Callable[..., Any]] = {
    call.__name__: call for call in (cleave_clock, cleave_probe_down, cleave_probe_up)
}
"""What a porter answers by itself."""


class Sizes:
    """Bytes of the tiles that the server waits for, as far as it has been asked."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self._blocks: OrderedDict[tuple[str, int, int, int], list[int | None]] = OrderedDict()

    async def learn(self, run: str, step: int, job: int, tile: int) -> None:
        """Ask for the size of a tile, and of those around it, unless it is known."""
        place = run, step, job, tile // BLOCK
        if place in self._blocks:
            return
        first = place[3] * BLOCK
        sizes = await self._ask("sizes", run=run, step=step, job=job, first=first, count=BLOCK)
        if not sizes:
            return  # it is over, or nobody has ever heard of it
        for other in [other for other in self._blocks if other[0] == run and other[1] != step]:
            del self._blocks[other]  # a run has one step in flight
        self._blocks[place] = sizes
        if len(self._blocks) > KNOWN:
            self._blocks.popitem(last=False)

    def expected(self, run: str, step: int, job: int, tile: int) -> int | None:
        """Bytes of a tile; None if nobody waits for it."""
        sizes = self._blocks.get((run, step, job, tile // BLOCK), [])
        return sizes[tile % BLOCK] if tile % BLOCK < len(sizes) else None

    def forget(self) -> None:
        """Tiles may be others from now on."""
        self._blocks.clear()


class AtPorter(WithServer):
    """What a device may say to a porter: the same as to the server. Its arrays are read onto trays."""

    def __init__(self, name: str | None, sizes: Sizes, trays: Trays) -> None:
        super().__init__(name or "a device without a certificate", sizes.expected)
        self._named = name is not None
        self._sizes, self._trays = sizes, trays

    async def prepare(self, message: Any) -> None:
        """Ask the server how large the tile is that comes, unless that is known."""
        if self.greeted and isinstance(message, dict) and (told := self.call(message))["op"] == "cleave_push":
            await self._sizes.learn(told["run"], told["step"], told["job"], told["tile"])

    def room(self, nbytes: int) -> memoryview:
        """On a tray."""
        return self._trays.take(nbytes).data if nbytes else super().room(0)

    def settle(self, op: str, fields: Message) -> Message:
        """Without a certificate a device has the name that it gave first."""
        if not self._named and "device" in fields:
            self.name, self._named = str(fields["device"]), True
        return super().settle(op, fields)


class Porter:
    """Listens for devices and passes on what they say."""

    def __init__(self, hatch: Hatch, sizes: Sizes) -> None:
        self.hatch = hatch
        own = {**ANSWERED, "cleave_await": _awaiting(hatch)}
        passed_on = {op: _passing(hatch, op) for op in WithServer.calls if op not in own}
        self.server = Server({**passed_on, **own})
        self.sizes = sizes
        self.admission = ServerAdmission(partial(AtPorter, sizes=sizes, trays=hatch.trays))

    async def listen(self, address: str, security: dict[str, Any]) -> None:
        """Take connections from now on."""
        arguments = Security(**security).get_listen_args("worker") if address.startswith("tls") else {}
        await self.server.listen(address, **arguments)
        self.admission.attach(self.server, self.sizes.expected)
        await self.server
        self.hatch.tell("ready")


def _passing(hatch: Hatch, op: str) -> Callable[..., Any]:
    """What passes an operation on to the server; a function, because Dask asks for its name."""

    async def pass_on(**fields: Any) -> Any:
        answer = await hatch.ask(op, arrived=time(), **fields)
        return _sendable(answer)

    return pass_on


def _awaiting(hatch: Hatch) -> Callable[..., Any]:
    """What has a device wait for a slice, and tells it when that is coming."""
    pull = _passing(hatch, "cleave_pull")

    async def cleave_await(comm: Comm, device: str, **slice_: Any) -> Any:
        place = {name: slice_[name] for name in ("run", "step", "job", "operand")}
        await hatch.ask("published", **place, device=device)
        await comm.write(COMING)
        return await pull(**slice_)

    return cleave_await


def _sendable(answer: Any) -> Any:
    """An answer of the server, its arrays as Dask sends arrays."""
    if isinstance(answer, dict):
        return {name: _sendable(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_sendable(value) for value in answer]
    return to_serialize(answer) if isinstance(answer, np.ndarray) else answer


async def _run(end: socket.socket, listening: socket.socket) -> None:
    ended = asyncio.Event()
    sizes: Sizes | None = None

    async def hear(op: str, _: dict[str, Any]) -> None:
        if op == "forget" and sizes is not None:
            sizes.forget()

    hatch = Hatch(end, hear, ended.set)
    sizes = Sizes(hatch.ask)
    tcp.netutil.bind_sockets = lambda *_, **__: [
        listening
    ]  # the server's: connections wait in it while no porter is there
    porter = Porter(hatch, sizes)
    await porter.listen(**await hatch.ask("hello"))
    await ended.wait()
    os._exit(0)  # it keeps nothing, and nobody is left to wait for it


def main() -> None:
    """Serve until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which a porter ends with
    end, listening = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    listening.setblocking(False)
    asyncio.run(_run(end, listening))


if __name__ == "__main__":
    main()

"""The server's porters: processes that talk with devices in its place, started, fed and replaced.

The server makes the sockets on which they listen, and keeps them: while a porter that died is being replaced, devices
that connect wait in the kernel's queue, at the same address.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import dask.config
from distributed.comm.addressing import get_address_host, parse_address, unparse_host_port
from distributed.core import Server
from distributed.security import Security
from tornado.netutil import bind_sockets

from cleave_dask.runtime.hatches import Hatch

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Starts of a porter, one after another, that may fail before it is given up."""

DESCRIPTORS = 8192
"""Descriptors that a server with porters, and each of them, may have."""

_TLS = ("require_encryption", "tls_ca_file", "tls_ciphers", "tls_worker_cert", "tls_worker_key")

Desk = Mapping[str, Callable[..., Awaitable[Any]]]
"""What the server does for porters, by operation: called with the hatch, the time of arrival and the fields."""


@dataclass
class _Place:
    """Where one porter stands, and the process that stands there now."""

    socket: socket.socket
    address: str
    process: subprocess.Popen[bytes] | None = None
    hatch: Hatch | None = None
    failures: int = 0  # starts in a row that came to nothing


class Porters:
    """All porters of a server that listens already."""

    def __init__(
        self, count: int, server: Server, security: Security, desk: Desk, changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._security, self._desk, self._changed = security, desk, changed
        self._closing = False
        self._replacing: set[asyncio.Task[None]] = set()
        scheme, _ = parse_address(server.address)
        told, inner = get_address_host(server.address), get_address_host(server.listeners[0].listen_address)
        backlog = int(dask.config.get("distributed.comm.socket-backlog"))
        sockets = [bind_sockets(0, inner, backlog=backlog)[0] for _ in range(count)]
        self._places = [
            _Place(each, f"{scheme}://{unparse_host_port(told, each.getsockname()[1])}") for each in sockets
        ]

    def start(self) -> None:
        """Start them; whoever connects before they are ready waits."""
        _raise_limit()
        for place in self._places:
            self._start(place)

    @property
    def addresses(self) -> list[str]:
        """Where devices find them."""
        return [place.address for place in self._places]

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [place.process.pid for place in self._places if place.process is not None]

    def forget_sizes(self) -> None:
        """Tiles may be others from now on."""
        for place in self._places:
            if place.hatch is not None:
                place.hatch.tell("forget")

    async def close(self) -> None:
        """End them."""
        self._closing = True
        for place in self._places:
            if place.hatch is not None:
                place.hatch.close()
            place.socket.close()
        await asyncio.gather(*(_reaped(place.process, patience=2.0) for place in self._places))

    def _start(self, place: _Place) -> None:
        ours, theirs = socket.socketpair()
        descriptors = theirs.fileno(), place.socket.fileno()
        inherited = {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config)}
        place.process = subprocess.Popen(
            [sys.executable, "-m", "cleave_dask.runtime.porter", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **inherited},
        )
        theirs.close()

        async def answer(op: str, told: dict[str, Any]) -> Any:
            if op == "hello":
                return {"address": place.address, "security": {name: getattr(self._security, name) for name in _TLS}}
            if op == "ready":
                place.failures = 0
                return None
            assert place.hatch is not None
            return await self._desk[op](place.hatch, **told)

        place.failures += 1
        place.hatch = Hatch(ours, answer, lambda: self._ended(place))

    def _ended(self, place: _Place) -> None:
        if not self._closing:
            task = asyncio.get_running_loop().create_task(self._replace(place))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, place: _Place) -> None:
        """A porter has ended: another takes its place, or its devices go elsewhere if none can."""
        await _reaped(place.process, patience=0.0)
        if self._closing:
            return
        code = place.process.returncode if place.process is not None else None
        if place.failures < ATTEMPTS:
            logger.warning("The porter at %s has ended with code %s; another takes its place", place.address, code)
            try:
                self._start(place)
                return
            except OSError:
                logger.exception("No process can be started")
        logger.error(
            "The porter at %s has ended %s times before it was ready, the last time with code %s, and is given up: "
            "devices go to the others, or to the server itself; what the porter said is above",
            *(place.address, place.failures, code),
        )
        self._places.remove(place)
        place.socket.close()
        await self._changed()


def _raise_limit() -> None:
    """An array on its way costs a descriptor: have as many as this process may, within reason."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, DESCRIPTORS)
    if now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _reaped(process: subprocess.Popen[bytes] | None, *, patience: float) -> None:
    """Wait for a process that is to end, for so many seconds until it is made to."""
    if process is None:
        return
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, max(patience, 0.01))
    if process.returncode is None:
        process.kill()
        await asyncio.to_thread(process.wait)

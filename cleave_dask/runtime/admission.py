"""The guard of the scheduler and of the server: devices that connect are known, held to their part, and sent away.

Made when the preload is imported, before Dask listens; attached when Dask runs it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import Scheduler
from distributed.comm.addressing import get_address_host, parse_address
from distributed.core import Server
from tornado.ioloop import PeriodicCallback

from cleave_dask import config
from cleave_dask.runtime.conversations import Conversation, Expected, WithScheduler, WithServer
from cleave_dask.runtime.credentials import ServerFolder
from cleave_dask.runtime.guarding import Guard, install
from cleave_dask.runtime.roles import Peer

LOOK = 1.0
"""Seconds between two looks for devices that were revoked."""


class SchedulerAdmission:
    """Devices at the scheduler."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self.guard = _installed(lambda peer: WithScheduler(peer.name, self))

    def attach(self, scheduler: Scheduler) -> None:
        """Know whom devices speak of, and hear who registers."""
        require_tls(scheduler)
        self._scheduler = scheduler
        self._stock_register: Any = scheduler.handlers["register-worker"]
        scheduler.handlers["register-worker"] = self.register
        scheduler.handlers["cleave_refused"] = lambda: self.guard.refused
        _expel_now_and_then(scheduler, self.guard)

    async def register(self, comm: Any, **fields: Any) -> Any:
        """A worker registers; from then on, a device's stream is held to what devices may say.

        A device that comes back takes its own place, even if nobody has noticed yet that it was gone.
        """
        peer: Peer | None = getattr(comm, "peer", None)
        told = (fields.get("extra") or {}).get("cleave") or {}
        if peer is not None and peer.role == "device" and (before := self.address_of(peer.name)) is not None:
            await self._scheduler.remove_worker(before, stimulus_id="cleave-returned")
        if comm.conversation is None and told.get("role") == "device":
            comm.conversation = WithScheduler(fields["name"], self, streaming=True)
            comm.conversation.greeted = True
        return await self._stock_register(comm, **fields)

    # The ledger

    def address_of(self, name: str) -> str | None:
        """Where the worker of this name is, unless it is the server."""
        address: str | None = self._scheduler.aliases.get(name)
        worker = self._scheduler.workers.get(address)
        served = worker is not None and (worker.extra.get("cleave") or {}).get("role") == "server"
        return None if served else address

    def is_taken(self, address: str) -> bool:
        """Whether a worker is at this address."""
        return address in self._scheduler.workers

    def has(self, name: str, key: Any) -> bool:
        """Whether the worker of this name was given this task and has not answered."""
        task, worker = self._scheduler.tasks.get(key), self._scheduler.workers.get(self.address_of(name))
        return task is not None and worker is not None and task.processing_on is worker


class ServerAdmission:
    """Devices at the server."""

    def __init__(self, converse: Callable[[str | None], Conversation] | None = None) -> None:
        """`converse` is a porter's, for devices by the name in their certificate, and for those that have none."""
        self._expected: Expected = lambda run, step, job, tile: None
        talk = converse or (lambda name: WithServer(str(name), self._expect))
        strangers = None if converse is None else (lambda: converse(None))
        self.guard = _installed(lambda peer: talk(peer.name), strangers)

    def attach(self, worker: Server, expected: Expected) -> None:
        """Know which tiles are waited for."""
        require_tls(worker)
        self._expected = expected
        _expel_now_and_then(worker, self.guard)

    def _expect(self, run: str, step: int, job: int, tile: int) -> int | None:
        return self._expected(run, step, job, tile)


def _installed(converse: Callable[[Peer], Conversation], strangers: Callable[[], Conversation] | None = None) -> Guard:
    register = config.get("security.register")
    guard = Guard(converse, None if register is None else ServerFolder(Path(register)), strangers)
    install(guard)
    return guard


def _expel_now_and_then(server: Any, guard: Guard) -> None:
    def expel() -> None:
        guard.expel()

    looking = PeriodicCallback(expel, LOOK * 1000)
    server.periodic_callbacks["cleave-expel"] = looking
    looking.start()


def require_tls(server: Any) -> None:
    """End the process if other machines can reach it without TLS; Dask only logs what a preload raises."""
    for listener in server.listeners:
        scheme, _ = parse_address(listener.listen_address)
        if scheme in ("tls", "inproc") or config.get("security.isolated"):
            continue
        host = get_address_host(listener.listen_address)
        if scheme != "tcp" or not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise SystemExit(
                f"listening at {listener.listen_address} without TLS: whoever can reach it could run code here and on "
                "every device. Start it with `cleave serve --host ...`, which uses TLS, or listen on 127.0.0.1"
            )

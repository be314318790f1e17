"""Starting the processes of a fleet on this machine: scheduler, server, devices. Each is a stock `dask` command.

Every process writes a log of its own and ends with this one, also when this one is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Self

from dask.system import CPU_COUNT
from distributed import Client
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import ProcessInterface, SpecCluster

from cleave_dask import config
from cleave_dask.errors import ClusterError, InputError
from cleave_dask.resources import nearest, shown
from cleave_dask.runtime.credentials import ServerFolder
from cleave_dask.runtime.parent import VARIABLE
from cleave_dask.runtime.roles import Role

START_TIMEOUT = 120.0
"""Seconds within which all processes must have joined; importing torch on a busy machine takes a while."""

JOINING = 0.5
"""Seconds added to that for each of them."""

_QUIET = {
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "2s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "500ms",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}
"""Many Dask processes share this machine: monitors that cost 3 % of a core each are slowed down."""

_WATCHED = ("--preload", "cleave_dask.runtime.parent")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: the address that it listens on, and what its command is put behind."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    port: int = 0  # of the scheduler; 0: any that is free
    folder: ServerFolder | None = None  # keys and certificates for TLS; None: not encrypted

    def options(self, role: Role) -> tuple[str, ...]:
        """What `dask scheduler` and `dask worker` are told of TLS."""
        return () if self.folder is None else ("--protocol", "tls", *self.folder.files(role).options)

    @property
    def settings(self) -> dict[str, str]:
        """What scheduler and server need to know of who may connect, in their environment."""
        if self.folder is None:
            return {"DASK_CLEAVE__SECURITY__ISOLATED": "True"} if self.prefix else {}  # a namespace of its own
        return {"DASK_CLEAVE__SECURITY__REGISTER": str(self.folder.path.absolute())}


HERE = Place()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to start: options of `dask worker`, threads of its kernel, settings in its environment.

    Or a program that holds many light workers: its module and arguments, after the scheduler's address.
    """

    options: tuple[str, ...]
    threads: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    place: Place = HERE
    holds: tuple[str, ...] = ()  # names of the workers that join from such a program


class DaskProcess(ProcessInterface):
    """A process that runs a Python module, such as `dask`, with its own log file."""

    def __init__(
        self, name: str, folder: str, place: Place, arguments: Iterable[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.name = name
        self._prefix = place.prefix
        self.log = Path(folder) / f"{name}.log"
        self._arguments = tuple(arguments)
        self._environment = environment
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it joins in its own time."""
        environment = {**os.environ, **_QUIET, **self._environment, VARIABLE: str(os.getpid())}
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(*self._prefix, sys.executable, "-m", *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others
            )
        await super().start()

    async def close(self) -> None:
        """End the process: politely first, since a stopped or busy one may not listen."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):  # it may end by itself at any moment
                self.process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(self.process.wait(), 2)
                except TimeoutError:
                    self.process.kill()
                    await self.process.wait()
        await super().close()

    @property
    def dead(self) -> bool:
        """Whether it was started and has ended."""
        return self.process is not None and self.process.returncode is not None

    def explain(self) -> str:
        """The end of its log."""
        return f"{self.name}: " + "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class SchedulerProcess(DaskProcess):
    """The scheduler; it has started once it has written down where it listens."""

    def __init__(self, folder: str, place: Place, dashboard: str) -> None:
        self._file = Path(folder) / "scheduler.json"
        arguments = (
            *(
                "dask",
                "scheduler",
                "--host",
                place.host,
                "--port",
                str(place.port),
                "--scheduler-file",
                str(self._file),
            ),
            *("--dashboard-address", dashboard, *_WATCHED, "--preload", "cleave_dask.runtime.scheduler"),
            *("--preload", "cleave_dask.views.dashboard", *place.options("scheduler")),
        )
        super().__init__("scheduler", folder, place, arguments, place.settings)

    async def start(self) -> None:
        """Start the process and wait for its address."""
        await super().start()
        while True:
            try:
                self.address = json.loads(self._file.read_text())["address"]
                return
            except (OSError, ValueError):
                if self.dead:
                    raise ClusterError(f"the scheduler did not start; its log ends with\n{self.explain()}") from None
                await asyncio.sleep(0.05)


class WorkerProcess(DaskProcess):
    """The server or a device: a stock Dask worker without a nanny."""

    def __init__(self, scheduler: str, *, name: str, folder: str, spec: WorkerSpec) -> None:
        where = ("--name", name, "--host", spec.place.host, "--local-directory", folder)
        arguments = ("dask", "worker", scheduler, "--no-nanny", "--no-dashboard", *where, *_WATCHED, *spec.options)
        environment = {**dict.fromkeys(_THREADS, str(spec.threads)), **spec.settings}
        super().__init__(name, folder, spec.place, arguments, environment)


class HostProcess(DaskProcess):
    """A program that holds many light workers."""

    def __init__(self, scheduler: str, *, name: str, folder: str, spec: WorkerSpec) -> None:
        module, *arguments = spec.options
        super().__init__(name, folder, spec.place, (module, scheduler, *arguments), dict(spec.settings))


class ServedCluster(SpecCluster):
    """A scheduler and a server on this machine, in one place, and workers by name."""

    preload = "cleave_dask.runtime.server"  # what makes a worker the server

    def __init__(
        self,
        workers: Mapping[str, WorkerSpec] | None = None,
        *,
        place: Place = HERE,
        dashboard: str = "127.0.0.1:0",
        name: str = "ServedCluster",
        processes: int | None = None,
    ) -> None:
        """`processes` of the server; None: as many as the settings say."""
        count = config.whole("server.processes") if processes is None else processes
        if count < 1:
            raise InputError(f"a server of {count} processes; give 1 or more")
        self.folder = mkdtemp(prefix="cleave-")  # logs, until it is closed
        self.server_name = str(config.get("server.name"))
        options = ("--nthreads", "1", "--memory-limit", "0", "--preload", self.preload)
        threads = os.cpu_count() or 1
        settings = {**place.settings, "DASK_CLEAVE__SERVER__PROCESSES": str(count)}
        if workers:  # which share this machine with the server
            settings["DASK_CLEAVE__SERVER__SHARED_CORES"] = str(CPU_COUNT)
        server = WorkerSpec((*options, *place.options("server")), threads, settings=settings, place=place)
        everyone = {self.server_name: server, **(workers or {})}
        address = {"folder": self.folder, "place": place, "dashboard": dashboard}
        super().__init__(
            workers={
                worker: {
                    "cls": HostProcess if spec.holds else WorkerProcess,
                    "options": {"name": worker, "folder": self.folder, "spec": spec},
                }
                for worker, spec in everyone.items()
            },
            scheduler={"cls": SchedulerProcess, "options": address},
            security=place.folder.files("client").security() if place.folder else None,
            name=name,
            silence_logs=False,
        )
        try:
            self.sync(self._joined, {name for worker, spec in everyone.items() for name in spec.holds or (worker,)})
        except BaseException:
            self.close()
            raise

    async def _joined(self, wanted: set[str]) -> None:
        """Wait until everyone has joined; a process that died on the way is shown with its log."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT + JOINING * len(wanted)
        while True:
            comm: Any = self.scheduler_comm
            info = await comm.identity()
            missing = wanted - {str(worker["name"]) for worker in info["workers"].values()}
            if not missing:
                return
            dead = [worker for worker in self.workers.values() if worker.dead]
            if dead or asyncio.get_running_loop().time() > deadline:
                logs = "\n".join(worker.explain() for worker in dead or self.workers.values())
                raise ClusterError(f"{len(missing)} of {len(wanted)} processes did not join:\n{logs}")
            await asyncio.sleep(0.05)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        """A worker came or went. Dask would end its process a while later, even one that is just starting again."""
        Cluster._update_worker_status(self, op, msg)

    def __enter__(self) -> Self:
        self.check_open()
        super().__enter__()
        return self

    def check_open(self) -> None:
        """Raise if this cluster is closed: its processes have ended and cannot be started again."""
        if self.status in (Status.closing, Status.closed):
            kind = type(self).__name__
            raise ClusterError(f"this {kind} is closed and its processes have ended; start another: {kind}(...)")

    def get_client(self) -> Client:
        """A client of this cluster."""
        self.check_open()
        return Client(self)

    def restart_worker(self, name: str) -> None:
        """Put a new process in the place of one that has ended."""
        self.check_open()
        self.sync(self._restart, name)

    async def _restart(self, name: str) -> None:
        ended = self.workers.get(name)
        if ended is not None:
            await ended.close()
            self.workers.pop(name, None)
        await self._correct_state()

    async def _close(self) -> None:
        await super()._close()
        rmtree(self.folder, ignore_errors=True)

    def pid(self, name: str) -> int:
        """Process id of a worker of this cluster."""
        self.check_open()
        if name not in self.workers:
            raise InputError(f"no process of this cluster is called {shown(name)}; {nearest(str(name), self.workers)}")
        pid: int = self.workers[name].process.pid
        return pid

    @property
    def scheduler_pid(self) -> int:
        """Process id of the scheduler."""
        self.check_open()
        scheduler: Any = self.scheduler
        pid: int = scheduler.process.pid
        return pid

    @property
    def server_pid(self) -> int:
        """Process id of the server."""
        return self.pid(self.server_name)

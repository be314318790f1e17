"""A cluster over TLS, with processes that join it as strangers would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import psutil
import torch
from distributed import Client

from cleave_dask.runtime.credentials import DeviceFolder, Files, ServerFolder
from cleave_dask.runtime.enrolment import Enrolment, enrol
from cleave_dask.runtime.processes import Place, ServedCluster
from cleave_dask.runtime.trainer import Trainer
from tests import models
from tests.waiting import until

FIGURES = {"FLOPS": "1e9", "DOWN": "1e8", "UP": "1e8", "LATENCY": "1e-3"}
"""What a device says of itself, so that it need not measure."""


class SecuredCluster(ServedCluster):
    """Scheduler, server and enrolment over TLS on this machine."""

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.root = folder
        self.keys = ServerFolder(folder / "server")
        self.keys.create("cleave-server")
        super().__init__(place=Place(folder=self.keys), processes=processes)
        port = int(self.scheduler_address.rpartition(":")[2])
        self.enrolment = Enrolment(self.keys, scheduler_port=port, days=1)
        run: Any = self.sync
        self.url = f"https://127.0.0.1:{run(self.enrolment.start, '127.0.0.1', 0)}"

    async def _close(self) -> None:
        await self.enrolment.stop()
        await super()._close()

    def token(self, lifetime: float = 3600) -> str:
        return self.keys.issue_token(now=time(), lifetime=lifetime)

    def enrol(self, name: str, token: str | None = None) -> Files:
        """Files of a device that has joined."""
        folder = DeviceFolder(self.root / name, "127.0.0.1", 1)
        enrol(self.url, token or self.token(), name, folder)
        return folder.files

    @contextmanager
    def device(self, name: str, *options: str, files: Files | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """A device process; gone when the block ends. Its log is `name.log` in the folder."""
        files = files or self.enrol(name)
        command = [sys.executable, "-m", "dask", "worker", self.scheduler_address, "--name", name, *files.options]
        command += ["--no-nanny", "--no-dashboard", "--preload", "cleave_dask.runtime.device", "--nthreads", "1"]
        settings = {f"DASK_CLEAVE__DEVICE__{key}": value for key, value in FIGURES.items()}
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env={**os.environ, **settings})
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def porter_pids(self) -> list[int]:
        """Processes of the server's porters, as they are now."""
        children = psutil.Process(self.server_pid).children()
        return [child.pid for child in children if "cleave_dask.runtime.porter" in _command(child)]

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:  # it has just ended
        return []
    return command


def porters_of(client: Client) -> list[str]:
    """Addresses of the server's porters."""
    scheduler: Any = client.scheduler
    (server,) = client.sync(scheduler.cleave_info)["server"].values()
    addresses: list[str] = list(server["porters"])
    return addresses


def devices_of(client: Client) -> dict[str, Any]:
    scheduler: Any = client.scheduler
    info: dict[str, Any] = client.sync(scheduler.cleave_info)
    devices: dict[str, Any] = info["device"]
    return devices


def until_joined(client: Client, *names: str) -> None:
    until(lambda: set(names) <= set(devices_of(client)), f"{names} join", seconds=120)


def losses(client: Client, steps: int = 2) -> list[float]:
    """What training gives."""
    module = models.llama()
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client) as trainer:
        return [trainer.step(**models.tokens(seed=step)) for step in range(steps)]

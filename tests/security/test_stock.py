"""The attacks of these tests are real: stock Dask, over mutual TLS, falls to the same messages from the same device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.protocol.serialize import ToPickle
from distributed.security import Security

from cleave_dask.runtime.credentials import Files
from tests.security.attackers import PATIENCE, Exploit, call, connected, registration
from tests.security.clusters import SecuredCluster


@dataclass(frozen=True)
class Stock:
    """A scheduler and a worker without this package, and a client of theirs."""

    scheduler: Scheduler
    worker: Worker
    client: Client


@asynccontextmanager
async def stock(cluster: SecuredCluster) -> AsyncIterator[Stock]:
    """With the certificates of a cluster that is guarded."""
    server, client = cluster.keys.files("scheduler"), cluster.keys.files("client")
    security = Security(
        require_encryption=True,
        tls_ca_file=str(server.authority),
        **{f"tls_{role}_cert": str(server.certificate) for role in ("scheduler", "worker")},
        **{f"tls_{role}_key": str(server.key) for role in ("scheduler", "worker")},
        tls_client_cert=str(client.certificate),
        tls_client_key=str(client.key),
    )
    options: dict[str, Any] = {"host": "127.0.0.1", "security": security, "dashboard_address": ":0", "dashboard": False}
    async with (
        Scheduler(protocol="tls", port=0, **options) as scheduler,
        Worker(scheduler.address, nthreads=1, **options) as worker,
        Client(scheduler.address, security=security, asynchronous=True, set_as_default=False) as user,
    ):
        yield Stock(scheduler, worker, user)


async def code_on_the_scheduler(of: Stock, mallory: Files, exploit: Exploit) -> None:
    await call(mallory, of.scheduler.address, {"op": "run_function", "function": exploit.pickled, "wait": True})


async def pickled_metrics(of: Stock, mallory: Files, exploit: Exploit) -> None:
    async with connected(mallory, of.scheduler.address) as comm:
        await comm.write(registration("mallory", metrics={"memory": ToPickle(exploit)}))
        await _until(exploit.marker.exists)


async def pickle_in_the_stream(of: Stock, mallory: Files, exploit: Exploit) -> None:
    async with connected(mallory, of.scheduler.address) as comm:
        await comm.write(registration("mallory"))
        await comm.read()
        await comm.write([{"op": "log-event", "topic": "all", "msg": ToPickle(exploit)}])
        await _until(exploit.marker.exists)


async def code_on_the_server(of: Stock, mallory: Files, exploit: Exploit) -> None:
    await call(mallory, of.worker.address, {"op": "run", "function": exploit.pickled})


async def a_type_at_the_client(of: Stock, mallory: Files, exploit: Exploit) -> None:
    """A task is given to the device; its answer is of a type that runs where it is read."""
    told = registration("mallory", status="running")
    async with connected(mallory, of.scheduler.address) as comm:
        await comm.write(told)
        await comm.read()
        future = of.client.submit(int, 1, key="task", workers=[told["address"]])
        run_id = None
        while run_id is None:
            messages = await asyncio.wait_for(comm.read(), PATIENCE)
            run_id = next((message["run_id"] for message in messages if message["op"] == "compute-task"), None)
        finished = {"op": "task-finished", "key": "task", "run_id": run_id, "nbytes": 1, "type": exploit.pickled}
        finished |= {"typename": "int", "metadata": {}, "thread": None, "startstops": (), "status": "OK"}
        await comm.write([{**finished, "stimulus_id": "x"}])
        await _until(exploit.marker.exists)
        future.release()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


CODE = (
    code_on_the_scheduler,
    pickled_metrics,
    pickle_in_the_stream,
    code_on_the_server,
    a_type_at_the_client,
)


@pytest.mark.parametrize("attack", CODE, ids=lambda attack: attack.__name__)
def test_stock_dask_runs_what_a_device_sends(
    cluster: SecuredCluster, tmp_path: Path, attack: Callable[[Stock, Files, Exploit], Awaitable[None]]
) -> None:
    exploit, mallory = Exploit(tmp_path / "mark"), _mallory(cluster)

    async def run() -> None:
        async with stock(cluster) as of:
            await attack(of, mallory, exploit)

    asyncio.run(run())
    assert exploit.marker.exists()


def test_stock_dask_lets_a_device_speak_for_another(cluster: SecuredCluster) -> None:
    mallory = _mallory(cluster)

    async def run() -> None:
        async with stock(cluster) as of:
            victim = of.worker.address
            await call(mallory, of.scheduler.address, {"op": "unregister", "address": victim, "stimulus_id": "x"})
            assert victim not in of.scheduler.workers

    asyncio.run(run())


def _mallory(cluster: SecuredCluster) -> Files:
    name = "stock-mallory"
    known = {member.name for member in cluster.keys.register().members}
    folder = cluster.root / name / "devices" / "127.0.0.1-1"
    if name in known:
        return Files(folder / "ca.pem", folder / "device.pem", folder / "device.key")
    return cluster.enrol(name)

"""One cluster over TLS for all tests of this folder; its server has porters, whom devices talk with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from distributed import Client
from psutil import Process

from cleave_dask.runtime.cluster import inspect
from tests.security import attackers
from tests.security.clusters import SecuredCluster, porters_of, until_joined


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with SecuredCluster(tmp_path_factory.mktemp("secured"), processes=3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: SecuredCluster) -> Iterator[Client]:
    """A client of the cluster, which has one honest device."""
    with Client(cluster, set_as_default=False) as client, cluster.device("honest"):
        until_joined(client, "honest")
        yield client


@pytest.fixture(params=["server", "porter"])
def server(request: pytest.FixtureRequest, cluster: SecuredCluster, client: Client) -> tuple[str, int]:
    """Address and process of whom a device can talk with: the server itself, or one of its porters."""
    if request.param == "server":
        return inspect(client).server, cluster.server_pid
    address = porters_of(client)[0]
    (pid,) = [pid for pid in cluster.porter_pids if int(address.rpartition(":")[2]) in _ports(pid)]
    return address, pid


def _ports(pid: int) -> set[int]:
    connections: list[Any] = Process(pid).net_connections()
    return {connection.laddr.port for connection in connections}


@pytest.fixture(scope="session")
def dripping(cluster: SecuredCluster, client: Client) -> Iterator[Future[list[float]]]:
    """A message to everyone who listens to devices that has begun and hardly goes on, beside other tests."""
    files, addresses = (
        cluster.enrol("loris"),
        (cluster.scheduler_address, inspect(client).server, porters_of(client)[0]),
    )

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(attackers.drip(files, address) for address in addresses))

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(asyncio.run, all_of_them())

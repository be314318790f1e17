"""One cluster over TLS for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from tests.security.clusters import SecuredCluster, until_joined


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with SecuredCluster(tmp_path_factory.mktemp("secured")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: SecuredCluster) -> Iterator[Client]:
    """A client of the cluster, which has one honest device."""
    with Client(cluster, set_as_default=False) as client, cluster.device("honest"):
        until_joined(client, "honest")
        yield client

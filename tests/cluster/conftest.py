"""One local fleet for all cluster tests that do not kill anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from cleave_dask.simulation.local import LocalFleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[LocalFleet]:
    with LocalFleet(3) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def client(fleet: LocalFleet) -> Iterator[Client]:
    with fleet.get_client() as client:
        yield client

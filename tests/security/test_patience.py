"""A message that trickles in: its minute goes by while the files before this one run, and while porters live."""

from __future__ import annotations

from concurrent.futures import Future

from distributed import Client

from tests.security.attackers import PATIENCE
from tests.security.clusters import devices_of


def test_neither_scheduler_nor_server_nor_porter_waits_for_a_message_that_hardly_goes_on(
    client: Client, dripping: Future[list[float]]
) -> None:
    for seconds in dripping.result(timeout=3 * PATIENCE):
        assert 50 < seconds < 3 * PATIENCE
    assert devices_of(client)["honest"]["running"]

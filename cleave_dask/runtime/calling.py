"""Calling the server: an answer may take its time, but a server that has left is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from distributed import Client

PATIENCE = 2.0
"""Seconds after which the scheduler is asked whether the server is still there."""


async def ask(client: Client, server: str, call: str, arguments: Mapping[str, Any]) -> Any:
    """The server's answer; OSError if it cannot be had.

    Dask would try to reach an address where nobody listens for half a minute.
    """
    answer = asyncio.ensure_future(getattr(client.rpc(server), call)(**arguments))
    try:
        while not (await asyncio.wait({answer}, timeout=PATIENCE))[0]:
            scheduler: Any = client.scheduler
            facts = await scheduler.cleave_info()
            if server not in {each["address"] for each in facts["server"].values()}:
                raise OSError("it has left the scheduler")
        return answer.result()
    finally:
        answer.cancel()

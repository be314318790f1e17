"""How many times as long Python takes here as on the machine that plans know the cost of a tile from.

    python -m benchmarks.pace

What a tile costs server and devices is mostly Python: tasks that wait for each other, small messages packed and read.
A loop of such things is timed, in CPU seconds, the least of a few rounds. The figure goes into `cleave.server.pace`
(DASK_CLEAVE__SERVER__PACE=1.6); `benchmarks.edge` sets it for the fleets that it starts.
"""

from __future__ import annotations

import asyncio
import sys
from subprocess import check_output
from time import process_time

import msgpack

REFERENCE = 0.0625
"""CPU seconds of a round at pace 1. Inferred: that machine is gone. On another a round took 0.1 s, and its server 1.6
times what cost.TILE_SECONDS and cost.BYTE_SECONDS say, in four runs of 816 to 3,292 tiles."""

_TURNS, _ROUNDS = 10_000, 9


async def _round() -> None:
    """Tasks in a row, each of which packs a message, waits for the one before it, and reads what that packed."""
    handed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    handed.set_result(msgpack.packb({"tile": 0}))

    async def turn(number: int, before: asyncio.Future[bytes]) -> bytes:
        await asyncio.sleep(0)
        told = msgpack.unpackb(await before)
        return bytes(msgpack.packb({**told, "tile": number, "moved": {"down": [number, 0.5], "up": [number, 0.5]}}))

    for number in range(_TURNS):
        handed = asyncio.ensure_future(turn(number, handed))
    await handed


def pace() -> float:
    """Times as long as the reference, in a process of its own: in one with much in memory Python is slower."""
    return float(check_output([sys.executable, "-m", __name__], text=True))


def _measured() -> float:
    least = float("inf")
    for _ in range(_ROUNDS):
        start = process_time()
        asyncio.run(_round())
        least = min(least, process_time() - start)
    return least / REFERENCE


if __name__ == "__main__":
    print(f"{_measured():.2f}")

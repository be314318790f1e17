"""A device measures itself: speed of its kernel, latency, downlink and uplink against the server.

It joins first, with default figures, and measures when it is its turn (`turns`). Everything is bounded: sizes double
until a transfer takes long enough to be told from its latency, and no direction takes more than LIMIT seconds. Of
transfers that are long enough the fastest counts: whatever else a machine does can only make one slower. What could not
be measured stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from time import perf_counter
from typing import Any

from distributed import Status, Worker

from cleave_dask.formatting import duration, quantity
from cleave_dask.runtime.kernels import Kernel, measure_flops
from cleave_dask.runtime.probes import LARGEST, SMALLEST, blocks
from cleave_dask.runtime.shaping import Links
from cleave_dask.runtime.turns import TURN

logger = logging.getLogger(__name__)

LIMIT = 3.0
"""Seconds that measuring one direction takes at most."""

ENOUGH = 0.3
"""Seconds of transfer that tell a bandwidth from everything else."""

PATIENCE = 20.0
"""Seconds after which a scheduler or server that does not answer is taken to be gone."""

_ROUNDS = 5
_LONG_ENOUGH = 2  # transfers, of which the faster tells the bandwidth
_GROWTH = 16  # times the size before, at most

Probe = Callable[[int], Awaitable[int]]
"""Moves about so many bytes and returns how many it were."""


async def measure_in_turn(
    worker: Worker, kernel: Kernel, links: Links, executor: Executor, *, missing: Collection[str]
) -> None:
    """Find the figures that are missing when it is this device's turn, and tell the scheduler."""
    while worker.status != Status.running:
        await asyncio.sleep(0.05)
    figures: dict[str, float] = {}
    try:
        server = await _turn(worker)
        if server is None:
            return
        try:
            async with asyncio.timeout(0.8 * TURN):
                await _measure(figures, worker.rpc(server), kernel, links, executor, missing)
        finally:
            told = {name: value for name, value in figures.items() if name in missing}
            await asyncio.wait_for(worker.scheduler.cleave_measured(worker=worker.address, figures=told), PATIENCE)
    except Exception as error:  # a device that cannot be measured works all the same
        logger.warning("Could not measure all of this device (%r); for the rest, defaults are planned with", error)
    logger.info("Measured: %s", shown(figures))


async def _turn(worker: Worker) -> str | None:
    """The server's address, once it is this device's turn; None if the scheduler does not know cleave."""
    while True:
        answer = await asyncio.wait_for(worker.scheduler.cleave_turn(worker=worker.address), PATIENCE)
        if answer is None:
            return None
        if not answer["wait"]:
            server: str = answer["server"]
            return server
        await asyncio.sleep(answer["wait"])


async def _measure(
    figures: dict[str, float],
    server: Any,
    kernel: Kernel,
    links: Links,
    executor: Executor,
    missing: Collection[str],
) -> None:
    """Put everything that can be found into `figures`, one after the other."""
    if "flops" in missing:
        work = asyncio.get_running_loop().run_in_executor(executor, measure_flops, kernel)
        figures["flops"] = await asyncio.wait_for(work, LIMIT)
    figures.update(await measure_links(server, links))


async def measure_links(server: Any, links: Links) -> dict[str, float]:
    """Latency, downlink and uplink to the server, an rpc of its worker; in base units."""

    async def down(nbytes: int) -> int:
        answer = await links.pull(lambda: server.cleave_probe_down(nbytes=nbytes), lambda answer: _size(answer["data"]))
        return _size(answer["data"])

    async def up(nbytes: int) -> int:
        data = blocks(nbytes)
        size = nbytes
        await links.push(lambda: server.cleave_probe_up(data=data), size)
        return size

    figures: dict[str, float] = {}
    trips = [await _timed(down, 0) for _ in range(_ROUNDS)]
    round_trip = min(seconds for _, seconds in trips)
    figures["latency"] = round_trip / 2
    links.expect(figures["latency"])
    for name, probe in (("down", down), ("up", up)):
        figures[name] = await measure_bandwidth(probe, round_trip)
    links.expect(figures["latency"], figures["down"], figures["up"])
    return figures


async def measure_bandwidth(probe: Probe, round_trip: float) -> float:
    """Bytes per second of one direction; of one that is too slow for the smallest probe, more than it has."""
    size, rate = SMALLEST, SMALLEST / LIMIT
    fastest: list[float] = []
    try:
        async with asyncio.timeout(LIMIT):
            while len(fastest) < _LONG_ENOUGH:
                moved, seconds = await _timed(probe, size)
                rate = moved / max(seconds - round_trip, seconds / 10)
                if seconds >= ENOUGH or size >= LARGEST:
                    fastest.append(rate)
                else:
                    size = next_size(size, rate)
    except TimeoutError:
        pass
    return max(fastest, default=rate)


def next_size(size: int, rate: float) -> int:
    """Bytes of the next probe: a little longer than ENOUGH by what is known, but no jump on the word of a small one."""
    return max(2 * SMALLEST, min(int(1.25 * ENOUGH * rate), _GROWTH * size, LARGEST))


async def _timed(probe: Probe, size: int) -> tuple[int, float]:
    start = perf_counter()
    moved = await asyncio.wait_for(probe(size), LIMIT)
    return moved, perf_counter() - start


def _size(arrays: Collection[Any]) -> int:
    return sum(array.nbytes for array in arrays)


def shown(figures: dict[str, float]) -> str:
    """Figures as people read them."""
    units = {"flops": "FLOP/s", "down": "B/s", "up": "B/s"}
    texts = {
        name: quantity(value, units[name]) if name in units else duration(value) for name, value in figures.items()
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "nothing"

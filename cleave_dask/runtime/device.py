"""The device's side: pull operand slices, multiply, push the tile. Preload of a stock worker.

    dask worker ADDRESS --preload cleave_dask.runtime.device

A device talks to the scheduler and to the server, over connections that it opens itself; it never takes data from
anyone else, runs nothing but tiles, and needs no torch unless its kernel is torch. Tiles come in parcels, one Dask task
each. While one tile is multiplied, the operands of the next come down and the result of the last goes up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Reschedule, Status, Worker, get_worker
from distributed.protocol import to_serialize
from distributed.system import MEMORY_LIMIT

from cleave_dask import config
from cleave_dask._version import __version__
from cleave_dask.errors import CleaveError
from cleave_dask.planning.cost import FILLER_SHARE
from cleave_dask.runtime.clock import ServerClock
from cleave_dask.runtime.early import EarlyTiles
from cleave_dask.runtime.fetching import Fetcher, JobOver
from cleave_dask.runtime.gates import Gate
from cleave_dask.runtime.kernels import use_threads
from cleave_dask.runtime.lending import Lent, read_reasons, read_settings
from cleave_dask.runtime.measuring import measure_in_turn
from cleave_dask.runtime.multiplying import multiplied
from cleave_dask.runtime.operands import Piece, SliceCache, assembled
from cleave_dask.runtime.pausing import pause_while
from cleave_dask.runtime.pipelines import Ways
from cleave_dask.runtime.refusing import refuse_all_but_tiles
from cleave_dask.runtime.tiles import ParcelSpec, TileSpec, own_bytes

logger = logging.getLogger(__name__)

PARCELS = 64
"""Parcels that may be open at once; it is tiles that wait for their turn, the most urgent first, not parcels."""

SMALLEST_LIMIT = 64 << 20
"""Bytes that a message may have on a device that lends next to nothing."""

Array = np.ndarray[Any, np.dtype[Any]]


async def run_parcel(parcel: ParcelSpec, server: str, again: bool) -> int:
    """Device task: the tiles of a parcel, from their operands to the server's receipts; returns how many."""
    device: DeviceRuntime = get_worker().extensions["cleave"]
    return await device.run(parcel, server, again)


class DeviceRuntime:
    """What a device keeps between tiles: its kernel, its slices, the one thread that multiplies."""

    def __init__(self, worker: Worker, lent: Lent) -> None:
        self.worker = worker
        self.kernel = lent.kernel
        self.links = lent.links
        half = lent.memory // 2
        chosen = half if config.get("device.cache") is None else config.nbytes("device.cache")
        self.places = Gate(config.whole("device.window"), half / 2)
        self.turns = Gate(1, 0)  # at the multiplier
        self.fetcher = Fetcher(worker, self.links, SliceCache(min(chosen, half)))
        self.early = EarlyTiles(self.fetcher, self._early_tile)
        self.pushing = Ways(worker)
        self.multiplier = ThreadPoolExecutor(1, thread_name_prefix="cleave-multiply")
        self.clock = ServerClock()
        self._asking: asyncio.Task[None] | None = None
        self.background: list[asyncio.Task[None]] = []
        use_threads(lent.cores)

    async def run(self, parcel: ParcelSpec, server: str, again: bool) -> int:
        """All tiles of a parcel; of one that was somebody else's before, those that are still wanted, last ones first.

        The former device may be alive and working from the other end.
        """
        self._set_clock(server)
        for ways, window in zip((self.fetcher.ways, self.pushing), self.links.windows, strict=True):
            ways.widen(window)
        specs = list(parcel.specs())
        tiles: list[asyncio.Task[None]] = []
        await self.links.assigned()
        try:
            if again or parcel.resumed:
                call = self.worker.rpc(server).cleave_wanted
                wanted = set(await call(run=parcel.run, step=parcel.step, job=parcel.job, tiles=parcel.numbers))
                specs = [spec for spec in (reversed(specs) if again else specs) if spec.tile in wanted]
            tiles = [
                asyncio.ensure_future(self._ordered(spec, server, parcel, rank, size))
                for rank, (spec, size) in enumerate(zip(specs, own_bytes(specs), strict=True), parcel.rank)
            ]
            if parcel.ahead is not None:
                self.early.begin(server, parcel, parcel.ahead)
            await asyncio.gather(*tiles)
            await self.links.reported()
        except OSError as error:
            logger.warning("A parcel of job %s could not reach the server: %s", parcel.job, error)
            await asyncio.sleep(0.1)
            raise Reschedule from error
        finally:
            for tile in tiles:
                tile.cancel()
        return len(specs)

    async def _ordered(self, spec: TileSpec, server: str, parcel: ParcelSpec, rank: int, size: int) -> None:
        if not await self.early.made(spec):
            with suppress(JobOver):
                await self._tile(spec, server, parcel, rank, size)

    async def _early_tile(self, spec: TileSpec, server: str, parcel: ParcelSpec, rank: int, size: int) -> None:
        """A tile that nobody has ordered yet, unless the owner wants the device meanwhile."""
        if self.worker.status is not Status.running:
            raise Reschedule
        await self._tile(spec, server, parcel, rank, size)

    async def _tile(self, spec: TileSpec, server: str, parcel: ParcelSpec, rank: int, size: int) -> None:
        """Pull, multiply, push; several tiles at a time, so that all three go on side by side.

        Before each of the three the most urgent tile comes first, so that filler is in the way of what others wait for
        by what is under way of it, and no more.
        """
        share = FILLER_SHARE if parcel.filler else 1.0
        async with self.places.through(rank, size, share):
            start = perf_counter()
            async with self.fetcher.turn(spec, rank, size, filler=parcel.filler):
                entered = perf_counter()
                operands, fetched = await self.fetcher.operands(server, spec, filler=parcel.filler)
            pulled = perf_counter()
            async with self.turns.through(rank, 0):
                work = asyncio.get_running_loop().run_in_executor(self.multiplier, self._multiply, spec, operands)
                results, seconds = await work
            nbytes = sum(result.nbytes for result in results)
            async with self.pushing.turn(rank, nbytes, filler=parcel.filler):
                timing = {
                    "queued": perf_counter() - pulled - seconds + entered - start,
                    "sent": self.clock.now(),
                    "down_bytes": sum(fresh.result().nbytes for fresh in fetched),
                }
                message = {
                    "run": spec.run,
                    "step": spec.step,
                    "job": spec.job,
                    "tile": spec.tile,
                    "device": str(self.worker.name),
                    "pull_seconds": pulled - entered,
                    "compute_seconds": seconds,
                    "timing": timing,
                    "moved": self.links.observed(),
                    "arrays": [to_serialize(result) for result in results],
                }
                push = partial(self.pushing.call, server, "cleave_push", filler=parcel.filler, **message)
                answer = await self.links.push(push, nbytes)
        if not answer["accepted"]:
            logger.warning("Tile %s of job %s was rejected: %s", spec.tile, spec.job, answer["why"])
            raise Reschedule

    def _set_clock(self, server: str) -> None:
        """Ask for the server's time now and then, beside the tiles."""
        if self.clock.due(server):
            self._asking = asyncio.ensure_future(self.clock.ask(self.worker.rpc(server).cleave_clock))

    def _multiply(self, spec: TileSpec, operands: Sequence[Sequence[Piece]]) -> tuple[tuple[Array, ...], float]:
        start = perf_counter()
        results = multiplied(self.kernel, spec, [assembled(pieces) for pieces in operands])
        return results, perf_counter() - start


async def dask_setup(worker: Worker) -> None:
    """Make a stock worker a device: its kernel, its window of tiles in flight, what it tells the scheduler."""
    manager = worker.memory_manager
    usable = (manager.memory_limit or MEMORY_LIMIT) * (manager.memory_pause_fraction or 1.0)  # above it Dask pauses
    available = int(usable) - worker.monitor.proc.memory_info().rss
    try:
        lent, why = read_settings(cores=worker.state.nthreads, memory=available), read_reasons()
    except CleaveError as error:  # Dask would only log it, and go on as a worker that is no device
        raise SystemExit(f"this device cannot start: {error}") from error
    runtime = DeviceRuntime(worker, lent)
    worker.extensions["cleave"] = runtime
    refuse_all_but_tiles(worker, run_parcel, max(lent.memory, SMALLEST_LIMIT))
    facts = {
        "role": "device",
        "version": __version__,
        "kernel": lent.kernel.name,
        "memory": lent.memory,
        "cores": lent.cores,
        "calibrate": bool(config.get("device.calibrate")),
        "measuring": bool(lent.missing),
        **lent.figures,
    }
    worker.startup_information["cleave"] = lambda _: facts
    worker.state.nthreads = PARCELS
    if lent.missing:
        measuring = measure_in_turn(worker, runtime.kernel, runtime.links, runtime.multiplier, missing=lent.missing)
        runtime.background.append(asyncio.create_task(measuring))
    if why is not None:
        runtime.background.append(asyncio.create_task(pause_while(worker, why)))


def dask_teardown(worker: Worker) -> None:
    """Stop the multiplying thread and what runs beside the tiles."""
    runtime: DeviceRuntime = worker.extensions["cleave"]
    for task in runtime.background:
        task.cancel()
    runtime.early.close()
    runtime.fetcher.close()
    runtime.pushing.close()
    runtime.multiplier.shutdown(wait=False, cancel_futures=True)

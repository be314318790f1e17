"""Many hollow devices in one process.

`HollowFleet` starts it as `python -m cleave_dask.simulation.hollow_devices SCHEDULER DEVICES.json`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import Any

import dask
from distributed import Reschedule, Worker

from cleave_dask._version import __version__
from cleave_dask.fleet.devices import Device, Link
from cleave_dask.planning.slices import SIDED
from cleave_dask.runtime import parent
from cleave_dask.runtime.device import PARCELS, run_parcel
from cleave_dask.runtime.gates import Gate
from cleave_dask.runtime.refusing import take_orders
from cleave_dask.runtime.shaping import Lane
from cleave_dask.runtime.tiles import ParcelSpec

_QUIET = {
    "distributed.admin.system-monitor.interval": "1h",  # each look counts the files of all of them
    "distributed.admin.system-monitor.disk": False,
    "distributed.worker.profile.enabled": False,
    "distributed.comm.timeouts.connect": "300s",  # all of them join at once
}
"""Hundreds of workers share a process: what each does in idle time is slowed down."""

_STARTED = 32  # workers that are started at once

Costs = tuple[float, float, float]
"""Of a job: flops of a cell, bytes down and bytes up of one number (a gemm) or of a cell (anything else)."""


class Jobs:
    """What the jobs of a run cost; asked for once, by whichever device needs it first."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], asyncio.Future[list[Costs]]] = OrderedDict()

    async def costs(self, worker: Worker, server: str, parcel: ParcelSpec) -> Costs:
        """Those of a parcel's job; they may be others in another step, for which it may be planned anew."""
        key = parcel.run, parcel.step
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(worker.rpc(server).cleave_shapes(run=parcel.run))
            while len(self._known) > 4:
                self._known.popitem(last=False)
        return (await asyncio.shield(self._known[key]))[parcel.job]


class HollowWorker(Worker):
    """A light Dask worker that says of itself what a device says, and takes its parcels."""

    def __init__(self, scheduler: str, *, device: Device, jobs: Jobs, **options: Any) -> None:
        fixed: dict[str, Any] = {"nthreads": 1, "host": "127.0.0.1", "memory_limit": 0, "dashboard": False}
        super().__init__(scheduler, name=device.name, **fixed, **options)
        facts = {
            "role": "device",
            "version": __version__,
            "kernel": "hollow",
            "cores": 1,
            "calibrate": False,
            "measuring": False,
            "memory": float(device.memory),
            "flops": float(device.flops),
            "down": float(device.down.bandwidth),
            "up": float(device.up.bandwidth),
            "latency": float(device.down.latency),
        }
        self.startup_information["cleave"] = lambda _: facts
        self.extensions["cleave"] = HollowDevice(self, device, jobs)
        take_orders(self, run_parcel)
        self.state.nthreads = PARCELS


class HollowDevice:
    """A downlink, a multiplier and an uplink that are busy for as long as they would be."""

    def __init__(self, worker: Worker, device: Device, jobs: Jobs) -> None:
        self.worker, self.device, self.jobs = worker, device, jobs
        self.turn = Gate(1, 0.0)  # the most urgent parcel has the downlink
        self.down = Lane(device.down.bandwidth, device.down.latency)
        self.multiplier = Lane(device.flops)
        self.up = Lane(device.up.bandwidth, device.up.latency)
        self.slices: dict[tuple[Any, ...], float] = {}  # bytes of each that it would hold, least used first
        self.held = 0.0

    async def run(self, parcel: ParcelSpec, server: str, again: bool) -> int:
        """All tiles of a parcel, or of one that was somebody else's before those that are still wanted."""
        call = self.worker.rpc(server)
        tiles = list(parcel.tiles)
        try:
            if again or parcel.resumed:
                name = {"run": parcel.run, "step": parcel.step, "job": parcel.job}
                wanted = set(await call.cleave_wanted(**name, tiles=parcel.numbers))
                tiles = [tile for tile in (reversed(tiles) if again else tiles) if tile[0] in wanted]
            if tiles:
                costs = await self.jobs.costs(self.worker, server, parcel)
                rows = await self._work(parcel, tiles, costs)
                await self._deliver(call, parcel, rows)
        except OSError as error:
            raise Reschedule from error
        return len(tiles)

    async def _work(self, parcel: ParcelSpec, tiles: Sequence[tuple[int, ...]], costs: Costs) -> list[list[float]]:
        """Let the time pass that the tiles would take; a row for each, as the server wants it."""
        began = time()
        await _until(began + 2 * self.device.down.latency + self.device.up.latency)  # told, asks, gets
        rows: list[list[float]] = []
        step = _at_once(len(tiles), filler=parcel.filler)
        for start in range(0, len(tiles), step):
            await self.turn.enter(parcel.rank + len(rows), 1.0)
            try:
                rows += [self._tile(parcel, tile, costs) for tile in tiles[start : start + step]]
                await _until(self.down.free)
            finally:
                self.turn.leave(1.0)
        await _until(rows[-1][-1])
        return rows

    def _tile(self, parcel: ParcelSpec, tile: tuple[int, ...], costs: Costs) -> list[float]:
        """Book a tile on the three parts: number, seconds of waiting, pull, compute and upload, bytes, end."""
        number, r0, r1, c0, c1, k0, k1 = tile
        flops, down_bytes, up_bytes = costs
        rows, cols, ks = r1 - r0, c1 - c0, k1 - k0
        job = parcel.run, parcel.step, parcel.job
        if parcel.kind in ("logit_dx", "logit_dw"):
            left = self._fetched((*job, 0, r0, c0), rows * cols * down_bytes)
            fetched = left + self._fetched((*job, 1, k0, c0), ks * cols * down_bytes)
        elif parcel.kind in SIDED:
            left = self._fetched((*job, 0, r0, k0), rows * ks * down_bytes)
            fetched = left + self._fetched((*job, 1, c0, k0), cols * ks * down_bytes)
        else:
            fetched = rows * cols * down_bytes
        now = time()
        started = max(now, self.down.free)
        self.down.book(fetched, now)
        here = max(self.multiplier.free, self.down.free)
        multiplied = self.multiplier.book(flops * rows * cols * ks, self.down.free)
        made = rows * (1 if parcel.kind == "logit_sums" else cols)
        arrived = self.up.book(made * up_bytes, multiplied)
        pulling, waiting = self.down.free - started, here - self.down.free + started - now
        return [number, waiting, pulling, multiplied - here, arrived - multiplied, fetched, arrived]

    def _fetched(self, name: tuple[Any, ...], nbytes: float) -> float:
        """Bytes that come down for a slice: none if the device holds it."""
        known = self.slices.pop(name, None)
        self.slices[name] = nbytes if known is None else known  # the last used are the last to go
        if known is not None:
            return 0.0
        self.held += nbytes
        while self.held > self.device.memory / 2:
            self.held -= self.slices.pop(next(iter(self.slices)))
        return nbytes

    async def _deliver(self, call: Any, parcel: ParcelSpec, rows: list[list[float]]) -> None:
        name = {"run": parcel.run, "step": parcel.step, "job": parcel.job, "device": self.device.name}
        answer = await call.cleave_deliver(**name, tiles=rows)
        if not answer["accepted"]:
            raise Reschedule


def _at_once(tiles: int, *, filler: bool) -> int:
    """Tiles after which a device looks whether another parcel has become more urgent."""
    return max(1, tiles // 4) if filler else tiles


async def _until(moment: float) -> None:
    left = moment - time()
    if left > 0:
        await asyncio.sleep(left)


async def hold(scheduler: str, devices: list[Device]) -> None:
    """Keep a worker for each device until this process is ended."""
    jobs = Jobs()
    gc.disable()  # until all have joined: each collection would look through all that were there before
    with TemporaryDirectory() as folder:
        workers = [HollowWorker(scheduler, device=device, jobs=jobs, local_directory=folder) for device in devices]
        for start in range(0, len(workers), _STARTED):
            await asyncio.gather(*workers[start : start + _STARTED])
        gc.collect()
        gc.freeze()  # the workers stay, and need not be looked through again
        gc.enable()
        await asyncio.Event().wait()


def main() -> None:
    """Read the devices and hold them."""
    scheduler, file = sys.argv[1:]
    devices = [
        Device(name, flops, memory, Link(down, there), Link(up, back))
        for name, flops, memory, down, there, up, back in json.loads(Path(file).read_text())
    ]
    parent.dask_setup(None)
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with dask.config.set(_QUIET):
        asyncio.run(hold(scheduler, devices))


if __name__ == "__main__":
    main()

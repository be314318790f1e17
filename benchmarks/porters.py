"""What porters take off the server's process: tiles pushed and slices pulled with none, one and two of them.

    python -m benchmarks.porters [--seconds 1.0] [--rounds 3] [--json out.json]

A process that keeps nothing answers as the server does: it takes a tile in with one copy, in a thread, as gathering
does, and cuts a slice out of an operand with one copy. Two other processes are devices: each pushes a tile, pulls a
slice of the same size, and waits for both answers. What is told is the median of the rounds: bytes per second in both
directions together, and seconds of CPU of the server's process and of its porters. On a machine that is busy with
other things, the seconds of CPU are what holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import psutil
from distributed.comm import connect
from distributed.core import Server
from distributed.protocol import to_serialize
from distributed.security import Security
from rich.console import Console
from rich.table import Table

from benchmarks.guard import _keys, _security
from cleave_dask.runtime.conversations import WithCluster, WithServer
from cleave_dask.runtime.credentials import Files, ServerFolder
from cleave_dask.runtime.guarding import Guard, install
from cleave_dask.runtime.porters import Porters

SIZES = (256 << 10, 4 << 20)
"""Bytes of a tile."""

DEVICES = 2
COUNTS = (0, 1, 2)
"""Porters."""

PLACE = {"run": "x", "step": 0, "job": 0}


class Keeper:
    """What stands in for the server: it copies as the server does, in threads, and keeps nothing."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        side = int((nbytes // 4) ** 0.5)
        self.operand = np.random.default_rng(0).standard_normal((side, 2 * side), dtype=np.float32)
        self.output = np.zeros((side, 2 * side), np.float32)
        self.threads = ThreadPoolExecutor(2)

    async def off_loop(self, work: Any, *args: Any) -> Any:
        """In a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)

    def sliced(self, **_: Any) -> tuple[list[Any], int]:
        """Half of the operand, which is no contiguous half."""
        return [self.operand[:, : self.operand.shape[0]].copy()], 0

    def gather(self, arrays: list[Any]) -> None:
        """A tile, to its place."""
        self.output[:, : self.output.shape[0]] = arrays[0]

    async def cleave_pull(self, **told: Any) -> dict[str, Any]:
        """A slice, over a connection."""
        parts, axis = await self.off_loop(self.sliced)
        return {"parts": [to_serialize(part) for part in parts], "axis": axis}

    async def cleave_push(self, arrays: list[Any], **_: Any) -> dict[str, Any]:
        """A tile, over a connection."""
        await self.off_loop(self.gather, arrays)
        return {"accepted": True}

    def desk(self) -> dict[str, Any]:
        """The same for porters."""

        def placed(hatch: Any) -> list[Any]:
            return [hatch.trays.placed(self.operand[:, : self.operand.shape[0]])]

        async def pull(hatch: Any, **_: Any) -> dict[str, Any]:
            return {"parts": await self.off_loop(placed, hatch), "axis": 0}

        async def push(hatch: Any, arrays: list[Any], **_: Any) -> dict[str, Any]:
            return await self.cleave_push(arrays)

        async def sizes(hatch: Any, count: int, **_: Any) -> list[int]:
            return [self.nbytes] * count

        return {"cleave_pull": pull, "cleave_push": push, "sizes": sizes}


@dataclass(frozen=True, slots=True)
class Way:
    """One thing to measure."""

    tls: bool
    nbytes: int
    porters: int

    def __str__(self) -> str:
        return f"{'TLS' if self.tls else 'plain'}, {self.nbytes >> 10} kB, {self.porters}"


def serve(way: Way, folder: str, pipe: Connection) -> None:
    """Be the server until told to stop; tells its addresses and, when asked, seconds of CPU: its own, its porters'."""
    asyncio.run(_serve(way, ServerFolder(Path(folder)), pipe))


async def _serve(way: Way, keys: ServerFolder, pipe: Connection) -> None:
    install(Guard(lambda peer: WithServer(peer.name, lambda *_: way.nbytes), keys))
    keeper = Keeper(way.nbytes)
    server = Server({"cleave_pull": keeper.cleave_pull, "cleave_push": keeper.cleave_push})
    security = _security(keys.files("server")) if way.tls else Security()
    arguments = security.get_listen_args("worker") if way.tls else {}
    await server.listen("tls://127.0.0.1:0" if way.tls else "tcp://127.0.0.1:0", **arguments)
    await server

    async def changed() -> None:
        raise SystemExit("a porter does not start")

    porters = Porters(way.porters, server, security, keeper.desk(), changed)
    porters.start()
    pipe.send(porters.addresses or [server.address])
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        if not pipe.poll():
            continue  # it was read before this was told
        if pipe.recv() == "stop":
            break
        times = [psutil.Process(pid).cpu_times() for pid in porters.pids]
        pipe.send((process_time(), sum(each.user + each.system for each in times)))
    await porters.close()
    await server.close()


def work(files: Files | None, nbytes: int, pipe: Connection) -> None:
    """Be a device: told an address and seconds, tells how many tiles that was."""
    asyncio.run(_work(files, nbytes, pipe))


async def _work(files: Files | None, nbytes: int, pipe: Connection) -> None:
    side = int((nbytes // 4) ** 0.5)
    tile = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    arguments = _security(files).get_connection_args("worker") if files else {}
    install()
    told = {"op": "cleave_push", **PLACE, "tile": 0, "device": "x", "timing": {}, "moved": {}}
    pull = {"op": "cleave_pull", **PLACE, "operand": 0, "first": (0, side), "second": (0, side)}
    address, seconds = pipe.recv()
    converse = {"cleave_converse": lambda: WithCluster(64 << 20)}
    pushing, pulling = [await connect(address, timeout=120, **arguments, **converse) for _ in range(2)]
    pipe.send("ready")
    while seconds:
        pipe.recv()
        start, count = perf_counter(), 0
        while perf_counter() - start < seconds:
            message = {**told, "pull_seconds": 0.0, "compute_seconds": 0.0, "arrays": [to_serialize(tile)]}
            await asyncio.gather(pushing.write(message), pulling.write(pull))
            answers = await asyncio.gather(pushing.read(), pulling.read())
            assert answers[0]["accepted"]
            assert answers[1]["parts"][0].nbytes == nbytes
            count += 1
        pipe.send((count, perf_counter() - start))
        seconds = pipe.recv()
    pushing.abort()
    pulling.abort()


def measure(way: Way, folder: str, files: Files | None, seconds: float, rounds: int) -> list[dict[str, float]]:
    """All rounds of one way."""
    context = multiprocessing.get_context("spawn")
    server, theirs = context.Pipe()
    serving = context.Process(target=serve, args=(way, folder, theirs))
    serving.start()
    addresses = server.recv()
    devices = []
    for number in range(DEVICES):
        pipe, other = context.Pipe()
        process = context.Process(target=work, args=(files, way.nbytes, other))
        process.start()
        pipe.send((addresses[number % len(addresses)], seconds))
        devices.append((pipe, process))
    for pipe, _ in devices:
        assert pipe.recv() == "ready"
    rows = []
    for number in range(rounds + 1):
        before = _cpu(server)
        for pipe, _ in devices:
            pipe.send("go")
        done = [pipe.recv() for pipe, _ in devices]
        after = _cpu(server)
        for pipe, _ in devices:
            pipe.send(seconds if number < rounds else 0)
        tiles = sum(count for count, _ in done)
        moved = 2 * tiles * way.nbytes
        own, porters = after[0] - before[0], after[1] - before[1]
        rows.append(
            {
                "bytes_per_second": moved / max(spent for _, spent in done),
                "server_cpu_seconds_per_gb": own / moved * 1e9,
                "server_cpu_seconds_per_tile": own / tiles,
                "porters_cpu_seconds_per_gb": porters / moved * 1e9,
            }
        )
    server.send("stop")
    for process in (serving, *(process for _, process in devices)):
        process.join(60)
    return rows[1:]  # the first warms up


def _cpu(pipe: Connection) -> tuple[float, float]:
    pipe.send("cpu")
    seconds: tuple[float, float] = pipe.recv()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        keys, files = _keys(Path(folder))
        for way in [Way(tls, nbytes, count) for tls in (True, False) for nbytes in SIZES for count in COUNTS]:
            rows = measure(way, str(keys.path), files if way.tls else None, options.seconds, options.rounds)
            found[str(way)] = {name: median(row[name] for row in rows) for name in rows[0]}
            print(way, found[str(way)], flush=True)
    _print(found)
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "at": datetime.now(UTC).isoformat()}))


def _print(found: dict[str, dict[str, float]]) -> None:
    heads = ("MB/s both ways", "CPU s per GB, server", "CPU ms per tile and slice, server", "CPU s per GB, porters")
    table = Table("connections, tiles, porters", *heads)
    for way, row in found.items():
        texts = [f"{row['bytes_per_second'] / 1e6:,.0f}", f"{row['server_cpu_seconds_per_gb']:.2f}"]
        texts += [f"{1e3 * row['server_cpu_seconds_per_tile']:.2f}", f"{row['porters_cpu_seconds_per_gb']:.2f}"]
        table.add_row(way, *texts)
    Console().print(table)


if __name__ == "__main__":
    main()

"""What TLS and the guard cost: the same bytes over stock TCP, stock TLS and guarded TLS, side by side in one run.

    python benchmarks/guard.py [--seconds 1.0] [--rounds 5] [--json out.json]

One process sends tiles to another over loopback and waits for each answer, as a device pushes them; then small
messages, as a device's questions are; then new connections. Every round measures all three ways one after the other,
so that a machine that is busy slows all of them. What is told is the median, with seconds of CPU of the receiver.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, time
from typing import Any

import numpy as np
from distributed.comm import connect
from distributed.core import Server
from distributed.protocol import to_serialize
from distributed.security import Security
from rich.console import Console
from rich.table import Table

from cleave_dask.runtime.certificates import make_request
from cleave_dask.runtime.conversations import WithServer
from cleave_dask.runtime.credentials import Files, ServerFolder, write_private
from cleave_dask.runtime.guarding import Guard, install

WAYS = ("tcp", "tls", "guarded")
SIDE = 1024
"""Rows and columns of a pushed tile of float32: 4 MiB."""


def serve(way: str, folder: str, pipe: Connection) -> None:
    """Take in tiles until told to stop; tells its address and, when asked, its seconds of CPU."""
    asyncio.run(_serve(way, ServerFolder(Path(folder)), pipe))


async def _serve(way: str, keys: ServerFolder, pipe: Connection) -> None:
    if way == "guarded":
        install(Guard(lambda peer: WithServer(peer.name, lambda *_: SIDE * SIDE * 4), keys))
    calls: dict[str, Any] = {"cleave_push": lambda **_: {"accepted": True}, "cleave_clock": lambda: time()}
    server = Server(calls)
    arguments = {} if way == "tcp" else _security(keys.files("server")).get_listen_args("worker")
    await server.listen("tcp://127.0.0.1:0" if way == "tcp" else "tls://127.0.0.1:0", **arguments)
    await server
    pipe.send(server.address)
    while True:
        while not pipe.poll():
            await asyncio.sleep(0.01)
        if pipe.recv() == "stop":
            break
        pipe.send(process_time())
    await server.close()


def _security(files: Files) -> Security:
    certificate, key = str(files.certificate), str(files.key)
    return Security(
        require_encryption=True, tls_ca_file=str(files.authority), tls_worker_cert=certificate, tls_worker_key=key
    )


async def _pushes(comm: Any, seconds: float) -> float:
    """Bytes per second of tiles."""
    tile = np.random.default_rng(0).standard_normal((SIDE, SIDE), dtype=np.float32)
    place = {"op": "cleave_push", "run": "x", "step": 0, "job": 0, "tile": 0, "device": "x", "timing": {}, "moved": {}}
    start, count = perf_counter(), 0
    while perf_counter() - start < seconds:
        told = {**place, "pull_seconds": 0.0, "compute_seconds": 0.0, "arrays": [to_serialize(tile)]}
        await comm.write(told)
        assert (await comm.read())["accepted"]
        count += 1
    return count * tile.nbytes / (perf_counter() - start)


async def _questions(comm: Any, seconds: float) -> float:
    """Small messages, with their answers, per second."""
    start, count = perf_counter(), 0
    while perf_counter() - start < seconds:
        await comm.write({"op": "cleave_clock"})
        await comm.read()
        count += 1
    return count / (perf_counter() - start)


Open = Callable[[], Awaitable[Any]]


async def _connections(opened: Open, seconds: float) -> float:
    """New connections per second, each with one question."""
    start, count = perf_counter(), 0
    while perf_counter() - start < seconds:
        comm = await opened()
        await comm.write({"op": "cleave_clock"})
        await comm.read()
        comm.abort()
        count += 1
    return count / (perf_counter() - start)


async def measure(address: str, files: Files, pipe: Connection, seconds: float) -> dict[str, float]:
    """One round of one way."""
    arguments = _security(files).get_connection_args("worker") if address.startswith("tls") else {}

    async def opened() -> Any:
        return await connect(address, **arguments)

    comm = await opened()
    before = _cpu(pipe)
    pushed = await _pushes(comm, seconds)
    spent = _cpu(pipe) - before
    result = {"bytes_per_second": pushed, "cpu_seconds_per_gb": spent / (pushed * seconds) * 1e9}
    before, start = _cpu(pipe), perf_counter()
    asked = await _questions(comm, seconds / 2)
    result["cpu_seconds_per_message"] = (_cpu(pipe) - before) / (asked * (perf_counter() - start))
    comm.abort()
    before, start = _cpu(pipe), perf_counter()
    made = await _connections(opened, seconds / 2)
    result["cpu_seconds_per_connection"] = (_cpu(pipe) - before) / (made * (perf_counter() - start))
    return result


def _cpu(pipe: Connection) -> float:
    pipe.send("cpu")
    seconds: float = pipe.recv()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of pushes per way and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        keys, files = _keys(Path(folder))
        context = multiprocessing.get_context("spawn")
        pipes, processes = {}, []
        for way in WAYS:
            pipes[way], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(way, str(keys.path), theirs), daemon=True))
            processes[-1].start()
        addresses = {way: pipes[way].recv() for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                rows[way].append(asyncio.run(measure(addresses[way], files, pipes[way], options.seconds)))
        for way, process in zip(WAYS, processes, strict=True):
            pipes[way].send("stop")
            process.join(10)
    found = {way: {name: median(row[name] for row in rows[way]) for name in rows[way][0]} for way in WAYS}
    _print(found)
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "rounds": rows, "at": datetime.now(UTC).isoformat()}))


def _keys(folder: Path) -> tuple[ServerFolder, Files]:
    """An authority, and a device that has joined."""
    keys = ServerFolder(folder / "server")
    keys.create("cleave-server")
    key, request = make_request("x")
    certificate = keys.enrol(keys.issue_token(now=time(), lifetime=60), "x", request, now=time(), days=1)
    files = Files(keys.files("server").authority, folder / "x.pem", folder / "x.key")
    write_private(files.certificate, certificate)
    write_private(files.key, key)
    return keys, files


def _print(found: dict[str, dict[str, float]]) -> None:
    heads = ("tiles, MB/s", "CPU s per GB of tiles", "CPU ms per message", "CPU ms per connection")
    table = Table("", *heads, title="4 MiB tiles over loopback; CPU of the receiving process")
    for way, row in found.items():
        texts = [f"{row['bytes_per_second'] / 1e6:,.0f}", f"{row['cpu_seconds_per_gb']:.2f}"]
        small = [f"{1e3 * row[f'cpu_seconds_per_{name}']:.2f}" for name in ("message", "connection")]
        table.add_row(way, *texts, *small)
    Console().print(table)


if __name__ == "__main__":
    main()

"""What a device with a valid certificate can send: messages that run code where they are read, and worse lengths."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from time import monotonic, time
from typing import Any

from distributed.comm import connect
from distributed.protocol import pickle
from distributed.security import Security

from cleave_dask.runtime.credentials import Files

PATIENCE = 60.0
"""Seconds within which a connection must have been closed, on a machine that is busy."""


class Exploit:
    """Makes a file wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)

    @property
    def pickled(self) -> bytes:
        packed: bytes = pickle.dumps(self)
        return packed


def security(files: Files) -> Security:
    """What a worker connects with."""
    return Security(
        require_encryption=True,
        tls_ca_file=str(files.authority),
        tls_worker_cert=str(files.certificate),
        tls_worker_key=str(files.key),
    )


@asynccontextmanager
async def connected(files: Files, address: str) -> AsyncIterator[Any]:
    comm = await connect(address, timeout=PATIENCE, **security(files).get_connection_args("worker"))
    try:
        yield comm
    finally:
        comm.abort()


async def call(files: Files, address: str, *messages: Any) -> Any:
    """Send messages one after the other over one connection: the last answer, or "closed"."""
    answer: Any = None
    try:
        async with connected(files, address) as comm:
            for message in messages:
                await comm.write(message)
                answer = await asyncio.wait_for(comm.read(), PATIENCE)
    except OSError:
        return "closed"
    return answer


async def send_raw(files: Files, address: str, content: bytes) -> str:
    """Send bytes as they are: "closed" if that ended the connection."""
    async with connected(files, address) as comm:
        try:
            await comm.stream.write(content)
            await asyncio.wait_for(comm.read(), PATIENCE)
        except OSError:
            return "closed"
        return "open"


async def stream(files: Files, address: str, name: str, *messages: Any) -> str:
    """Register as a worker, then send messages over its stream, and wait for its end."""
    async with connected(files, address) as comm:
        await comm.write(registration(name))
        answer = await asyncio.wait_for(comm.read(), PATIENCE)
        assert answer["status"] == "OK", answer
        try:
            await comm.write(list(messages))
            await comm.write([{"op": "close-stream"}])
            while True:
                await asyncio.wait_for(comm.read(), PATIENCE)
        except OSError:
            return "closed"


def registration(name: str, **changed: Any) -> dict[str, Any]:
    """What a stock worker with our preload says when it joins; it is paused, and gets no tiles."""
    facts = {"role": "device", "version": "0", "kernel": "numpy", "memory": 10**9, "cores": 1, "flops": 1e9}
    metrics = {"bandwidth": {"total": 1, "workers": {}, "types": {}}, "digests_total_since_heartbeat": {}, "memory": 1}
    message = {
        "op": "register-worker",
        "reply": False,
        "address": f"tls://127.0.0.1:{20000 + hash(name) % 20000}",
        "status": "paused",
        "nthreads": 1,
        "name": name,
        "now": time(),
        "resources": {},
        "memory_limit": 1 << 30,
        "local_directory": "/",
        "services": {},
        "nanny": None,
        "pid": 1,
        "versions": {},
        "metrics": {**metrics, "spilled_bytes": {"memory": 0, "disk": 0}},
        "extra": {"cleave": {**facts, "calibrate": True, "measuring": False}},
        "stimulus_id": "x",
        "server_id": name,
    }
    return {**message, **changed}


def lengths(*sizes: int) -> bytes:
    """The beginning of a message whose frames have these sizes, or say so."""
    head = struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q", len(head) + sizes[0]) + head


async def silent(address: str) -> bool:
    """Connect and say nothing: whether the other side ends it."""
    host, port = address.rpartition("/")[2].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        await asyncio.wait_for(reader.read(), PATIENCE)
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        writer.close()


async def mute(files: Files, address: str, *, first: bytes = b"", dripping: bytes = b"") -> bool:
    """Shake hands over TLS and say no more, or a byte now and then: whether the other side ends it."""
    host, port = address.rpartition("/")[2].rsplit(":", 1)
    context = security(files).get_connection_args("worker")["ssl_context"]
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)

    async def drip() -> None:
        writer.write(first)
        for byte in dripping:
            writer.write(bytes([byte]))
            await asyncio.sleep(1)

    dripped = asyncio.ensure_future(drip()) if dripping else None
    try:
        while await asyncio.wait_for(reader.read(1 << 16), PATIENCE):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        if dripped is not None:
            dripped.cancel()
        writer.close()


async def flood(files: Files, address: str, count: int, other: Files) -> tuple[int, bool]:
    """Open so many connections: how many stay open, and whether somebody else is let in meanwhile."""
    opened = 0
    async with AsyncExitStack() as stack:
        for _ in range(count):
            with suppress(OSError):
                await stack.enter_async_context(connected(files, address))
                opened += 1
        try:
            await stack.enter_async_context(connected(other, address))
        except OSError:
            return opened, False
        return opened, True


def slow(files: Files, address: str) -> list[Coroutine[Any, Any, bool]]:
    """Connections that are opened and hardly used: whether the other side ends each."""
    return [silent(address), mute(files, address), mute(files, address, dripping=lengths(1 << 19))]


def slow_requests(files: Files, url: str) -> list[Coroutine[Any, Any, bool]]:
    """The same where devices enrol; also requests whose head, whose body or whose chunks hardly come."""
    head, trickle = b"POST /join HTTP/1.1\r\nHost: x\r\n", b"X" * int(2 * PATIENCE)
    heads = (b"X-A: ", b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n999\r\n")
    return [*slow(files, url), *(mute(files, url, first=head + more, dripping=trickle) for more in heads)]


@asynccontextmanager
async def unread(files: Files, address: str, message: Any, count: int) -> AsyncIterator[None]:
    """Ask for the same so many times over one connection, and read none of the answers."""
    async with connected(files, address) as comm:
        for _ in range(count):
            await comm.write(message)
        yield


async def drip(files: Files, address: str) -> float:
    """Greet, begin a message and go on with a byte a second: after how many seconds the other side ends it."""
    async with connected(files, address) as comm:
        start = monotonic()
        with suppress(OSError):
            for byte in lengths(1 << 19) + bytes(int(4 * PATIENCE)):
                await comm.stream.write(bytes([byte]))
                await asyncio.sleep(1)
        return monotonic() - start

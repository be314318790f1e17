"""Reading from slow links: all bytes come, also over TLS, however they are cut, and the loop wakes seldom."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tornado.iostream import IOStream, StreamClosedError
from tornado.tcpclient import TCPClient
from tornado.tcpserver import TCPServer

from cleave_dask.runtime.certificates import Authority
from cleave_dask.runtime.streams import AT_ONCE, HELD_BACK, read_bytes

pytestmark = pytest.mark.unit

SIZES = (1, 8, HELD_BACK, AT_ONCE, AT_ONCE + 1, AT_ONCE + HELD_BACK + 7, 3 * AT_ONCE - 1, 1_000_003)
Send = Callable[[IOStream], Coroutine[Any, Any, None]]
Read = Callable[[IOStream], Coroutine[Any, Any, Any]]


@pytest.fixture(params=["plain", "tls"])
def contexts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """For the server and for the client: none, or those of one authority."""
    if request.param == "plain":
        return None, None
    now = datetime.now(UTC)
    authority = Authority(*Authority.create(now))
    certificate, key = authority.issue("server", "server", now)
    (tmp_path / "cert.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


def talk(contexts: tuple[Any, Any], send: Send, read: Read) -> Any:
    """What `read` makes of what `send` sends, over a real connection."""

    async def both() -> Any:
        class Sender(TCPServer):
            async def handle_stream(self, stream: IOStream, address: Any) -> None:
                try:
                    await send(stream)
                finally:
                    stream.close()

        server = Sender(ssl_options=contexts[0])
        server.listen(0, "127.0.0.1")
        port = next(iter(server._sockets.values())).getsockname()[1]
        stream = await TCPClient().connect("127.0.0.1", port, ssl_options=contexts[1])
        try:
            return await asyncio.wait_for(read(stream), 60)
        finally:
            stream.close()
            server.stop()

    return asyncio.run(both())


@pytest.mark.parametrize("piece", [1000, 12_500, 1 << 20])
def test_all_bytes_come(contexts: tuple[Any, Any], piece: int) -> None:
    """Messages of all lengths, one after another, in pieces that do not end where they do."""
    sent = np.random.default_rng(0).integers(0, 256, sum(SIZES), dtype=np.uint8).tobytes()

    async def send(stream: IOStream) -> None:
        for start in range(0, len(sent), piece):
            await stream.write(sent[start : start + piece])
            await asyncio.sleep(0)

    async def read(stream: IOStream) -> bytes:
        return b"".join([bytes(await read_bytes(stream, size)) for size in SIZES])

    assert talk(contexts, send, read) == sent


def test_connection_that_ends_is_noticed_in_the_middle_of_a_message(contexts: tuple[Any, Any]) -> None:
    """Also while much is waited for, and little has come."""

    async def send(stream: IOStream) -> None:
        await stream.write(b"x" * 50_000)

    async def read(stream: IOStream) -> None:
        await read_bytes(stream, 10 * AT_ONCE)

    with pytest.raises(StreamClosedError):
        talk(contexts, send, read)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to wait for many bytes")
def test_loop_wakes_for_many_bytes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte in a hundred pieces is read in a few."""
    size, reads = 1_000_000, 0

    async def send(stream: IOStream) -> None:
        for _ in range(100):
            await stream.write(b"x" * (size // 100))
            await asyncio.sleep(0.002)

    async def read(stream: IOStream) -> None:
        stock = stream.read_from_fd

        def counted(buffer: Any) -> int | None:
            nonlocal reads
            found = stock(buffer)
            reads += found is not None
            return found

        monkeypatch.setattr(stream, "read_from_fd", counted)
        await read_bytes(stream, size)

    talk((None, None), send, read)
    assert reads < 40

"""Reading much from a slow link without waking for every packet.

A link of 100 Mbit/s brings 12 kB in a millisecond, and an event loop that wakes for each of them spends more on waking
than on the bytes: 39 times for a tile of 0.6 MB. So while a message comes whose length is known, the kernel is asked to
wake the loop when much of it is there (SO_RCVLOWAT), and again for every byte when it is nearly through.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from typing import Any

from distributed.comm import tcp
from distributed.protocol.utils import host_array
from tornado.iostream import IOStream

AT_ONCE = 128 * 1024
"""Bytes that are waited for at most."""

HELD_BACK = 32 * 1024
"""Bytes, the last of a message, that are taken as they come: TLS may have read part of a record of 16 kB already."""

_ASKS = sys.platform == "linux"  # elsewhere an event loop may not look at it


async def read_bytes(stream: IOStream, nbytes: int) -> memoryview:
    """So many bytes of a stream, in memory of their own."""
    buffer = host_array(nbytes)
    await fill(stream, buffer)
    return buffer


async def fill(stream: IOStream, buffer: memoryview) -> None:
    """Fill a buffer with what comes."""
    patient = _ASKS and buffer.nbytes > AT_ONCE
    start, asked = 0, 1
    try:
        while patient and (left := buffer.nbytes - start) > HELD_BACK:
            if (wanted := min(left - HELD_BACK, AT_ONCE)) != asked:
                _wake_at(stream, wanted)
                asked = wanted
            start += await stream.read_into(_part(buffer, start), partial=True)
    finally:
        if asked != 1:
            _wake_at(stream, 1)
    while start < buffer.nbytes:
        start += await stream.read_into(_part(buffer, start))


def _part(buffer: memoryview, start: int) -> Any:
    return buffer[start : start + tcp.C_INT_MAX]


def _wake_at(stream: IOStream, nbytes: int) -> None:
    """Have the loop woken when so many bytes are there, or when the connection ends."""
    with suppress(OSError, AttributeError):  # it is closed by now
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

"""Words and arrays between two processes of this machine, over a pair of sockets that nobody else can open.

A word is an operation with plain values, or the answer to one. Arrays in it stay where they are, on trays that both
processes see, and only their places are told. Whoever has looked at an array to the end says so with its next words.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from array import array as numbers
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from mmap import mmap
from struct import Struct
from typing import Any

import msgpack
import numpy as np
from distributed.protocol.serialize import Serialize

from cleave_dask.errors import CleaveError, StepError
from cleave_dask.runtime.trays import Array, Trays, on_tray, order_of

logger = logging.getLogger(__name__)

Answer = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""What answers an operation with its fields."""

_LENGTH = Struct("<I")
_AT_ONCE = 1 << 18
_DESCRIPTORS = 250  # in one message at most, says the kernel
_ARRAY = 1  # an extension type, which no value that came from a device can be


class Hatch:
    """One end of such a pair, on the event loop that runs."""

    def __init__(self, end: socket.socket, answer: Answer, ended: Callable[[], None]) -> None:
        self.trays = Trays()
        self._end = end
        self._answer, self._ended = answer, ended
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._count = 0
        self._theirs: dict[int, mmap] = {}  # trays of the other side
        self._done: deque[int] = deque()  # ... that nobody here looks at any more
        self._telling = False  # soon, which those are
        self._incoming, self._descriptors = bytearray(), deque[int]()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self.closed = False
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    async def ask(self, op: str, **fields: Any) -> Any:
        """The answer of the other side, or what it raised, or OSError if it is gone."""
        if self.closed:
            raise ConnectionError("the other process has ended")
        self._count += 1
        answer = self._asked[self._count] = self._loop.create_future()
        self._send({"asks": self._count, "op": op, "fields": fields})
        return await answer

    def tell(self, op: str, **fields: Any) -> None:
        """Say something that needs no answer."""
        if not self.closed:
            self._send({"op": op, "fields": fields})

    def close(self) -> None:
        """End it, also for the other side."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        self.trays.close()
        for descriptor in [*self._descriptors, *(each for _, more in self._outgoing for each in more)]:
            os.close(descriptor)
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the other process has ended"))
        self._ended()

    # Out

    def _send(self, word: dict[str, Any]) -> None:
        fresh: list[tuple[int, int, int]] = []

        def place(value: Any) -> Any:
            array = value.data if isinstance(value, Serialize) else value
            if not isinstance(array, np.ndarray):
                return None  # what a device sent and nobody could read
            return msgpack.ExtType(_ARRAY, msgpack.packb(self._lent(array, fresh)))

        body = msgpack.packb(word, default=place)
        done, gone = [self._done.popleft() for _ in range(len(self._done))], self.trays.gone[:]
        del self.trays.gone[: len(gone)]
        head = msgpack.packb({"fresh": [each[:2] for each in fresh], "done": done, "gone": gone})
        framed = b"".join((_LENGTH.pack(len(head)), head, _LENGTH.pack(len(body)), body))
        self._outgoing.append((memoryview(framed), [each[2] for each in fresh]))
        if len(self._outgoing) == 1:
            self._write()

    def _lent(self, array: Array, fresh: list[tuple[int, int, int]]) -> tuple[Any, ...]:
        """The place of an array; of one that is on no tray, the place of a copy."""
        tray = self.trays.lend(array) if array.nbytes else None
        if tray is None and array.nbytes:
            array = self.trays.placed(array)
            tray = self.trays.lend(array)
        if tray is not None and (descriptor := tray.hand_over()) is not None:
            fresh.append((tray.number, tray.nbytes, descriptor))
        return tray.number if tray is not None else 0, array.dtype.str, array.shape, order_of(array)

    def _write(self) -> None:
        while self._outgoing:
            data, descriptors = self._outgoing.popleft()
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers("i", descriptors))] if descriptors else []
            try:
                sent = self._end.sendmsg([data[:_AT_ONCE]], extra)
            except BlockingIOError:
                self._outgoing.appendleft((data, descriptors))
                self._loop.add_writer(self._end, self._write)
                return
            except OSError:  # the other side is gone: reading tells so too
                self._outgoing.appendleft((data, descriptors))
                self.close()
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if sent < len(data):
                self._outgoing.appendleft((data[sent:], []))
        self._loop.remove_writer(self._end)

    def _dropped(self, number: int) -> None:
        """No array is left here on a tray of the other side; called in any thread."""
        self._done.append(number)
        if not self._telling:
            self._telling = True
            with suppress(RuntimeError):  # the loop has ended, and so has everything
                self._loop.call_soon_threadsafe(self._tell_done)

    def _tell_done(self) -> None:
        self._telling = False
        if self._done:
            self.tell("done")

    # In

    def _read(self) -> None:
        try:
            data, extra, _, _ = self._end.recvmsg(_AT_ONCE, socket.CMSG_SPACE(4 * _DESCRIPTORS))
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        for _, _, descriptors in extra:
            self._descriptors.extend(numbers("i", descriptors))
        if not data:
            self.close()
            return
        self._incoming += data
        while not self.closed and (parts := self._framed()) is not None:
            self._hear(*parts)

    def _framed(self) -> tuple[bytes, bytes] | None:
        """The head and the body of the next word, if all of it is here."""
        parts, start = [], 0
        for _ in range(2):
            if len(self._incoming) < start + _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            start += _LENGTH.size + length
            if len(self._incoming) < start:
                return None
            parts.append(bytes(self._incoming[start - length : start]))
        del self._incoming[:start]
        return parts[0], parts[1]

    def _hear(self, head: bytes, body: bytes) -> None:
        told = msgpack.unpackb(head)
        for number, nbytes in told["fresh"]:
            descriptor = self._descriptors.popleft()
            self._theirs[number] = mmap(descriptor, nbytes)
            os.close(descriptor)
        for number in told["gone"]:
            del self._theirs[number]
        self.trays.give_back(told["done"])
        word = msgpack.unpackb(body, ext_hook=self._found, strict_map_key=False)
        if "answers" in word:
            waiting = self._asked.pop(word["answers"])
            if waiting.done():
                return  # whoever asked has been cancelled
            if "error" in word:
                waiting.set_exception(StepError(word["error"]))
            else:
                waiting.set_result(word["value"])
        elif word["op"] != "done":
            task = self._loop.create_task(self._work(word.get("asks"), word["op"], word["fields"]))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def _found(self, _: int, place: bytes) -> Array:
        """An array in its place; it is given back when nobody has it any more."""
        number, dtype, shape, order = msgpack.unpackb(place)
        if number == 0:
            return np.empty(shape, dtype)
        memory = self._theirs[number]
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, on_tray(memory, nbytes, self._dropped, number), order=order)

    async def _work(self, asks: int | None, op: str, fields: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"answers": asks}
        try:
            answer["value"] = await self._answer(op, fields)
        except CleaveError as error:
            answer["error"] = str(error)
        except Exception as error:
            logger.exception("Could not answer %s", op)
            answer["error"] = f"{type(error).__name__}: {error}"
        del fields  # so that the answer says which trays are done with
        if asks is not None and not self.closed:
            self._send(answer)

"""How many tiles of a device do something at once: a few large ones, or many small ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush


class Gate:
    """Lets `least` through at once, or more while they have `limit` bytes together; the smallest rank first.

    Small tiles would otherwise wait for each other's round trips, and large ones share a link that then serves none.
    Nobody enters while somebody is inside the gate that this one is `behind`.
    """

    def __init__(self, least: int, limit: float, *, behind: Gate | None = None) -> None:
        self.least, self.limit = least, limit
        self._before, self._after = behind, list[Gate]()
        if behind is not None:
            behind._after.append(self)
        self._inside, self._bytes = 0, 0.0
        self._queue: list[tuple[int, int, float, float, asyncio.Future[None]]] = []
        self._count = 0

    @asynccontextmanager
    async def through(self, rank: int, nbytes: float, share: float = 1.0) -> AsyncIterator[None]:
        """Wait for a place, and have it for the length of the block."""
        await self.enter(rank, nbytes, share)
        try:
            yield
        finally:
            self.leave(nbytes)

    async def enter(self, rank: int, nbytes: float, share: float = 1.0) -> None:
        """Wait for a place: until, with those inside, no more than that share of the limit is in use."""
        self._count += 1
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._queue, (rank, self._count, share, nbytes, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.leave(nbytes)
            raise

    def hold(self) -> None:
        """Take a place without waiting for it."""
        self._inside += 1

    def leave(self, nbytes: float = 0.0) -> None:
        """Give the place to the next."""
        self._inside -= 1
        self._bytes -= nbytes
        self._admit()
        for gate in self._after:
            gate._admit()

    def _admit(self) -> None:
        while self._queue:
            _, _, share, nbytes, admitted = self._queue[0]
            if not admitted.done():
                if self._before is not None and self._before._inside:
                    return
                if self._inside >= self.least and self._bytes + nbytes > share * self.limit:
                    return
                self._inside += 1
                self._bytes += nbytes
                admitted.set_result(None)
            heappop(self._queue)

"""How many tiles of a device do something at once: a few large ones, or many small ones."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush


class Gate:
    """Lets `least` through at once, or more while they have `limit` bytes together; the smallest rank first.

    Small tiles would otherwise wait for each other's round trips, and large ones share a link that then serves none.
    """

    def __init__(self, least: int, limit: float) -> None:
        self.least, self.limit = least, limit
        self._inside, self._bytes = 0, 0.0
        self._queue: list[tuple[int, int, float, asyncio.Future[None]]] = []
        self._count = 0

    async def enter(self, rank: int, nbytes: float) -> None:
        """Wait for a place."""
        self._count += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._queue, (rank, self._count, nbytes, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(nbytes)
            raise

    def leave(self, nbytes: float) -> None:
        """Give the place to the next."""
        self._inside -= 1
        self._bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            _, _, nbytes, turn = self._queue[0]
            if not turn.done():
                if self._inside >= self.least and self._bytes + nbytes > self.limit:
                    return
                self._inside += 1
                self._bytes += nbytes
                turn.set_result(None)
            heappop(self._queue)

"""Waking those who wait on an event loop for something that happens in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cleave_dask.errors import StepError

MOST = 16384
"""Who may wait at once: one on each connection of thousands of devices. Who asks and leaves counts until it rings."""


class Bell:
    """Rung from any thread; whoever waits then looks whether it was for them. Belongs to the loop that makes it."""

    def __init__(self, most: int = MOST) -> None:
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] = self._loop.create_future()
        self._most, self._waiting = most, 0

    def ring(self) -> None:
        """Wake all who wait."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    async def until(self, there: Callable[[], bool]) -> None:
        """Wait until something is there, looking whenever it rings."""
        if there():
            return
        if self._waiting >= self._most:
            raise StepError(f"{self._most} wait already for what is not made yet; ask again when it is")
        self._waiting += 1
        try:
            while not there():
                await asyncio.shield(self._next)
        finally:
            self._waiting -= 1

    def _wake(self) -> None:
        rung, self._next = self._next, self._loop.create_future()
        rung.set_result(None)

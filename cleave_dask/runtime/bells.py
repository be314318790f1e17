"""Waking those who wait on an event loop for something that happens in a thread."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from cleave_dask.errors import StepError

EACH = 4
"""Times that one device may wait at once; it asks one question after another, and some that it left may still wait."""


class Bell:
    """Rung from any thread; whoever waits then looks whether it was for them. Belongs to the loop that makes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] = self._loop.create_future()
        self._waiting: Counter[str] = Counter()

    def ring(self) -> None:
        """Wake all who wait."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    async def until(self, there: Callable[[], bool], who: str) -> None:
        """Have somebody wait until something is there, looking whenever it rings."""
        if there():
            return
        if self._waiting[who] >= EACH:
            raise StepError(f"{who} waits for {EACH} slices already that are not made yet; ask again when they are")
        self._waiting[who] += 1
        try:
            while not there():
                await asyncio.shield(self._next)
        finally:
            self._waiting[who] -= 1
            self._waiting += Counter()  # without those who wait for nothing

    def _wake(self) -> None:
        rung, self._next = self._next, self._loop.create_future()
        rung.set_result(None)

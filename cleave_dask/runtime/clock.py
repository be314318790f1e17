"""The server's clock as a device reads it, so that an upload can be timed from its first byte to its last.

A device asks the server for its time now and then. The answer was given at some moment between question and answer; the
middle is wrong by at most half of that, so the quickest of a few answers is believed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic

_QUESTIONS = 3
_FRESH = 300.0  # seconds; quartz drifts by some 10 us in each


class ServerClock:
    """What time it is at the server; unknown until it has been asked."""

    def __init__(self) -> None:
        self._offset: float | None = None
        self._asked = float("-inf")
        self._of = ""

    def due(self, server: str) -> bool:
        """Whether the server should be asked again; if so, the caller is to do it."""
        if server == self._of and monotonic() - self._asked < _FRESH:
            return False
        if server != self._of:
            self._of, self._offset = server, None
        self._asked = monotonic()
        return True

    async def ask(self, question: Callable[[], Awaitable[float]]) -> None:
        """Set the clock by the quickest of a few answers; one that does not come leaves it as it is."""
        quickest = float("inf")
        for _ in range(_QUESTIONS):
            sent = monotonic()
            try:
                told = await question()
            except OSError:
                return
            came = monotonic()
            if came - sent < quickest:
                quickest, self._offset = came - sent, told - (sent + came) / 2

    def now(self) -> float | None:
        """Seconds on the server's clock."""
        return None if self._offset is None else monotonic() + self._offset

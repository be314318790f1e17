"""Work that may be left out: a thread of its own, and a queue that never holds up whoever fills it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """Runs calls one after another; those that carry more bytes than there is room for are refused."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit  # bytes that may wait
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...], int]] = deque()
        self._bytes = 0  # waiting, or being worked on
        self._busy = False
        self._closed = False
        self._changed = Condition()
        self._thread: Thread | None = None

    def submit(self, call: Callable[..., None], *args: Any, size: int = 0) -> bool:
        """Have a call run soon; False if there is no room for it. One that is alone always has room."""
        with self._changed:
            if self._closed or (size and self._bytes and self._bytes + size > self.limit):
                return False
            self._waiting.append((call, args, size))
            self._bytes += size
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def clear(self) -> None:
        """Forget what carries bytes and has not begun."""
        with self._changed:
            kept = [item for item in self._waiting if item[2] == 0]
            self._bytes -= sum(item[2] for item in self._waiting)
            self._waiting = deque(kept)

    def join(self) -> None:
        """Wait until nothing waits or runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        """Take no more calls; the thread ends with what it is at."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                call, args, size = self._waiting.popleft()
                self._busy = True
            try:
                call(*args)
            except Exception:
                logger.exception("Work beside the step failed")
            finally:
                del args
                with self._changed:
                    self._bytes -= size

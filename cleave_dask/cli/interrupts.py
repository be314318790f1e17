"""Ctrl-C, SIGTERM and a closed terminal, as one KeyboardInterrupt at a moment when it does no harm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 130
"""Exit code of a command that was interrupted."""


class Interrupts:
    """While it is entered, a signal raises KeyboardInterrupt; the second asks for patience, the third leaves at once.

    Leaving at once is safe too, only less tidy: processes of a local fleet end when the one that started them is gone.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
            for number in (signal.SIGINT, signal.SIGTERM, *([hangup] if hangup is not None else [])):
                if number is not hangup or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Something that should not be cut in two, such as a save: a signal takes effect after it."""
        before = self.count
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if before == 0 and self.count:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= 3:
            os._exit(EXIT_CODE)
        if self.count == 2:
            os.write(2, b"closing; once more to leave at once\n")
        elif not self._held:
            raise KeyboardInterrupt

"""Processes that end with their block, however it ends; each has a log."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from cleave_dask.runtime.parent import VARIABLE

_LOOK = 0.1  # seconds between two looks at them


class PeerError(Exception):
    """A system could not be measured, and why."""


class Processes:
    """Named processes, started one by one."""

    def __init__(self) -> None:
        self._temporary = TemporaryDirectory(prefix="cleave-edge-")
        self.folder = Path(self._temporary.name)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process; Ctrl-C does not reach it, but ends this block and with it the process."""
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {}), VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    def pid(self, name: str) -> int:
        """Process id."""
        return self._running[name].pid

    def wait(self, seconds: float) -> None:
        """Until all have ended, or one has failed; those that are late are named."""
        deadline = monotonic() + seconds
        while open_names := [name for name, process in self._running.items() if process.poll() is None]:
            if any(process.returncode for process in self._running.values()):
                self._settle()
                return
            if monotonic() > deadline:
                raise PeerError(f"not done after {seconds:.0f} s: {', '.join(open_names[:3])}")
            sleep(_LOOK)

    def check(self) -> None:
        """Raise if one has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise PeerError(f"{name} ended with {process.returncode}: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        """The last line of a process's log that says something."""
        lines = [line.strip() for line in self._log(name).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "nothing in its log"

    def failed(self) -> list[str]:
        """Those that have ended badly."""
        return [name for name, process in self._running.items() if process.poll() not in (None, 0)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        self._temporary.cleanup()

    def _settle(self) -> None:
        """Give the others a moment to say what they saw."""
        deadline = monotonic() + 2.0
        while monotonic() < deadline and any(process.poll() is None for process in self._running.values()):
            sleep(_LOOK)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

"""What one step moved and spent: the counters behind the record that the client gets.

Every pass of a step holds on to the counters of that step: what comes late is not counted for the next one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Any

from cleave_dask.runtime.server_gathering import Array, Attempt


@dataclass
class Counters:
    """Counters of one step; several threads count."""

    number: int  # of the step, as its rows in the trace have it
    down_bytes: int = 0
    up_bytes: int = 0
    tiles: int = 0
    tiles_of: Counter[str] = field(default_factory=Counter)  # accepted tiles, by device
    retries: int = 0
    rejected: int = 0
    reused: int = 0  # tiles that were on disk already
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds, by use
    unchecked: set[str] = field(default_factory=set)  # devices that it has taken tiles from without a check
    started: float = field(default_factory=perf_counter)
    _lock: Lock = field(default_factory=Lock)

    def took(self, attempt: Attempt, arrays: Sequence[Array], seconds: float, *, fresh: bool) -> None:
        """A tile was taken in so many seconds, or is here already."""
        with self._lock:
            self.spent["gather"] += seconds
            self.spent["pull"] += attempt.pull_seconds
            self.spent["compute"] += attempt.compute_seconds
            self.tiles_of[attempt.device] += fresh
            self.up_bytes += attempt.moved_up(arrays)
            self.tiles += fresh
            self.retries += not fresh

    def refused(self) -> None:
        """A tile was not what was asked for."""
        with self._lock:
            self.rejected += 1

    def found(self, tiles: int) -> None:
        """So many tiles were on disk already."""
        with self._lock:
            self.reused += tiles

    def sent(self, nbytes: int) -> None:
        """So many bytes went down to a device."""
        with self._lock:
            self.down_bytes += nbytes

    def spend(self, use: str, seconds: float) -> None:
        """Something took so many seconds."""
        with self._lock:
            self.spent[use] += seconds

    def record(self, step: int, loss: float) -> dict[str, Any]:
        """What the client is told of the step."""
        return {
            "step": step,
            "loss": loss,
            "seconds": perf_counter() - self.started,
            "down_bytes": self.down_bytes,
            "up_bytes": self.up_bytes,
            "tiles": self.tiles,
            "retries": self.retries,
            "rejected": self.rejected,
            "reused": self.reused,
            "tiles_of": dict(self.tiles_of),
            "spent": dict(self.spent),
        }

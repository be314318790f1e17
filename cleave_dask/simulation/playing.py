"""Playing churn to real processes: kills, stops and starts them at the script's times."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from threading import Event as Flag
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

from cleave_dask.errors import InputError
from cleave_dask.fleet.churn import LINKS, Churn, Event, Kind

_SLICE = 0.1
"""Seconds of a slowed device's turn: it runs for its share of them and stands still for the rest."""


class Player:
    """A thread that plays churn to the devices of a local fleet; when it ends, nobody is left stopped."""

    def __init__(self, fleet: Any, churn: Churn) -> None:
        if churn.count(*LINKS):
            raise InputError("churn that changes links is for the simulator: the links of processes stay as they are")
        self.fleet = fleet  # has `pids` and `restart(name)`
        self.churn = churn
        self.happened: Counter[Kind] = Counter()
        self._slowed: dict[str, float] = {}
        self._stalled: set[str] = set()
        self._end = Flag()
        self._thread = Thread(target=self._play, name="cleave-churn", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        for name in list(self.fleet.pids):
            self._signal(name, signal.SIGCONT)

    def _play(self) -> None:
        start = monotonic()
        for event in self.churn:
            while (left := start + event.seconds - monotonic()) > 0:
                if self._idle(left):
                    return
            if self._end.is_set():
                return
            self._apply(event)
        while not self._idle(_SLICE):
            pass

    def _idle(self, seconds: float) -> bool:
        """Let time pass, slowed devices working for their share of it; True when it is time to end."""
        if not self._slowed:
            return self._end.wait(min(seconds, _SLICE))
        for name in self._slowed:
            self._signal(name, signal.SIGSTOP)
        fraction = 1 / max(self._slowed.values())
        ended = self._end.wait(min(seconds, _SLICE) * (1 - fraction))
        for name in self._slowed.keys() - self._stalled:
            self._signal(name, signal.SIGCONT)
        return ended or self._end.wait(_SLICE * fraction)

    def _apply(self, event: Event) -> None:
        self.happened[event.kind] += 1
        name = event.device
        match event.kind:
            case "leave":
                self._slowed.pop(name, None)
                self._stalled.discard(name)
                self._signal(name, signal.SIGKILL)
            case "join":
                self.fleet.restart(name)
            case "stall":
                self._stalled.add(name)
                self._signal(name, signal.SIGSTOP)
            case "resume":
                self._stalled.discard(name)
                self._signal(name, signal.SIGCONT)
            case "slow":
                self._slowed[name] = event.factor
            case "recover":
                self._slowed.pop(name, None)
                self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(KeyError, ProcessLookupError):
            os.kill(self.fleet.pids[name], number)

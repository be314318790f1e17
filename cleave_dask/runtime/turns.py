"""Whose turn it is to measure itself: one device at a time, or each would find a machine and a network that are shared.

The scheduler's side of measuring. A device joins with default figures, asks for its turn, measures, and tells what it
found. A turn is lent for a while only, so that a device which dies or stops in the middle of it holds up nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distributed import Scheduler
from distributed.scheduler import WorkerState

from cleave_dask.errors import FleetError
from cleave_dask.fleet.units import require
from cleave_dask.runtime.checking import REASON
from cleave_dask.runtime.lending import FIGURES

logger = logging.getLogger(__name__)

TURN = 10.0
"""Seconds after which a turn is over, whatever has become of the device; measuring is bounded to less than that."""

USUAL = 1.0
"""Seconds that a turn usually takes: what a device waits for each one before it."""

LONGEST_WAIT = 5.0
"""Seconds between two questions of a device that waits; one that has been silent for three times as long has left."""


@dataclass
class Turns:
    """Devices in line; the first one measures. No clock and no I/O: times are given."""

    line: dict[str, float] = field(default_factory=dict)  # when each was last heard of, in the order of their coming
    until: float = 0.0  # when the turn of the first one ends
    told: str | None = None  # the first one, once it knows that it is its turn

    def ask(self, who: str, now: float) -> float:
        """Seconds that `who` must wait before it asks again; 0: it is its turn."""
        holder = next(iter(self.line), None)
        for other, heard in list(self.line.items()):
            over = now >= self.until if other == holder else now - heard > 3 * LONGEST_WAIT
            if over and other != who:
                del self.line[other]
        first = next(iter(self.line), who)
        self.line[who] = now
        if first == who:
            if self.told != who or now >= self.until:
                self.told, self.until = who, now + TURN
            return 0.0
        if first != holder:  # it is told so when it asks next
            self.until = now + LONGEST_WAIT + TURN
        ahead = list(self.line).index(who)
        return min(LONGEST_WAIT, USUAL * ahead)

    def end(self, who: str, now: float) -> None:
        """The turn of `who` is over, or it has left the line."""
        held = next(iter(self.line), None) == who
        self.line.pop(who, None)
        if held:  # the next one has until its next question, and a turn
            self.told, self.until = None, now + LONGEST_WAIT + TURN


class Measurements:
    """What devices measure of themselves, as the scheduler keeps it: in `ws.extra["cleave"]`."""

    def __init__(
        self,
        scheduler: Scheduler,
        address: Callable[[str], str],
        measured: Callable[[WorkerState], None] = lambda _: None,
    ) -> None:
        self.scheduler = scheduler
        self.address = address  # of the server, for the device of a name
        self.tell = measured  # who else wants to know
        self.turns = Turns()
        scheduler.handlers.update(cleave_turn=self.turn, cleave_measured=self.measured)

    def turn(self, worker: str) -> dict[str, Any]:
        """Whether it is this worker's turn: with the server's address, or with the seconds to wait."""
        now = monotonic()
        for other in [other for other in self.turns.line if other not in self.scheduler.workers]:
            self.turns.end(other, now)
        server = self.address(str(self.scheduler.workers[worker].name)) if worker in self.scheduler.workers else ""
        if not server:
            return {"wait": USUAL}
        before = set(self.turns.line)
        wait = self.turns.ask(worker, now)
        for silent in before - set(self.turns.line):
            ws = self.scheduler.workers[silent]
            logger.warning("Device %s did not measure itself in time; it is planned for with what it said", ws.name)
            ws.extra["cleave"] = {**_facts(ws), "measuring": False}
        return {"wait": wait} if wait else {"wait": 0.0, "server": server}

    def measured(self, worker: str, figures: Mapping[str, Any]) -> None:
        """A device has measured itself, or has given it up; its turn is over."""
        self.turns.end(worker, monotonic())
        ws = self.scheduler.workers.get(worker)
        if ws is None or _facts(ws).get("role") != "device":
            return
        known: dict[str, float] = {}
        for name, dimension in FIGURES.items():
            try:
                known |= {name: require(figures[name], dimension, field=name)} if name in figures else {}
            except FleetError as error:
                logger.warning("Device %s measured nonsense: %s", ws.name, error)
        known = {name: min(max(given, REASON[name][0]), REASON[name][1]) for name, given in known.items()}
        ws.extra["cleave"] = {**_facts(ws), **known, "measuring": False}
        self.tell(ws)


def _facts(ws: WorkerState) -> dict[str, Any]:
    facts: dict[str, Any] = ws.extra.get("cleave") or {}
    return facts

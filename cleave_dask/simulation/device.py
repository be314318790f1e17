"""A device on virtual time: a downlink, a multiplier and an uplink, each first come first served.

Parcels wait for the downlink, the most urgent first, and come down in a few runs of tiles; between two runs the device
turns to whatever has become more urgent. Within a run tiles follow each other through the three parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from cleave_dask.fleet.devices import Device
from cleave_dask.planning.cost import Floats
from cleave_dask.planning.parcels import Figures
from cleave_dask.simulation.cuts import Cut

RUN_SECONDS = 0.5
"""Seconds of filler after which a device looks whether something more urgent waits; never less than a tile, though."""

RUNS = 6
"""Runs that a parcel of filler comes down in at most; more would cost the simulation more than they show."""

AHEAD = 3
"""Tiles of filler that a device has in work at once: it fetches no more while results of so many wait to go up."""


@dataclass
class Parcel:
    """Tiles of a job that travel together, and what has become of them."""

    job: int
    rank: int
    cut: Cut
    filler: bool
    open: bool = True
    accepted: int = 0  # tiles that came in before an attempt broke off


@dataclass(eq=False)
class Attempt:
    """A parcel on a device."""

    number: int
    parcel: Parcel
    sent: float
    life: int  # of its device: what was under way in a former life is lost
    next: int  # the first tile that has not come down
    begun: float = 0.0  # the run that comes down now
    run: slice = field(default_factory=lambda: slice(0, 0))
    down: Floats = field(default_factory=lambda: np.zeros(0))  # bytes of the run, by tile
    ended: float = 0.0  # when the last tile so far is up
    runs_up: int = 0  # runs whose last byte is up
    up_to: list[tuple[float, int]] = field(default_factory=list)  # (time, tiles that are up by then)

    @property
    def complete(self) -> bool:
        """Whether everything has come down."""
        return self.next >= len(self.parcel.cut.tiles)


@dataclass(eq=False)
class SimulatedDevice:
    """A device: when each of its parts is free, and the attempts that it has."""

    device: Device
    life: int = 0
    present: bool = True
    factor: float = 1.0  # how many times slower than it should be
    stalled_at: float | None = None
    waiting: list[Attempt] = field(default_factory=list)  # for the downlink
    loading: Attempt | None = None
    dozing: bool = False  # until results have gone up
    compute_free: float = 0.0
    up_free: float = 0.0
    slices: dict[tuple[int, ...], float] = field(default_factory=dict)  # bytes of each that it keeps, least used first
    kept: float = 0.0  # bytes of all of them

    @property
    def figures(self) -> Figures:
        """What the dispatcher knows of it."""
        return Figures(
            self.device.flops, self.device.down.bandwidth, self.device.up.bandwidth, self.device.down.latency
        )

    def load(self, now: float) -> Attempt | None:
        """Begin to fetch the next run of the most urgent parcel, if the downlink is free and there is one."""
        if not self.ready(now):
            return None
        attempt = min(self.waiting, key=lambda waiting: waiting.parcel.rank)
        self.waiting.remove(attempt)
        cut, count = attempt.parcel.cut, len(attempt.parcel.cut.tiles)
        runs = min(RUNS, self.figures.seconds(cut.work) / RUN_SECONDS) if attempt.parcel.filler or self.waiting else 1
        attempt.run = slice(attempt.next, min(count, attempt.next + ceil(count / max(1.0, runs))))
        attempt.begun, attempt.down = now, self._fetch(attempt)
        attempt.next = attempt.run.stop
        self.loading = attempt
        return attempt

    def ready(self, now: float) -> bool:
        """Whether it would fetch something now."""
        opens = self.opens()
        return opens is not None and opens <= now

    def opens(self) -> float | None:
        """When it fetches next, if it has something to fetch and its downlink is free: as few results wait to go up."""
        self.waiting = [attempt for attempt in self.waiting if attempt.parcel.open]
        if not self.waiting or self.loading is not None or not self.present or self.stalled_at is not None:
            return None
        next_one = min(self.waiting, key=lambda waiting: waiting.parcel.rank).parcel
        if not next_one.filler:
            return 0.0
        return self.up_free - AHEAD * self.factor * float(next_one.cut.up[0]) / self.device.up.bandwidth

    def loaded(self, now: float) -> tuple[Attempt, Floats, Floats, Floats]:
        """A run is down: when each of its tiles was, when it is multiplied, and when it is up."""
        attempt = self.loading
        assert attempt is not None
        self.loading = None
        if not attempt.complete:
            self.waiting.append(attempt)
        cut, run, total = attempt.parcel.cut, attempt.run, float(attempt.down.sum())
        share = np.cumsum(attempt.down) / total if total else np.ones(len(attempt.down))
        arrived = attempt.begun + (now - attempt.begun) * share
        multiplied = served(arrived, cut.flops[run] * (self.factor / self.device.flops), self.compute_free)
        sent = served(multiplied, cut.up[run] * (self.factor / self.device.up.bandwidth), self.up_free)
        self.compute_free, self.up_free = float(multiplied[-1]), float(sent[-1])
        return attempt, arrived, multiplied, sent

    def resume(self, now: float) -> None:
        """Go on where it stood still."""
        assert self.stalled_at is not None
        stood, self.stalled_at = now - self.stalled_at, None
        self.compute_free += stood
        self.up_free += stood

    def _fetch(self, attempt: Attempt) -> Floats:
        """Bytes that come down for each tile of a run; slices that the device keeps do not."""
        cut, run = attempt.parcel.cut, attempt.run
        if cut.only and attempt.parcel.accepted == 0 and cut.work.down_bytes <= self.device.memory / 2:
            return cut.down[run]
        fetched, needed = np.zeros(run.stop - run.start), []
        for operand, (places, names, sizes) in enumerate(cut.slices):
            part = slice(*np.searchsorted(places, (run.start, run.stop)))
            columns = (places[part] - run.start, names[part], sizes[part])
            needed += [(place, operand, *rest) for place, *rest in zip(*(c.tolist() for c in columns), strict=True)]
        for place, operand, name, size in sorted(needed):
            key = (attempt.parcel.job, operand, name)
            if self.slices.pop(key, None) is None:
                self.kept += size
                fetched[place] += size
            self.slices[key] = size  # the last used are the last to go
            while self.kept > self.device.memory / 2:
                self.kept -= self.slices.pop(next(iter(self.slices)))
        return fetched


def served(ready: Floats, seconds: Floats, free: float) -> Floats:
    """When each of several jobs that come one after another is through, on a machine that is free from `free` on.

    through[i] = max(through[i - 1], ready[i]) + seconds[i]
    """
    total = np.cumsum(seconds)
    through: Floats = total + np.maximum.accumulate(np.maximum(ready, free) - (total - seconds))
    return through

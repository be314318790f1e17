"""A device on virtual time: a downlink, a multiplier and an uplink, each the most urgent tile first.

Parcels wait for the downlink, the most urgent first, and come down in a few runs of tiles. Within a run tiles follow
each other through the three parts. Where something more urgent comes while a run of filler is in one of them, the run
stands still meanwhile, but for what is under way of it: that comes first, as it does on a real device, where tiles wait
for each part by urgency and a link has few of them under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from cleave_dask.fleet.devices import Device
from cleave_dask.planning.cost import FILLER_SHARE, UNDER_WAY, Floats
from cleave_dask.planning.parcels import Figures
from cleave_dask.simulation.cuts import Cut
from cleave_dask.simulation.measured import Costs

RUN_SECONDS = 0.5
"""Seconds of filler after which a device looks for what it should do next; never less than a tile, though."""

AT_LEAST = 2
"""Tiles that are under way over a link at once, however large."""

RUNS = 6
"""Runs that a parcel of filler comes down in at most; more would cost the simulation more than they show."""


@dataclass
class Parcel:
    """Tiles of a job that travel together, and what has become of them."""

    job: int
    rank: int
    cut: Cut
    filler: bool
    open: bool = True
    accepted: int = 0  # tiles that came in before an attempt broke off
    seen: int = 0  # tiles that came in from anybody


@dataclass(eq=False)
class Attempt:
    """A parcel on a device."""

    number: int
    parcel: Parcel
    sent: float
    life: int  # of its device: what was under way in a former life is lost
    next: int  # the first tile that has not come down
    runs: int = 0  # that have come down
    runs_up: int = 0  # whose last byte is up
    up_to: int = 0  # tiles that are up

    @property
    def complete(self) -> bool:
        """Whether everything has come down."""
        return self.next >= len(self.parcel.cut.tiles)


@dataclass(eq=False)
class Run:
    """Tiles of an attempt that come down together."""

    attempt: Attempt
    tiles: slice
    down: Floats  # bytes, by tile
    begun: float
    down_bytes: float  # of all its tiles
    up_bytes: float
    left: float = 0.0  # seconds that it still takes to come down, if it was pushed aside
    stood: float = 0.0  # what filler of its device had stood still before the uplink when this was last moved on
    arrived: Floats = field(default_factory=lambda: np.zeros(0))  # when each tile was down
    multiplied: Floats = field(default_factory=lambda: np.zeros(0))
    sent: Floats = field(default_factory=lambda: np.zeros(0))  # when each should be up


@dataclass(eq=False)
class Stage:
    """The multiplier or the uplink: what others wait for goes first, filler stands still meanwhile."""

    critical: float = 0.0  # when the last of each kind is through
    filler: float = 0.0
    stood: float = 0.0  # seconds that filler has stood still, all in all

    def serve(self, ready: Floats, seconds: Floats, *, filler: bool, behind: float = 0.0) -> Floats:
        """When each of several tiles is through; `behind`: seconds of filler that are under way and come first."""
        if filler:
            through = served(ready, seconds, max(self.filler, self.critical))
            self.filler = float(through[-1])
            return through
        first, waits = float(ready[0]), self.filler > ready[0]
        through = served(ready, seconds, max(self.critical, first + min(behind, self.filler - first) if waits else 0.0))
        self.critical = float(through[-1])
        if waits:
            total = float(seconds.sum())
            self.filler += total
            self.stood += total
        return through


@dataclass(eq=False)
class SimulatedDevice:
    """A device: when each of its parts is free, and the attempts that it has."""

    device: Device
    costs: Costs
    life: int = 0
    present: bool = True
    factor: float = 1.0  # how many times slower than it should be
    stalled_at: float | None = None
    waiting: list[Attempt] = field(default_factory=list)  # for the downlink
    loading: Run | None = None
    pushed_aside: Run | None = None  # what came down until something more urgent came
    multiplier: Stage = field(default_factory=Stage)
    uplink: Stage = field(default_factory=Stage)
    slices: dict[tuple[int, ...], float] = field(default_factory=dict)  # bytes of each that it keeps, least used first
    kept: float = 0.0  # bytes of all of them
    _half_a_tile: float = 0.0  # seconds of the multiplier, of the filler that it had last
    _results_under_way: float = 0.0  # seconds of the uplink, of the same

    @property
    def figures(self) -> Figures:
        """What the dispatcher knows of it."""
        return Figures(
            self.device.flops, self.device.down.bandwidth, self.device.up.bandwidth, self.device.down.latency
        )

    def under_way(self, run: Run, seconds: float) -> float:
        """Seconds of a link that tiles of filler take which are under way and come first, if all take `seconds`."""
        tile = seconds / len(run.down)
        window = FILLER_SHARE * (2 * self.device.down.latency + UNDER_WAY)
        return max(AT_LEAST * tile, window) - tile / 2  # the first of them is half through

    def load(self, now: float) -> Run | None:
        """Begin to fetch the next run of the most urgent parcel, if it may come down now."""
        self.waiting = [attempt for attempt in self.waiting if attempt.parcel.open]
        if not self.waiting or not self.present or self.stalled_at is not None:
            return None
        attempt = min(self.waiting, key=lambda waiting: waiting.parcel.rank)
        critical = not attempt.parcel.filler
        if self.loading is not None:
            if self.pushed_aside is not None or not critical or not self.loading.attempt.parcel.filler:
                return None
            self.pushed_aside = self.loading
        elif self.pushed_aside is not None and not critical:
            return None
        self.waiting.remove(attempt)
        cut, count = attempt.parcel.cut, len(attempt.parcel.cut.tiles)
        runs = min(RUNS, self.figures.seconds(cut.work) / RUN_SECONDS) if attempt.parcel.filler or self.waiting else 1
        tiles = slice(attempt.next, min(count, attempt.next + ceil(count / max(1.0, runs))))
        attempt.next = tiles.stop
        attempt.runs += 1
        down = self._fetch(attempt, tiles)
        self.loading = Run(attempt, tiles, down, now, float(down.sum()), float(cut.up[tiles].sum()))
        return self.loading

    def down_seconds(self, run: Run) -> float:
        """Seconds that a run takes to come down if the server has nobody else to serve."""
        beside = len(run.down) * self.costs.message + run.up_bytes * self.costs.confirmation
        return (run.down_bytes + beside) * self.factor / self.device.down.bandwidth

    def go_on(self) -> Run | None:
        """The run that was pushed aside, if nothing more urgent comes down any more."""
        if self.loading is not None or self.pushed_aside is None:
            return None
        self.loading, self.pushed_aside = self.pushed_aside, None
        return self.loading

    def loaded(self, run: Run, now: float) -> None:
        """A run is down: when each of its tiles is multiplied and up."""
        self.loading = None
        attempt, cut, filler = run.attempt, run.attempt.parcel.cut, run.attempt.parcel.filler
        if not attempt.complete:
            self.waiting.append(attempt)
        share = np.cumsum(run.down) / run.down_bytes if run.down_bytes else np.ones(len(run.down))
        run.arrived = run.begun + (now - run.begun) * share
        seconds = cut.flops[run.tiles] * (self.factor / self.device.flops)
        run.multiplied = self.multiplier.serve(run.arrived, seconds, filler=filler, behind=self._half_a_tile)
        if filler:
            self._half_a_tile = float(seconds[-1]) / 2
        carried = cut.up[run.tiles] + (self.costs.message + run.down_bytes * self.costs.confirmation / len(run.down))
        seconds = carried * (self.factor / self.device.up.bandwidth)
        run.sent = self.uplink.serve(run.multiplied, seconds, filler=filler, behind=self._results_under_way)
        if filler:
            self._results_under_way = self.under_way(run, run.up_bytes * self.factor / self.device.up.bandwidth)
        run.stood = self.uplink.stood

    def left_to_send(self, run: Run) -> float:
        """Seconds that a run still takes because others went first, now that it would be up otherwise."""
        left, run.stood = self.uplink.stood - run.stood, self.uplink.stood
        return left if run.attempt.parcel.filler else 0.0

    def resume(self, now: float) -> None:
        """Go on where it stood still."""
        assert self.stalled_at is not None
        stood, self.stalled_at = now - self.stalled_at, None
        for stage in (self.multiplier, self.uplink):
            stage.critical += stood
            stage.filler += stood

    def _fetch(self, attempt: Attempt, run: slice) -> Floats:
        """Bytes that come down for each tile of a run; slices that the device keeps do not."""
        cut = attempt.parcel.cut
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

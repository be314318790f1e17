"""A device on virtual time: a downlink, a multiplier and an uplink, each the most urgent tile first.

Parcels wait for the downlink, the most urgent first, and come down in a few runs of tiles. Within a run tiles follow
each other through the three parts. Where something more urgent comes while a run of filler is in one of them, the run
stands still meanwhile, but for what is under way of it: that comes first, as it does on a real device, where tiles wait
for each part by urgency and a link has few of them under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil

import numpy as np

from cleave_dask.fleet.devices import Device, Link
from cleave_dask.planning.cost import FILLER_SHARE, TILES_UNDER_WAY, UNDER_WAY
from cleave_dask.planning.parcels import Figures
from cleave_dask.simulation.cuts import Cut
from cleave_dask.simulation.measured import Costs

RUN_SECONDS = 0.5
"""Seconds of filler after which a device looks for what it should do next; never less than a tile, though."""

RUNS = 6
"""Runs that a parcel of filler comes down in at most; more would cost the simulation more than they show."""


@dataclass(slots=True, eq=False)
class Parcel:
    """Tiles of a job that travel together, and what has become of them."""

    job: int
    rank: int
    cut: Cut
    filler: bool
    open: bool = True
    accepted: int = 0  # tiles that came in before an attempt broke off
    seen: int = 0  # tiles that came in from anybody


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
class Run:
    """Tiles of an attempt that come down together."""

    attempt: Attempt
    tiles: slice
    down: Sequence[float]  # bytes, by tile
    begun: float
    down_bytes: float  # of all its tiles
    up_bytes: float
    ends: float = 0.0  # when it is down, if nothing comes between
    moves: int = 0  # times that it was pushed aside
    left: float = 0.0  # seconds that it still takes to come down, if it was pushed aside
    stood: float = 0.0  # what filler of its device had stood still before the uplink when this was last moved on
    arrived: Sequence[float] = ()  # when each tile was down
    multiplied: Sequence[float] = ()
    sent: Sequence[float] = ()  # when each should be up


@dataclass(slots=True, eq=False)
class Stage:
    """The multiplier or the uplink: what others wait for goes first, filler stands still meanwhile."""

    critical: float = 0.0  # when the last of each kind is through
    filler: float = 0.0
    stood: float = 0.0  # seconds that filler has stood still, all in all

    def serve(
        self, ready: Sequence[float], amounts: Sequence[float], rate: float, *, filler: bool, behind: float
    ) -> list[float]:
        """When each of several tiles is through, at so many seconds for each part of their `amounts`.

        `behind`: seconds of filler that are under way and come first.
        """
        if filler:
            through = served(ready, amounts, rate, max(self.filler, self.critical))
            self.filler = through[-1]
            return through
        first, free = ready[0], self.critical
        waits = self.filler > first
        if waits:
            free = max(free, min(first + behind, self.filler))
        through = served(ready, amounts, rate, free)
        self.critical = through[-1]
        if waits:
            total = sum(amounts) * rate
            self.filler += total
            self.stood += total
        return through


@dataclass(slots=True, eq=False)
class SimulatedDevice:
    """A device: when each of its parts is free, and the attempts that it has."""

    device: Device
    costs: Costs
    life: int = 0
    figures: Figures = field(init=False)  # what the dispatcher knows of it
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

    def __post_init__(self) -> None:
        self.relink(self.device.down, self.device.up)

    @property
    def name(self) -> str:
        """Of the device."""
        return self.device.name

    def relink(self, down: Link, up: Link) -> None:
        """Its links are others from now on; a transfer under way ends at the rate that it began with."""
        self.device = replace(self.device, down=down, up=up)
        self.figures = Figures.of(self.device)

    def trip(self, *, told: bool) -> float:
        """Seconds from an order to the first byte of its operands, which whoever was told before has asked for."""
        down, up = self.device.down.latency, self.device.up.latency
        return down if told else 2 * down + up  # gets, or is told, asks, gets

    def report(self, *, awaited: bool) -> float:
        """Seconds until the scheduler hears of a parcel that is in; who is `awaited` has been begun without that."""
        return 0.0 if awaited else self.device.up.latency + self.device.down.latency

    def beside(self, run: Run | None, aside: Run) -> float:
        """Seconds that filler under way takes of the downlink: it and a run share it for as long as both last."""
        under_way = self.under_way(aside, self.down_seconds(aside))
        return under_way if run is None else min(under_way, self.down_seconds(run))

    def under_way(self, run: Run, seconds: float) -> float:
        """Seconds of a link that tiles of filler take which are under way, if all take `seconds`."""
        tile = seconds / len(run.down)
        window = FILLER_SHARE * (2 * self.device.down.latency + UNDER_WAY)
        return max(TILES_UNDER_WAY * tile, window) - tile / 2  # the first of them is half through

    def load(self, now: float) -> Run | None:
        """Begin to fetch the next run of the most urgent parcel, if it may come down now."""
        attempt = self._most_urgent()
        if attempt is None or not self.present or self.stalled_at is not None:
            return None
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
        self.loading = Run(attempt, tiles, down, now, sum(down), sum(cut.up[tiles]))
        return self.loading

    def _most_urgent(self) -> Attempt | None:
        """The attempt that comes first; those that nobody wants any more are forgotten."""
        if not all(attempt.parcel.open for attempt in self.waiting):
            self.waiting = [attempt for attempt in self.waiting if attempt.parcel.open]
        return min(self.waiting, key=_rank, default=None)

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
        if run.down_bytes:
            scale = (now - run.begun) / run.down_bytes
            run.arrived = [run.begun + scale * down for down in accumulate(run.down)]
        else:
            run.arrived = [now] * len(run.down)
        flops, rate = cut.flops[run.tiles], self.factor / self.device.flops
        run.multiplied = self.multiplier.serve(run.arrived, flops, rate, filler=filler, behind=self._half_a_tile)
        if filler:
            self._half_a_tile = flops[-1] * rate / 2
        beside = self.costs.message + run.down_bytes * self.costs.confirmation / len(run.down)
        carried, rate = [up + beside for up in cut.up[run.tiles]], self.factor / self.device.up.bandwidth
        shared = min(self._results_under_way, sum(carried) * rate)  # half and half for as long as both last
        run.sent = self.uplink.serve(run.multiplied, carried, rate, filler=filler, behind=shared)
        if filler:
            self._results_under_way = self.under_way(run, run.up_bytes * rate)
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

    def _fetch(self, attempt: Attempt, run: slice) -> Sequence[float]:
        """Bytes that come down for each tile of a run; slices that the device keeps do not."""
        cut = attempt.parcel.cut
        if cut.kept and (self.life or self.name != cut.device):  # somebody who has not done the gemms before
            return [new + old for new, old in zip(self._new(attempt, run), cut.kept[run], strict=True)]
        return self._new(attempt, run)

    def _new(self, attempt: Attempt, run: slice) -> Sequence[float]:
        """Bytes that come down for each tile of a run, of operands that no gemm before has brought."""
        cut = attempt.parcel.cut
        if cut.only and attempt.parcel.accepted == 0 and cut.work.down_bytes <= self.device.memory / 2:
            return cut.down[run]
        fetched, needed = [0.0] * (run.stop - run.start), []
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


def served(ready: Sequence[float], amounts: Sequence[float], rate: float, free: float) -> list[float]:
    """When each of several jobs that come one after another is through, on a machine that is free from `free` on."""
    through = []
    for begin, amount in zip(ready, amounts, strict=True):
        free = (begin if begin > free else free) + amount * rate
        through.append(free)
    return through


def _rank(attempt: Attempt) -> int:
    return attempt.parcel.rank

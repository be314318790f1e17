"""The simulator: a planned step on virtual time, with the same dispatcher that places parcels on a real fleet.

What is modelled, each as a queue of its own: every device's downlink, multiplier and uplink, first come first served;
the links' latency; the server's egress and ingress, shared by all transfers (`sharing`); the server's rounds between
levels, one after another; its check of each tile; the scheduler, which turns to one parcel after another. Inside a
parcel tiles follow each other: tile i is multiplied when it is down and tile i - 1 is through, and goes up likewise:

    multiplied[i] = max(multiplied[i - 1], down[i]) + compute[i]
    up[i] = max(up[i - 1], multiplied[i]) + send[i]

Slices that a device's tiles share come down once while its memory lasts. Events lie in one heap; a parcel makes about
five, so that a step of 500,000 parcels takes a minute. Nothing is random: the same plan and churn give the same trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from cleave_dask.errors import InputError, StepError
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.fleet.devices import Device, Fleet
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.cost import SCHEDULER_SECONDS, Floats, Ints, Shape
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.parcels import Figures, Work, first_with_slice, parcel_works
from cleave_dask.planning.values import Plan, Tiles
from cleave_dask.runtime.rounds import Schedule, schedule
from cleave_dask.simulation.sharing import SharedLink

TICK = 0.2
"""Seconds between two looks for late parcels, as on the real scheduler."""

VERIFIED = 16.0
"""Floating point operations of the server for each number of a tile's operands and result: eight random vectors."""

WINDOW = 3
"""Parcels in flight per device."""


@dataclass(frozen=True)
class _Cut:
    """A parcel as all gemms have it that are cut alike."""

    device: str
    work: Work
    tiles: Ints  # numbers
    slices: tuple[list[tuple[int, ...]], ...]  # names of each tile's operand slices
    sizes: tuple[list[float], ...]  # their bytes
    down: Floats  # bytes of each tile if nothing is there yet: a slice counts for the first tile that has it
    flops: Floats
    up: Floats
    only: bool  # all tiles that its device has of the gemm


@dataclass
class _Parcel:
    """Tiles of a job that travel together, and what has become of them."""

    job: int
    rank: int
    cut: _Cut
    filler: bool
    open: bool = True
    accepted: int = 0  # tiles that came in before an attempt broke off


@dataclass
class _State:
    """A device: when each of its parts is free, and the attempts that it has."""

    device: Device
    figures: Figures
    present: bool = True
    factor: float = 1.0  # slower than it should be
    stalled_at: float | None = None
    life: int = 0  # counts departures: what was under way in a former life is lost
    waiting: list[_Attempt] = field(default_factory=list)  # for the downlink
    loading: bool = False
    uploading: list[_Attempt] = field(default_factory=list)
    held: list[tuple[Callable[[_Attempt], None], _Attempt]] = field(default_factory=list)  # by a stall
    compute_free: float = 0.0
    up_free: float = 0.0
    slices: dict[tuple[int, ...], float] = field(default_factory=dict)  # bytes of each that it keeps, oldest first
    kept: float = 0.0  # bytes of all of them

    def fetch(self, job: int, cut: _Cut, first: int) -> Floats:
        """Bytes that come down for each tile of a parcel from `first` on, as the device's cache of slices has it."""
        if cut.only and first == 0:
            return cut.down
        fetched = np.zeros(len(cut.tiles) - first)
        for names, sizes in zip(cut.slices, cut.sizes, strict=True):
            for place, (name, size) in enumerate(zip(names[first:], sizes[first:], strict=True)):
                key = (job, *name)
                if key not in self.slices:
                    self.slices[key] = size
                    self.kept += size
                    fetched[place] += size
        while self.kept > self.device.memory / 2 and self.slices:
            oldest = next(iter(self.slices))
            self.kept -= self.slices.pop(oldest)
        return fetched


@dataclass
class _Attempt:
    """A parcel on a device."""

    parcel: int
    state: _State
    life: int
    sent: float
    begun: float = 0.0  # its download
    first: int = 0  # tiles before this one were accepted in a former attempt
    down: Floats = field(default_factory=lambda: np.zeros(0))  # bytes that come down for each tile
    ends: tuple[Floats, Floats, Floats] | None = None  # of each tile: down, multiplied, up


@dataclass(frozen=True)
class Measured:
    """What a simulated step shows: its seconds, and a row of numbers for each attempt at a parcel."""

    seconds: float
    rows: list[tuple[Any, ...]]
    down_bytes: float
    up_bytes: float
    handovers: int
    lost: int  # parcels that a device had when it left


class Simulator:
    """One step of a plan on virtual time."""

    def __init__(
        self,
        graph: StepGraph,
        fleet: Fleet,
        plan: Plan,
        churn: Churn | None = None,
        *,
        scheduler_seconds: float = SCHEDULER_SECONDS,
        keep_rows: bool = True,
    ) -> None:
        self.graph, self.fleet, self.plan = graph, fleet, plan
        self.scheduler_seconds = scheduler_seconds
        self.keep_rows = keep_rows
        self.now = 0.0
        self.dispatcher = Dispatcher(WINDOW)
        self.schedule: Schedule = schedule(graph, plan)
        self.states = {device.name: _State(device, _figures(device)) for device in fleet.devices}
        for name, state in self.states.items():
            self.dispatcher.device_joined(name, state.figures, 0.0)
        self.parcels: list[_Parcel] = []
        self.egress, self.ingress = SharedLink(fleet.server.egress), SharedLink(fleet.server.ingress)
        self.rows: list[tuple[Any, ...]] = []
        self.down_bytes = self.up_bytes = 0.0
        self.handovers = self.lost = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._scheduler_free = self._server_free = 0.0
        self._left_in_job = [0] * len(self.schedule.jobs)
        self._left_of_job = [len(job.after) for job in self.schedule.jobs]
        self._left_of_round = [len(this.jobs) + len(this.after) for this in self.schedule.rounds]
        self._rounds_left = len(self.schedule.rounds)
        self._followers = _followers(self.schedule)
        self._cuts: dict[tuple[Any, ...], list[_Cut]] = {}
        self._check_seconds = [0.0] * len(self.schedule.jobs)
        for event in churn or ():
            if event.device not in self.states:
                raise InputError(f"churn speaks of device {event.device!r}, which is not in the fleet of this plan")
            self._at(event.seconds, self._churn, event)
        self._at(TICK, self._tick)

    def run(self) -> Measured:
        """Play the step to its end."""
        for number, left in enumerate(self._left_of_round):
            if left == 0:
                self._round_ready(number)
        for number, left in enumerate(self._left_of_job):
            if left == 0:
                self._job_ready(number)
        self._settle()
        while self._rounds_left:
            if not self._heap:
                raise StepError("the simulated step stands still: no device is left, and none will join")
            self.now, _, action, arguments = heappop(self._heap)
            action(*arguments)
            if self._heap and self._heap[0][0] <= self.now:
                continue
            self._settle()
        server = self.fleet.server
        seconds = max(self.now, self.down_bytes / server.egress, self.up_bytes / server.ingress)
        return Measured(seconds, self.rows, self.down_bytes, self.up_bytes, self.handovers, self.lost)

    # The server: rounds and jobs

    def _round_ready(self, number: int) -> None:
        this = self.schedule.rounds[number]
        flops = 0.0
        for position in this.steps:
            step = self.graph.steps[position]
            flops += step.flops if isinstance(step, Gemm) else 0.0
        checks = sum(self._check_seconds[job] for job in this.jobs)
        self._server_free = max(self._server_free, self.now) + flops / self.fleet.server.flops + checks
        self._at(self._server_free, self._round_done, number)

    def _round_done(self, number: int) -> None:
        self._rounds_left -= 1
        for kind, follower in self._followers[number]:
            left = self._left_of_round if kind == "round" else self._left_of_job
            left[follower] -= 1
            if left[follower] == 0:
                (self._round_ready if kind == "round" else self._job_ready)(follower)

    def _job_ready(self, number: int) -> None:
        """All parcels of a gemm can go out."""
        job = self.schedule.jobs[number]
        cuts = self._cut(job.gemm, job.tiles)
        self._left_in_job[number] = len(cuts)
        numbers = sum(cut.work.down_bytes + cut.work.up_bytes for cut in cuts) / Shape.of(job.gemm).up_bytes
        self._check_seconds[number] = VERIFIED * numbers / self.fleet.server.flops if job.gemm.kind == "gemm" else 0.0
        done = 0
        for cut in cuts:
            index = len(self.parcels)
            self.parcels.append(_Parcel(number, job.rank + done, cut, filler=job.gemm.role == "dW"))
            done += len(cut.tiles)
            self._ready(index)

    def _cut(self, gemm: Gemm, tiles: Tiles) -> list[_Cut]:
        """The parcels of a gemm; gemms that are cut alike share them."""
        key = Shape.of(gemm), id(tiles.ranges), id(tiles.owner), tiles.together
        if key not in self._cuts:
            self._cuts[key] = _parcels(gemm, tiles)
        return self._cuts[key]

    def _accepted(self, index: int) -> None:
        """The last tile of a parcel is in."""
        parcel = self.parcels[index]
        if not parcel.open:
            return
        parcel.open = False
        self.dispatcher.parcel_ended(index, self.now)
        self.dispatcher.parcel_forgotten(index)
        self._left_in_job[parcel.job] -= 1
        if self._left_in_job[parcel.job] == 0:
            for kind, follower in self._followers[("job", parcel.job)]:
                assert kind == "round"
                self._left_of_round[follower] -= 1
                if self._left_of_round[follower] == 0:
                    self._round_ready(follower)

    # The scheduler

    def _ready(self, index: int) -> None:
        parcel = self.parcels[index]
        cut = parcel.cut
        device = self.dispatcher.parcel_ready(index, parcel.rank, cut.device, cut.work, self.now, filler=parcel.filler)
        if device is not None:
            self._send(index, device)

    def _settle(self) -> None:
        for index, device in self.dispatcher.settle(self.now):
            self._send(index, device)
        self._watch(self.egress)
        self._watch(self.ingress)

    def _send(self, index: int, device: str) -> None:
        """The scheduler turns to a parcel; the device has it after the latency of its downlink."""
        self._scheduler_free = max(self._scheduler_free, self.now) + self.scheduler_seconds
        state = self.states[device]
        attempt = _Attempt(index, state, state.life, self._scheduler_free, first=self.parcels[index].accepted)
        trip = 2 * state.device.down.latency + state.device.up.latency  # told, asks, gets
        self._at(self._scheduler_free + trip, self._arrived, attempt)

    def _tick(self) -> None:
        if self._rounds_left == 0:
            return
        for name, state in self.states.items():
            if state.present and state.stalled_at is None:
                self.dispatcher.device_heard(name, self.now)
        for handover in self.dispatcher.tick(self.now):
            self.handovers += 1
            self._ready(handover.parcel)
        if self._heap or any(state.present for state in self.states.values()):
            self._at(self.now + TICK, self._tick)

    # Devices

    def _arrived(self, attempt: _Attempt) -> None:
        """A device knows of a parcel; its operands come when the downlink is free, the smallest rank first."""
        if attempt.life != attempt.state.life:
            return
        attempt.state.waiting.append(attempt)
        self._load_next(attempt.state)

    def _load_next(self, state: _State) -> None:
        if state.loading or not state.waiting or not state.present or state.stalled_at is not None:
            return
        attempt = min(state.waiting, key=lambda waiting: self.parcels[waiting.parcel].rank)
        state.waiting.remove(attempt)
        if not self.parcels[attempt.parcel].open:
            self._load_next(state)
            return
        state.loading = True
        attempt.begun = self.now
        parcel = self.parcels[attempt.parcel]
        attempt.down = state.fetch(parcel.job, parcel.cut, attempt.first)
        amount = float(attempt.down.sum())
        self.down_bytes += amount
        speed = state.device.down.bandwidth / state.factor
        self.egress.add(self.now, amount / speed, speed, attempt)

    def _loaded(self, attempt: _Attempt) -> None:
        """Everything of a parcel is down: when its tiles are multiplied and sent follows from that."""
        state = attempt.state
        if self._broken_off(attempt, self._loaded):
            return
        state.loading = False
        parcel = self.parcels[attempt.parcel]
        down, flops, up = attempt.down, parcel.cut.flops[attempt.first :], parcel.cut.up[attempt.first :]
        arrived = attempt.begun + (self.now - attempt.begun) * np.cumsum(down) / max(float(down.sum()), 1e-300)
        multiplied = _served(arrived, flops * state.factor / state.device.flops, state.compute_free)
        seconds = up * state.factor / state.device.up.bandwidth
        sent = _served(multiplied, seconds, state.up_free)
        state.compute_free, state.up_free = float(multiplied[-1]), float(sent[-1])
        attempt.ends = arrived, multiplied, sent
        state.uploading.append(attempt)
        self.up_bytes += float(up.sum())
        left = max(float(sent[-1]) - self.now, 0.0)
        speed = min(state.device.up.bandwidth / state.factor, float(up.sum()) / max(left, 1e-12))
        self.ingress.add(self.now, left, speed, attempt)
        self._load_next(state)

    def _uploaded(self, attempt: _Attempt) -> None:
        if not self._broken_off(attempt, self._uploaded):
            self._at(self.now + attempt.state.device.up.latency, self._finished, attempt)

    def _finished(self, attempt: _Attempt) -> None:
        if self._broken_off(attempt, self._finished):
            return
        attempt.state.uploading.remove(attempt)
        parcel = self.parcels[attempt.parcel]
        if self.keep_rows:
            self._record(attempt, "accepted" if parcel.open else "duplicate")
        self._accepted(attempt.parcel)

    def _broken_off(self, attempt: _Attempt, then: Callable[[_Attempt], None]) -> bool:
        """Whether an attempt does not go on now: its device has left, or stands still until it resumes."""
        if attempt.life != attempt.state.life:
            return True
        if attempt.state.stalled_at is not None:
            attempt.state.held.append((then, attempt))
            return True
        return False

    def _record(self, attempt: _Attempt, outcome: str) -> None:
        """A row for each tile of an attempt."""
        parcel = self.parcels[attempt.parcel]
        gemm = self.schedule.jobs[parcel.job].gemm.name
        assert attempt.ends is not None
        begun = attempt.begun
        columns = (
            parcel.tiles[attempt.first :],
            *attempt.ends,
            parcel.down[attempt.first :],
            parcel.up[attempt.first :],
        )
        delay = self.now - float(attempt.ends[2][-1])
        for tile, arrived, multiplied, sent, down, up in zip(*(column.tolist() for column in columns), strict=True):
            row = (1, gemm, tile, attempt.state.device.name, attempt.sent, begun - attempt.sent, arrived - begun)
            self.rows.append((*row, multiplied - arrived, sent - multiplied, delay, outcome, round(down), round(up)))
            begun = arrived

    # Churn

    def _churn(self, event: Event) -> None:
        state = self.states[event.device]
        match event.kind:
            case "leave" if state.present:
                self._left(event.device, state)
            case "join" if not state.present:
                self.states[event.device] = _State(state.device, state.figures, life=state.life + 1)
                self.dispatcher.device_joined(event.device, state.figures, self.now)
            case "stall" if state.present:
                state.stalled_at = self.now
            case "resume" if state.present and state.stalled_at is not None:
                self._resumed(state)
            case "slow":
                state.factor = event.factor
            case "recover":
                state.factor = 1.0
            case _:
                pass  # it happens to somebody who is not there

    def _left(self, name: str, state: _State) -> None:
        """A device is gone; of its parcels under way those tiles count that were in before."""
        held = self.dispatcher.flying(name)
        for attempt in state.uploading:
            parcel = self.parcels[attempt.parcel]
            assert attempt.ends is not None
            in_time = int((attempt.ends[2] + state.device.up.latency <= self.now).sum())
            parcel.accepted = max(parcel.accepted, min(attempt.first + in_time, len(parcel.cut.tiles) - 1))
        state.present, state.life = False, state.life + 1
        self.dispatcher.device_left(name)
        self.lost += len(held)
        for index in held:
            self._ready(index)

    def _resumed(self, state: _State) -> None:
        """What was under way goes on where it stood still."""
        assert state.stalled_at is not None
        stood, state.stalled_at = self.now - state.stalled_at, None
        state.compute_free += stood
        state.up_free += stood
        held, state.held = state.held, []
        for then, attempt in held:
            then(attempt)
        self._load_next(state)

    # Time

    def _at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (time, self._count, action, arguments))

    def _watch(self, link: SharedLink) -> None:
        """Look at a shared link when its next transfer ends, unless something changes before."""
        end = link.next_end()
        if end is not None and link.version != link.watched:
            link.watched = link.version
            self._at(end, self._link_event, link, link.version)

    def _link_event(self, link: SharedLink, version: int) -> None:
        if link.version == version:
            attempt = link.pop(self.now)
            (self._loaded if link is self.egress else self._uploaded)(attempt)


def _parcels(gemm: Gemm, tiles: Tiles) -> list[_Cut]:
    """The parcels of a gemm with what each of their tiles costs."""
    shape, parcels = Shape.of(gemm), tiles.parcels()
    counts: Counter[str] = Counter(device for device, _ in parcels)
    order = np.concatenate([numbers for _, numbers in parcels]).astype(np.int64)
    parcel = np.repeat(np.arange(len(parcels)), [len(numbers) for _, numbers in parcels])
    ranges = tiles.ranges[order].astype(np.int64)
    works = parcel_works(gemm, ranges, parcel, tiles.owner[order])
    size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
    flops = size.prod(axis=1) * (shape.flops / shape.volume)
    up = size[:, 0] * size[:, 1] * shape.up_bytes
    axes = ((0, 4), (2, 4)) if shape.kind == "gemm" else ((0, 2),)
    names = [ranges[:, axis] for axis in axes]
    if shape.kind == "gemm":
        sizes = [size[:, axis] * size[:, 2] * shape.down_bytes for axis in (0, 1)]
    else:
        sizes = [size[:, 0] * size[:, 1] * shape.down_bytes]
    down = sum(first_with_slice(parcel, name) * bytes_ for name, bytes_ in zip(names, sizes, strict=True))
    found, start = [], 0
    for number, (device, numbers) in enumerate(parcels):
        part = slice(start, start + len(numbers))
        start = part.stop
        here = tuple([(axis, *row) for row in name[part].tolist()] for axis, name in enumerate(names))
        each = tuple(column[part].tolist() for column in sizes)
        only, work = counts[device] == 1, Work(*works[number].tolist())
        found.append(_Cut(device, work, order[part], here, each, down[part], flops[part], up[part], only))
    return found


def _served(ready: Floats, seconds: Floats, free: float) -> Floats:
    """When each of several jobs that come one after another is through, on a machine that is free from `free` on."""
    total = np.cumsum(seconds)
    return total + np.maximum.accumulate(np.maximum(ready, free) - (total - seconds))


def _figures(device: Device) -> Figures:
    return Figures(device.flops, device.down.bandwidth, device.up.bandwidth, device.down.latency)


def _followers(steps: Schedule) -> dict[Any, list[tuple[str, int]]]:
    """For each round, by number, and each job, as ("job", number): who waits for it."""
    found: dict[Any, list[tuple[str, int]]] = {number: [] for number in range(len(steps.rounds))}
    found |= {("job", number): [] for number in range(len(steps.jobs))}
    for number, this in enumerate(steps.rounds):
        for other in this.after:
            found[other].append(("round", number))
        for job in this.jobs:
            found["job", job].append(("round", number))
    for number, planned in enumerate(steps.jobs):
        for other in planned.after:
            found[other].append(("job", number))
    return found

"""The simulator: a planned step on virtual time, with the same dispatcher that places parcels on a real fleet.

What is modelled, each as a queue of its own: every device's downlink, multiplier and uplink, the most urgent first;
the links' latency; the server's egress and ingress, shared by all transfers (`sharing`); the server's rounds between
levels, one after another, and the messages around them; its work on each tile, one after another; the scheduler, which
turns to one parcel after another (`measured` has what these processes cost). Not modelled: packets that are lost, and
answers that fill the other direction of a link. Slices that a device's tiles share come down once while its memory
lasts. Events lie in one heap: a parcel makes a dozen, whatever the number of its tiles. Nothing is random: the same
plan and churn give the same trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from cleave_dask.errors import InputError, StepError
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.graph.ir import ITEMSIZE, Gemm
from cleave_dask.planning.cost import Shape
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.values import Plan, Tiles
from cleave_dask.runtime.rounds import Schedule, schedule
from cleave_dask.runtime.trace import ACCEPTED, DUPLICATE, MOST_ROWS, Trace
from cleave_dask.simulation.cuts import Cut, cut
from cleave_dask.simulation.device import Attempt, Parcel, Run, SimulatedDevice
from cleave_dask.simulation.measured import MEASURED, Costs
from cleave_dask.simulation.sharing import SharedLink

TICK = 0.2
"""Seconds between two looks for late parcels, as on the real scheduler."""

VERIFIED = 16.0
"""Floating point operations of the server for each number of a tile's operands and result: eight random vectors."""

WINDOW = 3
"""Parcels in flight per device."""


def simulate(plan: Plan, churn: Churn | None = None, *, costs: Costs = MEASURED) -> Trace:
    """One step of a plan on virtual time; `churn` is what goes wrong meanwhile. The trace has a row per tile attempt.

    Of a plan with more than a million tiles it has a row per run of tiles that came down together.
    """
    return Simulator(plan, churn, costs=costs).run()


class Simulator:
    """One step of a plan on virtual time."""

    def __init__(self, plan: Plan, churn: Churn | None = None, *, costs: Costs = MEASURED) -> None:
        self.plan, self.graph, self.fleet = plan, plan.graph, plan.fleet
        self.costs = costs
        self.by_tile = len(plan.tiles) <= MOST_ROWS
        self.now = 0.0
        self.dispatcher = Dispatcher(WINDOW)
        self.schedule: Schedule = schedule(plan.graph, plan)
        self.devices = {device.name: SimulatedDevice(device) for device in plan.fleet.devices}
        for name, device in self.devices.items():
            self.dispatcher.device_joined(name, device.figures, 0.0)
        self.parcels: list[Parcel] = []
        self.egress, self.ingress = SharedLink(self.fleet.server.egress), SharedLink(self.fleet.server.ingress)
        self.rows: list[tuple[Any, ...]] = []
        self.down_bytes = self.up_bytes = 0.0
        self.handovers = self.lost = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._scheduler_free = self._rounds_free = self._tiles_free = 0.0
        self._left_in_job = [0] * len(self.schedule.jobs)
        self._left_of_job = [len(job.after) for job in self.schedule.jobs]
        self._left_of_round = [len(this.jobs) + len(this.after) for this in self.schedule.rounds]
        self._rounds_left = len(self.schedule.rounds)
        self._followers = _followers(self.schedule)
        self._cuts: dict[tuple[Any, ...], list[Cut]] = {}
        self._held: dict[str, list[tuple[Callable[[str, Run], None], Run]]] = {}  # by a stall
        self._under_way: dict[str, list[Attempt]] = {}  # attempts of each device, where some may leave
        self._churning = bool(churn)
        for event in churn or ():
            if event.device not in self.devices:
                raise InputError(f"churn speaks of device {event.device!r}, which is not in the fleet of this plan")
            self._at(event.seconds, self._churn, event)
        self._at(TICK, self._tick)

    def run(self) -> Trace:
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
        return Trace.of(self.rows, lasted=seconds)

    # The server: rounds and jobs

    def _round_ready(self, number: int) -> None:
        this = self.schedule.rounds[number]
        flops = 0.0
        for position in this.steps:
            step = self.graph.steps[position]
            flops += step.flops if isinstance(step, Gemm) else 0.0
        self._rounds_free = max(self._rounds_free, self.now) + flops / self.fleet.server.flops
        messages = self.costs.level if this.jobs else 0.0
        self._at(self._rounds_free + messages, self._round_done, number)

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
        done = 0
        for each in cuts:
            self.parcels.append(Parcel(number, job.rank + done, each, filler=job.gemm.role == "dW"))
            done += len(each.tiles)
            self._ready(len(self.parcels) - 1)

    def _cut(self, gemm: Gemm, tiles: Tiles) -> list[Cut]:
        """The parcels of a gemm; gemms that are cut alike share them."""
        key = Shape.of(gemm), id(tiles.ranges), id(tiles.owner), tiles.together
        if key not in self._cuts:
            self._cuts[key] = cut(gemm, tiles)
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

    def _ready(self, number: int) -> None:
        parcel = self.parcels[number]
        planned, work = parcel.cut.device, parcel.cut.work
        device = self.dispatcher.parcel_ready(number, parcel.rank, planned, work, self.now, filler=parcel.filler)
        if device is not None:
            self._send(number, device)

    def _settle(self) -> None:
        for index, device in self.dispatcher.settle(self.now):
            self._send(index, device)
        self._watch(self.egress)
        self._watch(self.ingress)

    def _send(self, number: int, name: str) -> None:
        """The scheduler turns to a parcel; the device asks for operands once it has heard of it."""
        self._scheduler_free = max(self._scheduler_free, self.now) + self.costs.parcel
        device, parcel = self.devices[name], self.parcels[number]
        attempt = Attempt(number, parcel, self._scheduler_free, device.life, next=parcel.accepted)
        if self._churning:
            self._under_way.setdefault(name, []).append(attempt)
        trip = 2 * device.device.down.latency + device.device.up.latency  # told, asks, gets
        self._at(self._scheduler_free + trip, self._arrived, name, attempt)

    def _tick(self) -> None:
        if self._rounds_left == 0:
            return
        for name, device in self.devices.items():
            if device.present and device.stalled_at is None:
                self.dispatcher.device_heard(name, self.now)
        for handover in self.dispatcher.tick(self.now):
            self.handovers += 1
            self._ready(handover.parcel)
        if self._heap or any(device.present for device in self.devices.values()):
            self._at(self.now + TICK, self._tick)

    # Devices

    def _arrived(self, name: str, attempt: Attempt) -> None:
        """A device knows of a parcel."""
        device = self.devices[name]
        if attempt.life == device.life:
            device.waiting.append(attempt)
            self._load(name)

    def _load(self, name: str) -> None:
        device = self.devices[name]
        before = device.pushed_aside
        run = device.load(self.now)
        aside, behind = device.pushed_aside, 0.0
        if aside is not None and aside is not before:
            left = self.egress.take_back(self.now, (name, aside))
            behind = min(left, device.under_way(aside, device.down_seconds(aside)))
            aside.left = left - behind
        if run is not None:
            self.down_bytes += float(run.down.sum())
            self._fetch(name, run, behind + device.down_seconds(run))
        elif (again := device.go_on()) is not None:
            self._fetch(name, again, again.left)

    def _fetch(self, name: str, run: Run, seconds: float) -> None:
        """So many seconds of a device's downlink are taken up by a run."""
        device = self.devices[name]
        self.egress.add(self.now, seconds, device.device.down.bandwidth / device.factor, (name, run))

    def _loaded(self, name: str, run: Run) -> None:
        """A run of tiles is down; the rest of its way follows from that."""
        device = self.devices[name]
        if self._broken_off(name, run, self._loaded):
            return
        device.loaded(run, self.now)
        amount = float(run.attempt.parcel.cut.up[run.tiles].sum())
        self.up_bytes += amount
        self._send_up(name, run, max(float(run.sent[-1]) - self.now, 0.0), amount)
        self._load(name)

    def _send_up(self, name: str, run: Run, seconds: float, amount: float) -> None:
        speed = min(self.devices[name].device.up.bandwidth, amount / max(seconds, 1e-9))
        self.ingress.add(self.now, seconds, speed, (name, run))

    def _uploaded(self, name: str, run: Run) -> None:
        device, attempt = self.devices[name], run.attempt
        if self._broken_off(name, run, self._uploaded):
            return
        if (left := device.left_to_send(run)) > 0.0:
            self._send_up(name, run, left, 0.0)  # what others send meanwhile is theirs
            return
        taken_in = self._take_in(run, self.now + device.device.up.latency)
        attempt.runs_up += 1
        attempt.up_to = max(attempt.up_to, run.tiles.stop)
        self._record(name, run)
        if attempt.complete and attempt.runs_up == attempt.runs:
            receipt = device.device.up.latency + device.device.down.latency  # and the report of it
            self._at(taken_in + receipt, self._finished, name, run)

    def _take_in(self, run: Run, arrived: float) -> float:
        """When the server is through with the tiles of a run: handing out, checking, writing, one after another."""
        cut, gemm = run.attempt.parcel.cut, self.schedule.jobs[run.attempt.parcel.job].gemm
        moved = float(run.down.sum() + cut.up[run.tiles].sum())
        checks = VERIFIED * moved / ITEMSIZE[gemm.dtype] / self.fleet.server.flops
        seconds = len(run.down) * self.costs.tile + moved * self.costs.byte + checks
        self._tiles_free = max(self._tiles_free, arrived - seconds) + seconds
        return self._tiles_free

    def _finished(self, name: str, run: Run) -> None:
        if not self._broken_off(name, run, self._finished):
            self._accepted(run.attempt.number)

    def _broken_off(self, name: str, run: Run, then: Callable[[str, Run], None]) -> bool:
        """Whether an attempt does not go on now: its device has left, or stands still until it resumes."""
        device = self.devices[name]
        if run.attempt.life != device.life:
            return True
        if device.stalled_at is not None:
            self._held.setdefault(name, []).append((then, run))
            return True
        return False

    def _record(self, name: str, run: Run) -> None:
        """A row for each tile of a run that is up, or one for all."""
        attempt, parcel, tiles = run.attempt, run.attempt.parcel, run.tiles
        gemm = self.schedule.jobs[parcel.job].gemm.name
        sent = run.sent + (self.now - run.sent[-1])  # later than it should have been if others went first
        columns = (parcel.cut.tiles[tiles], run.arrived, run.multiplied, sent, run.down, parcel.cut.up[tiles])
        new = np.arange(tiles.start, tiles.stop) >= (parcel.seen if parcel.open else tiles.stop)
        if not self.by_tile:
            columns = (*(column[-1:] for column in columns[:4]), *(column.sum(keepdims=True) for column in columns[4:]))
            new = new[-1:]
        parcel.seen = max(parcel.seen, tiles.stop)
        begun = run.begun
        rows = zip(new.tolist(), *(column.tolist() for column in columns), strict=True)
        for fresh, tile, down, done, up, fetched, result in rows:
            row = (1, gemm, tile, name, attempt.sent, begun - attempt.sent, down - begun, done - down, up - done, 0.0)
            self.rows.append((*row, ACCEPTED if fresh else DUPLICATE, round(fetched), round(result)))
            begun = down

    # Churn

    def _churn(self, event: Event) -> None:
        device = self.devices[event.device]
        match event.kind:
            case "leave" if device.present:
                self._left(event.device, device)
            case "join" if not device.present:
                fresh = self.devices[event.device] = SimulatedDevice(device.device, device.life + 1)
                self.dispatcher.device_joined(event.device, fresh.figures, self.now)
            case "stall" if device.present and device.stalled_at is None:
                device.stalled_at = self.now
            case "resume" if device.present and device.stalled_at is not None:
                device.resume(self.now)
                for then, run in self._held.pop(event.device, []):
                    then(event.device, run)
                self._load(event.device)
            case "slow":
                device.factor = event.factor
            case "recover":
                device.factor = 1.0
            case "down":  # a transfer under way ends at the rate that it began with
                device.device = replace(device.device, down=replace(device.device.down, bandwidth=event.bandwidth))
            case "up":
                device.device = replace(device.device, up=replace(device.device.up, bandwidth=event.bandwidth))
            case _:
                pass  # it happens to somebody who is not there

    def _left(self, name: str, device: SimulatedDevice) -> None:
        """A device is gone; of its parcels under way those tiles count that were in before."""
        held = self.dispatcher.flying(name)
        for attempt in self._under_way.pop(name, []):
            kept = min(attempt.up_to, len(attempt.parcel.cut.tiles) - 1)
            attempt.parcel.accepted = max(attempt.parcel.accepted, kept)
        device.present, device.life = False, device.life + 1
        self._held.pop(name, None)
        self.dispatcher.device_left(name)
        self.lost += len(held)
        for number in held:
            self._ready(number)

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
            name, run = link.pop(self.now)
            (self._loaded if link is self.egress else self._uploaded)(name, run)


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

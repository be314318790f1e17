"""The simulator: a planned step on virtual time, with the same dispatcher that places parcels on a real fleet.

What is modelled, each as a queue of its own: every device's downlink, multiplier and uplink, the most urgent first;
the links' latency; the server's egress and ingress, shared by all transfers (`sharing`); the server's rounds between
levels, one after another, and the messages around them; its work on each tile, one after another; the scheduler, which
turns to one parcel after another; words around each tile, and packets that confirm others (`measured` has what these
cost). Not modelled: packets that are lost, and connections that start slowly. Slices that a device's tiles share come
down once while its memory lasts. Events lie in one heap: a parcel makes a dozen, whatever the number of its tiles.
Nothing is random: the same plan and churn give the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from cleave_dask.errors import InputError, StepError
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.graph.ir import ITEMSIZE, Gemm
from cleave_dask.planning.cost import Shape
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.values import Plan, Tiles
from cleave_dask.runtime.rounds import Schedule, followers, schedule
from cleave_dask.runtime.trace import ACCEPTED, DUPLICATE, MOST_ROWS, Trace
from cleave_dask.simulation.cuts import Cut, cut, recut
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
        self.devices = {device.name: SimulatedDevice(device, costs) for device in plan.fleet.devices}
        for name, device in self.devices.items():
            self.dispatcher.device_joined(name, device.figures, 0.0)
        self.parcels: list[Parcel] = []
        self.egress, self.ingress = self._server_links(churn)
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
        self._followers = followers(self.schedule)
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

    def _server_links(self, churn: Churn | None) -> tuple[SharedLink, SharedLink]:
        """Egress and ingress: what all devices could want of them together, if that does not change, may be less."""
        down, up = (sum(d.down.bandwidth for d in self.fleet.devices), sum(d.up.bandwidth for d in self.fleet.devices))
        if any(event.kind in ("down", "up") for event in churn or ()):
            down = up = inf
        server = self.fleet.server
        return SharedLink(server.egress, wanted=down), SharedLink(server.ingress, wanted=up)

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
        if self._churning:
            takers = self.dispatcher.takers(each.device for each in cuts)
            if any(each.device not in takers for each in cuts):
                behind = {name: self.dispatcher.behind(name) for name in takers} if job.gemm.role == "dW" else {}
                cuts = recut(job.gemm, job.tiles, cuts, takers, behind)
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
        if len(parcel.cut.tiles) - parcel.accepted > 1 and self._churning and self.dispatcher.scatters(planned):
            self._split(number)
            return
        device = self.dispatcher.parcel_ready(number, parcel.rank, planned, work, self.now, filler=parcel.filler)
        if device is not None:
            self._send(number, device)

    def _split(self, number: int) -> None:
        """A parcel whose device is not there goes out tile by tile, to whoever is free first; the largest first."""
        parcel = self.parcels[number]
        parts = [parcel.cut.tile(place) for place in range(parcel.accepted, len(parcel.cut.tiles))]
        parcel.open = False
        self.dispatcher.parcel_forgotten(number)
        self._left_in_job[parcel.job] += len(parts) - 1
        for place, part in enumerate(sorted(parts, key=lambda part: -part.work.up_bytes)):
            self.parcels.append(Parcel(parcel.job, parcel.rank + place, part, parcel.filler))
            self._ready(len(self.parcels) - 1)

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
            self.down_bytes += run.down_bytes
            self._fetch(name, run, behind + device.down_seconds(run))
        elif (again := device.go_on()) is not None:
            self._fetch(name, again, again.left)

    def _fetch(self, name: str, run: Run, seconds: float) -> None:
        """So many seconds of a device's downlink are taken up by a run."""
        device = self.devices[name]
        self._move(self.egress, seconds, device.device.down.bandwidth / device.factor, (name, run))

    def _loaded(self, name: str, run: Run) -> None:
        """A run of tiles is down; the rest of its way follows from that."""
        device = self.devices[name]
        if self._broken_off(name, run, self._loaded):
            return
        device.loaded(run, self.now)
        self.up_bytes += run.up_bytes
        self._send_up(name, run, max(float(run.sent[-1]) - self.now, 0.0), run.up_bytes)
        self._load(name)

    def _send_up(self, name: str, run: Run, seconds: float, amount: float) -> None:
        speed = min(self.devices[name].device.up.bandwidth, amount / max(seconds, 1e-9))
        self._move(self.ingress, seconds, speed, (name, run))

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
        gemm, moved = self.schedule.jobs[run.attempt.parcel.job].gemm, run.down_bytes + run.up_bytes
        checks = VERIFIED * moved / ITEMSIZE[gemm.tile_dtype] / self.fleet.server.flops
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
        gemm, begun = self.schedule.jobs[parcel.job].gemm.name, run.begun
        late = self.now - float(run.sent[-1])  # than it should have been, as others went first
        first = parcel.seen if parcel.open else tiles.stop  # the first that nobody has brought before
        columns: Iterable[tuple[Any, ...]]
        if self.by_tile:
            whole = (
                parcel.cut.tiles[tiles],
                run.arrived,
                run.multiplied,
                run.sent + late,
                run.down,
                parcel.cut.up[tiles],
            )
            columns = zip(range(tiles.start, tiles.stop), *(column.tolist() for column in whole), strict=True)
        else:
            last, times = tiles.stop - 1, (float(run.arrived[-1]), float(run.multiplied[-1]), self.now)
            columns = [(last, int(parcel.cut.tiles[last]), *times, run.down_bytes, run.up_bytes)]
        parcel.seen = max(parcel.seen, tiles.stop)
        for place, tile, down, done, up, fetched, result in columns:
            row = (1, gemm, tile, name, attempt.sent, begun - attempt.sent, down - begun, done - down, up - done, 0.0)
            self.rows.append((*row, ACCEPTED if place >= first else DUPLICATE, round(fetched), round(result)))
            begun = down

    # Churn

    def _churn(self, event: Event) -> None:
        device = self.devices[event.device]
        match event.kind:
            case "leave" if device.present:
                self._left(event.device, device)
            case "join" if not device.present:
                fresh = self.devices[event.device] = SimulatedDevice(device.device, self.costs, device.life + 1)
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

    def _move(self, link: SharedLink, seconds: float, speed: float, what: tuple[str, Run]) -> None:
        number = link.add(self.now, seconds, speed, what)
        if link.roomy:
            self._at(self.now + seconds, self._moved, link, what, number)

    def _moved(self, link: SharedLink, what: tuple[str, Run], number: int) -> None:
        if link.ended(what, number):
            (self._loaded if link is self.egress else self._uploaded)(*what)

    def _watch(self, link: SharedLink) -> None:
        """Look at a shared link when its next transfer ends, unless something changes before."""
        if link.roomy or link.version == link.watched:
            return
        end = link.next_end()
        if end is not None:
            link.watched = link.version
            self._at(end, self._link_event, link, link.version)

    def _link_event(self, link: SharedLink, version: int) -> None:
        if link.version == version:
            name, run = link.pop(self.now)
            (self._loaded if link is self.egress else self._uploaded)(name, run)

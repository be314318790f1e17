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

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

from cleave_dask.errors import InputError, StepError
from cleave_dask.fleet.churn import Churn, Event, check_churn
from cleave_dask.graph.ir import ITEMSIZE, Gemm
from cleave_dask.planning.cost import Shape
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.mending import mends
from cleave_dask.planning.values import Plan, Tiles, check_plan
from cleave_dask.runtime.rounds import Schedule, followers, following, schedule
from cleave_dask.runtime.trace import MOST_ROWS, Trace
from cleave_dask.simulation.collecting import without_collecting
from cleave_dask.simulation.cuts import Cut, cut, recut
from cleave_dask.simulation.device import Attempt, Parcel, Run, SimulatedDevice
from cleave_dask.simulation.measured import MEASURED, Costs
from cleave_dask.simulation.recording import rows_made_here, rows_of
from cleave_dask.simulation.sharing import SharedLink, server_links

TICK = 0.2
"""Seconds between two looks for late parcels, as on the real scheduler."""

TICKS = 400
"""They grow to this part of the time so far: what is late after hours is late a few seconds more or less."""

VERIFIED = 16.0
"""Floating point operations of the server for each number of a tile's operands and result: eight random vectors."""

WINDOW = 3
"""Parcels in flight per device."""


def simulate(plan: Plan, churn: Churn | None = None, *, costs: Costs = MEASURED) -> Trace:
    """One step of a plan on virtual time; `churn` is what goes wrong meanwhile. The trace has a row per tile attempt.

    Of a plan with more than a million tiles it has a row per run of tiles that came down together.
    """
    check_plan(plan)
    check_churn(churn)
    return Simulator(plan, churn, costs=costs).run()


class Simulator:
    """One step of a plan on virtual time."""

    def __init__(self, plan: Plan, churn: Churn | None = None, *, costs: Costs = MEASURED) -> None:
        self.plan, self.graph, self.fleet = plan, plan.graph, plan.fleet
        self.costs = costs = costs.on(plan.fleet.server)
        self.by_tile = len(plan.tiles) <= MOST_ROWS
        self.now = 0.0
        self.dispatcher = Dispatcher(WINDOW)
        self.schedule: Schedule = schedule(plan.graph, plan)
        self.devices = {device.name: SimulatedDevice(device, costs) for device in plan.fleet.devices}
        for name, device in self.devices.items():
            self.dispatcher.device_joined(name, device.figures, 0.0)
        self.parcels: list[Parcel] = []
        changing = any(event.kind in ("down", "up") for event in churn or ())
        self.egress, self.ingress = server_links(plan.fleet, changing=changing)
        self._shared = [link for link in (self.egress, self.ingress) if link is not None]
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
        self._next = following(self.schedule)  # of jobs, what devices begin before it is ordered
        self._early = {then.job for then in self._next.values()}
        checking = VERIFIED / plan.fleet.server.flops
        self._per_byte = [costs.byte + checking / ITEMSIZE[job.gemm.tile_dtype] for job in self.schedule.jobs]
        self._cuts: dict[tuple[Any, ...], list[Cut]] = {}
        self._held: dict[str, list[tuple[Callable[[SimulatedDevice, Run], None], Run]]] = {}  # by a stall
        self._under_way: dict[str, list[Attempt]] = {}  # attempts of each device, where some may leave
        self._churning, self._unsettled = bool(churn), True
        for event in churn or ():
            if event.device not in self.devices:
                raise InputError(f"churn speaks of device {event.device!r}, which is not in the fleet of this plan")
            self._at(event.seconds, self._churn, event)
        self._at(TICK, self._tick)

    def run(self) -> Trace:
        """Play the step to its end."""
        for left, ready in ((self._left_of_round, self._round_ready), (self._left_of_job, self._job_ready)):
            for number in [number for number, count in enumerate(left) if count == 0]:
                ready(number)
        self._settle()
        with without_collecting():
            self._play()
        server = self.fleet.server
        seconds = max(self.now, self.down_bytes / server.egress, self.up_bytes / server.ingress)
        return Trace.of(self.rows, lasted=seconds)

    def _play(self) -> None:
        heap = self._heap
        while self._rounds_left:
            if not heap:
                raise StepError("the simulated step stands still: no device is left, and none will join")
            self.now, _, action, arguments = heappop(heap)
            action(*arguments)
            if heap and heap[0][0] <= self.now:
                continue
            if self._unsettled:
                self._settle()
            for link in self._shared:
                self._watch(link)

    # The server: rounds and jobs

    def _round_ready(self, number: int) -> None:
        this = self.schedule.rounds[number]
        steps = (self.graph.steps[position] for position in this.steps)
        flops = sum(step.flops for step in steps if isinstance(step, Gemm))
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
                ahead = {name: self.dispatcher.ahead(name) for name in takers} if job.gemm.role == "dW" else {}
                cuts = recut(job.gemm, job.tiles, cuts, takers, ahead)
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
        self._unsettled = True
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
        else:
            self._unsettled = True

    def _split(self, number: int) -> None:
        """A parcel whose device is not there: what is not in goes tile by tile to whoever is free, largest first."""
        parcel, count = self.parcels[number], len(self.parcels[number].cut.tiles)
        parts = [parcel.cut.tile(place) for place in range(max(parcel.accepted, min(parcel.seen, count - 1)), count)]
        parcel.open = False
        self.dispatcher.parcel_forgotten(number)
        self._left_in_job[parcel.job] += len(parts) - 1
        for place, part in enumerate(sorted(parts, key=lambda part: -part.work.up_bytes)):
            self.parcels.append(Parcel(parcel.job, parcel.rank + place, part, parcel.filler, seen=parcel.seen // count))
            self._ready(len(self.parcels) - 1)

    def _settle(self) -> None:
        self._unsettled = False
        for index, device in self.dispatcher.settle(self.now):
            self._send(index, device)

    def _send(self, number: int, name: str) -> None:
        """The scheduler turns to a parcel; the device asks for operands once it has heard of it, or has done so."""
        self._scheduler_free = max(self._scheduler_free, self.now) + self.costs.parcel
        device, parcel = self.devices[name], self.parcels[number]
        attempt = Attempt(number, parcel, self._scheduler_free, device.life, next=parcel.accepted)
        if self._churning:
            self._under_way.setdefault(name, []).append(attempt)
        trip = device.trip(told=parcel.job in self._early and name == parcel.cut.device)
        self._at(self._scheduler_free + trip, self._arrived, device, attempt)

    def _tick(self) -> None:
        if self._rounds_left == 0:
            return
        for name, device in self.devices.items():
            if device.present and device.stalled_at is None:
                self.dispatcher.device_heard(name, self.now)
        for handover in self.dispatcher.tick(self.now):
            self.handovers += 1
            self._ready(handover.parcel)
        self._unsettled = True
        if self._heap or any(device.present for device in self.devices.values()):
            self._at(self.now + max(TICK, self.now / TICKS), self._tick)

    # Devices

    def _arrived(self, device: SimulatedDevice, attempt: Attempt) -> None:
        """A device knows of a parcel."""
        if attempt.life == device.life:
            device.waiting.append(attempt)
            self._load(device)

    def _load(self, device: SimulatedDevice) -> None:
        before = device.pushed_aside
        run = device.load(self.now)
        aside, behind = device.pushed_aside, 0.0
        if aside is not None and aside is not before:
            aside.moves += 1
            left = self.egress.take_back(self.now, (device, aside)) if self.egress else aside.ends - self.now
            aside.left = left - (behind := min(left, device.beside(run, aside)))
        if run is not None:
            self.down_bytes += run.down_bytes
            self._fetch(device, run, behind + device.down_seconds(run))
        elif (again := device.go_on()) is not None:
            self._fetch(device, again, again.left)

    def _fetch(self, device: SimulatedDevice, run: Run, seconds: float) -> None:
        """So many seconds of a device's downlink are taken up by a run."""
        if self.egress is not None:
            self.egress.add(self.now, seconds, device.device.down.bandwidth / device.factor, (device, run))
        else:
            run.ends = self.now + seconds
            self._at(run.ends, self._came_down, device, run, run.moves)

    def _came_down(self, device: SimulatedDevice, run: Run, moves: int) -> None:
        """A run is down, unless it was pushed aside meanwhile."""
        if run.moves == moves:
            self._loaded(device, run)

    def _loaded(self, device: SimulatedDevice, run: Run) -> None:
        """A run of tiles is down; the rest of its way follows from that."""
        if self._churning and self._broken_off(device, run, self._loaded):
            return
        device.loaded(run, self.now)
        self.up_bytes += run.up_bytes
        self._send_up(device, run, max(run.sent[-1] - self.now, 0.0), run.up_bytes)
        self._load(device)

    def _send_up(self, device: SimulatedDevice, run: Run, seconds: float, amount: float) -> None:
        if self.ingress is not None:
            speed = min(device.device.up.bandwidth, amount / max(seconds, 1e-9))
            self.ingress.add(self.now, seconds, speed, (device, run))
        else:
            self._at(self.now + seconds, self._uploaded, device, run)

    def _uploaded(self, device: SimulatedDevice, run: Run) -> None:
        if self._churning and self._broken_off(device, run, self._uploaded):
            return
        attempt = run.attempt
        if (left := device.left_to_send(run)) > 0.0:
            self._send_up(device, run, left, 0.0)  # what others send meanwhile is theirs
            return
        taken_in = self._take_in(run, self.now + device.device.up.latency)
        attempt.runs_up += 1
        attempt.up_to = max(attempt.up_to, run.tiles.stop)
        gemm = self.schedule.jobs[attempt.parcel.job].gemm.name
        self.rows += rows_of(run, gemm, device.name, self.now, by_tile=self.by_tile)
        if attempt.complete and attempt.runs_up == attempt.runs:
            self._at(taken_in + device.report(awaited=attempt.parcel.job in self._next), self._finished, device, run)

    def _take_in(self, run: Run, arrived: float) -> float:
        """When the server is through with the tiles of a run: handing out, checking, writing, one after another."""
        moved = run.down_bytes + run.up_bytes
        seconds = len(run.down) * self.costs.tile + moved * self._per_byte[run.attempt.parcel.job]
        self._tiles_free = max(self._tiles_free, arrived - seconds) + seconds
        return self._tiles_free

    def _finished(self, device: SimulatedDevice, run: Run) -> None:
        if not (self._churning and self._broken_off(device, run, self._finished)):
            self._accepted(run.attempt.number)

    def _broken_off(self, device: SimulatedDevice, run: Run, then: Callable[[SimulatedDevice, Run], None]) -> bool:
        """Whether an attempt does not go on now: its device has left, or stands still until it resumes."""
        if run.attempt.life != device.life:
            return True
        if device.stalled_at is not None:
            self._held.setdefault(device.name, []).append((then, run))
            return True
        return False

    # Churn

    def _churn(self, event: Event) -> None:
        device = self.devices[event.device]
        self._unsettled = True
        match event.kind:  # of somebody who is not there nothing else can go wrong
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
                    then(device, run)
                self._load(device)
            case "slow":
                device.factor = event.factor
            case "recover":
                device.factor = 1.0
            case "down":
                device.relink(replace(device.device.down, bandwidth=event.bandwidth), device.device.up)
            case "up":
                device.relink(device.device.down, replace(device.device.up, bandwidth=event.bandwidth))

    def _left(self, name: str, device: SimulatedDevice) -> None:
        """A device is gone; of its parcels under way those tiles count that were in before."""
        held, waited = self.dispatcher.flying(name), self.dispatcher.urgent(name)
        soon = [number for number in held if self._soon_made(number, name)]
        for attempt in self._under_way.pop(name, []):
            kept = min(attempt.up_to, len(attempt.parcel.cut.tiles) - 1)
            attempt.parcel.accepted = max(attempt.parcel.accepted, kept)
        device.present, device.life = False, device.life + 1
        self._held.pop(name, None)
        self.dispatcher.device_left(name)
        self.lost += len(held)
        for number in (*held, *waited):
            self.dispatcher.parcel_forgotten(number)
            (self._mend if number in soon else self._ready)(number)

    def _soon_made(self, number: int, name: str) -> bool:
        """Whether the server makes a parcel itself that a device has which leaves."""
        seconds = self.dispatcher.expected(number, name)
        return mends(self.parcels[number].cut.work, seconds, self.fleet.server.flops)

    def _mend(self, number: int) -> None:
        """The server makes what is left of a parcel, when it is through with what it has begun."""
        parcel, begins = self.parcels[number], max(self._rounds_free, self.now)
        self._rounds_free = begins + sum(parcel.cut.flops[parcel.accepted :]) / self.fleet.server.flops
        self._at(self._rounds_free + self.costs.parcel, self._mended, number, begins)

    def _mended(self, number: int, begun: float) -> None:
        parcel = self.parcels[number]
        if parcel.open:
            self.rows += rows_made_here(parcel, self.schedule.jobs[parcel.job].gemm.name, begun, self.now)
            self._accepted(number)

    # Time

    def _at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (time, self._count, action, arguments))

    def _watch(self, link: SharedLink) -> None:
        """Look at a shared link when its next transfer ends, unless something changes before."""
        if link.version == link.watched:
            return
        end = link.next_end()
        if end is not None:
            link.watched = link.version
            self._at(end, self._link_event, link, link.version)

    def _link_event(self, link: SharedLink, version: int) -> None:
        if link.version == version:
            device, run = link.pop(self.now)
            (self._loaded if link is self.egress else self._uploaded)(device, run)

"""Which device gets which parcel, one event at a time: a state machine without a clock and without I/O.

A parcel is what a device is sent at once: tiles of one gemm that travel as one task. Events go in (a device joined,
left, paused, was heard of; a parcel is ready, ended, is unwanted; time passed), placements come out. The scheduler's
plugin and the simulator drive this same object.

A parcel waits in the queue of the device it was planned for, and a device has a small window of parcels in flight. When
there is room it takes the next of its own, then one that is planned for nobody, then the last one of the device with
the longest work still waiting, if it would be through before that device. So a plan is followed while it holds, and a
device that joins late, or is faster than planned, still finds work. Filler, which nobody waits for, is sent while the
window has room; a parcel of the critical path only counts others of its kind, because a device turns to it first.

Lateness. A device should show something, a finished parcel, within FACTOR times what its largest parcel in flight takes
by its figures and its pace so far, plus GRACE. If it does not, its parcels in flight are handed to others, and it gets
nothing more until it is heard of. It may still be the first to deliver: the first result wins, which is the server's
business. Each handover doubles the patience, so that a parcel does not wander for ever.

Every event costs O(log devices); `settle` and `tick` look only at devices that have room or parcels in flight.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from cleave_dask.planning.dispatch_state import (
    ANYONE,
    FACTOR,
    FORGIVING,
    GRACE,
    HELPFUL,
    MEMORY,
    SLUGGISH,
    WASTE,
    DeviceState,
    Handover,
    ParcelId,
    WaitingParcel,
)
from cleave_dask.planning.parcels import Figures, Work


class Dispatcher:
    """The state of placement: devices with their parcels in flight, parcels that wait."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.pace = 1.0  # of the whole fleet
        self._devices: dict[str, DeviceState] = {}
        self._parcels: dict[ParcelId, WaitingParcel] = {}
        self._queues: dict[str, list[tuple[int, int, ParcelId]]] = {ANYONE: []}  # heaps: most urgent first
        self._tails: dict[str, list[tuple[int, int, ParcelId]]] = {}  # of devices: least urgent first
        self._longest: list[tuple[float, str]] = []  # (-backlog, device): a heap with stale entries
        self._free: deque[str] = deque()  # devices that may have room, each once
        self._listed: set[str] = set()
        self._waiting = 0
        self._pushed = 0

    # What can be looked at

    @property
    def waiting(self) -> int:
        """Loads that wait for a device."""
        return self._waiting

    @property
    def devices(self) -> tuple[str, ...]:
        """Everybody who has joined and not left."""
        return tuple(self._devices)

    def holder(self, parcel: ParcelId) -> str | None:
        """The device that has a parcel in flight."""
        found = self._parcels.get(parcel)
        return found.holder if found else None

    def flying(self, device: str) -> tuple[ParcelId, ...]:
        """Loads in flight on a device."""
        return tuple(self._devices[device].flying)

    def silent(self, device: str) -> bool:
        """Whether a device is late and was not heard of since."""
        return self._devices[device].silent

    def expected(self, parcel: ParcelId, device: str) -> float:
        """Seconds that a parcel is expected to take on a device, by its figures and its pace so far."""
        return self._seconds(self._parcels[parcel], device, self._devices[device])

    # Events: devices

    def device_joined(self, device: str, figures: Figures, now: float) -> None:
        """A device can take parcels from now on; or its figures are better known."""
        known = self._devices.get(device)
        if known is not None:
            known.figures = figures
            return
        self._devices[device] = DeviceState(figures, heard=now, since=now)
        self._queues[device], self._tails[device] = [], []
        self._has_room(device)

    def device_left(self, device: str) -> None:
        """A device is gone: what waited for it waits for anyone. Its parcels in flight come back as ready again."""
        state = self._devices.pop(device, None)
        if state is None:
            return
        for name in state.flying:
            self._parcels[name].holder = None
        del self._tails[device]
        self._disown(self._queues.pop(device), device)

    def device_paused(self, device: str, paused: bool) -> None:
        """A device wants no more parcels, or wants them again; it finishes those that it has."""
        state = self._devices[device]
        if state.paused != paused:
            state.paused = paused
            self._settled(device, state)

    def device_heard(self, device: str, now: float) -> None:
        """A sign of life."""
        state = self._devices[device]
        state.heard = max(state.heard, now)
        if state.pace is not None and not state.flying:
            state.pace += FORGIVING * (self.pace - state.pace)
        if state.silent and state.heard > state.since:
            state.silent = False
            self._settled(device, state)

    # Events: parcels

    def parcel_ready(
        self, parcel: ParcelId, rank: int, planned: str | None, work: Work, now: float, *, filler: bool = False
    ) -> str | None:
        """A parcel's operands are there; returns the device that it is sent to at once, if any.

        That is its planned device when it has room and nothing else waits for it. Otherwise the parcel waits, for that
        device or for anyone.
        """
        known = self._parcels.get(parcel)
        if known is not None and (known.holder is not None or known.queue is not None):
            return known.holder
        self._pushed += 1
        late_on = known.late_on if known else ()
        this = self._parcels[parcel] = WaitingParcel(rank, self._pushed, planned, work, filler, late_on=late_on)
        state = self._devices.get(planned) if planned is not None else None
        if state is not None:
            state.planned = True
        if planned is None or state is None or not state.active or planned in late_on or self._sluggish(state):
            self._wait(parcel, this, ANYONE)
        elif self._room(state, this) and not self._queues[planned]:
            self._send(parcel, this, planned, now)
            return planned
        else:
            self._wait(parcel, this, planned)
        return None

    def parcel_ended(self, parcel: ParcelId, now: float, *, done: bool = True) -> None:
        """A parcel in flight was accepted; or, with done=False, failed or was taken back."""
        this = self._parcels.get(parcel)
        if this is None:
            return
        state = self._devices.get(this.holder) if this.holder is not None else None
        if state is not None and this.holder is not None:
            self._drop(state, parcel)
            if done:
                self._observe(this.holder, state, this, now)
            state.since = now
            state.heard, state.silent = max(state.heard, now), False
            self._has_room(this.holder)
        this.holder = None
        if done and this.queue is None:
            del self._parcels[parcel]

    def parcel_forgotten(self, parcel: ParcelId) -> None:
        """A parcel is no longer wanted, wherever it is."""
        this = self._parcels.pop(parcel, None)
        if this is None:
            return
        if this.queue is not None:
            self._leave_queue(this)
        if this.holder is not None:
            self._parcels[parcel] = this
            self._drop(self._devices[this.holder], parcel)
            del self._parcels[parcel]
            self._has_room(this.holder)

    # Instructions

    def settle(self, now: float) -> list[tuple[ParcelId, str]]:
        """Everything that can be sent out now, one parcel for each device in turn."""
        placed: list[tuple[ParcelId, str]] = []
        declined: list[str] = []
        while self._free and self._waiting:
            device = self._free.popleft()
            self._listed.discard(device)
            state = self._devices.get(device)
            if state is None or not state.active or state.critical >= self.window:
                continue
            parcel = self._next(device, state)
            if parcel is None:
                declined.append(device)
                continue
            self._send(parcel, self._parcels[parcel], device, now)
            placed.append((parcel, device))
            self._has_room(device)
        for device in declined:
            self._has_room(device)
        return placed

    def tick(self, now: float) -> list[Handover]:
        """Time has passed: parcels that are late, to be taken back. Each then comes as ready again."""
        late: list[Handover] = []
        active = sum(state.active for state in self._devices.values())
        for name, state in self._devices.items():
            if not state.flying or active <= state.active:  # nobody else could do it
                continue
            first = self._parcels[next(iter(state.flying))]
            begun = max(state.since, first.sent)
            if now < begun + self._patience(name, state):
                continue
            if state.heard > begun:  # it lives, so it is slow
                state.pace = max(state.pace or 0.0, (now - begun) / self._cost(first, name, state))
            for parcel in state.flying:
                this = self._parcels[parcel]
                this.holder, this.late_on = None, (*this.late_on, name)
                late.append(Handover(parcel, name))
            state.flying.clear()
            state.critical = 0
            active -= state.active
            state.since, state.silent = now, True
            self._settled(name, state)
        return late

    # Inside

    def _patience(self, name: str, state: DeviceState) -> float:
        """Seconds within which a device must show something."""
        longest = max(self._seconds(self._parcels[parcel], name, state) for parcel in state.flying)
        handovers = min(len(self._parcels[parcel].late_on) for parcel in state.flying)
        return (FACTOR * longest + GRACE) * 2.0 ** min(handovers, 8)

    def _others(self, device: str) -> bool:
        """Whether anybody but this device can take parcels."""
        return any(state.active for name, state in self._devices.items() if name != device)

    def _cost(self, this: WaitingParcel, device: str, state: DeviceState) -> float:
        """Seconds of a parcel by a device's figures; what its planned device has of slices, another must fetch."""
        return state.figures.seconds(this.work, alone=device != this.planned)

    def _seconds(self, this: WaitingParcel, device: str, state: DeviceState) -> float:
        """The same, by the device's pace so far; a pace below 1 comes from overlap, which the last parcel has not."""
        return self._cost(this, device, state) * max(1.0, self.pace if state.pace is None else state.pace)

    def _observe(self, device: str, state: DeviceState, this: WaitingParcel, now: float) -> None:
        """A device's pace, from the time between its results."""
        ratio = (now - max(state.since, this.sent)) / self._cost(this, device, state)
        state.pace = ratio if state.pace is None else (1 - MEMORY) * state.pace + MEMORY * ratio
        share = MEMORY / max(1, len(self._devices))
        self.pace = (1 - share) * self.pace + share * min(ratio, 100.0)

    def _next(self, device: str, state: DeviceState) -> ParcelId | None:
        """The next parcel for a device: its own, anybody's, or one that it would finish before its own device does."""
        for queue in (device, ANYONE):
            parcel = self._first(queue, device, state)
            if parcel is not None and not (self._sluggish(state) and self._better_left(parcel, device, state)):
                self._leave_queue(self._parcels[parcel])
                return parcel
        victim = self._most_behind(device)
        if victim is not None:
            parcel = self._peek(self._tails[victim], victim, device, state)
            if parcel is not None and self._worth_helping(parcel, device, state, victim):
                self._leave_queue(self._parcels[parcel])
                return parcel
        return None

    def _worth_helping(self, parcel: ParcelId, device: str, state: DeviceState, victim: str) -> bool:
        """Whether a device should take a parcel from another's queue.

        It must be through well before the other would be with all it has. And as it has none of the slices that the
        other's parcels share, that is a waste unless the parcel shares little, or the other is slower than it was
        planned to be, or the device was not planned for at all.
        """
        this = self._parcels[parcel]
        if self._seconds(this, device, state) > HELPFUL * self._behind(victim):
            return False
        theirs = self._devices[victim].pace
        alone, shared = (state.figures.seconds(this.work, alone=choice) for choice in (True, False))
        return alone <= WASTE * shared or not state.planned or (theirs or 0.0) > WASTE * self.pace

    def _sluggish(self, state: DeviceState) -> bool:
        """Whether a device is far behind the common pace while somebody else is not."""
        slow = state.pace is not None and state.pace > SLUGGISH * self.pace
        return slow and any(
            other.active and (other.pace or 0.0) <= SLUGGISH * self.pace for other in self._devices.values()
        )

    def _better_left(self, parcel: ParcelId, device: str, state: DeviceState) -> bool:
        """Whether others would be through with everything that waits before this device were through with a parcel."""
        here = self._seconds(self._parcels[parcel], device, state)
        there = state.figures.seconds(self._parcels[parcel].work) * self.pace
        return here > there * (SLUGGISH + self._waiting / len(self._devices))

    def _first(self, queue: str, device: str, state: DeviceState) -> ParcelId | None:
        """The first parcel of a queue that this device may have; those that left the queue are dropped on the way."""
        return self._peek(self._queues[queue], queue, device, state)

    def _peek(
        self, heap: list[tuple[int, int, ParcelId]], queue: str, device: str, state: DeviceState
    ) -> ParcelId | None:
        skipped: list[tuple[int, int, ParcelId]] = []
        found = None
        while heap:
            _, number, parcel = heap[0]
            this = self._parcels.get(parcel)
            if this is None or this.queue != queue or this.number != abs(number):
                heappop(heap)
                continue
            if device in this.late_on and self._others(device):
                skipped.append(heappop(heap))
                continue
            found = parcel if self._room(state, this) else None
            break
        for entry in skipped:
            heappush(heap, entry)
        return found

    def _wait(self, parcel: ParcelId, this: WaitingParcel, queue: str) -> None:
        this.queue = queue
        heappush(self._queues[queue], (this.rank, this.number, parcel))
        self._waiting += 1
        if queue != ANYONE:
            state = self._devices[queue]
            heappush(self._tails[queue], (-this.rank, -this.number, parcel))
            state.backlog += state.figures.seconds(this.work)
            heappush(self._longest, (-self._behind(queue), queue))

    def _leave_queue(self, this: WaitingParcel) -> None:
        assert this.queue is not None
        if this.queue != ANYONE and this.queue in self._devices:
            state = self._devices[this.queue]
            state.backlog = max(0.0, state.backlog - state.figures.seconds(this.work))
        this.queue = None
        self._waiting -= 1

    def _behind(self, device: str) -> float:
        """Seconds until a device would be through with what waits for it."""
        state = self._devices[device]
        return state.backlog * (self.pace if state.pace is None else state.pace)

    def _most_behind(self, thief: str) -> str | None:
        """The device with the longest work waiting; its stale entries are renewed on the way."""
        while self._longest:
            behind, device = self._longest[0]
            state = self._devices.get(device)
            if state is None or state.backlog <= 0.0:
                heappop(self._longest)
            elif abs(self._behind(device) + behind) > 0.1 * -behind:
                heappop(self._longest)
                heappush(self._longest, (-self._behind(device), device))
            else:
                return device if device != thief else None
        return None

    def _send(self, parcel: ParcelId, this: WaitingParcel, device: str, now: float) -> None:
        this.holder, this.sent = device, now
        self._devices[device].flying[parcel] = None
        self._devices[device].critical += not this.filler

    def _drop(self, state: DeviceState, parcel: ParcelId) -> None:
        del state.flying[parcel]
        state.critical -= not self._parcels[parcel].filler

    def _room(self, state: DeviceState, this: WaitingParcel) -> bool:
        """Whether a device may have one more parcel of this kind in flight."""
        return (len(state.flying) if this.filler else state.critical) < self.window

    def _has_room(self, device: str) -> None:
        if device not in self._listed and device in self._devices:
            self._listed.add(device)
            self._free.append(device)

    def _settled(self, device: str, state: DeviceState) -> None:
        """A device takes parcels again, or what waits for it is anybody's."""
        if state.active:
            self._has_room(device)
        else:
            heap, self._queues[device], self._tails[device] = self._queues[device], [], []
            self._disown(heap, device)
            state.backlog = 0.0

    def _disown(self, heap: list[tuple[int, int, ParcelId]], device: str) -> None:
        """Loads that waited for a device wait for anyone."""
        for rank, number, parcel in heap:
            this = self._parcels.get(parcel)
            if this is not None and this.queue == device and this.number == number:
                this.queue = ANYONE
                heappush(self._queues[ANYONE], (rank, number, parcel))

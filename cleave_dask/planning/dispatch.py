"""Which device gets which parcel, one event at a time: a state machine without a clock and without I/O.

A parcel is what a device is sent at once: tiles of one gemm that travel as one task. Events go in (a device joined,
left, paused, was heard of; a parcel is ready, ended, is unwanted; time passed), placements come out. The scheduler's
plugin and the simulator drive this same object.

A parcel waits in the queue of the device it was planned for, and a device has a small window of parcels in flight. When
there is room it takes the next of its own, then one that is planned for nobody, then the last one of the device with
the longest work still waiting, if it would be through before that device. So a plan is followed while it holds, and a
device that joins late, or is faster than planned, still finds work. Filler, which nobody waits for, is sent while the
window has room; a parcel of the critical path only counts others of its kind, because a device turns to it first.

Parcels in flight on a device that is late (`lateness`) are handed to others, and it gets nothing more until it is heard
of. It may still be the first to deliver: the first result wins, which is the server's business.

Every event costs O(log devices); `tick` looks only at devices that may be late. `settle` asks each device to which
something has happened, and those that had nothing to do in turn, until LOOKS of them in a row decline.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain, islice

from cleave_dask.planning.dispatch_state import (
    ANYONE,
    FORGIVING,
    GRACE,
    HELPFUL,
    LOOKS,
    MEMORY,
    SLUGGISH,
    WASTE,
    DeviceState,
    Handover,
    ParcelId,
    WaitingParcel,
)
from cleave_dask.planning.lateness import Lateness
from cleave_dask.planning.lowest import Lowest
from cleave_dask.planning.parcels import Figures, Work
from cleave_dask.planning.waiting import Waiting


class Dispatcher:
    """The state of placement: devices with their parcels in flight, parcels that wait."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._devices: dict[str, DeviceState] = {}
        self._parcels: dict[ParcelId, WaitingParcel] = {}
        self._paces = Lowest()  # of devices that take parcels
        self._waiting = Waiting(self._devices, self._parcels, self._paces)
        self._free: deque[str] = deque()  # devices that may have room, each once
        self._listed: set[str] = set()
        self._idle: OrderedDict[str, None] = OrderedDict()  # devices that had nothing to do, the longest unasked first
        self._lateness = Lateness(self._devices, self._parcels)
        self._pushed = self._flying = 0

    # What can be looked at

    @property
    def waiting(self) -> int:
        """Loads that wait for a device."""
        return self._waiting.count

    @property
    def pace(self) -> float:
        """Observed seconds over expected ones, of the whole fleet."""
        return self._waiting.pace

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

    def takers(self, devices: Iterable[str]) -> dict[str, Figures]:
        """Those of these devices that take parcels, and what they are."""
        states = {device: self._devices.get(device) for device in devices}
        return {device: state.figures for device, state in states.items() if state is not None and state.active}

    def scatters(self, device: str) -> bool:
        """Whether a parcel planned for a device should go out in pieces: it takes none, and several others do."""
        return len(self._paces) > 1 and not self.takers([device])

    def urgent(self, device: str) -> list[ParcelId]:
        """Loads of the critical path that wait for a device."""
        return [parcel for parcel, this in self._waiting.of(device) if not this.filler]

    def ahead(self, device: str) -> Work:
        """All that a device has in flight or that waits for it, together."""
        flying = [self._parcels[parcel].work for parcel in self._devices[device].flying]
        return Work.total([*flying, *(this.work for _, this in self._waiting.of(device))])

    def expected(self, parcel: ParcelId, device: str) -> float:
        """Seconds that a parcel is expected to take on a device, by its figures and its pace so far."""
        return self._seconds(self._parcels[parcel], device, self._devices[device])

    # Events: devices

    def device_joined(self, device: str, figures: Figures, now: float) -> None:
        """A device can take parcels from now on; or its figures are better known."""
        known = self._devices.get(device)
        if known is not None:
            known.figures = figures
            for parcel in known.flying:
                self._parcels[parcel].cost = self._cost(self._parcels[parcel], device, known)
            self._lateness.watch(device, now)
            return
        state = self._devices[device] = DeviceState(figures, heard=now, since=now)
        self._waiting.open(device)
        self._settled(device, state)

    def device_left(self, device: str) -> None:
        """A device is gone: what waited for it waits for anyone. Its parcels in flight come back as ready again."""
        state = self._devices.pop(device, None)
        if state is None:
            return
        for name in state.flying:
            self._parcels[name].holder = None
        self._flying -= len(state.flying)
        self._paces.drop(device)
        self._lateness.drop(device)
        self._idle.pop(device, None)
        self._waiting.close(device)

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
            self._paced(device, state, state.pace + FORGIVING * (self.pace - state.pace))
        if state.silent and state.heard > state.since:
            state.silent = False
            self._settled(device, state)

    # Events: parcels

    def parcel_ready(
        self, parcel: ParcelId, rank: int, planned: str | None, work: Work, now: float, *, filler: bool = False
    ) -> str | None:
        """A parcel's operands are there; returns the device that it is sent to at once, if any.

        That is its planned device when it has room and nothing else waits for it. Otherwise the parcel waits, for that
        device or for anyone; one that somebody was late with, for whoever would finish it first of some that are idle.
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
            self._wait(parcel, this, (self._quickest_idle(this) if late_on else None) or ANYONE)
        elif self._room(state, this) and self._waiting.empty(planned):
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
            self._lateness.watch(this.holder, now + GRACE)
            self._settled(this.holder, state)
        this.holder = None
        if done and this.queue is None:
            del self._parcels[parcel]

    def parcel_forgotten(self, parcel: ParcelId) -> None:
        """A parcel is no longer wanted, wherever it is."""
        this = self._parcels.get(parcel)
        if this is None:
            return
        if this.queue is not None:
            self._waiting.remove(this)
        if this.holder is not None:
            self._drop(self._devices[this.holder], parcel)
            self._lateness.watch(this.holder, 0.0)
            self._has_room(this.holder)
        del self._parcels[parcel]

    # Instructions

    def settle(self, now: float) -> list[tuple[ParcelId, str]]:
        """Everything that can be sent out now, one parcel for each device in turn."""
        placed: list[tuple[ParcelId, str]] = []
        while self._free and self._waiting.count:
            device = self._free.popleft()
            self._listed.discard(device)
            self._place(device, now, placed)
        declined, most = 0, LOOKS if self._flying else len(self._idle)  # nobody works: nothing else would happen
        while self._idle and self._waiting.count and declined < most:
            device, _ = self._idle.popitem(last=False)
            declined = 0 if self._place(device, now, placed) else declined + 1
        return placed

    def _place(self, device: str, now: float, placed: list[tuple[ParcelId, str]]) -> bool:
        """Send a device its next parcel, if it has room and there is one."""
        state = self._devices.get(device)
        if state is None or not state.active or state.critical >= self.window:
            return False
        parcel = self._next(device, state)
        if parcel is None:
            self._idle[device] = None
            return False
        self._send(parcel, self._parcels[parcel], device, now)
        placed.append((parcel, device))
        self._has_room(device)
        return True

    def tick(self, now: float) -> list[Handover]:
        """Time has passed: parcels that are late, to be taken back. Each then comes as ready again."""
        late: list[Handover] = []
        for name, begun in self._lateness.late(now, self.pace, len(self._paces)):
            state = self._devices[name]
            if not self._others(name):
                self._lateness.watch(name, now)
                continue
            if state.heard > begun:  # it lives, so it is slow
                pace = (now - begun) / self._parcels[next(iter(state.flying))].cost
                self._paced(name, state, max(state.pace or 0.0, pace))
            late += self._take_back(name, state, now)
        return late

    def _take_back(self, name: str, state: DeviceState, now: float) -> list[Handover]:
        """A device loses what it has in flight, and gets nothing more until it is heard of."""
        taken = list(state.flying)
        for parcel in taken:
            this = self._parcels[parcel]
            this.holder, this.late_on = None, (*this.late_on, name)
        self._flying -= len(taken)
        self._lateness.drop(name)
        state.flying.clear()
        state.critical = state.excused = 0
        state.since, state.silent = now, True
        self._settled(name, state)
        return [Handover(parcel, name) for parcel in taken]

    # Inside

    def _quickest_idle(self, this: WaitingParcel) -> str | None:
        """Who would finish a parcel first, of a few for whom nothing waits and who were not late with it."""
        some = [device for device in islice(chain(self._idle, self._free), LOOKS) if device not in this.late_on]
        able = {
            device: self._seconds(this, device, state)
            for device in some
            if (state := self._devices.get(device)) is not None
            and state.active
            and self._room(state, this)
            and self._waiting.empty(device)
            and not self._sluggish(state)
        }
        return min(able, key=lambda device: able[device], default=None)

    def _others(self, device: str) -> bool:
        """Whether anybody but this device can take parcels."""
        state = self._devices.get(device)
        return len(self._paces) > (state is not None and state.active)

    def _cost(self, this: WaitingParcel, device: str, state: DeviceState) -> float:
        """Seconds of a parcel by a device's figures; what its planned device has of slices, another must fetch."""
        return state.figures.seconds(this.work, alone=device != this.planned)

    def _seconds(self, this: WaitingParcel, device: str, state: DeviceState) -> float:
        """The same, by the device's pace so far; a pace below 1 comes from overlap, which the last parcel has not."""
        return self._cost(this, device, state) * max(1.0, self.pace if state.pace is None else state.pace)

    def _observe(self, device: str, state: DeviceState, this: WaitingParcel, now: float) -> None:
        """A device's pace, from the time between its results."""
        seconds = now - max(state.since, this.sent)
        self._lateness.shown(device, state, seconds, this.cost)
        ratio = seconds / this.cost
        if this.work.begun and device == this.planned:  # how much of it was done before is not known here
            ratio = max(ratio, min(1.0, self.pace if state.pace is None else state.pace))
        self._paced(device, state, ratio if state.pace is None else (1 - MEMORY) * state.pace + MEMORY * ratio)
        share = MEMORY / max(1, len(self._devices))
        self._waiting.pace = (1 - share) * self.pace + share * min(ratio, 100.0)

    def _next(self, device: str, state: DeviceState) -> ParcelId | None:
        """The next parcel for a device: its own, anybody's, or one that it would finish before its own device does."""
        for queue in (device, ANYONE):
            parcel = self._waiting.first(queue, device, filler=queue != ANYONE or len(state.flying) < self.window)
            if parcel is None or not self._room(state, self._parcels[parcel]):
                continue
            if not (self._sluggish(state) and self._better_left(parcel, device, state)):
                self._waiting.remove(self._parcels[parcel])
                return parcel
        victim = self._waiting.most_behind()
        if victim is not None and victim != device:
            parcel = self._waiting.last(victim, device)
            room = parcel is not None and self._room(state, self._parcels[parcel])
            if room and self._worth_helping(parcel, device, state, victim):
                self._waiting.remove(self._parcels[parcel])
                return parcel
        return None

    def _worth_helping(self, parcel: ParcelId, device: str, state: DeviceState, victim: str) -> bool:
        """Whether a device should take a parcel from another's queue.

        It must be through well before the other would be with all it has. And as it has none of the slices that the
        other's parcels share, that is a waste unless the parcel shares little, or the other is slower than it was
        planned to be, or the device was not planned for at all.
        """
        this = self._parcels[parcel]
        if self._seconds(this, device, state) > HELPFUL * self._waiting.behind(victim):
            return False
        alone, shared = (state.figures.seconds(this.work, alone=choice) for choice in (True, False))
        return alone <= WASTE * shared or not state.planned or (self._devices[victim].pace or 0.0) > WASTE * self.pace

    def _sluggish(self, state: DeviceState) -> bool:
        """Whether a device is far behind the common pace while somebody else is not."""
        limit, quickest = SLUGGISH * self.pace, self._paces.least()
        return state.pace is not None and state.pace > limit and quickest is not None and quickest[0] <= limit

    def _better_left(self, parcel: ParcelId, device: str, state: DeviceState) -> bool:
        """Whether others would be through with everything that waits before this device were through with a parcel."""
        here = self._seconds(self._parcels[parcel], device, state)
        there = state.figures.seconds(self._parcels[parcel].work) * self.pace
        return here > there * (SLUGGISH + self._waiting.count / len(self._devices))

    def _wait(self, parcel: ParcelId, this: WaitingParcel, queue: str) -> None:
        self._waiting.add(parcel, this, queue)
        self._has_room(queue)

    def _send(self, parcel: ParcelId, this: WaitingParcel, device: str, now: float) -> None:
        state = self._devices[device]
        this.holder, this.sent, this.cost = device, now, self._cost(this, device, state)
        state.flying[parcel] = None
        state.critical += not this.filler
        self._flying += 1
        self._lateness.watch(device, now + GRACE)

    def _drop(self, state: DeviceState, parcel: ParcelId) -> None:
        del state.flying[parcel]
        self._flying -= 1
        state.critical -= not self._parcels[parcel].filler

    def _room(self, state: DeviceState, this: WaitingParcel) -> bool:
        """Whether a device may have one more parcel of this kind in flight."""
        return (len(state.flying) if this.filler else state.critical) < self.window

    def _paced(self, device: str, state: DeviceState, pace: float) -> None:
        state.pace = pace
        if state.active:
            self._paces.set(device, pace)

    def _has_room(self, device: str) -> None:
        if device not in self._listed and device in self._devices:
            self._idle.pop(device, None)
            self._listed.add(device)
            self._free.append(device)

    def _settled(self, device: str, state: DeviceState) -> None:
        """A device takes parcels again, or what waits for it is anybody's."""
        if state.active:
            self._paces.set(device, state.pace or 0.0)
            self._has_room(device)
        else:
            self._paces.drop(device)
            self._idle.pop(device, None)
            self._waiting.close(device)
            self._waiting.open(device)
            state.backlog = 0.0

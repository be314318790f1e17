"""Which devices are late: those that have parcels in flight and have shown nothing for longer than those should take.

A device should show something, a finished parcel, within FACTOR times what its largest parcel in flight takes by its
figures and its pace so far, plus GRACE. Each handover of its parcels doubles the patience, so that a parcel does not
wander for ever.

Where most of the fleet is behind at once and can still be heard, it is not the devices: their results wait for the
server. Copies would wait there too, behind all others, and make it worse. So nobody is late then: each of them has
twice the time, again and again, until its next result tells its pace. And nobody is late before FACTOR times what
results took of late, if that was more than figures explain: a queue is as long for small parcels as for large ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from cleave_dask.planning.dispatch_state import FACTOR, GRACE, HEARABLE, DeviceState, ParcelId, WaitingParcel
from cleave_dask.planning.lowest import Lowest

RECENT = 0.1
"""Weight of the last result in what results took of late."""


class Lateness:
    """When to look at each device with parcels in flight: then it is late, or it is known when to look again."""

    def __init__(self, devices: Mapping[str, DeviceState], parcels: Mapping[ParcelId, WaitingParcel]) -> None:
        self._devices = devices
        self._parcels = parcels
        self._due = Lowest()  # no device is late before that
        self._excused: set[str] = set()  # devices that were behind together with most, and have shown nothing since
        self._wait = 0.0  # seconds that results took of late, where that is more than their devices' figures explain

    def watch(self, device: str, soonest: float) -> None:
        """What a device has in flight has changed, and with it when it is late: not before `soonest`."""
        due = self._due.get(device)
        if due is None or due > soonest:
            self._due.set(device, soonest)

    def drop(self, device: str) -> None:
        """A device is gone."""
        self._due.drop(device)
        self._excused.discard(device)

    def shown(self, device: str, state: DeviceState, seconds: float, cost: float) -> None:
        """A device has finished a parcel after so many seconds, where its figures explain `cost`."""
        self._wait += RECENT * ((seconds if seconds > FACTOR * cost + GRACE else 0.0) - self._wait)
        if state.excused:
            state.excused = 0
            self._excused.discard(device)

    def late(self, now: float, pace: float, active: int) -> list[tuple[str, float]]:
        """Devices that are late, and since when they have shown nothing; `active` devices take parcels."""
        overdue = self._overdue(now, pace)
        heard = {name for name, _ in overdue if self._devices[name].heard >= now - HEARABLE}
        if 2 * len(heard | self._excused) <= active:
            return overdue
        for name in heard:
            self._devices[name].excused += 1
            self._due.set(name, now + GRACE)
        self._excused |= heard
        return [each for each in overdue if each[0] not in heard]

    def _overdue(self, now: float, pace: float) -> list[tuple[str, float]]:
        """Devices whose time is over, and since when they have shown nothing."""
        found = []
        while (due := self._due.least()) is not None and due[0] <= now:
            name, state = due[1], self._devices[due[1]]
            self._due.drop(name)
            if not state.flying:
                continue
            begun = max(state.since, self._parcels[next(iter(state.flying))].sent)
            deadline = begun + self._patience(state, pace)
            if now >= deadline:
                found.append((name, begun))
            else:  # the pace of the fleet, which may still change, stands in for one that is not known
                self._due.set(name, deadline if state.pace is not None else min(deadline, now + GRACE))
        return found

    def _patience(self, state: DeviceState, pace: float) -> float:
        """Seconds within which a device must show something."""
        flying = [self._parcels[parcel] for parcel in state.flying]
        expected = max(parcel.cost for parcel in flying) * max(1.0, pace if state.pace is None else state.pace)
        doubled = state.excused + min(len(parcel.late_on) for parcel in flying)
        return max((FACTOR * expected + GRACE) * 2.0 ** min(doubled, 16), FACTOR * self._wait + GRACE)

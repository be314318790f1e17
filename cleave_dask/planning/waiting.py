"""Parcels that wait, by whom they wait for: the most and the least urgent of a queue, and who is most behind."""

from __future__ import annotations

from collections.abc import Sized
from heapq import heappop, heappush

from cleave_dask.planning.dispatch_state import ANYONE, DeviceState, ParcelId, WaitingParcel

Entry = tuple[int, int, ParcelId]
Heaps = tuple[list[Entry], list[Entry]]
"""What others wait for, and filler: most urgent first."""


class Waiting:
    """Queues of parcels, one for each device and one for anyone; entries of parcels that left fall out in time."""

    def __init__(self, devices: dict[str, DeviceState], parcels: dict[ParcelId, WaitingParcel], takers: Sized) -> None:
        self.count = 0
        self.pace = 1.0  # of the whole fleet: stands in for a device's own while that is not known
        self._devices = devices
        self._parcels = parcels
        self._takers = takers  # devices that take parcels
        self._queues: dict[str, Heaps] = {ANYONE: ([], [])}
        self._tails: dict[str, list[Entry]] = {}  # of devices: least urgent first
        self._longest: list[tuple[float, str]] = []  # (-behind, device): a heap with stale entries

    def open(self, device: str) -> None:
        """A queue for a device."""
        self._queues[device], self._tails[device] = ([], []), []

    def close(self, device: str) -> None:
        """No more queue for a device: what waited in it waits for anyone."""
        del self._tails[device]
        for this, entry in self._entries(device):
            this.queue = ANYONE
            heappush(self._queues[ANYONE][this.filler], entry)
        del self._queues[device]

    def empty(self, device: str) -> bool:
        """Whether nothing has waited for a device since its queue was last looked through."""
        return not any(self._queues[device])

    def add(self, parcel: ParcelId, this: WaitingParcel, queue: str) -> None:
        """A parcel waits for a device, or for ANYONE."""
        this.queue = queue
        heappush(self._queues[queue][this.filler], (this.rank, this.number, parcel))
        self.count += 1
        if queue != ANYONE:
            state = self._devices[queue]
            heappush(self._tails[queue], (-this.rank, -this.number, parcel))
            state.backlog += state.figures.seconds(this.work)
            heappush(self._longest, (-self.behind(queue), queue))

    def remove(self, this: WaitingParcel) -> None:
        """A parcel waits no more."""
        assert this.queue is not None
        if this.queue != ANYONE and this.queue in self._devices:
            state = self._devices[this.queue]
            state.backlog = max(0.0, state.backlog - state.figures.seconds(this.work))
        this.queue = None
        self.count -= 1

    def first(self, queue: str, taker: str | None, *, filler: bool) -> ParcelId | None:
        """The most urgent parcel of a queue, filler too or not, but for those that are not for this taker."""
        found = [self._peek(heap, queue, taker) for heap in self._queues[queue][: 1 + filler]]
        return min((each for each in found if each is not None), key=self._urgency, default=None)

    def last(self, queue: str, taker: str) -> ParcelId | None:
        """The least urgent one."""
        return self._peek(self._tails[queue], queue, taker)

    def of(self, device: str) -> list[tuple[ParcelId, WaitingParcel]]:
        """What waits for a device."""
        return [(entry[-1], this) for this, entry in self._entries(device)]

    def behind(self, device: str) -> float:
        """Seconds until a device would be through with what waits for it."""
        state = self._devices[device]
        return state.backlog * (self.pace if state.pace is None else state.pace)

    def most_behind(self) -> str | None:
        """The device with the longest work waiting; stale entries are renewed on the way."""
        while self._longest:
            behind, device = self._longest[0]
            state = self._devices.get(device)
            if state is None or state.backlog <= 0.0:
                heappop(self._longest)
            elif abs(self.behind(device) + behind) > 0.1 * -behind:
                heappop(self._longest)
                heappush(self._longest, (-self.behind(device), device))
            else:
                return device
        return None

    def _peek(self, heap: list[Entry], queue: str, taker: str | None) -> ParcelId | None:
        skipped: list[Entry] = []
        found = None
        while heap:
            _, number, parcel = heap[0]
            this = self._parcels.get(parcel)
            if this is None or this.queue != queue or this.number != abs(number):
                heappop(heap)
            elif taker in this.late_on and self._others(this):
                skipped.append(heappop(heap))
            else:
                found = parcel
                break
        for entry in skipped:
            heappush(heap, entry)
        return found

    def _others(self, this: WaitingParcel) -> bool:
        """Whether somebody takes parcels who was never late with this one."""
        late = {name for name in this.late_on if name in self._devices and self._devices[name].active}
        return len(self._takers) > len(late)

    def _entries(self, queue: str) -> list[tuple[WaitingParcel, Entry]]:
        """Those of a queue that have not left it."""
        known = [(self._parcels.get(entry[-1]), entry) for heap in self._queues[queue] for entry in heap]
        return [(p, entry) for p, entry in known if p is not None and p.queue == queue and p.number == entry[1]]

    def _urgency(self, parcel: ParcelId) -> tuple[int, int]:
        return self._parcels[parcel].rank, self._parcels[parcel].number

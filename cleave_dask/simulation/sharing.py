"""A link that many transfers share: the server's egress or ingress, on virtual time.

While the devices' own links together want less than the server can carry, each transfer runs at its device's speed.
Where they want more, all are slowed by the same factor s = capacity / sum of their speeds. Time as the transfers see it
then runs s times slower, so a transfer that would take x seconds alone ends when that clock has advanced by x: one heap
holds all of them in an order that never changes, whoever comes and goes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from cleave_dask.fleet.devices import Fleet


class SharedLink:
    """Transfers in flight through one end of the server."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity  # bytes per second
        self.version = 0  # changes with whatever changes the time of the next end
        self.watched = -1  # the version whose end somebody waits for
        self._wanted = 0.0  # bytes per second, of all transfers in flight
        self._clock = 0.0  # as the transfers see it
        self._now = 0.0
        self._ends: list[tuple[float, int, float, Any]] = []
        self._flying: dict[Any, tuple[float, int, float]] = {}  # by what they are: end, number, speed
        self._count = 0

    def add(self, now: float, seconds: float, speed: float, what: Any) -> None:
        """A transfer begins that would take `seconds` alone at its device's `speed` (bytes/s)."""
        self._advance(now)
        self._count += 1
        end = self._clock + seconds
        self._flying[what] = end, self._count, speed
        heappush(self._ends, (end, self._count, speed, what))
        self._wanted += speed
        self.version += 1

    def take_back(self, now: float, what: Any) -> float:
        """A transfer stands still; the seconds that it would still take alone."""
        self._advance(now)
        end, _, speed = self._flying.pop(what)
        self._wanted = max(0.0, self._wanted - speed)
        self.version += 1
        return max(0.0, end - self._clock)

    def next_end(self) -> float | None:
        """When the first of the transfers in flight ends, if nothing changes before."""
        while self._ends and self._flying.get(self._ends[0][3], (0.0, 0))[1] != self._ends[0][1]:
            heappop(self._ends)  # it was taken back
        if not self._ends:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._clock) / self._share

    def pop(self, now: float) -> Any:
        """The transfer that ends now."""
        self._advance(now)
        _, _, speed, what = heappop(self._ends)
        del self._flying[what]
        self._wanted = max(0.0, self._wanted - speed) if self._flying else 0.0
        self.version += 1
        return what

    @property
    def _share(self) -> float:
        """How fast the transfers' clock runs."""
        return min(1.0, self.capacity / self._wanted) if self._wanted else 1.0

    def _advance(self, now: float) -> None:
        self._clock += (now - self._now) * self._share
        self._now = now


def server_links(fleet: Fleet, *, changing: bool) -> tuple[SharedLink | None, SharedLink | None]:
    """Egress and ingress of the server; None where it carries all that the devices could ever want together.

    That is not known where the devices' links are `changing`.
    """
    wanted = (sum(one.down.bandwidth for one in fleet.devices), sum(one.up.bandwidth for one in fleet.devices))
    egress, ingress = (
        SharedLink(most) if changing or together > most else None
        for together, most in zip(wanted, (fleet.server.egress, fleet.server.ingress), strict=True)
    )
    return egress, ingress

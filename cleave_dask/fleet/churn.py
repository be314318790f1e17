"""Churn: what goes wrong, as a script of events in time. The same script drives real processes and the simulator.

A device *leaves* (its process is killed, its connection closes) and may *join* again; it *stalls* (it stops without a
word) and *resumes*; it is *slowed* by a factor and *recovers*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, Self, get_args

from cleave_dask.errors import InputError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import html_table

Kind = Literal["leave", "join", "stall", "resume", "slow", "recover"]

_UNDONE_BY: dict[Kind, Kind] = {"leave": "join", "stall": "resume", "slow": "recover"}
_COMMON: dict[Kind, float] = {"leave": 0.7, "stall": 0.2, "slow": 0.1}
"""How often each mishap happens, of all that do."""

HARMFUL = 1 - _COMMON["slow"]
"""Share of mishaps after which a device answers no more, for a while or for good."""


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Something that happens to a device, `seconds` after the start."""

    seconds: float
    device: str
    kind: Kind
    factor: float = 1.0  # how many times slower, of a "slow" device


@dataclass(frozen=True)
class Churn:
    """Events in the order in which they happen."""

    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        for event in self.events:
            if event.kind not in get_args(Kind):
                raise InputError(f"churn knows no {event.kind!r}; use one of {', '.join(get_args(Kind))}")
            if not event.seconds >= 0 or not event.factor >= 1:
                raise InputError(f"{event}: time starts at 0, and a slow device is slower by a factor of 1 or more")
        object.__setattr__(self, "events", tuple(sorted(self.events)))

    @classmethod
    def sample(
        cls,
        fleet: Fleet,
        rate: float,
        seed: int = 0,
        *,
        seconds: float = 3600.0,
        away: float = 60.0,
        factor: float = 20,
    ) -> Self:
        """Mishaps at random: `rate` per device and hour, over `seconds`.

        Seven in ten leave, two stall, one becomes `factor` times slower; each is undone after some `away` seconds.
        """
        if not rate >= 0:
            raise InputError(f"a churn rate of {rate}; give mishaps per device and hour, 0 or more")
        chance = Random(seed)
        events: list[Event] = []
        for device in fleet.devices:
            now = chance.expovariate(rate / 3600) if rate else seconds
            while now < seconds:
                kind = chance.choices(list(_COMMON), list(_COMMON.values()))[0]
                events.append(Event(now, device.name, kind, factor if kind == "slow" else 1.0))
                now += chance.expovariate(1 / away)
                events.append(Event(now, device.name, _UNDONE_BY[kind]))
                now += chance.expovariate(rate / 3600)
        return cls(tuple(events))

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def count(self, *kinds: Kind) -> int:
        """How many events are of these kinds."""
        return sum(event.kind in kinds for event in self.events)

    def _repr_html_(self) -> str:
        rows: Iterable[tuple[str, int]] = [(kind, self.count(kind)) for kind in get_args(Kind)]
        return html_table(("event", "count"), list(rows), caption=f"Churn: {len(self)} events")

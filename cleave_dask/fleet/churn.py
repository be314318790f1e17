"""Churn: what goes wrong, as a script of events in time. The same script drives real processes and the simulator.

A device *leaves* (its process is killed, its connection closes) and may *join* again; it *stalls* (it stops without a
word) and *resumes*; it is *slowed* by a factor and *recovers*. In the simulator its links change too: *down* and *up*
give one a new bandwidth, so a file of them is a bandwidth trace. As a file, churn is CSV with one event a row, in the
order of time:

    seconds,device,event,value
    0,phone-0001,down,80 Mbit/s      bytes per second as fleet files write them
    12.5,phone-0002,leave,           nothing to say
    30,phone-0003,slow,20            how many times slower
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from math import inf
from pathlib import Path
from random import Random
from typing import Literal, Self, cast, get_args

from cleave_dask.errors import InputError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.fleet.units import parse
from cleave_dask.formatting import html_table
from cleave_dask.resources import expect, is_number, nearest, shown

Kind = Literal["leave", "join", "stall", "resume", "slow", "recover", "down", "up"]

COLUMNS = ("seconds", "device", "event", "value")
"""Of a churn file."""

LINKS: tuple[Kind, ...] = ("down", "up")
"""Events that give a link a new bandwidth; real processes cannot be told to."""

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
    bandwidth: float = 0.0  # bytes per second, of a link that is "down" or "up" from now on


@dataclass(frozen=True)
class Churn:
    """Events in the order in which they happen."""

    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        expect(self.events, Iterable, what="the events of churn", remedy="give a list of Event")
        for event in (events := tuple(self.events)):
            expect(event, Event, what="an event of churn", remedy="give Event(seconds, device, kind)")
            if event.kind not in get_args(Kind):
                raise InputError(f"churn knows no {event.kind!r}; use one of {', '.join(get_args(Kind))}")
            if not 0 <= event.seconds < inf or not 1 <= event.factor < inf:
                raise InputError(f"{event}: time starts at 0, and a slow device is slower by a factor of 1 or more")
            if event.kind in LINKS and not 0 < event.bandwidth < inf:
                raise InputError(f"{event}: give the link's new bandwidth, in bytes per second above zero")
        object.__setattr__(self, "events", tuple(sorted(events)))

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
        expect(fleet, Fleet, what="the fleet", remedy="give a Fleet, such as Fleet.load('lab-8')")
        expect(seed, int, what="the seed", remedy="give a whole number")
        check_rate(rate)
        for name, value in (("seconds", seconds), ("away", away)):
            if not is_number(value, least=0) or value == 0:
                raise InputError(f"{name} of churn is {shown(value)}; give a finite number of seconds above zero")
        if not is_number(factor, least=1):
            raise InputError(f"the factor of churn is {shown(factor)}; give how many times slower, 1 or more")
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

    @classmethod
    def load(cls, path: str | os.PathLike[str], fleet: Fleet | None = None) -> Self:
        """Read a CSV file (see above); with a fleet, every device must be one of its own.

        An InputError names the file, the line and the remedy.
        """
        expect(path, (str, os.PathLike), what="the file of churn", remedy="give the path of a CSV file")
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise InputError(f"{shown(os.fspath(path))} cannot be read: {error}; give a CSV file of churn") from None
        known = None if fleet is None else {device.name for device in fleet.devices}
        return cls(tuple(_read_events(text, f"{Path(path).name}", known)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file that `load` reads."""
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for event in self.events:
            value = event.factor if event.kind == "slow" else event.bandwidth if event.kind in LINKS else ""
            writer.writerow((repr(float(event.seconds)), event.device, event.kind, value))
        Path(path).write_text(out.getvalue(), encoding="utf-8")

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


def check_churn(churn: object) -> None:
    """Refuse what is neither churn nor None, such as a rate of it."""
    if churn is not None:
        expect(churn, Churn, what="churn", remedy="give a Churn, such as Churn.sample(fleet, 0.1)")


def check_rate(rate: object) -> None:
    """Refuse what cannot be a rate of churn."""
    if not is_number(rate, least=0):
        raise InputError(f"a churn rate of {shown(rate)}; give mishaps per device and hour, 0 or more and finite")


def _read_events(text: str, file: str, known: set[str] | None) -> Iterator[Event]:
    """The events of a churn file, one line after another."""
    lines = text.rstrip().splitlines()
    header = tuple(name.strip() for name in lines[0].split(",")) if lines else ()
    if header != COLUMNS:
        raise InputError(f"{file} line 1 has the columns {shown(','.join(header))}; write {','.join(COLUMNS)}")
    before = 0.0
    for number, line in enumerate(lines[1:], start=2):
        where = f"{file} line {number}"
        event = _read_event(next(csv.reader([line]), []), where)
        if event.seconds < before:
            raise InputError(f"{where} is at {event.seconds} s, after {before} s; sort the rows by time")
        if known is not None and event.device not in known:
            raise InputError(
                f"{where} has device {shown(event.device)}, which is not in the fleet; {_like(event, known)}"
            )
        before = event.seconds
        yield event


def _read_event(cells: list[str], where: str) -> Event:
    """One row of a churn file."""
    cells = [cell.strip() for cell in cells]
    if len(cells) != len(COLUMNS) or not all(cells[:3]):
        raise InputError(f"{where} has a gap: {shown(','.join(cells))}; give all of {','.join(COLUMNS)}, or delete it")
    seconds, device, kind, value = cells
    if kind not in get_args(Kind):
        raise InputError(f"{where} has event {shown(kind)}; {nearest(kind, get_args(Kind))}")
    if (value == "") == (kind in ("slow", *LINKS)):
        wanted = {"slow": "how many times slower", "down": "a bandwidth", "up": "a bandwidth"}.get(kind, "nothing")
        raise InputError(f"{where} has value {shown(value)} for {kind!r}; give {wanted}")
    try:
        time = parse(seconds, "seconds", field=f"{where}: seconds")
        bandwidth = parse(value, "bytes/s", field=f"{where}: value") if kind in LINKS else 0.0
        factor = float(value) if kind == "slow" else 1.0
        (event,) = Churn((Event(time, device, cast(Kind, kind), factor, bandwidth),)).events
    except ValueError:
        raise InputError(f"{where} has value {shown(value)}; give how many times slower, such as 20") from None
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    return event


def _like(event: Event, known: set[str]) -> str:
    """Names of devices that a wrong one may have meant; a fleet has too many to name all."""
    hint = nearest(event.device, known).partition("? ")
    return f"{hint[0]}?" if hint[1] else f"its devices have names such as {min(known)!r}"

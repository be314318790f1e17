"""A run as it can be shown: losses, tiles, devices, events, what binds. Facts go in, tables come out; no I/O.

The dashboard feeds it with what is new since the last look, the report with what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cleave_dask.formatting import duration, quantity
from cleave_dask.runtime.trace import HERE

MOST_TILES = 4_000
"""Newest tiles that are kept to be drawn."""

MOST_EVENTS = 200
BUSY = 0.3
"""Share of a step below which no resource binds: then levels wait for each other."""

STAGES = ("download", "compute", "upload", "verify")
Column = np.ndarray[Any, np.dtype[Any]]
GONE = ("left", "quarantined")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a resource was in the last step."""

    resource: str
    share: float  # of the step's seconds, of 1
    note: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a device."""

    when: float  # seconds since the epoch
    kind: str
    device: str
    text: str


class Story:
    """Everything that is known of a run and its fleet."""

    def __init__(self) -> None:
        self.runs = 0  # changes with every run
        self.why = "nobody has looked yet"  # there is no run
        self.run: str | None = None
        self.plan: dict[str, Any] = {}
        self.records: list[Mapping[str, Any]] = []
        self.progress: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.sums: dict[str, Sequence[float]] = {}  # by device, as `device_sums` orders them
        self.tiles: dict[str, Column] = {}
        self.tiles_seen = 0  # ever; the last of them is the last in `tiles`
        self.events: list[Event] = []
        self.present: dict[str, dict[str, Any]] = {}
        self.silent: set[str] = set()
        self.late: dict[str, int] = {}
        self.quarantined: dict[str, str] = {}  # devices that sent a wrong tile, and what was wrong
        self.gone: dict[str, str] = {}  # devices that were there, and what became of them
        self.redone: dict[str, int] = {}  # tiles that were planned for a device and done by another
        self.scheduler = 0.0
        self._names: dict[str, None] = {}  # in order
        self.base = 0.0  # when the run began, on the clock of the tiles

    # Facts go in

    def take(self, facts: Mapping[str, Any]) -> None:
        """Take what the feed says."""
        self.present = facts.get("devices", {})
        self.silent = set(facts.get("silent", ()))
        self.late = facts.get("late", {})
        self.quarantined = facts.get("quarantined", {})
        self.scheduler = facts.get("scheduler", 0.0)
        self.why = facts.get("why", "")
        for when, event in facts.get("events", ()):
            self.tell(when, event)
        if "run" in facts:
            self.take_run(facts["run"])

    def take_run(self, run: Mapping[str, Any]) -> None:
        """Take what is new of a run; another run than before begins a new story."""
        if run["run"] != self.run:
            self.run, self.runs = run["run"], self.runs + 1
            self.records, self.tiles, self.redone, self.sums, self.base = [], {}, {}, {}, 0.0
            self.summary = {}
        self.plan = run.get("plan", self.plan)
        self.progress = run.get("progress", {})
        self.summary = run.get("summary", {}) or self.summary
        self.sums |= run.get("sums", {})
        self.records.extend(run.get("records", ()))
        if run.get("rows") is not None:
            self._draw(run["rows"], run["names"])

    def tell(self, when: float, event: Mapping[str, Any]) -> None:
        """Take an event of the fleet."""
        kind, device = str(event.get("action", "")), str(event.get("device", ""))
        if kind in GONE:
            self.gone[device] = kind
        elif kind == "joined":
            self.gone.pop(device, None)
        parcels = event.get("parcels")
        more = f"{parcels} parcel{'s' * (parcels != 1)} handed to others" if parcels else str(event.get("why", ""))
        self.events = [*self.events, Event(when, kind, device, more)][-MOST_EVENTS:]

    def _draw(self, rows: Mapping[str, Column], names: Mapping[str, Sequence[str]]) -> None:
        """Keep the newest tiles; names in the place of numbers."""
        count = len(rows["step"])
        if not count:
            return
        named = {name: np.array([*names[name], ""], dtype=object)[rows[name]] for name in names}
        new = {name: named.get(name, column) for name, column in rows.items()}
        other = (new["planned"] != new["device"]) & (new["planned"] != "")
        for device in new["planned"][other].tolist():
            self.redone[device] = self.redone.get(device, 0) + 1
        self.tiles = {
            name: np.concatenate([self.tiles[name], column])[-MOST_TILES:] if self.tiles else column[-MOST_TILES:]
            for name, column in new.items()
        }
        self.tiles_seen += count
        if not self.base:
            first = self.records[0] if self.records else {}
            began = first.get("ended", float("inf")) - first.get("seconds", 0.0)
            self.base = min(began, float(self.tiles["start"].min()))

    # Tables come out

    @property
    def last(self) -> Mapping[str, Any]:
        """The record of the newest step."""
        return self.records[-1] if self.records else {}

    @property
    def names(self) -> list[str]:
        """Every device of the plan, or that is here, or was."""
        planned = self.plan.get("devices", {}).get("name", ())
        known = dict.fromkeys([*planned, *self.present, *self.sums, *self.gone, *self.quarantined])
        known.pop(HERE, None)  # tiles that it made itself count as done by others
        if known.keys() != self._names.keys():
            self._names = dict.fromkeys(sorted(known, key=_natural))
        return list(self._names)

    def state(self, device: str) -> str:
        """What a device is now: here, late, paused, measuring, left or quarantined."""
        facts = self.present.get(device)
        if device in self.quarantined:
            return "quarantined"
        if facts is None:
            return self.gone.get(device, "left")
        if device in self.silent:
            return "late"
        if not facts.get("running", True):
            return "paused"
        return "measuring" if facts.get("measuring") else "here"

    def devices(self) -> dict[str, list[Any]]:
        """A row for each device: what it is, what it does, what it was planned to do and why."""
        names, plan, summary = self.names, self.plan.get("devices", {}), self.summary
        planned, why = _by(plan, "name", "share"), _by(plan, "name", "why")
        share, taken_over = _by(summary, "device", "share"), _by(summary, "device", "taken_over")
        states = [self.state(name) for name in names]
        sums = [self.sums.get(name) or _NOTHING for name in names]
        unknown = [_unplanned(state, planned=bool(plan)) for state in states]
        reasons = [why.get(name, other) for name, other in zip(names, unknown, strict=True)]
        return {
            "device": names,
            "state": states,
            **{figure: self._figures(figure) for figure in _FIGURES},
            "planned": [planned.get(name, 0.0) for name in names],
            "share": [share.get(name, 0.0) for name in names],
            "tiles": [int(row[0]) for row in sums],
            "taken_over": [int(taken_over.get(name, 0)) for name in names],
            "down_bytes": [row[3] for row in sums],
            "up_bytes": [row[4] for row in sums],
            "late": [self.late.get(name, 0) for name in names],
            "rejected": [int(row[2]) for row in sums],
            "why": [self.quarantined.get(name) or reason for name, reason in zip(names, reasons, strict=True)],
        }

    def _figures(self, figure: str) -> list[float]:
        """A figure of each device: as tiles show it, as it was measured, or as it was planned with."""
        seen, planned = self.summary.get("figures", {}), _by(self.plan.get("devices", {}), "name", figure)
        found = []
        for name in self.names:
            guess = self.present.get(name, {}).get(figure, planned.get(name, float("nan")))
            found.append(float(seen.get(name, {}).get(figure, guess)))
        return found

    def loads(self) -> list[Load]:
        """How busy each resource was in the last step, the busiest first."""
        record, seconds = self.last, self.last.get("seconds", 0.0)
        if not seconds or not self.summary.get("device"):
            return []
        spent, server = record.get("spent", {}), self.plan.get("server", {})
        found = []
        for stage, resource in zip(STAGES, ("downlink", "compute", "uplink"), strict=False):
            busy = np.array(self.summary["busy"][stage]) / seconds
            top = int(busy.argmax())
            note = f"mean of {len(busy)} devices; most on {self.summary['device'][top]}: {min(1, busy[top]):.0%}"
            found.append(Load(resource, min(1.0, float(busy.mean())), note))
        own = (spent.get("rounds", 0.0) + spent.get("update", 0.0)) / seconds
        found.append(Load("server compute", min(1.0, own), "its own ops and the optimizer"))
        checks = spent.get("gather", 0.0) / seconds
        found.append(Load("verification", min(1.0, checks), "checking tiles and putting them together"))
        for link, moved in (("egress", "down_bytes"), ("ingress", "up_bytes")):
            if server.get(link):
                note = f"{quantity(record.get(moved, 0) / seconds, 'B/s')} of {quantity(server[link], 'B/s')}"
                found.append(Load(f"server {link}", record.get(moved, 0) / seconds / server[link], note))
        if self.scheduler:
            found.append(Load("scheduler", min(1.0, self.scheduler), "of its one thread"))
        return sorted(found, key=lambda load: -load.share)

    def binding(self) -> tuple[str, str]:
        """The resource that binds now, and why; nothing before the first step is over."""
        loads = self.loads()
        if not loads:
            return "", "known when the first step is over"
        planned = f"; planned: {self.plan['binding']}" if self.plan.get("binding") else ""
        if loads[0].share < BUSY:
            return "latency", f"no resource is busy for more than {loads[0].share:.0%} of a step{planned}"
        return loads[0].resource, f"busy for {loads[0].share:.0%} of a step{planned}"

    def headline(self) -> list[tuple[str, str, str]]:
        """Label, value and note of the most important numbers."""
        last, states = self.last, [self.state(name) for name in self.names]
        here = sum(state not in GONE for state in states)
        words = {"left": "gone", **{kind: kind for kind in ("quarantined", "late", "paused")}}
        trouble = ", ".join(f"{states.count(kind)} {word}" for kind, word in words.items() if kind in states)
        seconds = f"{duration(self.plan['seconds'])} planned" if self.plan.get("seconds") else ""
        moved = f"{quantity(last.get('up_bytes', 0), 'B')} up a step" if last else ""
        first = f"from {self.records[0]['loss']:.4f}" if self.records else ""
        return [
            ("step", f"{last['step']:,}" if last else "0", f"run {self.run}" if self.run else ""),
            ("loss", f"{last['loss']:.4f}" if last else "none yet", first),
            ("a step", duration(last["seconds"]) if last else "none yet", seconds),
            ("devices", f"{here:,}", trouble or "all well"),
            ("moved", f"{quantity(last.get('down_bytes', 0), 'B')} down" if last else "nothing yet", moved),
        ]


DEVICE_COLUMNS = (
    *("device", "state", "down", "up", "flops", "latency", "planned", "share", "tiles", "taken_over"),
    *("down_bytes", "up_bytes", "late", "rejected", "why"),
)
_FIGURES = ("down", "up", "flops", "latency")
_NOTHING = (0.0,) * 5  # sums of a device that has done nothing


def _by(table: Mapping[str, Any], key: str, column: str) -> dict[str, Any]:
    """A column of a table by the values of another."""
    return dict(zip(table.get(key, ()), table.get(column, ()), strict=True))


def _unplanned(state: str, *, planned: bool) -> str:
    if not planned:
        return "nothing is planned yet"
    return "its tiles went to others" if state in GONE else "joined after the plan was made"


def _natural(name: str) -> tuple[str, int, str]:
    """device-2 before device-10."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return stem, int(number) if number else -1, name

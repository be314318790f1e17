"""The bound of a step: gemms wait for each other, and what they move must cross the links once they may begin.

Devices may have asked for anything ahead of time (`runtime/early`), and may have been told long before which tiles are
theirs. But no operand comes down before the server has made it, and no product before both of its factors are there.
So, E(x) being a time before which no plan can have made the value x on the server:

    a gemm      E >= t + its bound when only those operands must come down that are made at t or later, for every t;
                latency then passes once, with the last operand and its first result, or twice from the step's begin
    a resource  whoever carries operands: T >= t + all that is made at t or later, over its speed, for every t;
                results and products follow their operands: they count from when the last of these is made

Both hold for any placement, order and overlap of what `sent` says that a device gets and sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.bound import kept_bound
from cleave_dask.planning.cost import ROUND_TRIPS, SCHEDULER_SECONDS, Rates, Shape
from cleave_dask.planning.slices import fetched

Sent = Mapping[str, Sequence[bool]]
"""Gemms that are sent out, and which of their operands are on the devices already."""


def longest_chain(graph: StepGraph, fleet: Fleet, seconds: Mapping[str, float]) -> float:
    """Seconds of the longest chain of gemms that wait for each other; those without `seconds` run on the server."""
    ready: dict[str, float] = {}
    longest = 0.0
    for step in graph.steps:
        finish = max((ready.get(name, 0.0) for name in step.reads), default=0.0)
        if isinstance(step, Gemm):
            finish += seconds.get(step.name, step.flops / fleet.server.flops)
        for name in step.writes:
            ready[name] = finish
        longest = max(longest, finish)
    return longest


@dataclass(frozen=True, slots=True)
class StepBound:
    """Seconds below which no plan can finish a step, and those that each gemm must take of them by itself."""

    seconds: float
    by_gemm: Mapping[str, float]  # from when the last of its operands is made


def step_bound(
    graph: StepGraph,
    fleet: Fleet,
    sent: Sent,
    *,
    gemm_bounds: Mapping[str, float],
    scheduler_seconds: float = SCHEDULER_SECONDS,
) -> StepBound:
    """The bound of a step that sends out the gemms `sent`; `gemm_bounds` are those of gemms by themselves."""
    walk = _Walk(fleet, sent, gemm_bounds)
    for step in graph.steps:
        if isinstance(step, Gemm) and step.name in sent:
            walk.send(step)
            continue
        seconds = step.flops / fleet.server.flops if isinstance(step, Gemm) else 0.0
        walk.made(step.writes, walk.start(step.reads) + seconds)
    rates, server = walk.rates, fleet.server
    down, up, flops = (walk.events[what] for what in ("down", "up", "flops"))
    here = sum(gemm.flops for gemm in graph.gemms if gemm.name not in sent)
    found = max(
        walk.longest,
        here / server.flops,
        _after(flops, float(rates.flops.sum())),
        _after(up, float(rates.up.sum())),
        _after(up, server.ingress),
        _after(down, float(rates.down.sum())),
        _after(down, server.egress),
        len(sent) * scheduler_seconds,
    )
    return StepBound(found, walk.by_gemm)


def _after(events: Iterable[tuple[float, float]], speed: float) -> float:
    """Seconds in which so much can be carried, none of it before its time."""
    longest = carried = 0.0
    for time, amount in sorted(events, reverse=True):
        carried += amount
        longest = max(longest, time + carried / speed)
    return longest


@dataclass
class _Walk:
    """Through the steps of a graph in program order: the earliest time of each value, and what is carried when."""

    fleet: Fleet
    sent: Sent
    alone: Mapping[str, float]
    longest: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    by_gemm: dict[str, float] = field(default_factory=dict)
    events: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _known: dict[tuple[Shape, tuple[bool, ...]], float] = field(default_factory=dict)

    @cached_property
    def rates(self) -> Rates:
        """The fleet's figures."""
        return Rates.of(self.fleet)

    @cached_property
    def told(self) -> Rates:
        """The same of devices that were told before: their links' latency passes once."""
        rates = self.rates
        return Rates(rates.down, rates.up, rates.flops, rates.memory, rates.latency / ROUND_TRIPS)

    def start(self, names: Iterable[str]) -> float:
        """When the last of some values is there."""
        return max((self.ready.get(name, 0.0) for name in names), default=0.0)

    def made(self, names: Iterable[str], time: float) -> None:
        """Some values are there."""
        self.ready.update(dict.fromkeys(names, time))
        self.longest = max(self.longest, time)

    def send(self, gemm: Gemm) -> None:
        """A gemm's tiles are made on devices."""
        shape, kept = Shape.of(gemm), tuple(self.sent[gemm.name])
        parts = [[part.name for part in operand.parts] for operand in gemm.inputs]
        begin = self.start(name for names in parts for name in names)
        since = [min(self.ready.get(name, 0.0) for name in names) for names in parts]  # nothing of it comes before
        finish, last = begin, 0.0
        for time in {*since, begin}:
            there = tuple(made < time for made in since)
            seconds = self._seconds(gemm, shape, kept, there, told=time > 0.0)
            finish = max(finish, time + seconds)
            last = max(last, seconds if time == begin else 0.0)
        self.by_gemm[gemm.name] = last
        self.made(gemm.writes, max(finish, self.start(gemm.reads)))
        self.events["up"].append((begin, shape.least_up))
        self.events["flops"].append((begin, shape.flops))
        self.events["down"] += _downs(shape, kept, since)

    def _seconds(
        self, gemm: Gemm, shape: Shape, kept: tuple[bool, ...], there: tuple[bool, ...], *, told: bool
    ) -> float:
        """The bound of a gemm of whose operands those that are `there` may have come down before."""
        if not any(there):
            saved = float((self.rates.latency - self.told.latency).max()) if told else 0.0
            return max(self.alone[gemm.name] - saved, 0.0)
        if gemm.kind != "gemm":
            return _made_there(shape, self.told)
        kept = tuple(one or other for one, other in zip(kept or there, there, strict=True))
        if (found := self._known.get((shape, kept))) is None:
            found = self._known[shape, kept] = kept_bound(shape, kept, self.told, self.fleet.server)[0]
        return found


def _downs(shape: Shape, kept: Sequence[bool], since: Sequence[float]) -> list[tuple[float, float]]:
    """When each operand is made at the earliest, and how many bytes of it must come down."""
    if shape.kind != "gemm":
        return [(min(since), shape.least_down)]
    return [(since[side], (shape.m, shape.n)[side] * shape.k * shape.down_bytes) for side in fetched(kept)]


def _made_there(shape: Shape, rates: Rates) -> float:
    """Seconds that a gemm takes at least whose operands have all come down before."""
    busy = shape.flops / float(rates.flops.sum()), shape.least_up / float(rates.up.sum())
    return float(rates.latency.min()) + max(busy)

"""The bound of a step: gemms wait for each other, and what they move must cross the links once they may begin.

The plan space is that of `bound`, gemm by gemm: nothing of a gemm comes down before the last of its operands is made,
unless it stays on the devices from gemms before. Then, E(x) being a time before which no plan has the value x:

    a gemm      its results: E >= the E of the last of its operands + its own bound; the links' latency passes twice at
                the step's begin, and once for whoever may have been told what to do meanwhile
    a resource  T >= t + all that gemms which begin at t or later move over it, or compute, over its speed, for every t

Real devices do fetch ahead, weights of their first tiles (`runtime/fetching`), and begin those without waiting for
their turn at the scheduler: a step may be shorter than its bound by what both take of its levels. No plan counts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.bound import least_down
from cleave_dask.planning.cost import SCHEDULER_SECONDS, Rates, Shape

Alone = Callable[[Shape, Sequence[bool], bool], float]
"""The bound of a gemm by itself, some of whose operands stay on devices; and whether they were told of it before."""


@dataclass(frozen=True, slots=True)
class StepBound:
    """Seconds below which no plan can finish a step, and those that each gemm takes of them by itself."""

    seconds: float
    by_gemm: Mapping[str, float]


def step_bound(
    graph: StepGraph,
    fleet: Fleet,
    sent: Mapping[str, Sequence[bool]],
    alone: Alone,
    *,
    scheduler_seconds: float = SCHEDULER_SECONDS,
) -> StepBound:
    """The bound of a step that sends out the gemms `sent`, some of whose operands may stay on the devices."""
    begins, by_gemm = dict[str, float](), dict[str, float]()

    def seconds(gemm: Gemm, begin: float) -> float:
        if gemm.name not in sent:
            return gemm.flops / fleet.server.flops
        begins[gemm.name] = begin
        by_gemm[gemm.name] = alone(Shape.of(gemm), sent[gemm.name], begin > 0.0)
        return by_gemm[gemm.name]

    longest = _longest(graph, seconds)
    rates, server = Rates.of(fleet), fleet.server
    shapes = {gemm.name: Shape.of(gemm) for gemm in graph.gemms if gemm.name in sent}
    down = [(begins[name], least_down(shape, sent[name])) for name, shape in shapes.items()]
    up = [(begins[name], shape.least_up) for name, shape in shapes.items()]
    flops = [(begins[name], shape.flops) for name, shape in shapes.items()]
    found = max(
        longest,
        sum(gemm.flops for gemm in graph.gemms if gemm.name not in sent) / server.flops,
        _after(flops, float(rates.flops.sum())),
        _after(up, min(float(rates.up.sum()), server.ingress)),
        _after(down, min(float(rates.down.sum()), server.egress)),
        len(sent) * scheduler_seconds,
    )
    return StepBound(found, by_gemm)


def longest_chain(graph: StepGraph, fleet: Fleet, seconds: Mapping[str, float]) -> float:
    """Seconds of the longest chain of gemms that wait for each other; those without `seconds` run on the server."""
    return _longest(graph, lambda gemm, _: seconds.get(gemm.name, gemm.flops / fleet.server.flops))


def _longest(graph: StepGraph, seconds: Callable[[Gemm, float], float]) -> float:
    """The longest chain, where a gemm takes so many seconds from when the last of its operands is there."""
    ready: dict[str, float] = {}
    longest = 0.0
    for step in graph.steps:
        finish = max((ready.get(name, 0.0) for name in step.reads), default=0.0)
        if isinstance(step, Gemm):
            finish += seconds(step, finish)
        for name in step.writes:
            ready[name] = finish
        longest = max(longest, finish)
    return longest


def _after(events: Iterable[tuple[float, float]], speed: float) -> float:
    """Seconds in which so much can be carried, none of it before its time."""
    longest = carried = 0.0
    for time, amount in sorted(events, reverse=True):
        carried += amount
        longest = max(longest, time + carried / speed)
    return longest

"""Lower bounds: no plan on a fleet can be faster, whatever its tiles.

The plan space. A gemm is cut into cuboids (a batched op into ranges of cells), any number for a device, each computed
by one device that has received the operands it needs, an operand number once at most for all its tiles. The server
sends and takes everything, devices do not talk to each other, and the scheduler turns to one tile after another for
`scheduler_seconds` each before the tile can start. The links' latency passes before a device's first result is back.

Why it is a bound. `capacity.most` caps what a device can do in a time by the inequality of Loomis and Whitney, for any
set of cuboids; `capacity.alone` caps a single tile. The tile in the scheduler's slot j starts after j slots, so it is
worth at most alone(T - j s), as is any other tile of a device whose first is in slot j, for it may share operands with
the first; and all its tiles are worth at most most(T - j s). The
most that slots can be worth together is an assignment problem; for any prices of slots, the price of all slots plus
each device's best gain at those prices is above it (weak duality). If even that is below the gemm's volume, T is
too short. The server's links are bounded in the same way, by what must cross them at least.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from cleave_dask.fleet.devices import Fleet, Server
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.capacity import alone, most
from cleave_dask.planning.cost import SCHEDULER_SECONDS, Floats, Rates, Shape

_SLOT_GROUPS = 12  # slots of a group are priced alike, as if all were the first of the group
_PRICES = (0.2, 0.5, 0.8)  # quantiles of a tile's worth over the devices, tried as the price of its slot
_PRECISION = 2e-3


def gemm_bound(
    shape: Shape, rates: Rates, server: Server, *, scheduler_seconds: float = SCHEDULER_SECONDS
) -> tuple[float, str]:
    """Seconds below which no plan can finish a gemm of this shape alone, and the resource that says so."""
    free = _least(lambda t: float(_whole(shape, most(shape, rates, t - rates.latency)[0]).sum()) >= shape.volume)
    by_devices = _least(lambda t: _worth(shape, rates, t, scheduler_seconds) >= shape.volume, start=free)
    by_egress = _least(lambda t: _sent(shape, rates, server, t) >= shape.volume)
    by_ingress = shape.m * shape.n * shape.up_bytes / server.ingress
    found = max(by_devices, by_egress, by_ingress)
    if found == by_devices:
        return found, "scheduler" if by_devices > 1.1 * free else _busiest(shape, rates, found)
    return found, "server egress" if found == by_egress else "server ingress"


def step_bound(
    graph: StepGraph,
    fleet: Fleet,
    sent: Collection[str],
    *,
    gemm_bounds: Mapping[Shape, float],
    scheduler_seconds: float = SCHEDULER_SECONDS,
) -> float:
    """Seconds below which no plan that sends out the gemms `sent` can finish the step.

    The longest chain of gemms that wait for each other, each at its own bound; and for the whole step, filler included,
    what must at least cross each link and each multiplier in sum.
    """
    rates = Rates.of(fleet)
    out = [Shape.of(gemm) for gemm in graph.gemms if gemm.name in sent]
    chain = {gemm.name: gemm_bounds[Shape.of(gemm)] for gemm in graph.gemms if gemm.name in sent}
    kept = sum(gemm.flops for gemm in graph.gemms if gemm.name not in sent)
    once = sum(_least_down(shape) for shape in out)
    back = sum(shape.m * shape.n * shape.up_bytes for shape in out)
    return max(
        longest_chain(graph, fleet, chain),
        kept / fleet.server.flops,
        sum(shape.flops for shape in out) / float(rates.flops.sum()),
        back / float(rates.up.sum()),
        back / fleet.server.ingress,
        once / float(rates.down.sum()),
        once / fleet.server.egress,
        len(out) * scheduler_seconds,
    )


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


def _least_down(shape: Shape) -> float:
    """Bytes that must leave the server at least: every operand once."""
    if shape.kind != "gemm":
        return shape.volume * shape.down_bytes
    return (shape.m + shape.n) * shape.k * shape.down_bytes


def _worth(shape: Shape, rates: Rates, seconds: float, slot_seconds: float) -> float:
    """At least the volume that the fleet can do in `seconds` when the scheduler starts one tile per slot."""
    starts = seconds * np.arange(_SLOT_GROUPS) / _SLOT_GROUPS
    slots = seconds / (_SLOT_GROUPS * slot_seconds) + 1.0 if slot_seconds else np.inf
    total = float(_whole(shape, most(shape, rates, seconds - rates.latency)[0]).sum())
    if total < shape.volume or slots * _SLOT_GROUPS > 16 * len(rates):
        return total
    left = (seconds - starts)[:, None] - rates.latency[None, :]
    whole = _whole(shape, most(shape, rates, left)[0])
    tile = np.minimum(_whole(shape, alone(shape, rates, left)[0]), whole)
    sample = tile[:, :: max(1, len(rates) // 256)]
    sample = np.sort(sample[:, sample[0] > 0], axis=1)
    flat = np.minimum(whole[0], 4 * tile[0]).sum() / (4.0 * len(rates))  # about what a later tile is worth
    for quantile in _PRICES if sample.size else ():
        price = sample[:, int(quantile * sample.shape[1])]
        for floor in (0.0, 0.3 * flat, flat):
            raised = np.maximum(price, floor)
            total = min(total, slots * float(raised.sum()) + float(_gain(whole, tile, raised).sum()))
            if total < shape.volume:
                return total
    return total


def _gain(whole: Floats, tile: Floats, price: Floats) -> Floats:
    """What each device gains at most from slots at these prices; a tile after its first pays the least of them."""
    cheapest = float(price.min())
    value = np.maximum(tile, whole - 4 * cheapest)  # one tile, or more than four
    for more in (1, 2, 3):
        np.maximum(value, np.minimum(whole, (1 + more) * tile) - more * cheapest, out=value)
    return np.asarray(np.maximum((value - price[:, None]).max(axis=0), 0.0), dtype=np.float64)


def _sent(shape: Shape, rates: Rates, server: Server, seconds: float) -> float:
    """At least the volume that devices can do with what the server can send in `seconds`, the thriftiest first."""
    volume, results = most(shape, rates, seconds - rates.latency)
    budget = server.egress * seconds
    if shape.kind != "gemm":
        return min(float(volume.sum()), budget / shape.down_bytes)
    side = float(min(shape.m, shape.n))
    reach = np.where(results <= side**2, np.sqrt(results) / 2.0, results * side / (side**2 + results))
    order = np.argsort(-reach)
    need = volume[order] * shape.down_bytes / np.maximum(reach[order], 1e-12)
    spent = np.cumsum(need)
    part = np.clip((budget - (spent - need)) / np.maximum(need, 1e-12), 0.0, 1.0)
    return float((volume[order] * part).sum())


def _busiest(shape: Shape, rates: Rates, seconds: float) -> str:
    """The resource of the devices that limits most of what they can do in `seconds`."""
    now = most(shape, rates, seconds - rates.latency)[0].sum()
    doubled = {
        "downlink": Rates(2 * rates.down, rates.up, rates.flops, rates.memory, rates.latency),
        "uplink": Rates(rates.down, 2 * rates.up, rates.flops, rates.memory, rates.latency),
        "compute": Rates(rates.down, rates.up, 2 * rates.flops, rates.memory, rates.latency),
        "latency": Rates(rates.down, rates.up, rates.flops, rates.memory, rates.latency / 2),
    }
    gains = {name: most(shape, more, seconds - more.latency)[0].sum() - now for name, more in doubled.items()}
    return max(gains, key=lambda name: gains[name])


def _whole(shape: Shape, volume: Floats) -> Floats:
    """Cells of a batched op cannot be divided."""
    return volume if shape.kind == "gemm" else np.floor(volume * (1 + 1e-9))


def _least(enough: Callable[[float], bool], *, start: float = 1e-9) -> float:
    """The least number of seconds that is enough, from below: what is returned is not enough, or only just."""
    low, high = start, 1.5 * start
    while not enough(high):
        low, high = high, 2.0 * high
        if high > 1e18:
            return float("inf")
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low

"""DTFM (Yuan et al. 2022): data x pipeline parallelism on slow links; as published, and with what that leaves out.

n = D S devices: S stages of L/S layers, each stage on D devices, each of which takes B/D sequences.

**As published** (its code): delay_ij and bw_ij of a pair, the same both ways; c_dp gradient bytes of a stage, c_pp
activation bytes of B/D sequences between two layers:

    DP = max over stages, max_i sum_{j != i} 2 (delay_ij + c_dp / (bw_ij D))        sharded parameter server
    PP = open-loop TSP over stages, a pair of stages costs its bottleneck matching of delay_ij + c_pp / bw_ij
    seconds = DP + 2 PP

No compute and no memory. Devices of a fleet meet behind their own links, so bw_ij = min(b_i, b_j) with b_i the slower
direction of i, and delay_ij = l_i + l_j. Then the matching in sorted order is a bottleneck matching, a pair of stages
costs what the slower of them costs, and a path of stages in sorted order is the TSP's optimum: no approximation but
for delays, which are three orders of magnitude below.

**With compute, bubble and memory** (`dtfm`): with M micro-batches of u sequences, a = u x boundary bytes, f_i and b_i
seconds of a micro-batch forward and backward, and stages that run one forward, one backward (Narayanan et al. 2019):

    period_i = max(f_i + b_i, 2 a / up_i, 2 a / down_i)     transfers overlap compute; end stages send and get one a
    PP = (M - 1) max_i period_i + max over lanes, sum over stages of f + b + 2 (a / min(up, next down) + delay)
    DP = max over stages, 2 (D-1)/D c_dp / min_i min(up_i, down_i) + 2 delay

    memory_i = (2 W + optimizer / D) L_s / L + activations of min(M, S) micro-batches <= what i has

Granted: optimizer state shared among replicas (the sharded parameter server allows it), embeddings and head spread
evenly over stages, recomputation where it is better, 1F1B instead of GPipe. D, S, u and the devices are searched in
full with devices in sorted order; the best few are then refined by evolution. A layer is the least that a stage holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from math import ceil

import numpy as np

from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import quantity
from cleave_dask.planning.cost import Ints, Rates
from cleave_dask.simulation.baselines.evolution import Dealt, evolve
from cleave_dask.simulation.baselines.faults import under_churn
from cleave_dask.simulation.baselines.values import Result, infeasible
from cleave_dask.simulation.baselines.workload import Workload

_REFINED = 3
"""Configurations that the evolutionary search refines: the best ones in sorted order."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a step is split."""

    replicas: int
    stages: int
    micro: int = 1  # sequences of a micro-batch
    recompute: bool = False

    def layers(self, work: Workload) -> int:
        """Layers of the fullest stage."""
        return ceil(work.layers / self.stages)

    def micro_batches(self, work: Workload) -> int:
        """Micro-batches of each replica."""
        return ceil(ceil(work.sequences / self.replicas) / self.micro)

    def memory(self, work: Workload) -> float:
        """Bytes on a device of the first stage, which holds the most."""
        layers = self.layers(work)
        state = (2 * work.weight_bytes + work.optimizer_bytes / self.replicas) * layers / work.layers
        in_flight = min(self.stages, self.micro_batches(work))
        return state + work.activation_bytes(layers, self.micro, in_flight, recompute=self.recompute)

    def moved(self, work: Workload) -> float:
        """Bytes that a device of a middle stage sends and gets: activations and gradients both ways, one exchange."""
        onward = 4 * work.boundary_bytes * work.sequences / self.replicas if self.stages > 1 else 0.0
        gradients = work.weight_bytes * self.layers(work) / work.layers
        return onward + 4 * (self.replicas - 1) / self.replicas * gradients


def published_cost(rates: Rates, dealt: Dealt, c_dp: float, c_pp: float) -> float:
    """Seconds by DTFM's own formula of devices dealt to (stage, replica); bytes c_dp of a stage, c_pp of a replica."""
    replicas = dealt.shape[1]
    link = np.minimum(rates.up, rates.down)[dealt]
    delay = rates.latency[dealt] / 4  # a round trip is two of these and two of the other end's; see `Rates`
    order = np.argsort(link, axis=1)
    link, delay = np.take_along_axis(link, order, 1), np.take_along_axis(delay, order, 1)
    data = 0.0
    if replicas > 1:
        slower = np.cumsum(1 / link, axis=1) - 1 / link  # peers that are slower bound the pair
        faster = np.arange(replicas - 1, -1, -1) / link
        delays = delay.sum(axis=1, keepdims=True) + (replicas - 2) * delay
        data = float((2 * (delays + (slower + faster) * c_dp / replicas)).max())
    path = np.argsort(link[:, 0])
    link, delay = link[path], delay[path]
    hops = delay[:-1] + delay[1:] + c_pp / np.minimum(link[:-1], link[1:])
    return data + 2 * float(hops.max(axis=1, initial=0.0).sum())


def price_published(work: Workload, fleet: Fleet, *, seed: int = 0) -> Result:
    """DTFM by its own cost, which knows neither compute nor memory; the best D and S, and devices by evolution."""
    rates = Rates.of(fleet)
    order = np.argsort(-np.minimum(rates.up, rates.down), kind="stable").astype(np.int64)

    def cost(setting: Setting, dealt: Dealt) -> float:
        gradients = work.weight_bytes * setting.layers(work) / work.layers
        return published_cost(rates, dealt, gradients, work.boundary_bytes * ceil(work.sequences / setting.replicas))

    # One device alone would cost nothing by this formula; it was made for splits over the whole fleet.
    used = min(len(rates), work.sequences * work.layers)
    settings = [each for each in _shapes(work, len(rates)) if each.replicas * each.stages > used / 2 or used == 1]
    tried = [(cost(each, _sorted(order, each)), number) for number, each in enumerate(settings)]
    best = None
    for _, number in nsmallest(_REFINED, tried):
        setting = settings[number]
        dealt, seconds = _refine(rates, _sorted(order, setting), partial(cost, setting), seed)
        if best is None or seconds < best[0]:
            best = seconds, setting, dealt
    assert best is not None  # one device, one stage is always among them
    seconds, setting, dealt = best
    link = "uplink" if rates.up[dealt].min() <= rates.down[dealt].min() else "downlink"
    text = f"{setting.replicas} x {setting.stages} (replicas, stages); no compute, no memory limit, no churn"
    return Result("dtfm-published", seconds, "", link, dealt.size, setting.memory(work), text, setting.moved(work))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where the seconds of a split go."""

    compute: float
    links: float
    total: float


def extended_cost(work: Workload, rates: Rates, setting: Setting, dealt: Dealt) -> _Parts:
    """Seconds with compute and bubble (above) of devices dealt to (stage, replica)."""
    stages, replicas = dealt.shape
    link = np.minimum(rates.up, rates.down)[dealt]
    dealt = np.take_along_axis(dealt, np.argsort(link, axis=1), 1)[np.argsort(link.min(axis=1))]
    up, down, delay = rates.up[dealt], rates.down[dealt], rates.latency[dealt] / 4
    share = setting.layers(work) / work.layers * setting.micro / work.sequences
    compute = work.flops(recompute=setting.recompute) * share / rates.flops[dealt]
    message = setting.micro * work.boundary_bytes
    traffic = np.zeros_like(compute)
    hops = np.zeros(replicas)
    if stages > 1:
        times = np.full((stages, 1), 2.0)
        times[[0, -1]] = 1.0
        traffic = times * message / np.minimum(up, down)
        onward = message / np.minimum(up[:-1], down[1:]) + message / np.minimum(up[1:], down[:-1])
        hops = (onward + 2 * (delay[:-1] + delay[1:])).sum(axis=0)
    again = setting.micro_batches(work) - 1
    period = float(np.maximum(compute, traffic).max())
    fill = float((compute.sum(axis=0) + hops).max())
    data = 0.0
    if replicas > 1:
        gradients = work.weight_bytes * setting.layers(work) / work.layers
        slowest = np.minimum(up, down).min(axis=1)
        data = float((2 * (replicas - 1) / replicas * gradients / slowest + 4 * delay.max(axis=1)).max())
    busy = (again + 1) * float(compute.max())
    return _Parts(busy, (again + 1) * float(traffic.max()) + data, again * period + fill + data)


def price_dtfm(work: Workload, fleet: Fleet, *, churn: float | None = None, seed: int = 0) -> Result:
    """DTFM with compute, bubble and memory: the best D, S, micro-batch and devices."""
    rates = Rates.of(fleet)
    tried = []
    for number, (setting, order) in enumerate(_fitting(work, rates)):
        tried.append((extended_cost(work, rates, setting, _sorted(order, setting)).total, number, setting, order))
    if not tried:
        return infeasible("dtfm", _why_not(work, rates))
    best = None
    for _, _, setting, order in nsmallest(_REFINED, tried):
        price = partial(_total, work, rates, setting)
        dealt, seconds = _refine(rates, _sorted(order, setting), price, seed)
        if best is None or seconds < best[0]:
            best = seconds, setting, dealt
    assert best is not None
    seconds, setting, dealt = best
    parts = extended_cost(work, rates, setting, dealt)
    side = "uplink" if rates.up[dealt].min() <= rates.down[dealt].min() else "downlink"
    text = f"{setting.replicas} x {setting.stages} (replicas, stages), micro-batch {setting.micro}"
    text += ", recomputed" if setting.recompute else ""
    binding = "compute" if parts.compute >= parts.links else side
    result = Result("dtfm", seconds, "", binding, dealt.size, setting.memory(work), text, setting.moved(work))
    state = work.state_bytes * setting.layers(work) / work.layers / float(np.median(rates.down))
    weights = work.weight_bytes * setting.layers(work) / work.layers / float(np.median(rates.down))
    repair = weights + parts.compute / 2 if setting.replicas > 1 else np.inf
    return under_churn(result, churn, reload=state, repair=float(repair))


def _total(work: Workload, rates: Rates, setting: Setting, dealt: Dealt) -> float:
    return extended_cost(work, rates, setting, dealt).total


def _refine(rates: Rates, dealt: Dealt, price: Callable[[Dealt], float], seed: int) -> tuple[Dealt, float]:
    """A better way to deal these devices, unless they are all alike: then there is none."""
    some = rates.take(dealt.ravel())
    if all(float(np.ptp(column)) == 0 for column in (some.down, some.up, some.flops, some.latency)):
        return dealt, price(dealt)
    return evolve(dealt, price, seed=seed)


def _shapes(work: Workload, devices: int) -> Iterator[Setting]:
    """All D and S that differ in sequences per replica or layers per stage, with devices for them."""
    for stages in sorted({ceil(work.layers / layers) for layers in range(1, work.layers + 1)}):
        most = min(work.sequences, devices // stages)
        for replicas in sorted({ceil(work.sequences / each) for each in range(1, work.sequences + 1)} | {most}):
            if 1 <= replicas <= most:
                yield Setting(replicas, stages)


def _fitting(work: Workload, rates: Rates) -> Iterator[tuple[Setting, Ints]]:
    """Settings for which enough devices have memory, with those devices, the fastest first."""
    slowest = 1 / np.minimum(rates.up, rates.down)
    for shape in _shapes(work, len(rates)):
        micro = 1
        while micro <= ceil(work.sequences / shape.replicas):
            for recompute in (False, True):
                setting = Setting(shape.replicas, shape.stages, micro, recompute)
                fit = np.flatnonzero(rates.memory >= setting.memory(work)).astype(np.int64)
                if len(fit) < setting.replicas * setting.stages:
                    continue
                share = setting.layers(work) / work.layers / setting.replicas
                compute = work.flops(recompute=recompute) * share / rates.flops
                traffic = 2 * work.boundary_bytes * work.sequences / setting.replicas * slowest * (shape.stages > 1)
                gradients = 2 * work.weight_bytes * setting.layers(work) / work.layers * slowest * (shape.replicas > 1)
                score = np.maximum(compute, traffic) + gradients
                yield setting, fit[np.argsort(score[fit], kind="stable")]
            micro *= 2


def _sorted(order: Ints, setting: Setting) -> Dealt:
    """The first devices of an order, dealt to stages one after another."""
    return np.asarray(order[: setting.replicas * setting.stages], dtype=np.int64).reshape(setting.stages, -1)


def _why_not(work: Workload, rates: Rates) -> str:
    """What the leanest stage lacks."""
    replicas = max(1, min(work.sequences, len(rates) // work.layers))
    leanest = Setting(replicas, work.layers, 1, recompute=True)
    need = min(leanest.memory(work), Setting(replicas, work.layers).memory(work))
    holding = int((rates.memory >= need).sum())
    return (
        f"a stage of one layer with one sequence needs {quantity(need, 'B')}: {holding:,} of {len(rates):,} devices "
        f"have that, the largest {quantity(rates.memory.max(), 'B')}, and {work.layers} stages need one each"
    )

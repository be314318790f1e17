"""Data parallelism on the fleet: DDP, where each device has all weights, and FSDP (ZeRO-3), where each has a shard.

Devices reach each other directly, at the slower of one's uplink and the other's downlink: behind most home routers
they could not, so this is granted. Sequences are dealt by speed. With n devices of links down_i, up_i, G gradient
bytes, W weight bytes, per batch in seconds:

    DDP   forward + max(backward, exchange)              Li et al. 2020: buckets go out while the backward runs
          exchange, the better of
            ring    2 (n-1)/n G / min_i min(up_i, down_i) + 2 log2(n) latency       slowest link bounds
            server  max(G / min up + G / min down, n G / ingress, n G / egress) + 2 latency   each sends and gets all
    FSDP  max(compute, traffic) + the first layer's gather
          traffic with p passes over the batch:
            (2 p + 1) (n-1)/n W / min_i min(up_i, down_i) + (2 p + 1) L log2(n) latency
          all-gather forward and backward in each pass, one reduce-scatter    Rajbhandari et al. 2020, section 7

Memory: DDP weights, gradients and optimizer state whole on each device; FSDP 1/n of them and two layers gathered; both
and the activations of a pass. The best subset counts: the devices with the fastest links or multipliers, for every
size, among those with enough memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, log2

import numpy as np

from cleave_dask.fleet.devices import Fleet, Server
from cleave_dask.formatting import quantity
from cleave_dask.planning.cost import Floats, Ints, Rates
from cleave_dask.simulation.baselines.faults import under_churn
from cleave_dask.simulation.baselines.values import Result, fastest, infeasible
from cleave_dask.simulation.baselines.workload import Workload

_MEMORY_STEPS = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Shares of a fleet that are left out for their small memory, one after another."""

_Price = Callable[[Workload, Rates, Server, int, bool], Result | None]


def price_ddp(work: Workload, fleet: Fleet, *, churn: float | None = None) -> Result:
    """Data parallelism with a whole model on each device."""
    least = work.state_bytes + work.activation_bytes(work.layers, 1, recompute=True)
    rates = Rates.of(fleet)
    why = f"weights, gradients and optimizer state with one sequence need {quantity(least, 'B')} on each device, "
    why += f"and the largest has {quantity(rates.memory.max(), 'B')}"
    best = _best(work, fleet, rates, _ddp, infeasible("ddp", why))
    return under_churn(best, churn, reload=0.0)  # those that are left have everything


def price_fsdp(work: Workload, fleet: Fleet, *, churn: float | None = None) -> Result:
    """Data parallelism with everything sharded."""
    rates = Rates.of(fleet)
    most = min(len(rates), work.sequences)
    least = _fsdp_memory(work, most, 1, recompute=True)
    why = f"a shard of {most} and two whole layers with one sequence need {quantity(least, 'B')} on each device: "
    why += f"{int((rates.memory >= least).sum()):,} of {len(rates):,} devices have that"
    best = _best(work, fleet, rates, _fsdp, infeasible("fsdp", why))
    shard = work.state_bytes / max(1, best.devices_used)
    return under_churn(best, churn, reload=shard / float(np.median(rates.down)))


def _best(work: Workload, fleet: Fleet, rates: Rates, price: _Price, otherwise: Result) -> Result:
    """The fastest over subsets, numbers of passes and recomputation."""
    found = (
        result
        for subset in _subsets(work, rates)
        for passes in _powers(ceil(work.sequences / len(subset)))
        for recompute in (False, True)
        if (result := price(work, rates.take(subset), fleet.server, passes, recompute)) is not None
    )
    return fastest(found, otherwise)


def _subsets(work: Workload, rates: Rates) -> Iterator[Ints]:
    """Positions of the best devices, by link and by speed, of those with enough memory, on a fine scale of both."""
    link = np.minimum(rates.up, rates.down)
    for least in np.unique(np.quantile(rates.memory, _MEMORY_STEPS, method="lower")):
        holding = np.flatnonzero(rates.memory >= least).astype(np.int64)
        most = min(len(holding), work.sequences)
        sizes = sorted({min(most, round(1.15**power)) for power in range(ceil(log2(most) / log2(1.15)) + 1)} | {most})
        for score in (link, rates.flops):
            order = holding[np.lexsort((-link[holding], -score[holding]))]
            yield from (order[:size] for size in sizes)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def dealt(work: Workload, flops: Floats) -> Floats:
    """Sequences of each device, by speed: whole ones, and none for a device that would hold up the others."""
    shares = np.floor(work.sequences * (flops / flops.sum()) * (1 - 1e-12))
    while shares.sum() < work.sequences:
        shares[int(np.argmin((shares + 1) / flops))] += 1
    return np.asarray(shares, dtype=np.float64)


def _ddp(work: Workload, rates: Rates, server: Server, passes: int, recompute: bool) -> Result | None:
    count, shares = len(rates), dealt(work, rates.flops)
    held = work.activation_bytes(work.layers, 1, recompute=recompute) * np.ceil(shares / passes)
    if bool((work.state_bytes + held > rates.memory).any()):
        return None
    per_sequence = work.flops(recompute=recompute) / work.sequences
    compute = float((shares * per_sequence / rates.flops).max())
    backward = compute * (1 - work.forward_flops / work.flops(recompute=recompute))
    exchange, way = _exchange(work.weight_bytes, rates, server) if count > 1 else (0.0, "")
    seconds = compute - backward + max(backward, exchange)
    return Result(
        "ddp",
        seconds,
        binding="compute" if compute >= exchange else way,
        devices_used=count,
        memory=work.state_bytes + float(held.max()),
        configuration=f"{count} devices, {passes} passes" + (", recomputed" if recompute else ""),
        moved=4 * (count - 1) / count * work.weight_bytes,
    )


def _exchange(amount: float, rates: Rates, server: Server) -> tuple[float, str]:
    """Seconds to sum `amount` bytes of gradients over devices, and what binds: the better of ring and server."""
    count, latency = len(rates), float(rates.latency.max()) / 2  # one way up and one way down
    link = np.minimum(rates.up, rates.down).min()
    ring = 2 * (count - 1) / count * amount / link + 2 * log2(count) * latency
    links = amount / rates.up.min() + amount / rates.down.min()
    shared = count * amount / min(server.ingress, server.egress)
    star = max(links, shared) + latency
    if star < ring:
        return float(star), "server" if shared > links else "uplink"
    return float(ring), "uplink" if rates.up.min() <= rates.down.min() else "downlink"


def _fsdp_memory(work: Workload, devices: int, sequences: float, *, recompute: bool) -> float:
    """Bytes on each device: a shard of everything, two layers gathered, activations."""
    gathered = 2 * work.weight_bytes / work.layers
    held = work.activation_bytes(work.layers, sequences, recompute=recompute)
    return work.state_bytes / devices + gathered + held


def _fsdp(work: Workload, rates: Rates, server: Server, passes: int, recompute: bool) -> Result | None:
    count, shares = len(rates), dealt(work, rates.flops)
    memory = np.array([_fsdp_memory(work, count, each, recompute=recompute) for each in np.ceil(shares / passes)])
    if bool((memory > rates.memory).any()):
        return None
    compute = float((shares * work.flops(recompute=recompute) / work.sequences / rates.flops).max())
    link = float(np.minimum(rates.up, rates.down).min())
    rounds = 2 * passes + 1 if count > 1 else 0
    each = (count - 1) / count * work.weight_bytes / link
    hops = log2(count) * float(rates.latency.max()) / 2
    traffic = rounds * (each + work.layers * hops)
    first = (each / work.layers + hops) if rounds else 0.0
    binding = "compute" if compute >= traffic else "uplink" if rates.up.min() <= rates.down.min() else "downlink"
    if binding != "compute" and work.layers * hops > each:
        binding = "latency"
    setting = f"{count} devices, {passes} passes" + (", recomputed" if recompute else "")
    moved = 2 * rounds * (count - 1) / count * work.weight_bytes
    return Result("fsdp", max(compute, traffic) + first, "", binding, count, float(memory.max()), setting, moved)

"""Gradients of weights as filler: gemms off the critical path, spread over groups of devices.

Nothing waits for a dW gemm but the optimizer, so many of them can run side by side, each on a group of devices of its
own. With G groups a device's tile has G times the volume, for G^(2/3) times the bytes, and the scheduler has G times
fewer tiles to hand out. Memory is what limits G: a tile must fit. All groups are made alike, a gemm goes to the group
that has the least to do, and the gemms that become ready last, when little is left to run beside them, get everybody.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave_dask.fleet.devices import Server
from cleave_dask.graph.ir import LOGITS, Gemm
from cleave_dask.planning.capacity import most
from cleave_dask.planning.cost import Ints, Rates, Shape
from cleave_dask.planning.layout import Layout
from cleave_dask.planning.tiling import tile_gemm, volume_share

_LEAST_GROUP = 2  # devices: what one device has to do alone is longest, and nobody could share it
_MOST_GROUPS = 4  # more bring little: volume per byte grows with their cube root


def place_filler(
    gemms: Sequence[Gemm],
    rates: Rates,
    server: Server,
    *,
    spare: Rates,
    split_k: bool,
    scheduler_seconds: float,
    level_seconds: float,
) -> dict[str, Layout]:
    """A layout for each filler gemm, by name.

    `spare` is what the critical path leaves of the devices; its levels take `level_seconds` each.
    """
    groups = _groups(gemms, spare, server, scheduler_seconds) if split_k and gemms else [np.arange(len(rates))]
    everybody, last = np.arange(len(rates)), max((gemm.level for gemm in gemms), default=0)
    known: dict[tuple[Shape, bytes], Layout] = {}
    moved: dict[tuple[Shape, int], Layout] = {}

    def laid_out(gemm: Gemm, members: Ints) -> Layout:
        if (Shape.of(gemm), id(members)) in moved:
            return moved[Shape.of(gemm), id(members)]
        shape, some, share = Shape.of(gemm), rates.take(members), round(len(rates) / len(members))
        left = spare.take(members) if share > 1 or len(groups) == 1 else None
        key = shape, b"".join(column.tobytes() for column in (some.down, some.up, some.flops, some.memory))
        if key not in known:
            slot = scheduler_seconds * share
            known[key] = tile_gemm(shape, some, server, split_k=split_k, spare=left, scheduler_seconds=slot)
        moved[shape, id(members)] = known[key].moved(members, share)
        return moved[shape, id(members)]

    placed: dict[str, Layout] = {}
    load = np.zeros(len(groups))
    for gemm in sorted(gemms, key=lambda gemm: -gemm.flops):
        number = int(load.argmin())
        layout = laid_out(gemm, groups[number])
        if len(groups) > 1 and layout.seconds > (last - gemm.level) * level_seconds:
            layout = laid_out(gemm, everybody)
        else:
            load[number] += float(layout.stages.max())
        placed[gemm.name] = layout
    return placed


def _groups(gemms: Sequence[Gemm], rates: Rates, server: Server, slot: float) -> list[Ints]:
    """Devices in as many like groups as make the filler shortest."""
    products = [Shape.of(gemm) for gemm in gemms if gemm.kind not in LOGITS]
    if not products:
        return [np.arange(len(rates))]
    shape = max(products, key=lambda shape: shape.flops)
    order = np.argsort(-most(shape, rates, np.full(len(rates), 10.0))[0], kind="stable")
    best, shortest = 1, float("inf")
    count = 1
    while count <= min(_MOST_GROUPS, len(gemms), len(rates) // _LEAST_GROUP) or count == 1:
        seconds = volume_share(shape, rates.take(order[::count]), server, slot * count) / count
        if seconds < 0.97 * shortest:
            best, shortest = count, seconds
        count *= 2
    return [np.sort(order[start::best]) for start in range(best)]

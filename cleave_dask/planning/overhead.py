"""Overhead: what a gemm takes in a step beyond what it takes by itself.

A layout counts operands, results, operations, two round trips and the scheduler's turns. In a step a level also waits

    a third round trip       the server's answer to the last result, and the report that its parcel is done
    LEVEL_SECONDS            processes written in Python, between the last tile of a level and the first of the next

but devices have begun what follows a level before it is ordered (`runtime/early`): then links wait for one round trip
only, that of the last result and of the next first slice, as all else has been told, asked and answered meanwhile.

Each link carries, beside operands and results,

    MESSAGE_BYTES a tile     in each direction: questions, answers, what is said of a result
    CONFIRMED a byte         in one direction for each byte of the other: on uneven links a tenth of the uplink

Where filler runs beside, a level shares each link with what is under way of it, TILES_UNDER_WAY tiles, one of them half
through, half and half while both last; and it waits for half a tile in the multiplier (`in_the_way`). A link that binds
loses about as much: as a level drains, the first tile of filler has yet to come. That it is as much is what the
simulator shows, no proof.

A server that says how many processes it has also spends TILE_SECONDS on each tile and BYTE_SECONDS on each byte that it
hands out or takes in, in each of them at once; where all devices share its cores, so does what a tile takes server,
scheduler and device together on these. Both are multiplied by how many times as long Python takes there (`pace`). That
runs beside the links, but for half of the last parcels of a level, which all devices send at about the same time (half:
as measured on eight devices of 100/100 Mbit/s). None of this is physically unavoidable, so none of it is in the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cleave_dask.fleet.devices import Server
from cleave_dask.planning.cost import (
    CONFIRMED,
    MESSAGE_BYTES,
    ROUND_TRIPS,
    TILES_UNDER_WAY,
    Floats,
    Rates,
    work_seconds,
)
from cleave_dask.planning.layout import Layout


@dataclass(frozen=True, eq=False)
class InStep:
    """A gemm as a step has it."""

    layout: Layout
    stages: Floats  # (3, devices): seconds down, in the multiplier, up, with all that the links carry
    seconds: float  # until the next may begin, if nothing runs beside it
    binding: str  # what decides them
    middle: dict[str, float]  # seconds of the scheduler, the server's links, its processes and shared cores

    @classmethod
    def of(cls, layout: Layout, rates: Rates, server: Server, *, begun: bool = False) -> InStep:
        """What a layout takes in a step; `begun`: devices have asked for its operands before they are ordered to."""
        here = rates.take(layout.devices)
        down, up, words = layout.stages[0] * here.down, layout.stages[2] * here.up, MESSAGE_BYTES * layout.tiles
        more_down, more_up = words + CONFIRMED * up, words + CONFIRMED * down
        stages = layout.stages + np.stack([more_down / here.down, np.zeros(len(here)), more_up / here.up])
        trip = layout.latency / ROUND_TRIPS
        later = stages.max(axis=0) - layout.stages.max(axis=0) + (-trip if begun else trip)
        middle = {
            "scheduler": layout.scheduler_seconds,
            "server egress": layout.egress_seconds + float(more_down.sum()) / server.egress,
            "server ingress": layout.ingress_seconds + float(more_up.sum()) / server.ingress,
        }
        work = work_seconds(server, len(layout.owner), layout.down_bytes + layout.up_bytes)
        middle |= work
        by_devices, slowest = float((layout.finish + later).max()), max(middle, key=lambda name: middle[name])
        last = min(1.0, layout.together * len(here) / len(layout.owner))  # parcels of all devices, which end together
        seconds = max(by_devices + 0.5 * last * max(work.values(), default=0.0), middle[slowest])
        return cls(layout, stages, seconds, slowest if middle[slowest] > by_devices else layout.binding, middle)


def in_the_way(filler: Sequence[InStep], level: InStep) -> float:
    """Seconds that a level waits for filler that is under way when it begins, on the device where that takes longest.

    Any of the filler may be under way: the mean of all.
    """
    if not filler:
        return 0.0
    links = TILES_UNDER_WAY - 0.5
    times = Counter(map(id, filler))
    own = np.full((3, 1 + max(int(part.layout.devices.max()) for part in (*filler, level))), np.inf)
    own[:, level.layout.devices] = level.stages
    waits = 0.0
    for part in {id(part): part for part in filler}.values():
        here = part.layout.devices
        tiles = np.array([[links], [0.5], [links]]) * part.stages / part.layout.tiles
        tiles[[0, 2]] = np.minimum(tiles[[0, 2]], own[:, here][[0, 2]])
        waits += times[id(part)] * float(tiles.sum(axis=0).max())
    return waits / len(filler)

"""What the middle of a fleet costs by itself: the seconds of scheduler and server that no link or device explains.

A plan counts bytes, operations, latency and the scheduler's turns. A real step also waits for processes that are
written in Python: messages between levels, and the server's own work on each tile and byte. `Costs` has those, and
`MEASURED` is what `python benchmarks/costs.py` found on the machine of docs/results.md. The simulator counts them;
`PLANNED` is what a plan counts of them, `IDEAL` leaves all out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave_dask.planning.cost import SCHEDULER_SECONDS


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the processes in the middle, each a queue of its own."""

    parcel: float = 0.0  # of the scheduler, for each parcel that it sends
    level: float = 0.0  # between the last tile of a level and the first of the next, beside latency and arithmetic
    tile: float = 0.0  # of the server, for each tile: handing out its slices, taking it in, checking, writing a row
    byte: float = 0.0  # of the server, for each byte that it hands out or takes in


IDEAL = Costs()
PLANNED = Costs(parcel=SCHEDULER_SECONDS)
MEASURED = Costs(parcel=SCHEDULER_SECONDS, level=0.02, tile=0.7e-3, byte=1.0e-9)

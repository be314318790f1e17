"""What the middle of a fleet costs by itself: seconds and bytes that neither arithmetic nor operands explain.

A real step waits for processes that are written in Python, for the words around each tile, and for the packets that
confirm others. `Costs` has all of it, and is all that the simulator knows of them. `MEASURED` is what
benchmarks/truth.py found on a machine of 2 cores (docs/results.md, "Predictions and emulated devices"; the figures are
in `planning.cost`), with a server of one process. `PLANNED` is what plans count on every fleet: all but the work of
server processes, which they count where the fleet says how many there are. `IDEAL` leaves everything out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cleave_dask.fleet.devices import Server
from cleave_dask.planning.cost import (
    BYTE_SECONDS,
    CONFIRMED,
    LEVEL_SECONDS,
    MESSAGE_BYTES,
    SCHEDULER_SECONDS,
    SHARED_BYTE_SECONDS,
    SHARED_TILE_SECONDS,
    TILE_SECONDS,
)


@dataclass(frozen=True, slots=True)
class Costs:
    """Scheduler and server, each a queue of its own; and what a link carries beside operands and results."""

    parcel: float = 0.0  # seconds of the scheduler, for each parcel that it sends
    level: float = 0.0  # seconds from the last tile of a level to the first of the next, beside latency and arithmetic
    tile: float = 0.0  # seconds of the server for each tile: handing out its slices, taking it in, checking, a row
    byte: float = 0.0  # seconds of the server for each byte that it hands out or takes in
    message: float = 0.0  # bytes of each direction for each tile: questions, answers, what is said of a result
    confirmation: float = 0.0  # bytes of one direction for each byte of the other: TCP's acknowledgements

    def on(self, server: Server) -> Costs:
        """The same with a server that is slower, or whose cores its devices run on too: then all work is one queue."""
        if not self.tile:
            return self
        tile, byte = self.tile, self.byte
        if server.shared_cores is not None:
            tile = max(tile, SHARED_TILE_SECONDS / server.shared_cores)
            byte = max(byte, SHARED_BYTE_SECONDS / server.shared_cores)
        return replace(self, tile=server.pace * tile, byte=server.pace * byte)


IDEAL = Costs()
PLANNED = Costs(parcel=SCHEDULER_SECONDS, level=LEVEL_SECONDS, message=MESSAGE_BYTES, confirmation=CONFIRMED)
MEASURED = replace(PLANNED, tile=TILE_SECONDS, byte=BYTE_SECONDS)

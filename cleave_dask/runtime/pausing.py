"""Pausing a device: while its owner's pause file exists, it finishes what it has and takes no new tiles.

A file works alike on every system, from every language, and across restarts: `touch` it to pause, remove it to resume.
The device then has the status that Dask calls paused.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from distributed import Status, Worker

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the file."""

ON_THEIR_WAY = 0.5
"""Seconds in which tiles arrive that were sent before the scheduler heard of the pause: they are still done."""


async def watch_pause_file(worker: Worker, file: Path, interval: float = INTERVAL) -> None:
    """Pause and resume a worker as the file comes and goes."""
    fraction = worker.memory_manager.memory_pause_fraction
    paused = False
    while True:
        if worker.status in (Status.running, Status.paused) and file.exists() != paused:
            paused = not paused
            logger.info("%s: %s", "Paused" if paused else "Resumed", file)
            if paused:
                worker.memory_manager.memory_pause_fraction = False  # or Dask would resume it: there is memory enough
                worker.batched_stream.send(
                    {"op": "worker-status-change", "status": "paused", "stimulus_id": "cleave-pause"}
                )
                await asyncio.sleep(ON_THEIR_WAY)
                worker.status = Status.paused
            else:
                worker.memory_manager.memory_pause_fraction = fraction
                worker.status = Status.running
        await asyncio.sleep(interval)

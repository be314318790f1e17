"""Pausing a device: while its owner has a reason, it finishes what it has and takes no new tiles.

A reason is the pause file (a file works alike on every system, from every language, and across restarts: `touch` it to
pause, remove it to resume), a laptop that runs on its battery, or other programs that want the machine. The device then
has the status that Dask calls paused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import psutil
from distributed import Status, Worker

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the reasons."""

ON_THEIR_WAY = 0.5
"""Seconds in which tiles arrive that were sent before the scheduler heard of the pause: they are still done."""

BUSY, QUIET = 0.25, 0.15
"""Share of the machine's cores that other programs use: above the one it is busy, below the other it is idle."""

BUSY_FOR, QUIET_FOR = 3.0, 30.0
"""Seconds that it must be so before the device pauses, and before it resumes."""

Reason = Callable[[], str | None]
"""Why a device takes no new tiles; None if it may."""


@dataclass
class IdleRule:
    """Whether a machine is idle, from one look after another; no clock and no I/O of its own.

    A moment of work does not pause a device, and a moment of rest does not resume it.
    """

    idle: bool = True
    since: float | None = None  # when the looks began to say otherwise

    def look(self, share: float, now: float) -> bool:
        """Other programs use this share of the cores now; whether the machine counts as idle."""
        otherwise = share > BUSY if self.idle else share < QUIET
        if not otherwise:
            self.since = None
        elif self.since is None:
            self.since = now
        elif now - self.since >= (BUSY_FOR if self.idle else QUIET_FOR):
            self.idle, self.since = not self.idle, None
        return self.idle


@dataclass
class CpuMeter:
    """What other programs use of this machine's cores, between one look and the next."""

    process: psutil.Process = field(default_factory=psutil.Process)
    last: tuple[float, float, float] | None = None

    def share(self) -> float:
        """Their share of all cores since the last look; 0 at the first."""
        times, own = psutil.cpu_times(), self.process.cpu_times()
        rest = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user time already
        now = (sum(times) - guests, rest, own.user + own.system)
        before, self.last = self.last or now, now
        return used_by_others(before, now)


def used_by_others(before: tuple[float, float, float], now: tuple[float, float, float]) -> float:
    """Share of the cores, from two readings of (all seconds of all cores, idle ones, those of this process)."""
    total, rest, own = (later - earlier for later, earlier in zip(now, before, strict=True))
    return max(0.0, total - rest - own) / total if total > 0 else 0.0


def on_battery() -> bool:
    """Whether this machine runs on its battery; one without a battery, or that cannot tell, does not."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def reasons(*, file: Path | None, only_on_mains: bool, only_when_idle: bool) -> Reason | None:
    """What an owner gave as reasons to pause, as one; None if there is none."""
    meter, rule = CpuMeter(), IdleRule()

    def why() -> str | None:
        busy = only_when_idle and not rule.look(meter.share(), monotonic())
        if file is not None and file.exists():
            return str(file)
        if only_on_mains and on_battery():
            return "on battery"
        return "other programs use this machine" if busy else None

    return why if file is not None or only_on_mains or only_when_idle else None


async def pause_while(worker: Worker, why: Reason, interval: float = INTERVAL) -> None:
    """Pause and resume a worker as its owner's reasons come and go."""
    fraction = worker.memory_manager.memory_pause_fraction
    paused = False
    while True:
        reason = why()
        if worker.status in (Status.running, Status.paused) and (reason is not None) != paused:
            paused = not paused
            logger.info("Paused: %s", reason) if reason is not None else logger.info("Resumed")
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

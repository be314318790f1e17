"""What the dispatcher remembers of a device and of a parcel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cleave_dask.planning.parcels import Figures, Work

ParcelId = Any
"""Whatever the caller knows a parcel by; it is only hashed and compared."""


@dataclass
class WaitingParcel:
    """A parcel that waits or is in flight."""

    rank: int
    number: int
    planned: str | None
    work: Work
    filler: bool
    queue: str | None = None  # where it waits
    holder: str | None = None  # who has it
    sent: float = 0.0
    late_on: tuple[str, ...] = ()  # devices that it was taken back from


@dataclass
class DeviceState:
    """A device that has joined."""

    figures: Figures
    flying: dict[ParcelId, None] = field(default_factory=dict)  # in the order in which they were sent
    critical: int = 0  # parcels in flight that are no filler
    pace: float | None = None  # observed seconds over expected ones; unknown until its first parcel is done
    backlog: float = 0.0  # seconds of work that waits for it
    heard: float = 0.0
    since: float = 0.0  # its last finished parcel, or handover
    planned: bool = False  # whether anything was ever planned for it
    silent: bool = False  # late, and not heard of since
    paused: bool = False

    @property
    def active(self) -> bool:
        """Whether it takes parcels."""
        return not (self.silent or self.paused)

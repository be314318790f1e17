"""What the dispatcher remembers of a device and of a parcel, and the numbers of its rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cleave_dask.planning.parcels import Figures, Work

FACTOR = 1.7
"""A parcel is late after so many times its expected seconds."""

GRACE = 0.6
"""Seconds added to that: a busy machine is no lost one."""

HEARABLE = 10.0
"""Seconds since its last sign of life after which a device may be gone. Workers of 1,024 give one in 6 s."""

SLUGGISH = 3.0
"""From so many times the common pace on, a device leaves parcels to others that would be through sooner."""

HELPFUL = 0.7
"""A device takes another's parcel if that takes it less than this part of the other's waiting work."""

WASTE = 1.5
"""How many times longer than planned a parcel may take on another device, or a device be than the fleet, as a rule."""

LOOKS = 8
"""Idle devices that are asked in turn whether they can help, until as many in a row cannot."""

FORGIVING = 0.02  # of its distance from the common pace an idle device loses with each sign of life: it gets a new try
MEMORY = 0.5  # weight of the last observation in a device's pace
ANYONE = ""

ParcelId = Any
"""Whatever the caller knows a parcel by; it is only hashed and compared."""


@dataclass(slots=True, eq=False)
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
    cost: float = 0.0  # seconds by the figures of who has it
    late_on: tuple[str, ...] = ()  # devices that it was taken back from


@dataclass(slots=True, eq=False)
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
    excused: int = 0  # times that it was behind together with most of the fleet, since its last finished parcel
    silent: bool = False  # late, and not heard of since
    paused: bool = False

    @property
    def active(self) -> bool:
        """Whether it takes parcels."""
        return not (self.silent or self.paused)


@dataclass(frozen=True, slots=True)
class Handover:
    """A parcel that its device is late with: take it back, so that it becomes ready again."""

    parcel: ParcelId
    device: str

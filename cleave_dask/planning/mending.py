"""Mending: what a lost device had in flight the server makes itself, where it soon has it done.

The operands are on the server, and so is the place of the result: nothing travels, while another device would first
have to fetch slices that it lacks and then to send the result up a slow link. Parcels that had not been sent yet go to
the other devices: those are not lost.
"""

from __future__ import annotations

from cleave_dask.planning.parcels import Work

SOON = 0.25
"""Part of the time that a parcel takes on its device, in which the server must have it done to make it itself."""

BRIEF = 0.25
"""Seconds that it may take at most: what the server does between levels waits meanwhile."""


def mends(work: Work, seconds: float, flops: float) -> bool:
    """Whether a server of so many flop/s makes a lost parcel that its device was expected to take `seconds` for."""
    return work.flops / flops <= min(SOON * seconds, BRIEF)

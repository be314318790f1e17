"""Bytes to measure links with: a block of noise, sent as often as it takes, so that a probe costs no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed.protocol import to_serialize

from cleave_dask.errors import InputError

LARGEST = 16 << 20
"""Bytes of one probe at most, in either direction."""

SMALLEST = 16 << 10
"""Bytes of the first probe of a link."""

_BLOCK = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)  # noise, in case a link compresses


def blocks(nbytes: int) -> list[Any]:
    """So many bytes, ready to send."""
    check(nbytes)
    whole, rest = divmod(nbytes, len(_BLOCK))
    return [to_serialize(_BLOCK)] * whole + ([to_serialize(_BLOCK[:rest])] if rest else [])


def check(nbytes: object) -> None:
    """Raise unless a probe may be that large."""
    if not isinstance(nbytes, int) or not 0 <= nbytes <= LARGEST:
        raise InputError(f"a probe of {nbytes!r} bytes; ask for a whole number from 0 to {LARGEST:,}")


def cleave_probe_down(nbytes: int) -> dict[str, Any]:
    """The server's answer to a device that measures its downlink."""
    return {"data": blocks(nbytes)}


def cleave_probe_up(data: list[Any]) -> dict[str, int]:
    """The server's answer to a device that measures its uplink."""
    received = sum(part.nbytes for part in data if isinstance(part, np.ndarray))
    check(received)
    return {"nbytes": received}

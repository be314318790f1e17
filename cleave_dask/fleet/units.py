"""Amounts as people write them, into base units: bytes, bytes per second, flop per second, seconds."""

from __future__ import annotations

import re
from itertools import product
from math import inf
from numbers import Real
from typing import Literal

from cleave_dask.errors import FleetError
from cleave_dask.resources import shown

Dimension = Literal["bytes", "bytes/s", "flop/s", "seconds"]

EXAMPLES: dict[Dimension, str] = {
    "bytes": '"512 MB", "2 GiB" or a number of bytes',
    "bytes/s": '"400 Mbit/s", "50 MB/s" or a number of bytes per second',
    "flop/s": '"5 TFLOP/s", "200 GFLOP/s" or a number of flop per second',
    "seconds": '"20 ms", "0.5 s" or a number of seconds',
}
"""What is accepted, as an error says it."""

_AMOUNT = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\S*)", re.ASCII)
_LONGEST = 100  # characters; no amount needs more
_LEAST, _MOST = 1.0, 1e24  # of any amount but seconds: what is beyond is a slip, and no plan could reckon with it
_LATEST = 1e9  # seconds: thirty years
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {"B": 1.0, "byte": 1.0, "bytes": 1.0, "b": 0.125, "bit": 0.125, "bits": 0.125}
_FLOP = ("flop/s", "flops", "flops/s", "FLOP/s", "FLOPS", "FLOPs", "FLOPS/s", "FLOPs/s")


def _prefixed(
    units: dict[str, float], prefixes: dict[str, float], suffixes: tuple[str, ...] = ("",)
) -> dict[str, float]:
    """Every spelling of a unit with its factor: 'Mbit/s', 'Mbps', 'MB/s', ..."""
    return {
        prefix + unit + suffix: size * factor
        for (prefix, factor), (unit, size), suffix in product(prefixes.items(), units.items(), suffixes)
    }


# Case matters: 'Mb' is a megabit, 'MB' a megabyte, and 'mb' could be either, so it is refused.
_UNITS: dict[Dimension, dict[str, float]] = {
    "bytes": _prefixed(_BYTES, _DECIMAL | _BINARY),
    "bytes/s": _prefixed(_BYTES, _DECIMAL | _BINARY, ("/s", "ps")),
    "flop/s": _prefixed(dict.fromkeys(_FLOP, 1.0), _DECIMAL),
    "seconds": {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
}


def parse(given: object, dimension: Dimension, *, field: str) -> float:
    """`parse("400 Mbit/s", "bytes/s", field="down")` is 5e7; a plain number is in base units already.

    Amounts are above zero, except that seconds may be zero, and within what machines may ever have. Anything else is a
    FleetError that names the field, what was given, and what is accepted.
    """
    if not isinstance(given, str):
        return require(given, dimension, field=field)
    match = _AMOUNT.fullmatch(given.strip()) if len(given) <= _LONGEST else None
    factor = None if match is None else _UNITS[dimension].get(match[2]) if match[2] else 1.0
    if match is None or factor is None:
        raise FleetError(f"{field} is {shown(given)}, which does not read as {dimension}; give {EXAMPLES[dimension]}")
    return _possible(float(match[1]) * factor, dimension, field=field, given=given)


def require(given: object, dimension: Dimension, *, field: str) -> float:
    """A number in base units, as a float, if it can be an amount; a FleetError that names the field if it cannot."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise FleetError(f"{field} is {shown(given)}, which is not an amount; give {EXAMPLES[dimension]}")
    try:
        number = float(given)
    except OverflowError:  # an int beyond every float
        number = inf
    return _possible(number, dimension, field=field, given=given)


def require_count(given: object, *, field: str) -> int:
    """A whole number above zero; a FleetError that names the field if it is none."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise FleetError(f"{field} is {shown(given)}; give a whole number above zero")
    return given


def _possible(number: float, dimension: Dimension, *, field: str, given: object) -> float:
    """The number, unless no device and no link could have it."""
    least, most = (0.0, _LATEST) if dimension == "seconds" else (_LEAST, _MOST)
    if least <= number <= most:
        return number
    if not 0 < number < inf:
        wanted = f"finite and {'zero or more' if dimension == 'seconds' else 'above zero'}"
    else:
        wanted = f"from {least:g} to {most:g} {dimension}"
    raise FleetError(f"{field} is {shown(given)}; it must be {wanted}, such as {EXAMPLES[dimension]}")

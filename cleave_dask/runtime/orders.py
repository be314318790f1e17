"""How the scheduler tells a device which tiles to multiply: in plain values, which need no pickle to be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cleave_dask.runtime import checking as check
from cleave_dask.runtime.checking import chosen
from cleave_dask.runtime.decoding import Refused
from cleave_dask.runtime.tiles import ParcelSpec

TILES = 1 << 20
"""Tiles of a parcel at most."""

SHARED = 2
"""Operands of a gemm, the only kind that shares them."""

OPERANDS = 6
"""Operands of any kind at most: those of an attention's way back."""


def write_order(parcel: ParcelSpec, server: str, again: bool, *, planned: bool = True) -> dict[str, Any]:
    """A parcel as it is sent; to another than its planned device, or for a second time, without what is ahead of it."""
    kept = parcel if planned and not again else replace(parcel, ahead=None)
    return {**_fields(kept), "server": server, "again": again}


def read_order(told: Any) -> tuple[ParcelSpec, str, bool]:
    """A parcel as it was sent, the server's address, and whether somebody else had it before."""
    if not isinstance(told, dict):
        raise Refused("a task that is no parcel of tiles")
    fields = chosen(told, _FIELDS)
    server, again = fields.pop("server"), fields.pop("again")
    return ParcelSpec(**fields), server, again


def _fields(parcel: ParcelSpec) -> dict[str, Any]:
    fields = {name: getattr(parcel, name) for name in ParcelSpec.__slots__}
    return fields if parcel.ahead is None else {**fields, "ahead": _fields(parcel.ahead)}


def _ahead(value: Any) -> ParcelSpec | None:
    """Another parcel, with none ahead of it."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("ahead") is not None:
        raise Refused("tiles to come that are no parcel")
    return ParcelSpec(**chosen(value, _PARCEL))


def _tiles(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, tuple) or len(value) > TILES:
        raise Refused("tiles that are no list")
    return tuple(_tile(tile) for tile in value)


def _tile(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) != 7 or not all(type(part) is int and part >= 0 for part in value):
        raise Refused("a tile that is no range of rows, columns and k")
    return value


def _values(value: Any) -> tuple[tuple[int, bool], ...]:
    if not isinstance(value, tuple) or len(value) > SHARED or not all(_is_value(part) for part in value):
        raise Refused("operands that are no numbers")
    return value


def _is_value(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and type(value[0]) is int and type(value[1]) is bool


def _flags(value: Any) -> tuple[bool, ...]:
    if not isinstance(value, tuple) or len(value) > OPERANDS or not all(type(part) is bool for part in value):
        raise Refused("operands that are no list of yes and no")
    return value


_PARCEL: dict[str, check.Check] = {
    "run": check.text,
    "step": check.whole,
    "job": check.whole,
    "kind": check.text,
    "dtype": check.text,
    "causal": check.flag,
    "scale": check.optional(check.number),
    "rank": check.whole,
    "filler": check.flag,
    "tiles": _tiles,
    "resumed": check.flag,
    "values": _values,
    "kept": _flags,
    "ahead": _ahead,
    "at_hand": _flags,
}

_FIELDS: dict[str, check.Check] = {**_PARCEL, "server": check.text, "again": check.flag}

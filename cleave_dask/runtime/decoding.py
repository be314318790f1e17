"""Reading Dask's messages from a stranger: plain values and arrays of numbers, nothing that runs code.

Dask's own reader unpickles what a message asks it to, also with `deserializers=["msgpack"]`, and allocates whatever a
length says. This one checks every length before it asks for the bytes, and never unpickles: in place of what only
pickle could read stands `OPAQUE`. It is a generator that yields what it wants to be given, and so needs no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from math import prod
from struct import unpack
from typing import Any

import msgpack
import numpy as np

FRAMES = 1024
"""Frames of a message at most."""

HEADER = 1 << 20
"""Bytes of a message beside its arrays at most."""

SUBHEADER = 4096
"""Bytes that describe one array at most."""

SKIPPED = 4 << 30
"""Bytes of arrays that are read past, without being kept, at most."""

_NUMBERS = frozenset(("<f8", "<f4", "<f2", "<u2", "|u1"))
_DIMENSIONS = 8

Array = np.ndarray[Any, np.dtype[Any]]


class Refused(Exception):
    """A message that its sender may not send."""


class _Opaque:
    """Stands for what was not read."""

    def __repr__(self) -> str:
        return "OPAQUE"


OPAQUE = _Opaque()


@dataclass(frozen=True, slots=True)
class Wanted:
    """So many bytes, to be given back or to be thrown away; and how many will be wanted from here on."""

    nbytes: int
    keep: bool = True
    ahead: int = 0
    array: bool = False  # whether they are the numbers of an array
    about: Any = None  # a message that is about to be allowed its arrays: whoever must ask first, asks now


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many bytes of arrays a message may have, and whether they are kept."""

    nbytes: int
    keep: bool = True


NO_ARRAYS = Allowance(1 << 20, keep=False)
"""For peers that have no arrays to send; what Dask attaches all the same is read past."""

Allow = Callable[[Any], Allowance]
Reader = Generator[Wanted, memoryview, Any]


def receive(allow: Allow) -> Reader:
    """One message; `allow` is asked once all but its arrays is known, which stand there as OPAQUE."""
    (together,) = unpack("<Q", (yield Wanted(8)))
    (count,) = unpack("<Q", (yield Wanted(8)))
    if not 1 <= count <= FRAMES:
        raise Refused(f"a message of {count} frames; at most {FRAMES} are read")
    lengths = unpack(f"<{count}Q", (yield Wanted(8 * count)))
    if lengths[0] > HEADER:
        raise Refused(f"a message of {lengths[0]} bytes beside its arrays; at most {HEADER} are read")
    before = 8 * (1 + count)
    if not before + lengths[0] <= together <= before + sum(lengths):
        raise Refused("a message whose lengths contradict each other")
    body = yield Wanted(lengths[0])
    message = decode(body, {})
    if count == 1:
        return message
    yield Wanted(0, about=message)
    allowance, total = allow(message), sum(lengths[1:])
    if total > allowance.nbytes + (count - 1) * SUBHEADER * allowance.keep:
        raise Refused(f"arrays of {total} bytes where at most {allowance.nbytes} are taken")
    if not allowance.keep:
        yield Wanted(total, keep=False, ahead=total)
        return message
    yield Wanted(0, ahead=total)
    parts = yield from _parts(lengths[1:])
    return decode(body, parts)


def _parts(lengths: tuple[int, ...]) -> Generator[Wanted, memoryview, dict[int, Any]]:
    """The arrays by the number of the frame that describes them."""
    parts: dict[int, Any] = {}
    frame = 0
    while frame < len(lengths):
        if lengths[frame] > SUBHEADER:
            raise Refused(f"a description of an array of {lengths[frame]} bytes; at most {SUBHEADER} are read")
        header = _unpacked((yield Wanted(lengths[frame])))
        pieces = header.get("num-sub-frames") if isinstance(header, dict) else None
        if not isinstance(pieces, int) or not 0 <= pieces < len(lengths) - frame:
            raise Refused("an array without a description")
        data = yield Wanted(sum(lengths[frame + 1 : frame + 1 + pieces]), array=True)
        parts[frame + 1] = read_array(header, data)
        frame += 1 + pieces
    return parts


def read_array(header: Mapping[str, Any], data: memoryview) -> Any:
    """The array that Dask's header describes; OPAQUE if it is anything else than numbers as they lie in memory."""
    methods = header.get("compression") or ()
    if not isinstance(methods, tuple) or any(method is not None for method in methods):
        raise Refused("a compressed array; a device sends numbers as they are")
    form = header.get("sub-header")
    if header.get("serializer") != "dask" or not isinstance(form, dict) or form.keys() - _FORM:
        return OPAQUE
    kind, inner, strides = (form.get(name, ()) for name in ("dtype", "shape", "strides"))
    shape = form.get("broadcast_to", inner)  # Dask says so of axes that are as good as none
    if not isinstance(kind, tuple) or len(kind) != 2 or kind[0] != 0 or not isinstance(kind[1], str):
        return OPAQUE
    if kind[1] not in _NUMBERS:
        return OPAQUE
    if not all(map(_whole, (shape, inner, strides))) or len(shape) > _DIMENSIONS or prod(shape) != prod(inner):
        return OPAQUE
    dtype = np.dtype(kind[1])
    if prod(shape) * dtype.itemsize != data.nbytes:
        raise Refused(f"an array of shape {shape} in {data.nbytes} bytes")
    if data.nbytes == 0:
        return np.empty(shape, dtype)
    for order in "CF":
        array: Array = np.ndarray(shape, dtype, data, order=order)  # type: ignore[arg-type]
        if all(size == 1 or mine == told for size, mine, told in zip(shape, array.strides, strides, strict=False)):
            return array
    return OPAQUE


_FORM = frozenset(("broadcast_to", "dtype", "shape", "strides", "writeable"))


def _whole(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(number) is int and 0 <= number < 2**62 for number in value)


def decode(body: memoryview, parts: Mapping[int, Any]) -> Any:
    """Plain values out of msgpack, with arrays in their places."""

    def place(value: dict[Any, Any]) -> Any:
        if "__Serialized__" in value:
            offset = value["__Serialized__"]
            return parts.get(offset, OPAQUE) if type(offset) is int else OPAQUE
        return OPAQUE if "__Pickled__" in value or "__Enum__" in value or "__Set__" in value else value

    return _unpacked(body, place)


def _unpacked(body: memoryview, place: Callable[[dict[Any, Any]], Any] | None = None) -> Any:
    try:
        return msgpack.unpackb(
            body, object_hook=place, ext_hook=_no_extension, use_list=False, strict_map_key=False, raw=False
        )
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise Refused(f"a message that cannot be read: {type(error).__name__}") from None


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError("an extension type")

"""Every parser of bytes that a device sends: whatever comes, it is read or refused, with no more memory than allowed.

`make fuzz` runs the same for minutes each, and prints how many examples that were.
"""

from __future__ import annotations

import os
import struct
from base64 import b64decode, encodebytes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, wraps
from resource import RUSAGE_SELF, getrusage
from time import monotonic
from typing import Any

import msgpack
import numpy as np
import pytest
from distributed.comm.tcp import _add_frames_header
from distributed.protocol import dumps
from distributed.protocol.serialize import to_serialize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave_dask.errors import AccessError, CleaveError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.runtime import checking as check
from cleave_dask.runtime.certificates import Authority, make_request
from cleave_dask.runtime.conversations import WithCluster, WithScheduler, WithServer
from cleave_dask.runtime.decoding import HEADER, OPAQUE, Allowance, Refused, read_array, receive
from cleave_dask.runtime.enrolment import parse_join
from cleave_dask.runtime.orders import read_order, write_order
from cleave_dask.runtime.roles import peer_of
from cleave_dask.runtime.tiles import ParcelSpec
from cleave_dask.runtime.tokens import parse_token

LIMIT = 1 << 16
QUIET = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))  # for each parser, by `make fuzz`


def fuzzed(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Give a parser as many examples as a property has or, by `make fuzz`, as come in the time that it has."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        count = 0

        @wraps(test)
        def counted(**drawn: Any) -> None:
            nonlocal count
            count += 1
            test(**drawn)

        examples = QUIET(given(*strategies)(counted))

        def many() -> None:
            start = monotonic()
            examples()
            while monotonic() - start < SECONDS:
                examples()
            if SECONDS:
                most = getrusage(RUSAGE_SELF).ru_maxrss / 1e3
                print(f"\n{test.__name__}: {count:,} examples in {monotonic() - start:.0f} s, {most:.0f} MB at most")

        many.__name__ = many.__qualname__ = test.__name__
        return many

    return decorate


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
plain = st.recursive(
    scalars | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)


anything = st.integers(0, 2**64 - 1)


class Books:
    """A ledger in which everybody has everything."""

    def address_of(self, name: str) -> str | None:
        return "tls://own:1"

    def is_taken(self, address: str) -> bool:
        return address == "tls://other:1"

    def has(self, name: str, key: Any) -> bool:
        hash(key)
        return True


def read(content: bytes) -> Any:
    """One message out of bytes; the bytes that it asks for at once are counted."""
    reader = receive(lambda message: Allowance(LIMIT))
    position, kept = 0, 0
    try:
        wanted = next(reader)
        while True:
            assert wanted.nbytes >= 0
            kept += wanted.nbytes * wanted.keep
            assert kept <= 2 * HEADER + LIMIT + 1025 * 4096, "more memory than allowed"
            piece = content[position : position + wanted.nbytes]
            if len(piece) < wanted.nbytes:
                return None  # it would wait for more
            position += wanted.nbytes
            wanted = reader.send(memoryview(bytearray(piece if wanted.keep else b"")))
    except StopIteration as done:
        return done.value


def written(message: Any) -> bytes:
    """A message as Dask sends it."""
    frames, _, _ = _add_frames_header(dumps(message))
    return b"".join(frames)


@fuzzed(st.binary(max_size=400))
def test_bytes_are_read_or_refused(content: bytes) -> None:
    with suppress(Refused):
        read(content)


@fuzzed(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=6),
    st.binary(max_size=300),
    st.integers(0, 2**64 - 1),
)
def test_lengths_are_checked_before_memory_is_taken(lengths: list[int], rest: bytes, together: int) -> None:
    head = struct.pack(f"<{len(lengths) + 2}Q", together, len(lengths), *lengths)
    with suppress(Refused):
        read(head + rest)


@fuzzed(plain, st.data())
def test_mutated_messages_are_read_or_refused(message: Any, data: st.DataObject) -> None:
    array = np.arange(6, dtype=data.draw(st.sampled_from(["float32", "float64", "uint16", "int64", "complex64"])))
    content = bytearray(written({"op": "x", "told": message, "array": to_serialize(array.reshape(2, 3).T)}))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Refused):
        read(bytes(content))


@fuzzed(st.data())
def test_descriptions_of_arrays_are_read_or_refused(data: st.DataObject) -> None:
    wholes = st.lists(st.integers(0, 4) | anything, max_size=4)
    form = {"dtype": [0, "<f4"], "shape": [2], "strides": [4], "writeable": [True]}
    for name, odd in (("dtype", plain), ("shape", wholes), ("strides", wholes), ("broadcast_to", wholes)):
        if data.draw(st.booleans()):
            form[name] = data.draw(odd | plain, label=name)
    header = {"serializer": "dask", "compression": data.draw(st.just([None]) | plain), "sub-header": form}
    told = msgpack.unpackb(msgpack.packb(header), use_list=False, strict_map_key=False)
    with suppress(Refused):
        array = read_array(told, memoryview(bytearray(8)))
        assert array is OPAQUE or array.nbytes in (0, 8)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "uint16", "uint8"])
@pytest.mark.parametrize("shape", [(2, 3), (4,), (), (0, 5), (2, 3, 4, 5)])
def test_arrays_come_as_they_were_sent(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for sent in (array, np.asfortranarray(array)):
        got = read(written({"op": "x", "array": to_serialize(sent)}))["array"]
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype
        assert got.strides == sent.strides or array.size == 0


def test_an_axis_of_one_may_have_any_stride() -> None:
    array = np.lib.stride_tricks.as_strided(np.arange(6.0), (1, 2, 3), (0, 24, 8))
    np.testing.assert_array_equal(read(written({"array": to_serialize(array)}))["array"], array)
    spread = np.broadcast_to(np.arange(3.0), (1000, 3))  # few bytes that would become many
    assert read(written({"array": to_serialize(spread)}))["array"] is OPAQUE


def test_what_needs_a_pickle_is_opaque_and_what_is_too_large_is_refused() -> None:
    objects = np.array([object()], dtype=object)
    assert read(written({"x": to_serialize(objects), "y": to_serialize({1, 2})})) == {"x": OPAQUE, "y": OPAQUE}
    with pytest.raises(Refused, match="at most 65536 are taken"):
        read(written({"x": to_serialize(np.zeros(100_000))}))
    with pytest.raises(Refused, match="cannot be read"):
        read(written(msgpack.ExtType(1, b"x")))


@fuzzed(plain, st.sampled_from(sorted({**WithScheduler.calls, **WithServer.calls, **WithScheduler.stream})), st.data())
def test_conversations_admit_or_refuse(value: Any, op: str, data: st.DataObject) -> None:
    fields = {**WithScheduler.calls, **WithServer.calls, **WithScheduler.stream}[op]
    message = {name: data.draw(plain, label=name) for name in fields} if data.draw(st.booleans()) else {"x": value}
    told = msgpack.unpackb(msgpack.packb({"op": op, **message}), use_list=False, strict_map_key=False)
    talks = [WithScheduler("a", Books()), WithScheduler("a", Books(), streaming=True)]
    for talk in (*talks, WithServer("a", lambda run, step, job, tile: None), WithCluster(1)):
        talk.greeted = True
        for one in (told, (told,), value):
            with suppress(Refused, CleaveError):
                talk.allow(one)
                talk.admit(one)


@fuzzed(st.dictionaries(st.sampled_from(["flops", "down", "up", "latency", "memory", "cores", "x"]), plain))
def test_what_a_device_says_of_itself_never_breaks_planning(told: dict[str, Any]) -> None:
    said = {"role": "device", "version": "0", "kernel": "numpy", **told}
    packed = msgpack.unpackb(msgpack.packb({"cleave": said}), use_list=False, strict_map_key=False)
    try:
        facts = check.facts(packed)["cleave"]
        Fleet.from_workers({"a": facts})
    except (Refused, CleaveError):
        return
    metrics = check.metrics(packed)
    assert isinstance(metrics["memory"] + metrics["spilled_bytes"]["memory"], int | float)


@fuzzed(plain | st.binary(max_size=200))
def test_orders_tokens_and_requests_are_read_or_refused(value: Any) -> None:
    packed = msgpack.unpackb(msgpack.packb(value), use_list=False, strict_map_key=False)
    with pytest.raises(Refused):
        read_order(packed)
    with pytest.raises(AccessError):
        parse_token(str(value))
    with pytest.raises(AccessError):
        parse_join(str(value).encode(errors="replace"))
    if isinstance(packed, dict):
        assert peer_of({"subject": [[(str(key), str(one))] for key, one in packed.items()]}) is None


@fuzzed(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4), st.booleans())
def test_signing_requests_are_signed_or_refused(changes: list[tuple[int, int]], within: bool) -> None:
    """Changed as they travel, or within their armour."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    authority, request = _authority(now)
    content = bytearray(pem_of(request) if not within else request)
    for place, byte in changes:
        content[place % len(content)] = byte
    try:
        signed = authority.sign(pem_of(content) if within else bytes(content), "device", "x", now, 1)
    except AccessError:
        assert changes
    else:
        assert b"BEGIN CERTIFICATE" in signed


@cache
def _authority(now: datetime) -> tuple[Authority, bytes]:
    """An authority, and a signing request without its armour."""
    lines = make_request("x")[1].splitlines()
    return Authority(*Authority.create(now)), b64decode(b"".join(lines[1:-1]))


def pem_of(request: bytes | bytearray) -> bytes:
    begin, end = (f"-----{word} CERTIFICATE REQUEST-----\n".encode() for word in ("BEGIN", "END"))
    return begin + encodebytes(request) + end


def test_an_order_is_read_as_it_was_written() -> None:
    parcel = ParcelSpec("run", 1, 2, "gemm", "float32", False, None, 7, True, ((0, 0, 1, 0, 2, 0, 3),), resumed=True)
    sent = read(written(write_order(parcel, "tls://x:1", True)))
    assert read_order(sent) == (parcel, "tls://x:1", True)
    told = replace(parcel, ahead=replace(parcel, job=3, at_hand=(True, False)))
    sent = read(written(write_order(told, "tls://x:1", False)))
    assert read_order(sent) == (told, "tls://x:1", False)
    for again, planned in ((True, True), (False, False)):
        assert write_order(told, "tls://x:1", again, planned=planned)["ahead"] is None, "it is for its planned device"


def test_of_what_is_ahead_nothing_is_ahead() -> None:
    parcel = ParcelSpec("run", 1, 2, "gemm", "float32", False, None, 7, True, ((0, 0, 1, 0, 2, 0, 3),))
    deep = replace(parcel, ahead=replace(parcel, ahead=parcel))
    with pytest.raises(Refused, match="tiles to come"):
        read_order(read(written(write_order(deep, "tls://x:1", False))))
    wrongs: list[Any] = [1, [], "x", {}, {"run": "run"}]
    for wrong in wrongs:
        order = {**write_order(parcel, "tls://x:1", False), "ahead": wrong}
        with pytest.raises(Refused):
            read_order(read(written(order)))

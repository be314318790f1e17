"""Operands in pieces: only what is missing is fetched, and what is put together is what was asked for."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.runtime.operands import WHOLE, SliceCache, assembled, named, operand_slices, span_of
from cleave_dask.runtime.tiles import SliceName, TileSpec, own_bytes

WHOLE_ARRAY = np.arange(40 * 7).reshape(40, 7)


def spec(rows: tuple[int, int], cols: tuple[int, int], kind: str = "gemm") -> TileSpec:
    return TileSpec("run", 1, 2, 0, kind, "float32", rows, cols, (0, 8), causal=False, scale=None)


async def fetch(cache: SliceCache, name: SliceName, axis: int) -> int:
    """Have what is missing fetched, from an array of rows or of columns; how much that was."""
    parts = cache.missing(name, axis)
    for part in parts:
        start, stop = span_of(part, axis)
        arriving: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        arriving.set_result(WHOLE_ARRAY[start:stop] if axis == 0 else WHOLE_ARRAY.T[:, start:stop])
        cache.add(part, axis, arriving)
    await asyncio.sleep(0)  # callbacks of what has arrived
    return sum(np.diff(span_of(part, axis))[0] for part in parts)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=12),
    st.sampled_from([0, 1]),
    st.sampled_from([10**6, 600]),
)
@settings(deadline=None, max_examples=40)
def test_slices_are_put_together_from_pieces(spans: list[tuple[int, int]], axis: int, limit: int) -> None:
    async def check() -> None:
        cache, here = SliceCache(limit), set[int]()
        base = operand_slices(spec((0, 1), (0, 1)))[axis][0]
        for start, size in spans:
            name = named(base, axis, (start, start + size))
            fetched = await fetch(cache, name, axis)
            if limit == 10**6:
                assert fetched == len(set(range(start, start + size)) - here)
                here |= set(range(start, start + size))
                found = assembled(cache.pieces(name, axis))
                expected = WHOLE_ARRAY[start : start + size]
                assert np.array_equal(found, expected if axis == 0 else expected.T)
            assert cache.bytes == sum(held.result().nbytes for held in cache.held.values())
            assert cache.bytes <= max(limit, size * 7 * 8)

    asyncio.run(check())


def test_slices_of_an_attention_are_fetched_whole_and_a_new_step_forgets_the_old() -> None:
    async def check() -> None:
        cache = SliceCache(10**6)
        (name, axis), *_ = operand_slices(spec((0, 4), (0, 2), kind="attention"))
        assert axis == WHOLE
        assert cache.missing(name, axis) == [name]
        arriving: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        cache.add(name, axis, arriving)
        assert cache.missing(name, axis) == []
        arriving.set_result(WHOLE_ARRAY)
        await asyncio.sleep(0)
        assert assembled(cache.pieces(name, axis)) is WHOLE_ARRAY
        later = (name[0], name[1] + 1, *name[2:])
        cache.add(later, axis, asyncio.get_running_loop().create_future())
        assert list(cache.held) == [later]
        assert cache.bytes == 0

    asyncio.run(check())


def test_a_tile_adds_what_is_new_of_its_operands_and_its_result() -> None:
    tiles = [spec((0, 4), (0, 4)), spec((4, 6), (0, 4)), spec((0, 6), (4, 5))]
    assert own_bytes(tiles) == [4 * ((4 + 4) * 8 + 16), 4 * (2 * 8 + 8), 4 * (1 * 8 + 6)]

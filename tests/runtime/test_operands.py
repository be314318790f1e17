"""Operands in pieces: only what is missing is fetched, and what is put together is what was asked for."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.runtime.operands import Need, SliceCache, assembled, operand_slices
from cleave_dask.runtime.tiles import TileSpec, Values, own_bytes

MATRIX = np.arange(40 * 30).reshape(40, 30)

Span = tuple[int, int]


def spec(
    rows: Span, cols: Span, ks: Span = (0, 8), *, kind: str = "gemm", job: int = 2, step: int = 1, values: Values = ()
) -> TileSpec:
    return TileSpec("run", step, job, 0, kind, "float32", rows, cols, ks, causal=False, scale=None, values=values)


def read(need: Need) -> np.ndarray:
    """What the server would answer."""
    first, second = (slice(*span) for span in need.name[4:])
    return (MATRIX.T if need.turned else MATRIX)[first, second]


async def fetch(cache: SliceCache, need: Need) -> int:
    """Have what is missing fetched; how many numbers that was."""
    parts = cache.missing(need)
    for part in parts:
        arriving: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        arriving.set_result(read(part))
        cache.add(part, arriving)
    await asyncio.sleep(0)  # callbacks of what has arrived
    return sum(read(part).size for part in parts)


SPAN = st.tuples(st.integers(0, 20), st.integers(1, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    st.lists(st.tuples(SPAN, SPAN, st.booleans()), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([10**6, 600]),
)
@settings(deadline=None, max_examples=80)
def test_slices_are_put_together_from_pieces(slices: list[tuple[Span, Span, bool]], shared: bool, limit: int) -> None:
    async def check() -> None:
        cache, here, newest = SliceCache(limit), np.zeros(MATRIX.shape, dtype=bool), 0
        for first, second, flip in slices:
            turned = flip and shared  # only gemms that share a matrix read it either way
            values: Values = ((5, turned), (6, False)) if shared else ()
            need = operand_slices(spec(first, (0, 1), second, job=int(turned), values=values))[0]
            fetched = await fetch(cache, need)
            if limit == 10**6:
                area = tuple(slice(*span) for span in need.area)
                assert fetched == (~here[area]).sum()
                here[area] = True
                assert np.array_equal(assembled(cache.pieces(need)), read(need))
            assert cache.bytes == sum(held.result().nbytes for held in cache.held.values())
            newest = read(need).nbytes if fetched else newest  # it stays, however large, until the next comes
            assert cache.bytes <= max(limit, newest)

    asyncio.run(check())


def test_what_arrives_at_the_same_moment_is_counted_before_it_goes() -> None:
    async def check() -> None:
        cache = SliceCache(300)
        needs = [operand_slices(spec((start, start + 5), (0, 1), (0, 10)))[0] for start in (0, 5)]
        futures: list[asyncio.Future[np.ndarray]] = [asyncio.get_running_loop().create_future() for _ in needs]
        for need, arriving in zip(needs, futures, strict=True):
            cache.add(need, arriving)
        for need, arriving in zip(needs, futures, strict=True):
            arriving.set_result(read(need))
        await asyncio.sleep(0)
        assert cache.bytes == sum(held.result().nbytes for held in cache.held.values()) == 400

    asyncio.run(check())


def test_what_later_gemms_need_is_the_last_to_go() -> None:
    async def check() -> None:
        values: Values = ((5, False), (6, False))
        shared = operand_slices(spec((0, 10), (0, 1), (0, 10), values=values))[0]
        own = [operand_slices(spec((0, 10), (0, 1), (0, 10), job=job))[0] for job in (3, 4)]
        cache = SliceCache(2 * read(shared).nbytes)
        for need in (shared, *own):
            await fetch(cache, need)
        assert list(cache.held) == [shared, own[1]]
        assert cache.missing(shared) == []
        assert cache.missing(own[0]) == [own[0]]

    asyncio.run(check())


def test_slices_of_an_attention_are_fetched_whole_and_a_new_step_forgets_the_old() -> None:
    async def check() -> None:
        cache = SliceCache(10**6)
        need, *_ = operand_slices(spec((0, 4), (0, 2), kind="attention"))
        assert need.whole
        assert cache.missing(need) == [need]
        arriving: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        cache.add(need, arriving)
        assert cache.missing(need) == []
        arriving.set_result(MATRIX)
        await asyncio.sleep(0)
        assert np.array_equal(assembled(cache.pieces(need)), MATRIX)
        later, *_ = operand_slices(spec((0, 4), (0, 2), kind="attention", step=2))
        cache.add(later, asyncio.get_running_loop().create_future())
        assert list(cache.held) == [later]
        assert cache.bytes == 0

    asyncio.run(check())


def test_a_tile_adds_what_is_new_of_its_operands_and_its_result() -> None:
    tiles = [spec((0, 4), (0, 4)), spec((4, 6), (0, 4)), spec((0, 6), (4, 5))]
    assert own_bytes(tiles) == [4 * ((4 + 4) * 8 + 16), 4 * (2 * 8 + 8), 4 * (1 * 8 + 6)]

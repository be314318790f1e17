"""Filler asks for nothing beside what others wait for, and makes way for what is coming."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cleave_dask.runtime.fetching import JobOver
from cleave_dask.runtime.operands import assembled, operand_slices
from cleave_dask.runtime.tiles import TileSpec
from tests.runtime.test_early import NEXT, SIDE, B, Pair, Pull, run

OPERANDS = 2


def filler(job: int = 5, *, shared: bool = False) -> TileSpec:
    """A tile of filler; its operands may be those of other gemms of its layer."""
    values = ((7, False), (8, False)) if shared else ()
    return next(iter(replace(NEXT, job=job, filler=True, values=values).specs()))


async def fetched(pair: Pair, spec: TileSpec) -> list[np.ndarray]:
    """The operands of a tile of filler, as a device gets them."""
    fetcher = pair.device.fetcher
    async with fetcher.turn(spec, 3, 10, filler=True):
        pieces, _ = await fetcher.operands(pair.address, spec, filler=True)
    return [assembled(each) for each in pieces]


async def waits(asked: list[Pull], task: asyncio.Future[list[np.ndarray]], pulls: int) -> None:
    """For a while nothing more is asked for."""
    await asyncio.sleep(0.2)
    assert not task.done()
    assert len(asked) == pulls


def test_it_waits_while_anything_else_is_under_way() -> None:
    async def main() -> None:
        async with Pair() as pair:
            async with pair.device.fetcher.ways.turn(1, 0, filler=False):
                waiting = asyncio.ensure_future(fetched(pair, filler()))
                await waits(pair.keeper.pulls, waiting, 0)
            assert np.array_equal((await waiting)[1], B)

    run(main())


def test_whoever_needs_what_filler_has_yet_to_ask_for_asks_itself() -> None:
    """Or they would wait for each other: filler for the way to be free, and who is on it for the slice."""

    async def main() -> None:
        async with Pair() as pair:
            fetcher, spec = pair.device.fetcher, replace(filler(6, shared=True), tile=9)
            async with fetcher.turn(spec, 1, 10, filler=False):
                waiting = asyncio.ensure_future(fetched(pair, filler(shared=True)))
                await waits(pair.keeper.pulls, waiting, 0)
                pieces, _ = await asyncio.wait_for(fetcher.operands(pair.address, spec, filler=False), 10)
                assert np.array_equal(assembled(pieces[1]), B)
            assert np.array_equal((await waiting)[1], B)
            assert [job for job, *_ in pair.keeper.pulls] == [6] * OPERANDS, "and filler has it for nothing"

    run(main())


def test_a_piece_that_has_just_failed_is_asked_for_again() -> None:
    """The cache lets go of it only when the event loop turns: whoever comes before must let it turn."""

    async def main() -> None:
        async with Pair() as pair:
            fetcher, spec = pair.device.fetcher, replace(filler(), job=4)
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(JobOver("all tiles are delivered"))
            fetcher.cache.add(operand_slices(spec)[1], failed)
            pieces, _ = await fetcher.operands(pair.address, spec, filler=False)
            assert np.array_equal(assembled(pieces[1]), B)

    run(main())


@pytest.mark.parametrize("breaks", [False, True])
def test_it_makes_way_for_what_is_coming(breaks: bool) -> None:
    """From the word that it is coming until it is here, or the connection has broken."""

    async def main() -> None:
        async with Pair() as pair:
            keeper = pair.keeper
            keeper.sending.clear()
            pair.begin()
            await pair.until(1)
            assert (await fetched(pair, filler(4)))[1].shape == (SIDE, SIDE), "the server has nothing to send: it comes"
            before = len(keeper.pulls)
            keeper.make()
            await asyncio.sleep(0.2)
            waiting = asyncio.ensure_future(fetched(pair, filler(5)))
            await waits(keeper.pulls, waiting, before)
            if breaks:
                pair.device.fetcher.give_up()
            else:
                keeper.sending.set()
            assert np.array_equal((await asyncio.wait_for(waiting, 10))[1], B)
            keeper.sending.set()

    run(main())

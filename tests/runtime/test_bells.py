"""Whoever waits is woken from a thread, looks for itself, and is one of a few."""

from __future__ import annotations

import asyncio
from functools import partial
from threading import Thread

import pytest

from cleave_dask.errors import StepError
from cleave_dask.runtime.bells import Bell


def test_whoever_waits_looks_at_every_ring_and_goes_on_when_it_is_there() -> None:
    async def main() -> None:
        bell, there = Bell(), set[str]()
        first, second = (asyncio.ensure_future(bell.until(partial(there.__contains__, name))) for name in ("x", "y"))
        for name in ("x", "y"):
            await asyncio.sleep(0)
            there.add(name)
            thread = Thread(target=bell.ring)
            thread.start()
            await asyncio.wait_for(first if name == "x" else second, 30)
            assert second.done() == (name == "y")
            thread.join()
        await bell.until(lambda: True)  # it is there: nothing to wait for

    asyncio.run(main())


def test_no_more_may_wait_than_there_is_room_for() -> None:
    async def main() -> None:
        bell, there = Bell(most=2), [False]
        waiting = [asyncio.ensure_future(bell.until(lambda: there[0])) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(StepError, match="ask again"):
            await bell.until(lambda: there[0])
        waiting.pop().cancel()  # whoever leaves makes room
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(bell.until(lambda: there[0])))
        await asyncio.sleep(0)
        there[0] = True
        bell.ring()
        await asyncio.wait_for(asyncio.gather(*waiting), 30)

    asyncio.run(main())

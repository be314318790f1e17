"""Whoever waits is woken from a thread, looks for itself, and has not too many questions."""

from __future__ import annotations

import asyncio
from functools import partial
from threading import Thread

import pytest

from cleave_dask.errors import StepError
from cleave_dask.runtime.bells import EACH, Bell


def test_whoever_waits_looks_at_every_ring_and_goes_on_when_it_is_there() -> None:
    async def main() -> None:
        bell, there = Bell(), set[str]()
        first, second = (
            asyncio.ensure_future(bell.until(partial(there.__contains__, name), "one")) for name in ("x", "y")
        )
        for name in ("x", "y"):
            await asyncio.sleep(0)
            there.add(name)
            thread = Thread(target=bell.ring)
            thread.start()
            await asyncio.wait_for(first if name == "x" else second, 30)
            assert second.done() == (name == "y")
            thread.join()
        await bell.until(lambda: True, "one")  # it is there: nothing to wait for

    asyncio.run(main())


def test_nobody_waits_for_more_than_a_few_things_at_once() -> None:
    async def main() -> None:
        bell, there = Bell(), [False]

        def wait(who: str) -> asyncio.Future[None]:
            return asyncio.ensure_future(bell.until(lambda: there[0], who))

        waiting = [wait("one") for _ in range(EACH)]
        await asyncio.sleep(0)
        with pytest.raises(StepError, match="one waits for 4 slices"):
            await wait("one")
        waiting += [wait("two")]  # others do not suffer
        waiting.pop(0).cancel()  # whoever leaves makes room
        await asyncio.sleep(0)
        waiting += [wait("one")]
        await asyncio.sleep(0)
        there[0] = True
        bell.ring()
        await asyncio.wait_for(asyncio.gather(*waiting), 30)

    asyncio.run(main())

"""What a few timed transfers say of a link."""

from __future__ import annotations

import asyncio

import pytest

from cleave_dask.runtime.measuring import ENOUGH, LIMIT, measure_bandwidth

RATE = 10e6


def test_a_transfer_that_was_held_up_does_not_count() -> None:
    held_up = iter([0.0, 0.0, 2.0 * ENOUGH, 0.0])

    async def probe(nbytes: int) -> int:
        await asyncio.sleep(nbytes / RATE + next(held_up, 0.0))
        return nbytes

    assert asyncio.run(measure_bandwidth(probe, 0.0)) == pytest.approx(RATE, rel=0.1)


def test_a_link_that_moves_nothing_is_given_up_in_time() -> None:
    async def probe(nbytes: int) -> int:
        await asyncio.sleep(60)
        return nbytes

    async def measured() -> float:
        return await asyncio.wait_for(measure_bandwidth(probe, 0.0), 2 * LIMIT)

    assert 0 < asyncio.run(measured()) < RATE

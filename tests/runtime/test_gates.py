"""Gates: the most urgent tile first, a few large or many small ones at once, and filler only where there is room."""

from __future__ import annotations

import asyncio

from cleave_dask.runtime.gates import Gate

Visitor = tuple[int, float, float]
"""Rank, bytes, and share of the limit."""


async def visit(gate: Gate, visitor: Visitor, entered: list[int], leave: asyncio.Event) -> None:
    async with gate.through(*visitor):
        entered.append(visitor[0])
        await leave.wait()


def admitted(gate: Gate, visitors: list[Visitor]) -> list[int]:
    """The ranks of those who are let in while nobody leaves, in order of entry."""

    async def come() -> list[int]:
        entered: list[int] = []
        leave = asyncio.Event()
        visits = [asyncio.ensure_future(visit(gate, visitor, entered, leave)) for visitor in visitors]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        inside = list(entered)
        leave.set()
        await asyncio.gather(*visits)
        assert sorted(entered) == sorted(visitor[0] for visitor in visitors), "somebody was never let in"
        return inside

    return asyncio.run(come())


def test_a_few_large_ones_or_many_small_ones_are_inside() -> None:
    assert admitted(Gate(2, 100), [(rank, 500, 1.0) for rank in range(5)]) == [0, 1]
    assert admitted(Gate(2, 100), [(rank, 10, 1.0) for rank in range(15)]) == list(range(10))


def test_filler_leaves_room_for_what_others_wait_for() -> None:
    filler = [(10 + number, 10.0, 0.5) for number in range(8)]
    critical = [(number, 10.0, 1.0) for number in (1, 2)]
    assert admitted(Gate(2, 100), filler + critical) == [10, 11, 12, 13, 14, 1, 2]


def test_nobody_enters_behind_a_gate_that_is_in_use() -> None:
    async def come() -> list[int]:
        first, entered = Gate(2, 100), list[int]()
        second, leave, rest = Gate(2, 100, behind=first), asyncio.Event(), asyncio.Event()
        rest.set()
        before = asyncio.ensure_future(visit(first, (5, 10, 1.0), entered, leave))
        await asyncio.sleep(0)
        first.hold()
        behind = [asyncio.ensure_future(visit(second, (rank, 10, 1.0), entered, rest)) for rank in (1, 2)]
        leave.set()
        await before
        for _ in range(5):
            await asyncio.sleep(0)
        assert entered == [5], "one place is still held"
        first.leave()
        await asyncio.wait_for(asyncio.gather(*behind), 10)
        return entered

    assert asyncio.run(come()) == [5, 1, 2]


def test_the_most_urgent_is_next_whenever_it_came() -> None:
    async def come() -> list[int]:
        gate, entered = Gate(1, 0), list[int]()
        holds, rest = asyncio.Event(), asyncio.Event()
        rest.set()
        first = asyncio.ensure_future(visit(gate, (5, 1, 1.0), entered, holds))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(visit(gate, (rank, 1, 1.0), entered, rest)) for rank in (4, 9, 1)]
        await asyncio.sleep(0)
        others[0].cancel()
        holds.set()
        await asyncio.gather(first, *others[1:])
        return entered

    assert asyncio.run(come()) == [5, 1, 9]

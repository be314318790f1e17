"""Tiles that are begun before they are ordered: a device asks, over real connections, and a server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from distributed import Reschedule, Status, Worker
from distributed.comm import Comm
from distributed.core import Server
from distributed.protocol import to_serialize

from cleave_dask.errors import StepError
from cleave_dask.graph.ir import Range
from cleave_dask.runtime.bells import Bell
from cleave_dask.runtime.device import DeviceRuntime
from cleave_dask.runtime.early import RUNS, EarlyTiles
from cleave_dask.runtime.fetching import Fetcher, JobOver
from cleave_dask.runtime.operands import SliceCache, assembled, operand_slices
from cleave_dask.runtime.shaping import Links
from cleave_dask.runtime.tiles import COMING, ParcelSpec, TileSpec

SIDE = 64
A, B = (np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32) for seed in (1, 2))
NUMBERS = 4  # bytes of each

FIRST = ParcelSpec("run", 3, 1, "gemm", "float32", False, None, 10, False, ((0, 0, 8, 0, 8, 0, 8),))
TILES = tuple((n, 16 * n, 16 * n + 16, 0, SIDE, 0, SIDE) for n in range(4))
NEXT = ParcelSpec("run", 3, 2, "gemm", "float32", False, None, 1 << 20, False, TILES, at_hand=(False, True))

Pull = tuple[int, int, Range, Range, bool]
"""Job, operand, ranges, and whether it was asked for before it was made."""


class Keeper:
    """Answers pulls: the second operand at once, the first once it is made; of job 8 nothing is left, 9 is unknown."""

    def __init__(self) -> None:
        self.pulls: list[Pull] = []
        self.bell, self.made, self.asked = Bell(), False, 0
        self.sending = asyncio.Event()  # what was announced
        self.sending.set()

    async def cleave_pull(
        self, run: str, step: int, job: int, operand: int, first: Range, second: Range, ahead: bool = False
    ) -> dict[str, Any]:
        self.pulls.append((job, operand, first, second, ahead))
        if job == 9:
            raise StepError("the step is over")
        if job == 8:
            return {"parts": [], "axis": 0}
        part = (A, B)[operand][slice(*first), slice(*second)]
        return {"parts": [to_serialize(np.ascontiguousarray(part))], "axis": 0}

    async def cleave_await(self, comm: Comm, device: str, **told: Any) -> dict[str, Any]:
        self.asked += 1
        await self.bell.until(lambda: self.made, device)
        await comm.write(COMING)
        await self.sending.wait()
        return await self.cleave_pull(**told, ahead=True)

    def make(self) -> None:
        self.made = True
        self.bell.ring()


class Device:
    """The part of a device that asks, and notes the tiles that it is to make."""

    def __init__(self, worker: Server, limit: int) -> None:
        vars(worker)["name"] = "device"  # as a Dask worker has one
        self.fetcher = Fetcher(cast("Worker", worker), Links(), SliceCache(limit))
        self.early = EarlyTiles(self.fetcher, self.tile)
        self.tiles: list[int] = []
        self.fails = 0

    async def tile(self, spec: TileSpec, server: str, parcel: ParcelSpec, rank: int, size: int) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("the connection broke")
        waits = bool([need for need in operand_slices(spec) if self.fetcher.cache.missing(need)])
        assert not waits, "all that it needs is here"
        operands, _ = await self.fetcher.operands(server, spec, filler=parcel.filler)
        left, right = (assembled(pieces) for pieces in operands)
        assert np.array_equal(left, A[slice(*spec.rows)])
        assert np.array_equal(right, B)
        self.tiles.append(spec.tile)


class Pair:
    """A server and a device of it, for the length of a block."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit

    async def __aenter__(self) -> Pair:
        self.stack = AsyncExitStack()
        self.keeper = Keeper()
        server, worker = (
            Server({"cleave_pull": self.keeper.cleave_pull, "cleave_await": self.keeper.cleave_await}),
            Server({}),
        )
        for each in (server, worker):
            await each.rpc.start()
            await each.listen("tcp://127.0.0.1:0")
            self.stack.push_async_callback(each.close)
        self.address = server.address
        self.device = Device(worker, self.limit)
        self.stack.callback(self.device.fetcher.close)
        self.stack.callback(self.device.early.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    def begin(self, following: ParcelSpec = NEXT, ordered: ParcelSpec = FIRST) -> None:
        self.device.early.begin(self.address, ordered, following)

    async def made(self, parcel: ParcelSpec = NEXT) -> list[bool]:
        """Order a parcel; which of its tiles were made early."""
        return list(await asyncio.gather(*map(self.device.early.made, parcel.specs())))

    async def until(self, pulls: int) -> None:
        """Wait for pulls, and for a first question whose answer must wait."""
        while len(self.keeper.pulls) < pulls or not self.keeper.asked:
            await asyncio.sleep(0.01)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_tiles_are_made_once_their_operands_are_and_before_they_are_ordered() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.begin()
            await pair.until(1)
            assert not pair.device.tiles, "the first operand is not there yet"
            assert [pull[1:] for pull in pair.keeper.pulls] == [(1, (0, SIDE), (0, SIDE), False)], (
                "what is at hand comes"
            )
            pair.keeper.make()
            while len(pair.device.tiles) < len(TILES):
                await asyncio.sleep(0.01)
            assert await pair.made() == [True] * 4
            assert await pair.made() == [False] * 4, "of what is ordered again nothing is left"
            assert len(pair.keeper.pulls) == 5, "four slices of one operand, and the other once for all tiles"

    run(main())


def test_a_tile_that_is_ordered_while_it_waits_is_not_begun_twice() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.begin()
            ordered = asyncio.ensure_future(pair.made())
            await pair.until(1)
            pair.keeper.make()
            assert await ordered == [True] * 4
            assert sorted(pair.device.tiles) == [0, 1, 2, 3]

    run(main())


def test_what_fails_early_is_made_as_if_it_had_never_been_begun() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.keeper.make()
            pair.device.fails = 2
            pair.begin()
            assert sorted(await pair.made()) == [False, False, True, True]
            pair.begin(replace(NEXT, job=9), NEXT)
            assert await pair.made(replace(NEXT, job=9)) == [False] * 4
            pair.begin(replace(NEXT, job=4), NEXT)
            assert await pair.made(replace(NEXT, job=4)) == [True] * 4, "later jobs do not suffer"

    run(main())


def test_a_tile_of_a_job_that_is_over_says_so() -> None:
    async def main() -> None:
        async with Pair() as pair:
            over = replace(NEXT, job=8)
            pair.begin(over)
            assert await pair.made(over) == [False] * 4
            with pytest.raises(JobOver, match="all tiles of job 8 of step 3"):
                await pair.device.fetcher.operands(pair.address, next(over.specs()), filler=False)

    run(main())


def test_the_server_holds_back_the_slices_of_one_job_at_a_time() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.begin()
            await pair.until(1)
            other = replace(NEXT, job=4)
            pair.begin(other)
            assert pair.keeper.asked == 1, "its slices would wait behind the others'"
            assert not any(place[2] == 4 for place in pair.device.early._begun)
            pair.keeper.make()
            await pair.made()
            pair.begin(other, NEXT)
            assert await pair.made(other) == [True] * 4

    run(main())


def test_no_more_is_begun_than_there_is_room_for() -> None:
    async def main() -> None:
        slices = SIDE * SIDE * NUMBERS
        async with Pair(limit=4 * slices) as pair:
            pair.keeper.make()
            pair.begin()
            assert await pair.made() == [True, False, False, False]

    run(main())


def test_a_piece_that_fails_for_another_tile_is_asked_for_again() -> None:
    """Gemms of a layer share operands: what one of them asked for may end with its job, not with the other's."""

    async def main() -> None:
        shared = ((7, False), (8, False))
        over, other = (replace(NEXT, job=job, values=shared) for job in (8, 4))
        async with Pair() as pair:
            fetcher = pair.device.fetcher
            first, second = (
                asyncio.ensure_future(fetcher.operands(pair.address, next(parcel.specs()), filler=False))
                for parcel in (over, other)
            )
            with pytest.raises(JobOver):
                await first
            operands, came = await second
            assert np.array_equal(assembled(operands[0]), A[:16])
            assert sum(each.result().nbytes for each in came) == (16 + SIDE) * SIDE * NUMBERS
            assert {job for job, *_ in pair.keeper.pulls} == {8, 4}

    run(main())


def test_what_has_been_ordered_is_not_begun_again() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.keeper.make()
            assert await pair.made() == [False] * 4, "nothing was begun"
            pair.begin()
            assert await pair.made() == [False] * 4
            assert not pair.device.tiles

    run(main())


def test_what_was_ordered_is_not_remembered_for_ever() -> None:
    async def main() -> None:
        async with Pair() as pair:
            for number in range(3 * RUNS):
                for step in (1, 2):
                    assert await pair.made(replace(NEXT, run=f"product-{number}", step=step)) == [False] * 4
            kept = pair.device.early._ordered
            assert len(kept) == RUNS
            assert all(each.step == 2 and len(each.places) == 4 for each in kept.values())

    run(main())


def test_a_device_whose_owner_wants_it_begins_nothing() -> None:
    worker = SimpleNamespace(status=Status.paused)
    early = DeviceRuntime._early_tile(cast("DeviceRuntime", SimpleNamespace(worker=worker)), *(cast("Any", None),) * 5)
    with pytest.raises(Reschedule):
        asyncio.run(early)


def test_a_run_that_never_goes_on_does_not_hold_up_another() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.begin()
            await pair.until(1)
            others = replace(NEXT, run="other"), replace(FIRST, run="other")
            pair.begin(*others)
            assert await pair.made() == [False] * 4, "it is given up"
            pair.keeper.make()
            assert await pair.made(others[0]) == [True] * 4

    run(main())

"""Tiles that are begun before they are ordered: a device asks, over real connections, and a server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import numpy as np
from distributed import Worker
from distributed.core import Server
from distributed.protocol import to_serialize

from cleave_dask.errors import StepError
from cleave_dask.graph.ir import Range
from cleave_dask.runtime.bells import Bell
from cleave_dask.runtime.early import EarlyTiles
from cleave_dask.runtime.fetching import Fetcher
from cleave_dask.runtime.operands import SliceCache, assembled
from cleave_dask.runtime.shaping import Links
from cleave_dask.runtime.tiles import ParcelSpec, TileSpec

SIDE = 64
A, B = (np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32) for seed in (1, 2))
NUMBERS = 4  # bytes of each

FIRST = ParcelSpec("run", 3, 1, "gemm", "float32", False, None, 10, False, ((0, 0, 8, 0, 8, 0, 8),))
TILES = tuple((n, 16 * n, 16 * n + 16, 0, SIDE, 0, SIDE) for n in range(4))
NEXT = ParcelSpec("run", 3, 2, "gemm", "float32", False, None, 1 << 20, False, TILES, at_hand=(False, True))


class Keeper:
    """Answers pulls: the second operand at once, the first once it is made; of job 9 nothing."""

    def __init__(self) -> None:
        self.pulls: list[tuple[int, int, Range, Range, bool]] = []
        self.bell, self.made = Bell(), False

    async def cleave_pull(
        self, run: str, step: int, job: int, operand: int, first: Range, second: Range, ahead: bool
    ) -> dict[str, Any]:
        self.pulls.append((job, operand, first, second, ahead))
        if job == 9:
            raise StepError("the step is over")
        await self.bell.until(lambda: self.made or not ahead)
        part = (A, B)[operand][slice(*first), slice(*second)]
        return {"parts": [to_serialize(np.ascontiguousarray(part))], "axis": 0}

    def make(self) -> None:
        self.made = True
        self.bell.ring()


class Device:
    """The part of a device that asks, and notes the tiles that it is to make."""

    def __init__(self, worker: Server, limit: int) -> None:
        self.fetcher = Fetcher(cast("Worker", worker), Links(), SliceCache(limit))
        self.early = EarlyTiles(self.fetcher, self.tile)
        self.tiles: list[int] = []
        self.fails = 0

    async def tile(self, spec: TileSpec, server: str, parcel: ParcelSpec, rank: int, size: int) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("the connection broke")
        operands, _ = self.fetcher.operands(server, spec, filler=parcel.filler)
        assert all(piece.arriving.done() for pieces in operands for piece in pieces), "it waits for nothing"
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
        server, worker = Server({"cleave_pull": self.keeper.cleave_pull}), Server({})
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

    async def until(self, count: int) -> None:
        """Wait for pulls."""
        while len(self.keeper.pulls) < count:
            await asyncio.sleep(0.01)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_tiles_are_made_once_their_operands_are_and_before_they_are_ordered() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.begin()
            await pair.until(2)
            assert not pair.device.tiles, "the first operand is not there yet"
            asked = {(operand, ahead) for _, operand, _, _, ahead in pair.keeper.pulls}
            assert asked == {(0, True), (1, False)}, "what is at hand comes at once, over the connection of the rest"
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
            await pair.until(2)
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


def test_the_server_holds_back_the_slices_of_one_job_at_a_time() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.begin()
            await pair.until(2)
            other = replace(NEXT, job=4)
            pair.begin(other)
            assert await pair.made(other) == [False] * 4, "its slices would wait behind the others'"
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

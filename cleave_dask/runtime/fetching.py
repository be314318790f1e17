"""How a device gets operand slices: what a tile misses when its turn comes, and ahead what the next job begins with.

While the results of a job go up, the downlink would have nothing to do: slices of tiles that come next (`early`) are
asked for ahead, those that the server has already as anything else, after what more urgent tiles need, and those that
the end of this job makes over a connection of their own, on which the server answers as soon as it has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
from distributed import Worker

from cleave_dask.runtime.operands import Array, Need, Piece, SliceCache, operand_slices
from cleave_dask.runtime.pipelines import Pipeline, Ways
from cleave_dask.runtime.shaping import Links
from cleave_dask.runtime.tiles import SliceName, TileSpec

Asked = asyncio.Future[Array]
Question: TypeAlias = dict[str, Any]
Answer: TypeAlias = dict[str, Any]
Ask = Callable[[Question], Coroutine[Any, Any, Answer]]


class JobOver(Exception):
    """Somebody else has delivered what a tile was for, and its operands are gone from the server."""


class Fetcher:
    """All that a device asks the server for."""

    def __init__(self, worker: Worker, links: Links, cache: SliceCache) -> None:
        self.cache = cache
        self.ways = Ways(worker)
        self._worker, self._links = worker, links
        self._awaiting = Pipeline(worker, self._announced)
        self._early: WeakSet[Asked] = WeakSet()  # what no tile has used yet

    def turn(self, spec: TileSpec, rank: int, size: int, *, filler: bool) -> AbstractAsyncContextManager[None]:
        """A tile's turn to ask for operands; it need not wait for one if all are here or on their way."""
        asks = any(self.cache.missing(need) for need in operand_slices(spec))
        return self.ways.turn(rank, size, filler=filler) if asks else nullcontext()

    async def operands(self, server: str, spec: TileSpec, *, filler: bool) -> tuple[list[list[Piece]], list[Asked]]:
        """The operands of a tile once they are here, and what came because of it, asked for now or ahead.

        A piece on its way was asked for by another tile, and may fail for its reasons: then this one asks itself.
        """
        needs, came = operand_slices(spec), list[Asked]()
        while True:
            asked = [each for need in needs for each in self._request(partial(self._pull, server, filler=filler), need)]
            operands = [self.cache.pieces(need) for need in needs]
            early = {piece.arriving for pieces in operands for piece in pieces} & set(self._early)
            self._early -= early
            came += [*asked, *early]
            try:
                await arrived(operands)
            except Exception:
                if any(map(_has_failed, asked)):
                    raise
                came = [each for each in came if not _has_failed(each)]
                await asyncio.sleep(0)  # the cache lets go of what has failed as soon as the loop turns
                continue
            return operands, came

    async def ahead(self, server: str, spec: TileSpec, at_hand: Sequence[bool], rank: int, size: int) -> None:
        """Have the operands of a tile come that is still to be ordered: those at hand, and those to be made."""
        needs = list(zip(operand_slices(spec), at_hand, strict=True))
        awaited = self._ask_early(partial(self._await, server), [need for need, here in needs if not here])
        async with self.ways.turn(rank, size, filler=False):
            pull = partial(self._pull, server, filler=False)
            await arrived(self._ask_early(pull, [need for need, here in needs if here]))
        await arrived(awaited)

    @property
    def awaits(self) -> bool:
        """Whether slices that were asked for ahead are still to come."""
        return self._awaiting.waiting

    def give_up(self) -> None:
        """Await nothing more; whoever needs it asks for itself."""
        self._awaiting.close()

    def close(self) -> None:
        """Break the connections."""
        self.ways.close()
        self._awaiting.close()

    def _ask_early(self, ask: Ask, needs: Sequence[Need]) -> list[list[Piece]]:
        self._early.update(each for need in needs for each in self._request(ask, need))
        return [self.cache.pieces(need) for need in needs]

    def _request(self, ask: Ask, need: Need) -> list[Asked]:
        """Have what is missing of a slice fetched; what was asked for."""
        asked: list[Asked] = []
        for part in self.cache.missing(need):
            asked.append(asyncio.ensure_future(_fetched(ask, part.name)))
            self.cache.add(part, asked[-1])
        return asked

    async def _pull(self, server: str, question: Question, *, filler: bool) -> Answer:
        """Ask for what the server has."""

        def call() -> Awaitable[Answer]:
            return self.ways.call(server, "cleave_pull", filler=filler, **question)

        return await self._links.pull(call, _nbytes)

    async def _await(self, server: str, question: Question) -> Answer:
        """Ask for what the server will have."""
        call = partial(self._awaiting.call, server, "cleave_await", **question, device=str(self._worker.name))
        return await self._links.await_pull(call, _nbytes)

    def _announced(self, *, coming: bool) -> None:
        """A slice that was asked for ahead begins to come, or is here: until then no filler begins."""
        if coming:
            self.ways.hold()
            self._links.down_meter.spoil()
        else:
            self.ways.release()


async def _fetched(ask: Ask, name: SliceName) -> Array:
    run, step, job, operand, first, second = name
    answer = await ask({"run": run, "step": step, "job": job, "operand": operand, "first": first, "second": second})
    parts: list[Array] = answer["parts"]
    if not parts:
        raise JobOver(f"all tiles of job {job} of step {step} are delivered")
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=answer["axis"])


def _nbytes(answer: Answer) -> int:
    return sum(part.nbytes for part in answer["parts"])


def _has_failed(asked: Asked) -> bool:
    return asked.done() and (asked.cancelled() or asked.exception() is not None)


async def arrived(operands: Sequence[Sequence[Piece]]) -> None:
    """Wait for pieces; whoever is cancelled does not cancel them for others.

    For none but those still on their way: of two tiles that wait for the same piece, the first to ask goes on first.
    """
    pieces = [piece.arriving for pieces in operands for piece in pieces]
    for piece in pieces:
        if piece.done():
            piece.result()
    await asyncio.gather(*(asyncio.shield(piece) for piece in pieces if not piece.done()))

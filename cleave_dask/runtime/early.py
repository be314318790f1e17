"""Tiles that a device begins before they are ordered: the first of the job that follows the one it has.

Between the last result of a job and the first of the next lie a receipt, a report, a round, and an order, each of them
a message that somebody busy must read. So the last parcel of a job says which tiles come next, and they are made as
soon as their operands are there; the order, when it comes, finds them under way or done. What comes from somebody else
meanwhile, because others have come or gone, is made twice, and the server takes the first.

What the server still has to make is of one job at a time, made by one round that waits for nothing that is asked for
ahead of it (`rounds.following`): so nobody waits in a circle.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cleave_dask.runtime.fetching import Fetcher
from cleave_dask.runtime.tiles import ParcelSpec, TileSpec, own_bytes

logger = logging.getLogger(__name__)

ROOM = 0.25
"""Of what a device keeps of slices, what it asks for early; one tile whatever it needs."""

RUNS = 8
"""Of so many runs it is kept what has been ordered."""

Place = tuple[str, int, int, int]
"""Run, step, job and number of a tile."""

Make = Callable[[TileSpec, str, ParcelSpec, int, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Ordered:
    """The tiles of one step that have been ordered."""

    step: int
    places: set[Place] = field(default_factory=set)


class EarlyTiles:
    """What was begun before it was ordered."""

    def __init__(self, fetcher: Fetcher, make: Make) -> None:
        self._fetcher, self._make = fetcher, make
        self._begun: dict[Place, asyncio.Task[None]] = {}
        self._job: tuple[str, int, int] | None = None  # that they belong to
        self._ordered: OrderedDict[str, _Ordered] = OrderedDict()  # of each run

    def begin(self, server: str, ordered: ParcelSpec, following: ParcelSpec) -> None:
        """A parcel was ordered: begin those that follow it, unless those begun before are still to be ordered.

        A run that comes to no end holds up no other.
        """
        job = ordered.run, ordered.step, ordered.job
        self._begun = {place: task for place, task in self._begun.items() if not task.done() or place[:3] == job}
        if self._job != job and (self._begun or self._fetcher.awaits):
            if self._job is None or self._job[0] == ordered.run:
                return
            self.close()
        self._job = (following.run, following.step, following.job)
        specs = [spec for spec in following.specs() if _place(spec) not in self._orders(spec).places]
        room = ROOM * self._fetcher.cache.limit
        for rank, (spec, size) in enumerate(zip(specs, own_bytes(specs), strict=True), following.rank):
            room -= size
            if room < 0 and rank > following.rank:
                break
            task = asyncio.ensure_future(self._make_early(spec, server, following, rank, size))
            task.add_done_callback(_seen)
            self._begun[_place(spec)] = task

    async def made(self, spec: TileSpec) -> bool:
        """Whether a tile that has been ordered was begun early and is delivered; waits for it if it is under way."""
        self._orders(spec).places.add(_place(spec))
        task = self._begun.pop(_place(spec), None)
        if task is None:
            return False
        try:
            await task
        except Exception as error:  # it is made again, as if it had never been begun
            logger.debug("Tile %s of job %s, begun early, failed: %r", spec.tile, spec.job, error)
            return False
        return True

    def close(self) -> None:
        """Give up what was begun."""
        for task in self._begun.values():
            task.cancel()
        self._begun = {}
        self._fetcher.give_up()

    def _orders(self, spec: TileSpec) -> _Ordered:
        """What has been ordered of a tile's step; of steps before it nothing is kept, nor of runs long ago."""
        found = self._ordered.pop(spec.run, None)
        if found is None or found.step != spec.step:
            found = _Ordered(spec.step)
        self._ordered[spec.run] = found
        if len(self._ordered) > RUNS:
            self._ordered.popitem(last=False)
        return found

    async def _make_early(self, spec: TileSpec, server: str, parcel: ParcelSpec, rank: int, size: int) -> None:
        await self._fetcher.ahead(server, spec, parcel.at_hand, rank, size)
        await self._make(spec, server, parcel, rank, size)


def _place(spec: TileSpec) -> Place:
    return spec.run, spec.step, spec.job, spec.tile


def _seen(task: asyncio.Task[None]) -> None:
    """An error of a tile that is never ordered is nobody's."""
    if not task.cancelled():
        task.exception()

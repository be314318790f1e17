"""Lowering: a planned step graph becomes a Dask graph of blocked gemms.

Each distributed gemm is a `dask.array.Array` whose blocks are its tiles (or are put together from them where the tiles
are no grid or split k). Between them stand the server's rounds. The whole step travels as one small expression that
the scheduler expands, so that a step of 50,000 tiles costs the client next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import dask.array as da
import numpy as np
from dask._expr import Expr
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.typing import Key

from cleave_dask.graph.ir import Gemm, Range, StepGraph
from cleave_dask.planning.parcels import Work, parcel_works
from cleave_dask.planning.values import Plan, Tile, Tiles
from cleave_dask.runtime.device import run_parcel
from cleave_dask.runtime.rounds import Next, Schedule, deaths, following, schedule
from cleave_dask.runtime.tasks import OrderedTask, finish_step, read_block, run_round
from cleave_dask.runtime.tiles import ParcelSpec, Values

EARLY = 4
"""Tiles of a device that it may begin before they are ordered."""


@dataclass(frozen=True, slots=True)
class JobSkeleton:
    """What the scheduler must know of a job: its tiles, and the parcels in which they go out."""

    kind: str
    dtype: str
    causal: bool
    scale: float | None
    cuts: np.ndarray[Any, np.dtype[np.int32]]  # one row per tile: number; rows, cols, ks as start and stop; by parcel
    ends: tuple[int, ...]  # of each parcel, in `cuts`
    devices: tuple[str | None, ...]  # the planned device of each parcel
    works: np.ndarray[Any, np.dtype[np.float64]]  # one row per parcel: the numbers of its `Work`
    after: tuple[int, ...]
    rank: int
    filler: bool  # nothing but the update waits for it
    values: Values = ()
    kept: tuple[bool, ...] = ()
    next: Next | None = None  # what devices may ask for ahead

    def parcels(
        self, run: str, step: int, job: int, *, resumed: bool = False
    ) -> Iterator[tuple[ParcelSpec, str | None, Work]]:
        """The parcels of this job in one step, with the device and the work of each."""
        tiles = [tuple(row) for row in self.cuts.tolist()]
        start = 0
        for stop, device, work in zip(self.ends, self.devices, self.works.tolist(), strict=True):
            rank = self.rank + start
            kind = (self.kind, self.dtype, self.causal, self.scale)
            shared = (self.values, self.kept)
            spec = ParcelSpec(run, step, job, *kind, rank, self.filler, tuple(tiles[start:stop]), resumed, *shared)
            yield spec, device, Work(*work)
            start = stop


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A step without its arithmetic: which tasks there are and what each waits for."""

    rounds: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]  # (jobs, after, rank) of each round
    jobs: tuple[JobSkeleton, ...]
    resumed: bool = False  # some of its tiles are on the server already

    def tasks(self, run: str, step: int) -> dict[Key, OrderedTask]:
        """The Dask graph of one step; its last task is `finish_key(run, step)`."""
        graph: dict[Key, OrderedTask] = {}
        waited: set[int] = set()
        told = {job.next.job for job in self.jobs if job.next is not None and not self.resumed}
        for number, job in enumerate(self.jobs):
            ahead = self._ahead(job, run, step)
            known = number in told
            graph.update(job_tasks(job, run, step, number, resumed=self.resumed, told=known, ahead=ahead))
            waited.update(job.after)
        for number, (jobs, after, rank) in enumerate(self.rounds):
            key = round_key(run, step, number)
            order = [round_key(run, step, other) for other in after]
            for index in jobs:
                order.extend(parcel_key(run, step, index, parcel) for parcel in range(len(self.jobs[index].ends)))
            waited.update(after)
            graph[key] = OrderedTask(key, run_round, run, step, number, after=order, rank=rank)
        last = [round_key(run, step, number) for number in range(len(self.rounds)) if number not in waited]
        key = finish_key(run, step)
        rank = 1 + max(rank for _, _, rank in self.rounds)
        graph[key] = OrderedTask(key, finish_step, run, step, after=last, rank=rank)
        return graph

    def _ahead(self, job: JobSkeleton, run: str, step: int) -> dict[str | None, ParcelSpec]:
        """The first tiles that each device has of the next job, as one parcel."""
        found: dict[str | None, ParcelSpec] = {}
        if job.next is not None and not self.resumed:
            for spec, device, _ in self.jobs[job.next.job].parcels(run, step, job.next.job):
                first = found.get(device, replace(spec, tiles=(), at_hand=job.next.at_hand))
                found[device] = replace(first, tiles=(*first.tiles, *spec.tiles)[:EARLY])
        return found


def job_tasks(
    job: JobSkeleton,
    run: str,
    step: int,
    number: int,
    *,
    resumed: bool = False,
    told: bool = False,
    ahead: Mapping[str | None, ParcelSpec] | None = None,
) -> Iterator[tuple[Key, OrderedTask]]:
    """One task per parcel of a job, whose devices may have been `told` of the first; the last says what lies ahead."""
    order = [round_key(run, step, other) for other in job.after]
    last = {device: index for index, device in enumerate(job.devices)}
    before: Counter[str | None] = Counter()  # tiles of each device
    for index, (spec, device, work) in enumerate(job.parcels(run, step, number, resumed=resumed)):
        key = parcel_key(run, step, number, index)
        if ahead and device is not None and device in ahead and last[device] == index:
            spec = replace(spec, ahead=ahead[device])
        work = replace(work, begun=told and device is not None and before[device] < EARLY)
        before[device] += len(spec.tiles)
        place: dict[str, Any] = {
            "place": "device",
            "rank": spec.rank,
            "device": device,
            "work": work,
            "filler": job.filler,
        }
        yield key, OrderedTask(key, run_parcel, spec, after=order, **place)


def parcel_key(run: str, step: int, job: int, parcel: int) -> Key:
    """Dask key of a parcel."""
    return (f"parcel-{run}-{step}", job, parcel)


def round_key(run: str, step: int, number: int) -> Key:
    """Dask key of a round."""
    return (f"round-{run}-{step}", number)


def finish_key(run: str, step: int) -> str:
    """Dask key of the end of a step, whose result is the step's record."""
    return f"finish-{run}-{step}"


class StepExpression(Expr):
    """One step as the client submits it: a skeleton and a number, expanded into tasks on the scheduler."""

    _parameters = ["run", "step", "skeleton"]  # noqa: RUF012  # an instance variable to Expr

    def __new__(cls, run: str, step: int, skeleton: Skeleton, **kwargs: Any) -> StepExpression:
        """Name it by run and step, so that Dask need not hash the skeleton."""
        kwargs.setdefault("_determ_token", f"{run}-{step}")
        expression: StepExpression = super().__new__(cls, run, step, skeleton, **kwargs)
        return expression

    def __dask_keys__(self) -> list[Key]:
        """The one key that the client waits for."""
        return [finish_key(self.run, self.step)]

    def _layer(self) -> dict[Key, OrderedTask]:
        tasks: dict[Key, OrderedTask] = self.skeleton.tasks(self.run, self.step)
        return tasks


@dataclass(frozen=True)
class Lowered:
    """A step ready to run: the program, its rounds and jobs, and the skeleton that the scheduler gets."""

    graph: StepGraph
    plan: Plan
    schedule: Schedule

    @cached_property
    def skeleton(self) -> Skeleton:
        """What travels to the scheduler."""
        jobs, nexts = self.schedule.jobs, following(self.schedule)
        return Skeleton(
            rounds=tuple((r.jobs, r.after, r.rank) for r in self.schedule.rounds),
            jobs=tuple(job_skeleton(j.gemm, j.tiles, j.after, j.rank, nexts.get(n)) for n, j in enumerate(jobs)),
        )

    @cached_property
    def deaths(self) -> tuple[list[set[str]], ...]:
        """For each round what each of its steps is the last to need."""
        return tuple(deaths(self.graph, this) for this in self.schedule.rounds)

    def tasks(self, run: str = "preview", step: int = 0) -> dict[Key, OrderedTask]:
        """The Dask graph of the step, as the scheduler will expand it."""
        return self.skeleton.tasks(run, step)

    def array(self, gemm: str, run: str = "preview", step: int = 0) -> da.Array:
        """One distributed gemm as a Dask array: look at its `.chunks`, `.visualize()` it."""
        for number, job in enumerate(self.schedule.jobs):
            if job.gemm.name == gemm:
                return _array(job.gemm, job.tiles, self.tasks(run, step), (run, step, number))
        raise KeyError(f"'{gemm}' is not distributed; the distributed gemms are in `.arrays`")

    @property
    def arrays(self) -> Mapping[str, da.Array]:
        """Every distributed gemm as a Dask array, by name."""
        return {job.gemm.name: self.array(job.gemm.name) for job in self.schedule.jobs}


def lower(graph: StepGraph, plan: Plan) -> Lowered:
    """Turn a planned step into the Dask graph that runs it."""
    return Lowered(graph, plan, schedule(graph, plan))


def job_skeleton(
    gemm: Gemm, tiles: Tiles, after: tuple[int, ...], rank: int, following: Next | None = None
) -> JobSkeleton:
    """The compact form of a job."""
    parcels = tiles.parcels()
    order = np.fromiter(chain.from_iterable(numbers for _, numbers in parcels), dtype=np.int32, count=len(tiles))
    cuts = np.column_stack([order, tiles.ranges[order]]).astype(np.int32)
    ends = tuple(accumulate(len(numbers) for _, numbers in parcels))
    parcel = np.repeat(np.arange(len(parcels)), np.diff((0, *ends)))
    works = parcel_works(gemm, cuts[:, 1:], parcel, tiles.owner[order], tiles.kept)
    devices = tuple(device for device, _ in parcels)
    kind = gemm.kind, gemm.tile_dtype, gemm.causal, gemm.scale
    skeleton = JobSkeleton(*kind, cuts, ends, devices, works, after, rank, filler=gemm.role == "dW")
    return replace(skeleton, values=tiles.values, kept=tiles.kept, next=following)


def grid_of(tiles: Iterable[Tile]) -> tuple[list[Range], list[Range]] | None:
    """Row and column ranges if the tiles form a grid (k may be split), else None."""
    cells = {(tile.rows, tile.cols) for tile in tiles}
    rows, cols = sorted({row for row, _ in cells}), sorted({col for _, col in cells})
    apart = all(a[1] == b[0] for spans in (rows, cols) for a, b in pairwise(spans))
    return (rows, cols) if apart and len(cells) == len(rows) * len(cols) else None


def block_tasks(
    name: str,
    tiles: Tiles,
    grid: tuple[list[Range], list[Range]],
    of: tuple[str, int, int],
    *,
    dimensions: int = 2,
) -> dict[Key, OrderedTask]:
    """The server tasks that hand out a gathered gemm block by block."""
    run, step, job = of
    tasks: dict[Key, OrderedTask] = {}
    parcel_of = {number: parcel for parcel, (_, numbers) in enumerate(tiles.parcels()) for number in numbers}
    for i, rows in enumerate(grid[0]):
        for j, cols in enumerate(grid[1]):
            needed = {
                parcel_key(run, step, job, parcel_of[number])
                for number, tile in enumerate(tiles)
                if overlaps(tile.rows, rows) and overlaps(tile.cols, cols)
            }
            key: tuple[Key, ...] = (name, i, j, *(0 for _ in range(dimensions - 2)))
            tasks[key] = OrderedTask(key, read_block, run, step, job, rows, cols, after=needed)
    return tasks


def overlaps(one: Range, other: Range) -> bool:
    """Whether two ranges share anything."""
    return one[0] < other[1] and other[0] < one[1]


def _array(gemm: Gemm, tiles: Tiles, tasks: dict[Key, OrderedTask], of: tuple[str, int, int]) -> da.Array:
    name = f"{gemm.name}-{of[0]}-{of[1]}"
    grid = grid_of(tiles) or ([(0, gemm.m)], [(0, gemm.n)])
    shape = (gemm.m, gemm.n) if gemm.kind == "gemm" else gemm.outputs[0].shape
    if gemm.kind == "logit_sums":  # all columns make one number for each row
        grid, shape = ([(0, gemm.m)], [(0, gemm.n)]), (gemm.m, 1)
    blocks = block_tasks(name, tiles, grid, of, dimensions=len(shape))
    wanted = _closure({**tasks, **blocks}, blocks)
    layers = HighLevelGraph({name: wanted}, {name: set()})
    ratios = zip(shape[:2], (gemm.m, gemm.n), grid, strict=True)  # extents of the array, and of the cuboid
    chunks = [tuple(whole * (stop - start) // cells for start, stop in spans) for whole, cells, spans in ratios]
    dtype = np.dtype("uint16" if gemm.outputs[0].dtype == "bfloat16" else gemm.outputs[0].dtype)
    return da.Array(layers, name, (*chunks, *((extent,) for extent in shape[2:])), dtype=dtype)


def _closure(tasks: dict[Key, OrderedTask], wanted: Iterable[Key]) -> dict[Key, OrderedTask]:
    """The tasks that `wanted` stand on, themselves included."""
    found: dict[Key, OrderedTask] = {}
    stack = list(flatten(wanted, container=list))
    while stack:
        key = stack.pop()
        if key not in found:
            found[key] = tasks[key]
            stack.extend(tasks[key].dependencies)
    return found

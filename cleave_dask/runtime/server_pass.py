"""One pass over one micro-batch, as the server keeps it: its values, the gatherings of its jobs, its rounds.

Whoever has to do with a step looks up its pass once and keeps to it. A copy of a tile that comes late, or a round that
runs on after its step was cut short, ends in a pass that nobody looks at any more, and never in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from time import perf_counter, thread_time
from typing import Any

import torch

from cleave_dask.graph.ir import Gemm, Op, Range
from cleave_dask.runtime.counting import Counters
from cleave_dask.runtime.interpreter import Scope, run_gemm, run_op
from cleave_dask.runtime.lowering import Lowered
from cleave_dask.runtime.rounds import Job, Round
from cleave_dask.runtime.server_checking import Checker
from cleave_dask.runtime.server_gathering import Array, Gathering, TileRejected, operand_slice, tile_nbytes
from cleave_dask.runtime.tiles_in_flight import PassOnDisk

_DRAWING = Lock()
"""Held by a round that draws random numbers: torch has one stream of them for the whole process."""


class Pass:
    """One pass over one micro-batch. Tiles, pulls and rounds may come in any thread."""

    def __init__(
        self,
        step: int,
        lowered: Lowered,
        values: dict[str, Any],
        *,
        random_state: bytes,
        on_disk: PassOnDisk | None,
        counters: Counters,
    ) -> None:
        self.step = step
        self.lowered = lowered
        self.values = values  # by name; one without readers is freed
        self.random_state = random_state  # torch's, as the next round that draws from it finds it
        self.on_disk = on_disk
        self.counters = counters  # of the update that this pass is a part of
        self.gatherings: dict[int, Gathering] = {}  # of the jobs that have begun
        self._checkers: dict[int, Checker] = {}
        self._readers = dict(lowered.schedule.readers)
        self._outcomes: dict[int, Future[None]] = {}  # of the rounds that were started
        self._lock = Lock()
        self._building = Lock()

    def loss(self) -> float:
        """The loss, once the rounds are done."""
        return float(self.values[self.lowered.graph.loss])

    def job(self, number: int) -> Job:
        """A job of the program."""
        return self.lowered.schedule.jobs[number]

    # What devices ask for, and send

    def slice(self, job: int, operand: int, ranges: tuple[Range, Range]) -> tuple[list[Array], int]:
        """The slice of an operand, in parts, and the axis along which they are joined; no parts if its job is over."""
        if self._is_over(job):
            return [], 0
        try:
            return operand_slice(self.job(job).gemm, operand, ranges, self._checker(job).read)
        except KeyError:
            if self._is_over(job):  # and its round has run meanwhile
                return [], 0
            raise

    def published(self, job: int, operand: int) -> bool:
        """Whether the numbers of an operand are there, or its job is over, so that nobody waits for them."""
        return self._is_over(job) or self._has_operands(job, operand)

    def _has_operands(self, job: int, *which: int) -> bool:
        """Whether the numbers of these operands of a job are there, or of all."""
        operands = self.job(job).gemm.inputs
        some = [operands[each] for each in which] or operands
        return all(part.name in self.values for operand in some for part in operand.parts)

    def _is_over(self, job: int) -> bool:
        """Whether all tiles of a job are here."""
        gathering = self.gatherings.get(job)
        return gathering is not None and gathering.complete

    def due(self, job: int) -> int | None:
        """The round of a job, if it can run and nobody has begun it."""
        number = self.lowered.schedule.round_of[job]
        this = self.lowered.schedule.rounds[number]
        before = {*this.after, *(other for job in this.jobs for other in self.job(job).after)}
        with self._lock:
            if number in self._outcomes or not all(map(self._done, before)):
                return None
        return number if all(map(self._is_over, this.jobs)) else None

    def _done(self, number: int) -> bool:
        outcome = self._outcomes.get(number)
        return outcome is not None and outcome.done() and outcome.exception() is None

    def operands(self, job: int, spans: Sequence[tuple[Range, Range]]) -> list[Array]:
        """The slices of all operands of a tile, as they would travel."""
        return self._checker(job).operands(spans)

    def tile_nbytes(self, job: int, tile: int) -> int | None:
        """Bytes of a tile that a device may push; None if there is no such tile."""
        if job >= len(self.lowered.schedule.jobs):
            return None
        planned = self.job(job)
        return tile_nbytes(planned.gemm, planned.tiles, tile)

    def accept(self, job: int, tile: int, arrays: Sequence[Array], *, check: bool) -> bool:
        """Take a tile; False if it is here already. Raises TileRejected if it is not what was asked for."""
        if not self._has_operands(job) and not self._is_over(job):  # in this order: they go when it is over
            raise TileRejected(f"tile {tile} of {self.job(job).gemm.name} came before its operands were made")
        return self.gathering(job).accept(tile, arrays, partial(self._right, job) if check else None)

    def gathering(self, job: int) -> Gathering:
        """Where the tiles of a job are put together; those that are on disk from before are there at once."""
        found = self.gatherings.get(job)
        if found is None:
            with self._building:
                found = self.gatherings.get(job)
                if found is None:
                    found = self.gatherings[job] = self._begun(job)
        return found

    def _begun(self, job: int) -> Gathering:
        """A gathering with the tiles that are on disk."""
        gathering = Gathering(self.job(job).gemm, self.job(job).tiles)
        if self.on_disk is not None:
            self.counters.found(sum(gathering.accept(tile, arrays) for tile, arrays in self.on_disk.stored(job)))
        return gathering

    def _right(self, job: int, tile: int, arrays: Sequence[Array]) -> bool:
        """Whether a tile is what its operands make."""
        start = thread_time()  # what it costs, not how long it waited for a core
        right = self._checker(job).right(tile, arrays)
        self.counters.spend("verify", thread_time() - start)
        return right

    def _checker(self, job: int) -> Checker:
        """What knows the operands of a job as they travel, and checks its tiles."""
        found = self._checkers.get(job)
        if found is None:  # it reads from the values, not from the pass: no circle keeps a dropped pass in memory
            made = Checker(self.job(job).gemm, self.job(job).tiles, self.values.__getitem__)
            found = self._checkers.setdefault(job, made)
        return found

    # Rounds

    def run_round(self, number: int) -> None:
        """Run a round, once: whoever comes again waits until it is done, and gets what was raised in it."""
        with self._lock:
            first = number not in self._outcomes
            outcome = self._outcomes.setdefault(number, Future())
        if first:
            try:
                self._run(number)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)
        outcome.result()

    def _run(self, number: int) -> None:
        """Gather the jobs of a round, run its ops, publish what others need, free what nobody needs."""
        start = perf_counter()
        this = self.lowered.schedule.rounds[number]
        local = Scope(self.values)
        released = list(this.reads)
        for job in this.jobs:
            gathering = self.gathering(job)
            assert gathering.complete, f"round {number} began before job {job} was gathered"
            for value, tensor in zip(gathering.gemm.outputs, gathering.finish(self.values.__getitem__), strict=True):
                local[value.name] = tensor
            released.extend({part.name for operand in gathering.gemm.inputs for part in operand.parts})
        self._run_steps(this, self.lowered.deaths[number], local)
        self.values.update({name: local[name] for name in this.publishes})
        self._release(released)
        for job in this.jobs:
            self.gatherings[job].outputs = []
            self._checkers.pop(job, None)
        self.counters.spend("rounds", perf_counter() - start)

    def _run_steps(self, this: Round, deaths: Sequence[set[str]], local: Scope) -> None:
        """The ops of a round, in program order; a value goes with the last that needs it."""
        items = [self.lowered.graph.steps[position] for position in this.steps]
        with self._stream() if any(isinstance(item, Op) and item.random for item in items) else nullcontext():
            for item, dead in zip(items, deaths, strict=True):
                if isinstance(item, Gemm):
                    local.update(zip(item.writes, run_gemm(item, local), strict=True))
                else:
                    local[item.name] = run_op(item, local)
                for name in dead:
                    local.pop(name, None)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Random numbers are those of this pass, whatever else draws in this process."""
        with _DRAWING:
            torch.set_rng_state(torch.frombuffer(bytearray(self.random_state), dtype=torch.uint8))
            yield
            self.random_state = torch.get_rng_state().numpy().tobytes()

    def _release(self, names: Iterable[str]) -> None:
        """One reader less for each; a value without readers is freed."""
        with self._lock:
            for name in names:
                if name in self._readers:
                    self._readers[name] -= 1
                    if self._readers[name] == 0:
                        self.values.pop(name, None)

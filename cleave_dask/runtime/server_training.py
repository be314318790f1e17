"""One model under training, as the server keeps it: weights, optimizer state, and the values of the step in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from threading import Lock
from time import perf_counter, thread_time, time
from typing import Any

import torch

from cleave_dask.errors import DistrustedError, StepError
from cleave_dask.graph.ir import Gemm, Range, StepGraph
from cleave_dask.planning.calibration import Calibration
from cleave_dask.planning.cost import tile_flops
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.counting import Counters
from cleave_dask.runtime.history import History
from cleave_dask.runtime.interpreter import Scope, load_constants, owned, run_gemm, run_op
from cleave_dask.runtime.lowering import Lowered
from cleave_dask.runtime.rounds import Round, deaths
from cleave_dask.runtime.server_checking import Checker
from cleave_dask.runtime.server_gathering import Array, Attempt, Gathering, TileRejected, operand_slice, tile_nbytes
from cleave_dask.runtime.store import TileStore
from cleave_dask.runtime.tiles_in_flight import PassOnDisk, TilesInFlight
from cleave_dask.runtime.trace import ACCEPTED, DUPLICATE, Recorder
from cleave_dask.runtime.wire import to_wire


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients become an update."""

    clip_norm: float | None = None  # largest norm of all gradients together
    accumulate: int = 1  # micro-batches whose gradients are averaged into one update


_OVER = -1
"""The step in flight, between two steps."""


class Training:
    """Weights, buffers and optimizer of one model, and the program that trains it."""

    def __init__(self, name: str, client: str, settings: Settings, random_state: bytes) -> None:
        self.name = name
        self.client = client  # whose it is, as the scheduler knows it
        self.settings = settings
        self.random_state = random_state  # torch's, as it is between two steps
        self.weights: dict[str, torch.Tensor] = {}  # parameters and buffers by their full name
        self.store: TileStore | None = None  # where it is saved, once it has been
        self._optimizer: torch.optim.Optimizer | None = None
        self.lr_schedule: torch.optim.lr_scheduler.LRScheduler | None = None
        self.lowered: Lowered | None = None
        self.updates = 0  # optimizer updates done
        self.step = _OVER  # the step in flight: one pass over one micro-batch
        self.values: dict[str, Any] = {}
        self.counters = Counters(1)  # of the step in flight, or of the last one
        self.trace = Recorder()
        self.history = History()
        self.told = 0.0  # when the last event happened that is on disk
        self.programs = 0  # that were loaded so far
        self.plans: deque[tuple[int, Plan]] = deque(maxlen=2)  # this one and the one before, each with its first row
        self.began = time()  # when the last step began, by the clock of the trace
        self.flight = TilesInFlight()
        self._on_disk: PassOnDisk | None = None
        self.calibration = Calibration()
        self._losses: list[float] = []
        self._readers: dict[str, int] = {}
        self._gatherings: dict[int, Gathering] = {}
        self._checkers: dict[int, Checker] = {}
        self._distrusted: set[str] = set()  # devices that have sent a wrong tile
        self._start: tuple[bytes, dict[str, torch.Tensor]] = (b"", {})  # random state and buffers before this update
        self._deaths: list[list[set[str]]] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._lock = Lock()
        self._building = Lock()
        self.updating = Lock()  # held while weights and optimizer state change, or are saved

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the weights."""
        assert self._optimizer is not None, "the client sends the optimizer before anything else can happen"
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def graph(self) -> StepGraph:
        """The program."""
        assert self.lowered is not None
        return self.lowered.graph

    def load(self, lowered: Lowered) -> None:
        """Take a program and its plan; the next step runs it."""
        self.lowered = lowered
        self.programs += 1
        self.plans.append((self.trace.count, lowered.plan))
        self.values.clear()
        self._deaths = [deaths(lowered.graph, this) for this in lowered.schedule.rounds]
        self._constants = self.constants()

    def constants(self) -> dict[str, torch.Tensor]:
        """The constants of the program, by source."""
        return load_constants(self.graph)

    def loss(self) -> float:
        """The loss of the step in flight, once its rounds are done."""
        return float(self.read(self.graph.loss))

    def begin(self, step: int, batch: Mapping[str, torch.Tensor], *, first: bool = True) -> None:
        """Start a step on a batch, the first of an update or another; what an unfinished one left behind is dropped."""
        assert self.lowered is not None
        self.step = _OVER
        if first:
            if self._losses:
                self._rewind()
            self.counters = Counters(self.updates + 1)
            self.began = time()
            self._start = self.random_state, self._copied_buffers() if self.settings.accumulate > 1 else {}
        self._gatherings, self._checkers = {}, {}
        self._on_disk = self.flight.begin(self.lowered, {name: to_wire(tensor) for name, tensor in batch.items()}, self.random_state)
        torch.set_rng_state(torch.frombuffer(bytearray(self.random_state), dtype=torch.uint8))
        self._readers = dict(self.lowered.schedule.readers)
        sources = {"param": self.weights, "buffer": self.weights, "batch": batch, "constant": self._constants}
        self.values = {item.value.name: sources[item.kind][item.source] for item in self.graph.inputs}
        self.step = step

    def read(self, name: str) -> torch.Tensor:
        """A value of the step in flight."""
        tensor: torch.Tensor = self.values[name]
        return tensor

    def slice(self, step: int, job: int, operand: int, ranges: tuple[Range, Range]) -> tuple[list[Array], int]:
        """The slice of an operand that a device asks for."""
        self._check_step(step)
        start = perf_counter()
        parts, axis = operand_slice(self._job_gemm(job), operand, ranges, self._checker(job).read)
        self.counters.spend("slice", perf_counter() - start)
        self.counters.sent(sum(part.nbytes for part in parts))
        return parts, axis

    def operands(self, step: int, job: int, spans: Sequence[tuple[Range, Range]]) -> list[Array]:
        """The slices of all operands of a tile that is made here, as they would travel."""
        self._check_step(step)
        return self._checker(job).operands(spans)

    def _checker(self, job: int) -> Checker:
        """What knows the operands of a job as they travel, and checks its tiles."""
        found = self._checkers.get(job)
        if found is None:
            assert self.lowered is not None
            planned = self.lowered.schedule.jobs[job]
            found = self._checkers.setdefault(job, Checker(planned.gemm, planned.tiles, self.read))
        return found

    def accept(
        self, step: int, job: int, tile: int, arrays: list[Array], attempt: Attempt, *, check: bool = True
    ) -> bool:
        """Take a tile that a device pushed; False if it is here already."""
        self._check_step(step)
        assert self.lowered is not None
        start = perf_counter()
        gathering, on_disk = self.gathering(job), self._on_disk
        if not check:
            self.counters.unchecked.add(attempt.device)  # before its tile can be in any sum
        try:
            fresh = gathering.accept(tile, arrays, partial(self._right, job) if check else None)
        except TileRejected as error:
            self.counters.refused()
            self._note(gathering.gemm, tile, attempt, perf_counter() - start, str(error), arrays)
            raise
        seconds = perf_counter() - start
        if fresh and check:
            self.flight.offer(on_disk, job, tile, arrays)
        self._note(gathering.gemm, tile, attempt, seconds, ACCEPTED if fresh else DUPLICATE, arrays)
        self.counters.took(attempt, arrays, seconds, fresh=fresh)
        if fresh:
            planned = self.lowered.schedule.jobs[job].tiles[tile]
            work = tile_flops(self._job_gemm(job), planned), attempt.compute_seconds
            with self._lock:
                self.calibration.observe(attempt.device, {"flops": work, **attempt.moved})
        return fresh

    def _right(self, job: int, tile: int, arrays: Sequence[Array]) -> bool:
        """Whether a tile is what its operands make."""
        start = thread_time()  # what it costs, not how long it waited for a core
        right = self._checker(job).right(tile, arrays)
        self.counters.spend("verify", thread_time() - start)
        return right

    def distrust(self, identity: str) -> None:
        """A device has sent a wrong tile, to this run or to another: what it was believed before is done again."""
        self._distrusted.add(identity)

    def wanted(self, step: int, job: int, tiles: list[int]) -> list[int]:
        """Which of these tiles have not come yet."""
        self._check_step(step)
        return self.gathering(job).wanted(tiles)

    def _note(
        self, gemm: Gemm, tile: int, attempt: Attempt, seconds: float, outcome: str, arrays: Iterable[Any]
    ) -> None:
        """A row of the trace."""
        told = (attempt.started, attempt.queued_seconds, attempt.pull_seconds, attempt.compute_seconds)
        moved = attempt.down_bytes, attempt.moved_up(arrays)
        head = (self.counters.number, gemm.name, tile, attempt.device)
        self.trace.add((*head, *told, attempt.upload_seconds, seconds, outcome, *moved))

    def tile_nbytes(self, step: int, job: int, tile: int) -> int | None:
        """Bytes of a tile that a device may push; None if this step has no such tile."""
        self._check_step(step)
        assert self.lowered is not None
        jobs = self.lowered.schedule.jobs
        return tile_nbytes(jobs[job].gemm, jobs[job].tiles, tile) if job < len(jobs) else None

    def gathering(self, job: int) -> Gathering:
        """Where the tiles of a job are put together; those that are on disk from before are there at once."""
        assert self.lowered is not None
        found = self._gatherings.get(job)
        if found is None:
            with self._building:
                found = self._gatherings.get(job)
                if found is None:
                    planned = self.lowered.schedule.jobs[job]
                    found = Gathering(planned.gemm, planned.tiles)
                    stored = () if self._on_disk is None else self._on_disk.stored(job)
                    reused = sum(found.accept(tile, arrays) for tile, arrays in stored)
                    self._gatherings[job] = found
                    self.counters.found(reused)
        return found

    def run_round(self, step: int, number: int) -> None:
        """Gather the jobs of a round, run its ops, publish what others need, free what nobody needs."""
        self._check_step(step)
        self._check_trust()
        start = perf_counter()
        assert self.lowered is not None
        this: Round = self.lowered.schedule.rounds[number]
        local = Scope(self.values)
        released = list(this.reads)
        for job in this.jobs:
            gathering = self.gathering(job)
            assert gathering.complete, f"round {number} began before job {job} was gathered"
            for value, tensor in zip(gathering.gemm.outputs, gathering.finish(self.read), strict=True):
                local[value.name] = tensor
            released.extend({part.name for operand in gathering.gemm.inputs for part in operand.parts})
        for position, dead in zip(this.steps, self._deaths[number], strict=True):
            item = self.graph.steps[position]
            if isinstance(item, Gemm):
                local.update(zip(item.writes, run_gemm(item, local), strict=True))
            else:
                local[item.name] = run_op(item, local)
            for name in dead:
                local.pop(name, None)
        self.values.update({name: local[name] for name in this.publishes})
        self._release(released)
        for job in this.jobs:
            self._gatherings[job].outputs = []
            self._checkers.pop(job, None)
        self.counters.spend("rounds", perf_counter() - start)

    def _release(self, names: Iterable[str]) -> None:
        """One reader less for each; a value without readers is freed."""
        with self._lock:
            for name in names:
                if name in self._readers:
                    self._readers[name] -= 1
                    if self._readers[name] == 0:
                        self.values.pop(name, None)

    def finish(self, step: int) -> dict[str, Any]:
        """End of a step: keep its gradients, and update the weights when the last micro-batch is in."""
        self._check_step(step)
        self._check_trust()
        loss = self.loss()
        if not isfinite(loss):
            self._rewind()
            raise StepError(
                f"the loss of step {self.updates} is {loss}; the weights are unchanged. "
                "Lower the learning rate, set clip_norm, or look for bad values in the batch"
            )
        self._losses.append(loss)
        self.random_state = torch.get_rng_state().numpy().tobytes()
        self._collect_gradients()
        self.flight.end()
        last = len(self._losses) == self.settings.accumulate
        start = perf_counter()
        if last:
            with self.updating:
                self._update()
        self.counters.spend("update", perf_counter() - start)
        record = self.counters.record(self.updates, sum(self._losses) / len(self._losses))
        record["figures"] = self.calibration.figures()
        if last:
            self._losses = []
            self.history.add({**record, "ended": time()})
        self.values = {}
        self._gatherings, self._checkers = {}, {}
        self.step = _OVER
        self.trace.seal()
        return record

    def _collect_gradients(self) -> None:
        """Add the gradients of this micro-batch to those of the ones before, each with its share."""
        share = 1 / self.settings.accumulate
        taken = {self.values[item.value.name].untyped_storage().data_ptr() for item in self.graph.inputs}
        for parameter, value in self.graph.grads:
            tensor, gradient = self.weights[parameter], owned(self.values.pop(value), taken)
            if share != 1:
                gradient = gradient.mul_(share)
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
        for buffer, value in self.graph.buffers:
            self.weights[buffer].copy_(self.values[value])

    def _update(self) -> None:
        """One optimizer update, in place."""
        self.flight.leave()
        if self.settings.clip_norm is not None:
            parameters = [self.weights[name] for name, _ in self.graph.grads]
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.lr_schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.lr_schedule.step(sum(self._losses) / len(self._losses))
        elif self.lr_schedule is not None:
            self.lr_schedule.step()
        self.updates += 1

    def abandon(self) -> None:
        """Forget the step in flight and the gradients gathered for it."""
        self.flight.leave()
        self.values, self._gatherings, self._checkers, self._losses = {}, {}, {}, []
        self.step = _OVER
        for parameter in self.weights.values():
            parameter.grad = None

    def _rewind(self) -> None:
        """Go back to where this update began."""
        self.abandon()
        self.random_state, buffers = self._start
        for name, tensor in buffers.items():
            self.weights[name].copy_(tensor)

    def settled(self) -> tuple[bytes, dict[str, torch.Tensor]]:
        """Random state, parameters and buffers as the last update left them, whatever micro-batches came since."""
        if not self._losses:
            return self.random_state, self.weights
        random_state, buffers = self._start
        return random_state, {**self.weights, **buffers}

    def _copied_buffers(self) -> dict[str, torch.Tensor]:
        return {name: self.weights[name].clone() for name, _ in self.graph.buffers}

    def close(self) -> None:
        """Let go of the checkpoint's folder."""
        self.flight.close()
        if self.store is not None:
            self.store.close()

    def _check_step(self, step: int) -> None:
        if step != self.step:
            now = "no step" if self.step == _OVER else f"step {self.step}"
            raise StepError(f"step {step} of '{self.name}' is over; {now} is in flight")

    def _check_trust(self) -> None:
        liars = self.counters.unchecked & self._distrusted
        if liars:
            raise DistrustedError(
                f"{', '.join(sorted(liars))} sent a wrong tile after unchecked ones of this step; it is done again"
            )

    def _job_gemm(self, job: int) -> Gemm:
        assert self.lowered is not None
        return self.lowered.schedule.jobs[job].gemm

"""One model under training, as the server keeps it: weights, optimizer state, the pass in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from threading import Lock
from time import perf_counter, time
from typing import Any

import torch

from cleave_dask.errors import DistrustedError, StepError
from cleave_dask.graph.ir import Range, StepGraph
from cleave_dask.planning.calibration import Calibration
from cleave_dask.planning.cost import tile_flops
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.counting import Counters
from cleave_dask.runtime.history import History
from cleave_dask.runtime.interpreter import load_constants, owned
from cleave_dask.runtime.lowering import Lowered
from cleave_dask.runtime.server_gathering import Array, Attempt, Gathering, TileRejected
from cleave_dask.runtime.server_pass import Pass
from cleave_dask.runtime.store import TileStore
from cleave_dask.runtime.tiles_in_flight import TilesInFlight
from cleave_dask.runtime.trace import ACCEPTED, DUPLICATE, Recorder
from cleave_dask.runtime.wire import to_wire


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients become an update."""

    clip_norm: float | None = None  # largest norm of all gradients together
    accumulate: int = 1  # micro-batches whose gradients are averaged into one update


class Training:
    """Weights, buffers and optimizer of one model, and the program that trains it."""

    pass_type = Pass

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
        self.current: Pass | None = None  # the step in flight: one pass over one micro-batch
        self.counters = Counters(1)  # of the step in flight, or of the last one
        self.trace = Recorder()
        self.history = History()
        self.told = 0.0  # when the last event happened that is on disk
        self.programs = 0  # that were loaded so far
        self.plans: deque[tuple[int, Plan]] = deque(maxlen=2)  # this one and the one before, each with its first row
        self.began = time()  # when the last step began, by the clock of the trace
        self.flight = TilesInFlight()
        self.calibration = Calibration()
        self._losses: list[float] = []
        self._distrusted: set[str] = set()  # devices that have sent a wrong tile
        self._start: tuple[bytes, dict[str, torch.Tensor]] = (b"", {})  # random state and buffers before this update
        self._constants: dict[str, torch.Tensor] = {}
        self._calibrating = Lock()
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
        self.current = None
        self.lowered = lowered
        self.programs += 1
        self.plans.append((self.trace.count, lowered.plan))
        self._constants = self.constants()

    def constants(self) -> dict[str, torch.Tensor]:
        """The constants of the program, by source."""
        return load_constants(self.graph)

    def begin(self, step: int, batch: Mapping[str, torch.Tensor], *, first: bool = True) -> None:
        """Start a step on a batch, the first of an update or another; what an unfinished one left behind is dropped."""
        assert self.lowered is not None
        self.current = None
        if first:
            if self._losses:
                self._rewind()
            self.counters = Counters(self.updates + 1)
            self.began = time()
            self._start = self.random_state, self._copied_buffers() if self.settings.accumulate > 1 else {}
        wired = {name: to_wire(tensor) for name, tensor in batch.items()}
        self.current = self.pass_type(
            step,
            self.lowered,
            self.inputs(batch),
            random_state=self.random_state,
            on_disk=self.flight.begin(self.lowered, wired, self.random_state),
            counters=self.counters,
        )

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The values that a pass starts from, by name."""
        sources = {"param": self.weights, "buffer": self.weights, "batch": batch, "constant": self._constants}
        return {item.value.name: sources[item.kind][item.source] for item in self.graph.inputs}

    def pass_of(self, step: int) -> Pass:
        """The pass of a step, if that is the one in flight; whoever has it keeps to it, also when it is over."""
        found = self.current
        if found is None or found.step != step:
            now = "no step" if found is None else f"step {found.step}"
            raise StepError(f"step {step} of '{self.name}' is over; {now} is in flight")
        return found

    def slice(self, step: int, job: int, operand: int, ranges: tuple[Range, Range]) -> tuple[list[Array], int]:
        """The slice of an operand that a device asks for."""
        found = self.pass_of(step)
        start = perf_counter()
        parts, axis = found.slice(job, operand, ranges)
        found.counters.spend("slice", perf_counter() - start)
        found.counters.sent(sum(part.nbytes for part in parts))
        return parts, axis

    def published(self, step: int, job: int, operand: int) -> bool:
        """Whether an operand is there."""
        return self.pass_of(step).published(job, operand)

    def due(self, step: int, job: int) -> int | None:
        """The round of a job, if it can run and nobody has begun it."""
        return self.pass_of(step).due(job)

    def operands(self, step: int, job: int, spans: Sequence[tuple[Range, Range]]) -> list[Array]:
        """The slices of all operands of a tile that is made here, as they would travel."""
        return self.pass_of(step).operands(job, spans)

    def accept(
        self, step: int, job: int, tile: int, arrays: list[Array], attempt: Attempt, *, check: bool = True
    ) -> bool:
        """Take a tile that a device pushed; False if it is here already."""
        found = self.pass_of(step)
        start = perf_counter()
        planned = found.job(job)
        head = (found.counters.number, planned.gemm.name, tile)
        if not check:
            found.counters.unchecked.add(attempt.device)  # before its tile can be in any sum
        try:
            fresh = found.accept(job, tile, arrays, check=check)
        except TileRejected as error:
            found.counters.refused()
            self._note(head, attempt, perf_counter() - start, str(error), arrays)
            raise
        seconds = perf_counter() - start
        if fresh and check:
            self.flight.offer(found.on_disk, job, tile, arrays)
        self._note(head, attempt, seconds, ACCEPTED if fresh else DUPLICATE, arrays)
        found.counters.took(attempt, arrays, seconds, fresh=fresh)
        if fresh:
            work = tile_flops(planned.gemm, planned.tiles[tile]), attempt.compute_seconds
            with self._calibrating:
                self.calibration.observe(attempt.device, {"flops": work, **attempt.moved})
        return fresh

    def distrust(self, identity: str) -> None:
        """A device has sent a wrong tile, to this run or to another: what it was believed before is done again."""
        self._distrusted.add(identity)

    def wanted(self, step: int, job: int, tiles: list[int]) -> list[int]:
        """Which of these tiles have not come yet."""
        return self.pass_of(step).gathering(job).wanted(tiles)

    def _note(
        self, head: tuple[int, str, int], attempt: Attempt, seconds: float, outcome: str, arrays: Iterable[Any]
    ) -> None:
        """A row of the trace; it begins with step, gemm and tile."""
        told = (attempt.started, attempt.queued_seconds, attempt.pull_seconds, attempt.compute_seconds)
        moved = attempt.down_bytes, attempt.moved_up(arrays)
        self.trace.add((*head, attempt.device, *told, attempt.upload_seconds, seconds, outcome, *moved))

    def tile_nbytes(self, step: int, job: int, tile: int) -> int | None:
        """Bytes of a tile that a device may push; None if this step has no such tile."""
        return self.pass_of(step).tile_nbytes(job, tile)

    def gathering(self, step: int, job: int) -> Gathering:
        """Where the tiles of a job are put together."""
        return self.pass_of(step).gathering(job)

    def run_round(self, step: int, number: int) -> None:
        """Gather the jobs of a round, run its ops, publish what others need, free what nobody needs."""
        found = self.pass_of(step)
        self._check_trust(found)
        found.run_round(number)

    def finish(self, step: int) -> dict[str, Any]:
        """End of a step: keep its gradients, and update the weights when the last micro-batch is in."""
        found = self.pass_of(step)
        self._check_trust(found)
        loss = found.loss()
        if not isfinite(loss):
            self._rewind()
            raise StepError(
                f"the loss of step {self.updates} is {loss}; the weights are unchanged. "
                "Lower the learning rate, set clip_norm, or look for bad values in the batch"
            )
        self._losses.append(loss)
        self.random_state = found.random_state
        self._collect_gradients(found)
        self.flight.end()
        last = len(self._losses) == self.settings.accumulate
        start = perf_counter()
        if last:
            with self.updating:
                self._update()
        found.counters.spend("update", perf_counter() - start)
        record = found.counters.record(self.updates, sum(self._losses) / len(self._losses))
        record["figures"] = self.calibration.figures()
        if last:
            self._losses = []
            self.history.add({**record, "ended": time()})
        self.current = None
        self.trace.seal()
        return record

    def _collect_gradients(self, found: Pass) -> None:
        """Add the gradients of this micro-batch to those of the ones before, each with its share."""
        share = 1 / self.settings.accumulate
        graph, values = found.lowered.graph, found.values
        taken = {values[item.value.name].untyped_storage().data_ptr() for item in graph.inputs}
        for parameter, value in graph.grads:
            tensor, gradient = self.weights[parameter], owned(values.pop(value), taken)
            if share != 1:
                gradient = gradient.mul_(share)
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
        for buffer, value in graph.buffers:
            self.weights[buffer].copy_(values[value])

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
        self.current, self._losses = None, []
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

    def _check_trust(self, found: Pass) -> None:
        liars = found.counters.unchecked & self._distrusted
        if liars:
            raise DistrustedError(
                f"{', '.join(sorted(liars))} sent a wrong tile after unchecked ones of this step; it is done again"
            )

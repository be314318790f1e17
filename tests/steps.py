"""A training step in this process: the server's side as it is, and a device that is a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.kernels import load_kernel
from cleave_dask.runtime.lowering import lower
from cleave_dask.runtime.multiplying import multiplied
from cleave_dask.runtime.server_gathering import Array, Attempt
from cleave_dask.runtime.server_saving import Limits, restore_training, save_training
from cleave_dask.runtime.server_training import Settings, Training
from cleave_dask.runtime.tiles import TileSpec, slice_names

LIMITS = Limits(tiles=1 << 30)
cut = partial(plan, min_flops=0, grid=(2, 2, 2))
KERNEL = load_kernel("numpy")

Module = torch.nn.Module
Batch = dict[str, torch.Tensor]
Planner = Callable[[Any, Fleet], Plan]


_GRAPHS: dict[object, StepGraph] = {}  # capturing takes seconds, and the same module gives the same graph


def captured(module: Module, batch: Batch) -> StepGraph:
    """The step of a module; captured once."""
    key = str(module), *((name, tensor.shape) for name, tensor in batch.items())
    if key not in _GRAPHS:
        _GRAPHS[key] = capture(module, **batch)
    return _GRAPHS[key]


class Local:
    """A training on this process's own hands."""

    def __init__(
        self, module: Module, batch: Batch, *, planner: Planner = cut, accumulate: int = 1, seed: int = 7
    ) -> None:
        torch.manual_seed(seed)
        self.graph = captured(module, batch)
        self.training = Training("run", "client", Settings(accumulate=accumulate), self._random_state())
        self.training.weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.training.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.training.load(lower(self.graph, planner(self.graph, Fleet.sample(3))))
        self.accumulate = accumulate
        self.passes = self.finished = 0

    def _random_state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    def step(self, batch: Batch, *, stop_after: int | None = None) -> dict[str, Any]:
        """One pass; `stop_after` so many tiles it is left as it is, and the record is empty."""
        training, step = self.training, self.passes
        assert training.lowered is not None
        self.passes += 1
        training.begin(step, flatten_batch(self.graph, (), batch), first=self.finished % self.accumulate == 0)
        skeleton = training.lowered.skeleton
        ready: set[int] = set()
        multiplied: set[int] = set()
        done = 0
        while len(ready) < len(skeleton.rounds):
            for number, (jobs, after, _) in enumerate(skeleton.rounds):
                if number in ready or not set(after) <= ready or not set(jobs) <= multiplied:
                    continue
                with torch.no_grad():
                    training.run_round(step, number)
                ready.add(number)
            for number, job in enumerate(skeleton.jobs):
                if number in multiplied or not set(job.after) <= ready:
                    continue
                specs = [spec for parcel, _, _ in job.parcels("run", step, number) for spec in parcel.specs()]
                for spec in self.open(specs):
                    if done == stop_after:
                        return {}
                    self.multiply(spec)
                    done += 1
                multiplied.add(number)
        record = training.finish(step)
        self.finished += 1
        return record

    def open(self, specs: Iterable[TileSpec]) -> list[TileSpec]:
        """The tiles that have not come yet."""
        return [spec for spec in specs if spec.tile not in self.training.gathering(spec.step, spec.job).accepted]

    def multiply(self, spec: TileSpec) -> None:
        """What a device does."""
        self.training.accept(spec.step, spec.job, spec.tile, self.made(spec), Attempt("here", 0.0, 0.0))

    def made(self, spec: TileSpec) -> list[Array]:
        """A tile."""
        operands = []
        for _, step, job, operand, first, second in slice_names(spec):
            parts, axis = self.training.slice(step, job, operand, (first, second))
            operands.append(np.concatenate(parts, axis=axis))
        return list(multiplied(KERNEL, spec, operands))

    def save(self, folder: Path, limits: Limits = LIMITS) -> None:
        save_training(self.training, str(folder), limits)

    def restore(self, folder: Path, limits: Limits = LIMITS) -> dict[str, Any]:
        return restore_training(self.training, str(folder), None, limits)

    def die(self) -> None:
        """What a kill leaves: tiles that were written, no lock, no goodbye."""
        self.training.flight.settle()
        self.training.close()

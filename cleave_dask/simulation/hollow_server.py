"""The server of a hollow fleet: all of its bookkeeping, no numbers. Preload in place of `runtime.server`.

Its tensors are on torch's meta device: they have shapes and no memory, and an op on them costs the same microseconds
whatever their size. Rounds, gatherings, readers, the trace, the counters, the optimizer are the server's own. Devices
push what they have done, not results: for each tile the server makes an array that has no numbers and takes it in as
it would any other. There is no loss: it is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from distributed import Worker
from torch.utils._python_dispatch import TorchDispatchMode

from cleave_dask._version import __version__
from cleave_dask.errors import StepError
from cleave_dask.planning.cost import Shape
from cleave_dask.planning.trust import Trust
from cleave_dask.runtime.interpreter import empty_output
from cleave_dask.runtime.server import ServerRuntime, dask_teardown
from cleave_dask.runtime.server_gathering import Array, Attempt, Gathering, TileRejected, tile_forms
from cleave_dask.runtime.server_pass import Pass
from cleave_dask.runtime.server_training import Training
from cleave_dask.runtime.wire import hollow
from cleave_dask.runtime.wire_torch import from_wire

__all__ = ["dask_setup", "dask_teardown"]

META = torch.device("meta")


class _OnMeta(TorchDispatchMode):
    """Ops that name a device get the meta device instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = META
        return func(*args, **named)


_ON_META: Any = _OnMeta  # its base class is not typed


class HollowPass(Pass):
    """A pass whose tensors have no memory."""

    def loss(self) -> float:
        """There is none."""
        return 0.0

    def _begun(self, job: int) -> Gathering:
        with META:
            return super()._begun(job)

    def _run(self, number: int) -> None:
        with META, _ON_META():
            super()._run(number)


class HollowTraining(Training):
    """A training whose tensors have no memory."""

    pass_type = HollowPass

    def constants(self) -> dict[str, torch.Tensor]:
        """Constants of the right shapes."""
        with META:
            return {item.source: empty_output(item.value) for item in self.graph.inputs if item.kind == "constant"}

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The values that a pass starts from; of the batch only the shapes are kept."""
        return {name: tensor.to(META) for name, tensor in super().inputs(batch).items()}

    def deliver(self, step: int, job: int, device: str, tiles: list[list[float]]) -> None:
        """Take tiles in; each row: number, seconds of waiting, pull, compute and upload, bytes down, when it was up."""
        found = self.pass_of(step)
        planned = found.job(job)
        for number, queued, pull, compute, upload, down, arrived in tiles:
            forms = tile_forms(planned.gemm, planned.tiles[int(number)])
            attempt = Attempt(device, pull, compute, queued, upload, int(down), arrived)
            arrays = [hollow(shape, dtype) for shape, dtype in forms]
            self.accept(step, job, int(number), arrays, attempt, check=False)  # there is nothing to check
        found.counters.sent(int(sum(row[5] for row in tiles)))


class HollowServer(ServerRuntime):
    """The server, for trainings without numbers."""

    training_type = HollowTraining

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, Trust())
        worker.handlers.update(cleave_deliver=self.cleave_deliver, cleave_shapes=self.cleave_shapes)

    def cleave_put(self, run: str, name: str, array: Array, dtype: str, role: str) -> None:
        """One weight or buffer: its shape."""
        tensor = from_wire(array[tuple(slice(1) for _ in array.shape)], dtype).to(META).expand(array.shape).contiguous()
        weight = torch.nn.Parameter(tensor, requires_grad=role == "param") if role != "buffer" else tensor
        self._training(run).weights[name] = weight

    def cleave_shapes(self, run: str) -> list[tuple[Any, ...]]:
        """For each job of a run what its device must know of it: kind, flops of a cell, bytes down and up."""
        lowered = self._training(run).lowered
        assert lowered is not None
        shapes = [Shape.of(job.gemm) for job in lowered.schedule.jobs]
        return [(shape.flops / shape.volume, shape.down_bytes, shape.up_bytes) for shape in shapes]

    async def cleave_deliver(
        self, run: str, step: int, job: int, device: str, tiles: list[list[float]]
    ) -> dict[str, Any]:
        """The tiles of a parcel, as a hollow device says that it did them."""
        training = self._training(run)
        assert isinstance(training, HollowTraining)
        try:
            await self.off_loop(training.deliver, step, job, device, tiles)
        except (TileRejected, StepError) as error:
            return {"accepted": False, "why": str(error)}
        return {"accepted": True}


def dask_setup(worker: Worker) -> None:
    """Make a stock worker the server of a hollow fleet."""
    worker.extensions["cleave"] = HollowServer(worker)
    facts = {"role": "server", "version": __version__}
    worker.startup_information["cleave"] = lambda _: facts

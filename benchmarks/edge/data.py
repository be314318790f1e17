"""Replicas on slices of the batch: DDP, with fp32 or bf16 gradients on the wire, and FSDP2. Stock torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.edge.rank import Job
from benchmarks.edge.timing import Step, updates


def ddp(job: Job, _: str) -> Step:
    """A replica on every device; gradients are summed in a ring while backward runs."""
    return _step(job, _replica(job))


def ddp_bf16(job: Job, _: str) -> Step:
    """The same with gradients cast to bf16 on their way."""
    replica = _replica(job)
    # Under its own name DDP takes torch's hook with NCCL alone, though gloo sums bf16 as well.
    replica.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    return _step(job, replica)


def fsdp(job: Job, _: str) -> Step:
    """Weights sharded; each layer is gathered when it is needed and dropped after."""
    require_slices(job)
    module: Any = job.llama.module()
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    return _step(job, module)


def require_slices(job: Job) -> None:
    """Every device needs a part of the batch."""
    if job.llama.batch % job.size:
        raise ValueError(f"a batch of {job.llama.batch} sequences cannot be cut into {job.size} equal slices")


def _replica(job: Job) -> DistributedDataParallel:
    require_slices(job)
    # Weights are the same on all of them already: sending those of the first around would take minutes.
    return DistributedDataParallel(job.llama.module(), gradient_as_bucket_view=True, init_sync=False)


def _step(job: Job, module: nn.Module) -> Step:
    update = updates(module)

    def step(batch: dict[str, torch.Tensor]) -> float:
        return update({name: values.chunk(job.size)[job.rank] for name, values in batch.items()})

    return step

"""hivemind: replicas whose gradients are averaged by groups that find each other through a hash table. Optional.

Every step waits for one group of all devices, so that the step is that of one process. Its helper processes are no
part of the row's memory.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager

from benchmarks.edge.data import require_slices
from benchmarks.edge.rank import PATIENCE, Job
from benchmarks.edge.timing import LEARNING_RATE, Step

MATCHMAKING = 2.0
"""Seconds in which a group gathers, at least; a full one begins at once."""


def hivemind_average(job: Job, _: str) -> Step:
    """A replica on every device, gradients in fp32."""
    require_slices(job)
    module = job.llama.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    parameters = list(module.parameters())
    averager = DecentralizedAverager(
        [torch.zeros_like(parameter) for parameter in parameters],
        dht=_table(job),
        prefix="edge",
        target_group_size=job.size,
        min_group_size=job.size,
        min_matchmaking_time=MATCHMAKING,
        start=True,
    )

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = module(**{name: values.chunk(job.size)[job.rank] for name, values in batch.items()}).loss
        loss.backward()
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        with averager.get_tensors() as shared:
            for tensor, gradient in zip(shared, gradients, strict=True):
                tensor.copy_(gradient)
        if averager.step(timeout=PATIENCE.total_seconds(), allow_retries=True) is None:
            raise RuntimeError("hivemind found no group for a step")
        with averager.get_tensors() as shared:
            for tensor, gradient in zip(shared, gradients, strict=True):
                gradient.copy_(tensor)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def _table(job: Job) -> Any:
    """The hash table; rank 0 has the first part of it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((job.address, 1))
        here = f"/ip4/{trial.getsockname()[0]}/tcp/0"
    first: list[Any] = [None]
    if job.rank == 0:
        table = DHT(host_maddrs=[here], start=True)
        first = [[str(address) for address in table.get_visible_maddrs()]]
    dist.broadcast_object_list(first, 0)
    return table if job.rank == 0 else DHT(host_maddrs=[here], initial_peers=first[0], start=True)

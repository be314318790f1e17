"""Tensor parallelism: every layer cut across all devices by DTensor, the loss by vocabulary columns. Stock torch.

One sum over all devices for each of attention and MLP, forward and backward: the projections of each share one input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.edge.rank import Job
from benchmarks.edge.timing import LEARNING_RATE, Step

IGNORED = -100
"""The label of a token that has no next one."""


def tensor_parallel(job: Job, _: str) -> Step:
    """Heads, MLP columns and vocabulary columns spread over all devices; the embedding is on each."""
    if job.llama.heads % job.size:
        raise ValueError(f"{job.llama.heads} attention heads cannot be spread over {job.size} devices")
    module: Any = job.llama.module()
    mesh = init_device_mesh("cpu", (job.size,))
    parallelize_module(module, mesh, _styles(job.llama.layers))
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def step(batch: dict[str, torch.Tensor]) -> float:
        with loss_parallel():
            logits = module(input_ids=batch["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens(batch["labels"]).flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        full: Any = loss
        return float(full.full_tensor().item() if hasattr(full, "full_tensor") else full.item())

    return step


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """For each token the one after it."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _styles(layers: int) -> dict[str, ParallelStyle]:
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {"lm_head": ColwiseParallel(use_local_output=False)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        styles |= {
            f"{layer}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
            **{f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            f"{layer}.self_attn.o_proj": RowwiseParallel(),
            f"{layer}.mlp.gate_proj": ColwiseParallel(),
            f"{layer}.mlp.up_proj": ColwiseParallel(),
            f"{layer}.mlp.down_proj": RowwiseParallel(),
        }
    return styles

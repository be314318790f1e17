"""Pipelines: consecutive halves of layers on each device, micro-batches one after another. Stock torch.

A variant is a schedule with a number of micro-batches, such as "gpipe/8". Data x pipeline is DTFM's scheme: replicas of
a shorter pipeline, each on its part of the batch, whose gradients are averaged stage by stage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.edge.rank import Job
from benchmarks.edge.tensor import next_tokens
from benchmarks.edge.timing import LEARNING_RATE, Step

REPLICAS = 2
SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def gpipe(job: Job, variant: str) -> Step:
    """All devices in one pipeline."""
    return _pipeline(job, variant, replicas=1)


def one_forward_one_backward(job: Job, variant: str) -> Step:
    """All devices in one pipeline, backward as early as it can be."""
    return _pipeline(job, variant, replicas=1)


def data_pipeline(job: Job, variant: str) -> Step:
    """Two pipelines side by side."""
    return _pipeline(job, variant, replicas=REPLICAS)


class Half(nn.Module):
    """Attention or MLP of a layer, with its norm and its residual."""

    def __init__(self, norm: nn.Module, body: nn.Module, *, attends: bool) -> None:
        super().__init__()
        self.norm, self.body, self.attends = norm, body, attends

    def forward(self, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """With the residual added."""
        inner = self.norm(hidden)
        inner = self.body(inner, position_embeddings=positions)[0] if self.attends else self.body(inner)
        result: torch.Tensor = hidden + inner
        return result


class Stage(nn.Module):
    """A run of halves; the first stage embeds, the last one has the head."""

    def __init__(self, llama: Any, index: int, stages: int) -> None:
        super().__init__()
        model = llama.model
        halves = [half for layer in model.layers for half in _halves(layer)]
        self.embedding = model.embed_tokens if index == 0 else None
        self.rotary = model.rotary_emb
        self.halves = nn.ModuleList(halves[len(halves) * index // stages : len(halves) * (index + 1) // stages])
        self.head = nn.Sequential(model.norm, llama.lm_head) if index == stages - 1 else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """From tokens or hidden states to hidden states or logits."""
        hidden: torch.Tensor = given if self.embedding is None else self.embedding(given)
        positions = self.rotary(hidden, position_ids=torch.arange(hidden.shape[1])[None])
        for half in self.halves:
            hidden = half(hidden, positions)
        return hidden if self.head is None else self.head(hidden)


def _halves(layer: Any) -> tuple[Half, Half]:
    return (
        Half(layer.input_layernorm, layer.self_attn, attends=True),
        Half(layer.post_attention_layernorm, layer.mlp, attends=False),
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens(labels).flatten())


def _pipeline(job: Job, variant: str, *, replicas: int) -> Step:
    name, _, micro_batches = variant.partition("/")
    stages = job.size // replicas
    replica, index = divmod(job.rank, stages)
    pipes = [dist.new_group([row * stages + stage for stage in range(stages)]) for row in range(replicas)]
    peers = [dist.new_group([row * stages + stage for row in range(replicas)]) for stage in range(stages)]
    module = Stage(job.llama.module(), index, stages)
    stage = PipelineStage(module, index, stages, torch.device("cpu"), group=pipes[replica])
    schedule = SCHEDULES[name](stage, int(micro_batches), loss_fn=_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def step(batch: dict[str, torch.Tensor]) -> float | None:
        mine = {key: values.chunk(replicas)[replica] for key, values in batch.items()}
        losses: list[torch.Tensor] = []
        given = (mine["input_ids"],) if index == 0 else ()
        last: dict[str, Any] = {"target": mine["labels"], "losses": losses} if index == stages - 1 else {}
        schedule.step(*given, **last, return_outputs=False)
        if replicas > 1:
            _average(module, peers[index], replicas)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean().item()) if losses else None

    return step


def _average(module: nn.Module, group: Any, replicas: int) -> None:
    """Gradients of a stage over its replicas, in one message."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = (flat / replicas).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))

"""A step graph as systems see it that do not cut gemms: parameters, operations, layers, and what passes between layers.

Memory of training with Adam, in bytes per parameter of w bytes, for every system alike:

    weights w + gradients w + first and second moment 4 + 4 + a float32 copy of the weights 4, if w < 4

which are the 16 bytes of mixed precision in Rajbhandari et al. 2020 (ZeRO), section 3.1. Activations per sequence and
layer, two ways, and each system gets the better one:

    kept         the operands that the layer's backward gemms read again
    recomputed   the layer's input only; the forward pass is computed twice, and one layer at a time is kept whole

Norms, activation functions and logits are left out: what a careful implementation fuses or computes in pieces.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

from cleave_dask.errors import InputError
from cleave_dask.graph.ir import ITEMSIZE, Gemm, StepGraph

_NUMBERED = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step of one model, as numbers."""

    name: str
    parameters: float  # numbers
    width: int  # bytes of a number: of weights, gradients and activations
    forward_flops: float  # of the whole batch
    backward_flops: float  # of the whole batch, nothing recomputed
    sequences: int  # of the batch: what data parallelism divides
    layers: int  # repeated blocks: what pipelines divide
    boundary_bytes: float  # per sequence: activations that pass from one layer to the next
    kept_bytes: float  # per sequence and layer: activations that the backward pass reads again

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, and of all gradients."""
        return self.parameters * self.width

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of Adam's moments and, of narrow weights, their float32 copy."""
        return self.parameters * (8.0 if self.width >= 4 else 12.0)

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer state."""
        return 2 * self.weight_bytes + self.optimizer_bytes

    def flops(self, *, recompute: bool) -> float:
        """Operations of the whole batch."""
        return self.forward_flops * (2 if recompute else 1) + self.backward_flops

    def activation_bytes(self, layers: float, sequences: float, in_flight: float = 1, *, recompute: bool) -> float:
        """Bytes of activations on a device with so many layers, for `in_flight` micro-batches of so many sequences."""
        if recompute:
            return sequences * (layers * in_flight * self.boundary_bytes + self.kept_bytes)
        return sequences * layers * in_flight * self.kept_bytes

    @classmethod
    def of(cls, graph: StepGraph) -> Workload:
        """What a step graph asks of such a system."""
        forward = [gemm for gemm in graph.gemms if gemm.role == "forward"]
        plain = [gemm for gemm in forward if gemm.kind == "gemm"]
        if not plain:
            raise InputError(f"step graph '{graph.name}' has no forward gemm: there is nothing to compare")
        largest = max(plain, key=lambda gemm: gemm.flops)
        width = ITEMSIZE[largest.dtype]
        tokens, layers = largest.m, _layers(forward)
        sequences = _sequences(graph, forward, tokens)
        hidden = Counter(gemm.k for gemm in plain).most_common(1)[0][0]  # more gemms read it than the inner widths
        inside = [gemm for gemm in forward if gemm.level <= _last_of_layers(forward)]
        return cls(
            name=graph.name,
            parameters=_parameters(graph, plain),
            width=width,
            forward_flops=sum(gemm.flops for gemm in forward),
            backward_flops=sum(gemm.flops for gemm in graph.gemms if gemm.role != "forward"),
            sequences=sequences,
            layers=layers,
            boundary_bytes=tokens * hidden * width / sequences,
            kept_bytes=sum(map(_read_bytes, inside)) / layers / sequences,
        )


def _parameters(graph: StepGraph, plain: list[Gemm]) -> float:
    """Numbers in all parameters; of a graph without inputs, those of the right-hand sides of its forward gemms."""
    given = [prod(entry.value.shape) for entry in graph.inputs if entry.kind == "param"]
    return float(sum(given) or sum(gemm.n * gemm.k for gemm in plain))


def _layers(forward: list[Gemm]) -> int:
    """Attentions, one to a layer; without any, the numbers that the names of gemms count up to."""
    attentions = sum(gemm.kind == "attention" for gemm in forward)
    if attentions:
        return attentions
    numbers = {int(found[1]) for gemm in forward if (found := _NUMBERED.search(gemm.name))}
    return max(1, len(numbers))


def _sequences(graph: StepGraph, forward: list[Gemm], tokens: int) -> int:
    """Rows of the batch, as attentions or the batch's own tensors say; else every token stands for itself."""
    for gemm in forward:
        if gemm.kind == "attention":
            return gemm.m
    leaves = [entry.value.shape[0] for entry in graph.inputs if entry.kind == "batch" and entry.value.shape]
    return leaves[0] if leaves and tokens % leaves[0] == 0 else tokens


def _last_of_layers(forward: list[Gemm]) -> int:
    """The level of the last forward gemm before the head, which is the last one where there are attentions."""
    levels = sorted({gemm.level for gemm in forward})
    has_head = any(gemm.kind == "attention" for gemm in forward) and len(levels) > 1
    return levels[-2] if has_head else levels[-1]


def _read_bytes(gemm: Gemm) -> float:
    """Bytes of the activations that a forward gemm reads: its left side, or all sides of an attention."""
    width = ITEMSIZE[gemm.dtype]
    if gemm.kind == "gemm":
        return float(gemm.m * gemm.k * width)
    return float(sum(prod(operand.shape) * width for operand in gemm.inputs))

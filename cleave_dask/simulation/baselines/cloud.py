"""GPUs in a data centre: the best data x tensor x pipeline split of n of them, and a single one with offload.

Per batch of B sequences on n = d t p GPUs (d replicas, each layer split over t, layers in p stages), with m
micro-batches per replica, F peak flop/s at EFFICIENCY, in seconds:

    compute    flops / (n F e) (m + p - 1) / m           the pipeline's bubble as in Huang et al. 2019 (GPipe)
    tensor     4 L/p m 2 (t-1)/t a / bandwidth           two all-reduces each way and layer: Shoeybi et al. 2019
    pipeline   2 (m + p - 1) a / bandwidth               activations on, gradients back
    data       2 (d-1)/d G / bandwidth                   ring all-reduce of gradients, G = weight bytes / (t p)

a: bytes of a micro-batch between two layers; bandwidth: NVLink while the group is inside a node, else the node's
network divided among the groups that share it. Nothing but the bubble is lost to waiting: tensor traffic is exposed,
data and pipeline traffic is hidden behind compute (the larger of the two counts). Optimizer state is sharded over the
replicas, as Alpa does (Zheng et al. 2022, section 4.1): memory = (2 weights + optimizer / d) / (t p) + activations.
The search is exhaustive over d, t, p, m and recomputation: the best that Alpa's two levels could find in this space.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from cleave_dask.formatting import quantity
from cleave_dask.simulation.baselines.values import Result, fastest, infeasible
from cleave_dask.simulation.baselines.workload import Workload

EFFICIENCY = 0.5
"""Share of a GPU's peak that large products reach: assumed; published runs of these models report 0.3 to 0.55."""

NODE = 8
"""GPUs of a node, joined by NVLink."""

PCIE = 25e9
"""Bytes per second between a GPU and its host, each way: PCIe 4.0 x16 as measured by most."""

HOST_MEMORY = 2e12
"""Bytes of the host that offloads: a large one."""

HOST_BANDWIDTH = 2e11
"""Bytes per second of the host's memory, which bounds its Adam."""

_ROOM = 0.94
"""Of a GPU's memory what a program can fill; the rest is the driver's and lost to fragments."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, as its maker's data sheet has it."""

    flops: float  # dense bf16 peak, flop per second
    memory: float  # bytes
    nvlink: float  # bytes per second each way
    network: float  # bytes per second each way, of a node


GPUS = {
    "A100-40": Gpu(312e12, 40e9, 300e9, 50e9),  # a p4d.24xlarge: 400 Gbit/s
    "A100-80": Gpu(312e12, 80e9, 300e9, 50e9),
    "H100": Gpu(989e12, 80e9, 450e9, 400e9),  # a p5.48xlarge: 3,200 Gbit/s
}


def price_cloud(work: Workload, kind: str, gpus: int, system: str) -> Result:
    """The best split of a step over `gpus` GPUs of a kind."""
    gpu = GPUS[kind]
    room = _ROOM * gpu.memory
    least = min((_memory(work, split) for split in _splits(work, gpus)), default=inf)
    short = f"{gpus} {kind} cannot share {work.sequences} sequences and {work.layers} layers; take fewer"
    if least < inf:
        need, have = quantity(least, "B"), quantity(room, "B")
        short = f"the leanest split over {gpus} {kind} needs {need} on each, and {have} can be filled; take more GPUs"
    fits = (split for split in _splits(work, gpus) if _memory(work, split) <= room)
    return fastest((_price(work, gpu, split, system) for split in fits), infeasible(system, short))


@dataclass(frozen=True, slots=True)
class _Split:
    data: int
    tensor: int
    pipeline: int
    micro: int  # sequences of a micro-batch
    recompute: bool


def _splits(work: Workload, gpus: int) -> Iterator[_Split]:
    """Every way to use all GPUs."""
    for tensor in (t for t in range(1, min(NODE, gpus) + 1) if gpus % t == 0):
        rest = gpus // tensor
        for pipeline in (p for p in range(1, min(work.layers, rest) + 1) if rest % p == 0):
            data = rest // pipeline
            if data > work.sequences:
                continue
            share, micro = ceil(work.sequences / data), 1
            while micro <= share:
                yield _Split(data, tensor, pipeline, micro, recompute=False)
                yield _Split(data, tensor, pipeline, micro, recompute=True)
                micro *= 2


def _micro_batches(work: Workload, split: _Split) -> int:
    return ceil(ceil(work.sequences / split.data) / split.micro)


def _memory(work: Workload, split: _Split) -> float:
    """Bytes on the fullest GPU, the first of a pipeline that runs one forward, one backward."""
    shards = split.tensor * split.pipeline
    layers, in_flight = ceil(work.layers / split.pipeline), min(split.pipeline, _micro_batches(work, split))
    held = work.activation_bytes(layers, split.micro, in_flight, recompute=split.recompute)
    return (2 * work.weight_bytes + work.optimizer_bytes / split.data) / shards + held / split.tensor


def _price(work: Workload, gpu: Gpu, split: _Split, system: str) -> Result:
    data, tensor, pipeline = split.data, split.tensor, split.pipeline
    micros = _micro_batches(work, split)
    layers = ceil(work.layers / pipeline)
    uneven = layers * pipeline / work.layers * micros * split.micro * data / work.sequences
    work_seconds = work.flops(recompute=split.recompute) * uneven / (data * tensor * pipeline * gpu.flops * EFFICIENCY)
    message = split.micro * work.boundary_bytes
    reduced = 4 * (1.5 if split.recompute else 1.0) * layers * micros * 2 * (tensor - 1) / tensor * message
    filled = (micros + pipeline - 1) / micros
    compute = work_seconds * filled
    exposed = reduced / gpu.nvlink * filled
    onward = 2 * (micros + pipeline - 1) * message / _bandwidth(gpu, tensor * pipeline, 1) if pipeline > 1 else 0.0
    gradients = work.weight_bytes / (tensor * pipeline)
    beside = min(NODE, tensor * pipeline)  # groups of replicas that share a node's network
    reduce = 2 * (data - 1) / data * gradients / _bandwidth(gpu, data * tensor * pipeline, beside)
    stages = {"compute": compute + exposed, "network": max(onward, reduce)}
    binding = "compute" if stages["compute"] >= stages["network"] else "network"
    if exposed > compute:
        binding = "NVLink"
    return Result(
        system,
        max(stages.values()),
        binding=binding,
        devices_used=data * tensor * pipeline,
        memory=_memory(work, split),
        configuration=f"{data} x {tensor} x {pipeline} (data, tensor, pipeline), micro-batch {split.micro}"
        + (", recomputed" if split.recompute else ""),
    )


def _bandwidth(gpu: Gpu, across: int, groups: int) -> float:
    """Bytes per second of a group that spans so many GPUs, when so many groups share each node's network."""
    return gpu.nvlink if across <= NODE else gpu.network / groups


def price_offload(work: Workload, kind: str, system: str) -> Result:
    """One GPU whose weights, gradients and optimizer state live in its host's memory (ZeRO-Infinity).

    With m passes of B/m sequences each, in seconds (Rajbhandari et al. 2021, section 4):

        max(compute, down, up) + Adam on the host
        down  2 m W / PCIE    weights for every forward and backward pass
        up    m W / PCIE      gradients of every pass
        Adam  (2 W + 2 optimizer) / HOST_BANDWIDTH: each state read and written once

    Memory on the GPU: two layers of weights and gradients, and the activations of a pass.
    """
    gpu = GPUS[kind]
    if work.state_bytes > HOST_MEMORY:
        need, have = quantity(work.state_bytes, "B"), quantity(HOST_MEMORY, "B")
        return infeasible(system, f"weights, gradients and optimizer state need {need} on the host, which has {have}")
    found, least, passes = [], inf, 1
    adam = (2 * work.weight_bytes + 2 * work.optimizer_bytes) / HOST_BANDWIDTH
    while passes <= work.sequences:
        for recompute in (False, True):
            held = work.activation_bytes(work.layers, ceil(work.sequences / passes), recompute=recompute)
            memory = 4 * work.weight_bytes / work.layers + held
            least = min(least, memory)
            if memory > _ROOM * gpu.memory:
                continue
            compute = work.flops(recompute=recompute) / (gpu.flops * EFFICIENCY)
            stream = 2 * passes * work.weight_bytes / PCIE
            setting = f"{passes} passes" + (", recomputed" if recompute else "")
            binding = "compute" if compute >= stream else "PCIe"
            found.append(Result(system, max(compute, stream) + adam, "", binding, 1, memory, setting))
        passes *= 2
    have = quantity(_ROOM * gpu.memory, "B")
    return fastest(found, infeasible(system, f"two layers and one sequence need {quantity(least, 'B')} of {have}"))

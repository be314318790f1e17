"""One process of a peer, in the namespace of its device: builds its part of the model, steps, writes what it saw.

Started by `peers`:

    python -m benchmarks.edge.rank JOB    (a Job as JSON; its answer goes to the file that the job names)
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import memory
from benchmarks.edge.settings import require_memory
from benchmarks.edge.timing import Effort, Step, timed
from benchmarks.models import Llama
from cleave_dask.runtime.parent import dask_setup as live_with_parent

PATIENCE = timedelta(hours=1)
"""How long a collective may take before gloo gives up: links are slow here."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank is to do."""

    system: str
    variants: tuple[str, ...]  # ways to run the system; each is measured
    llama: Llama
    effort: Effort
    rank: int
    size: int
    address: str  # of rank 0
    port: int
    answer: str  # file
    cap: int | None = None  # bytes for its part of the training

    @classmethod
    def of(cls, text: str) -> Job:
        """From JSON."""
        given = json.loads(text)
        given["llama"], given["effort"] = Llama(**given["llama"]), Effort(**given["effort"])
        return cls(**{**given, "variants": tuple(given["variants"])})


BUILDERS: Mapping[str, str] = {
    "ddp": "benchmarks.edge.data:ddp",
    "ddp-bf16": "benchmarks.edge.data:ddp_bf16",
    "fsdp": "benchmarks.edge.data:fsdp",
    "tensor": "benchmarks.edge.tensor:tensor_parallel",
    "gpipe": "benchmarks.edge.pipeline:gpipe",
    "1f1b": "benchmarks.edge.pipeline:one_forward_one_backward",
    "data-pipeline": "benchmarks.edge.pipeline:data_pipeline",
    "hivemind": "benchmarks.edge.volunteers:hivemind_average",
}
"""Where each system's `(job, variant) -> Step` is; imported by those who run it."""


def main() -> None:
    """Run the job; an error is an answer too."""
    job = Job.of(sys.argv[1])
    live_with_parent(None)
    torch.set_num_threads(1)
    answer: dict[str, Any]
    try:
        answer = {"variants": run(job)}
    except Exception as error:  # said in the row of the system
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}", "at": time()}
    written = Path(job.answer)
    written.with_suffix(".part").write_text(json.dumps(answer))
    written.with_suffix(".part").rename(written)
    sys.exit(1 if "error" in answer else 0)


def run(job: Job) -> list[dict[str, Any]]:
    """Every variant, from the same weights."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://{job.address}:{job.port}", rank=job.rank, world_size=job.size, timeout=PATIENCE
    )
    module, function = BUILDERS[job.system].split(":")
    build: Callable[[Job, str], Step] = getattr(importlib.import_module(module), function)
    _wake()
    answers = [measure(job, variant, build) for variant in job.variants]
    dist.barrier()
    dist.destroy_process_group()
    return answers


def measure(job: Job, variant: str, build: Callable[[Job, str], Step]) -> dict[str, Any]:
    """One variant. Memory counts from before the model was there; a whole model that is cut up on the way does not."""
    memory.give_back()
    before = memory.resident()
    step = build(job, variant)
    memory.give_back()
    memory.reset_peak()

    def fence() -> None:
        dist.barrier()
        require_memory(memory.peak() - before, job.cap)

    seen = timed(step, job.llama, job.effort, counters=carried, fence=fence, agree=_agree)
    return {
        "variant": variant,
        "losses": seen.losses,
        "seconds": seen.seconds,
        "warm": seen.warm,
        "down": seen.counted[0],
        "up": seen.counted[1],
        "memory": memory.peak() - before,
    }


def carried() -> tuple[int, int]:
    """Bytes that came to this namespace and left it, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]), int(fields[8])
    raise RuntimeError("no eth0 in this namespace")


def _wake() -> None:
    """Start the threads of autograd and of the group, which are no part of what training takes."""
    dist.barrier()
    (torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)).sum().backward()
    dist.all_reduce(torch.ones(1024))


def _agree(number: int) -> int:
    """What rank 0 says."""
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told.item())


if __name__ == "__main__":
    main()

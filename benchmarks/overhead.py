"""What a step costs beyond its arithmetic: an unshaped local fleet beside plain torch on the same cores, in one run.

    python benchmarks/overhead.py [--steps 5] [--devices 2] [--json out.json]

Prints seconds per step of both, their ratio, where the rest goes, and the server's peak memory beside what plain torch
holds for the same step: weights, optimizer state and saved activations.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import memory
from benchmarks.models import Llama
from cleave_dask.formatting import duration, quantity
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

LLAMA = Llama(hidden=1024, intermediate=2816, layers=4, heads=16, vocabulary=8192, batch=4, length=512)


class PlainTorch:
    """The same training in this process."""

    def __init__(self) -> None:
        self.module = LLAMA.module()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        self.saved_bytes = 0

    def step(self, **inputs: torch.Tensor) -> float:
        """One update."""
        held: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.module(**inputs).loss
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        self.saved_bytes = sum(size for pointer, size in held.items() if pointer not in weights)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    @property
    def held_bytes(self) -> int:
        """Weights, optimizer state and saved activations."""
        parameters = sum(parameter.nbytes for parameter in self.module.parameters())
        states = self.optimizer.state.values()
        state = sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))
        return parameters + state + self.saved_bytes


def timed(step: Callable[..., float], number: int) -> tuple[float, float]:
    """Loss and seconds of a step."""
    start = perf_counter()
    loss = step(**LLAMA.tokens(number))
    return loss, perf_counter() - start


def measure(steps: int, devices: int) -> dict[str, Any]:
    """Both systems, step by step in turn, so that noise hits them alike; the first step is not counted."""
    plain = PlainTorch()
    module = LLAMA.module()
    with LocalFleet(devices) as local, local.get_client() as client:
        trainer = Trainer(module, torch.optim.AdamW(module.parameters(), lr=1e-4), client)
        rows = [(timed(plain.step, number), timed(trainer.step, number)) for number in range(steps + 1)]
        peak = memory.peak(local.server_pid)
        spent = [record["spent"] for record in trainer.records[1:]]
    torch_seconds, seconds = (median(row[system][1] for row in rows[1:]) for system in (0, 1))
    return {
        "setting": f"{LLAMA}, {devices} devices",
        "torch_seconds": torch_seconds,
        "seconds": seconds,
        "ratio": median(ours[1] / theirs[1] for theirs, ours in rows[1:]),
        "spent": {name: median(one[name] for one in spent) for name in spent[-1]},
        "torch_bytes": plain.held_bytes,
        "server_bytes": peak,
        "memory_ratio": peak / plain.held_bytes,
        "loss_difference": max(abs(theirs[0] - ours[0]) for theirs, ours in rows),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result, to look at."""
    times = Table("system", "seconds per step", "ratio", title=result["setting"])
    times.add_row("plain torch", f"{result['torch_seconds']:.2f}", "1.00")
    times.add_row("cleave_dask", f"{result['seconds']:.2f}", f"{result['ratio']:.2f}")
    rest = Table("where", "seconds", title="Where a step goes (sums over devices; they overlap)")
    for name, seconds in result["spent"].items():
        rest.add_row(name, duration(seconds))
    held = Table("memory", "bytes", title="Memory")
    held.add_row("plain torch: weights, optimizer state, saved activations", quantity(result["torch_bytes"], "B"))
    held.add_row("server: peak resident", quantity(result["server_bytes"], "B"))
    held.add_row("ratio", f"{result['memory_ratio']:.2f}")
    return [times, rest, held]


def main() -> None:
    """Run both, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    result = measure(options.steps, options.devices)
    console = Console()
    for table in tables(result):
        console.print(table)
    console.print(f"largest difference of the loss: {result['loss_difference']:.1e}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

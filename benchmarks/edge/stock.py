"""The gemms of the same step as plain dask arrays: stock scheduler, stock workers on the devices, no plugin of ours.

Every linear layer multiplies through Dask, forward and backward; everything else runs in this process, which keeps the
weights and is joined to the server's side of the network. Each variant is a way to write the product:

    rows         a in as many row chunks as there are devices, b in one: `da.matmul`
    grid         a in row chunks, b in column chunks, on a near-square grid: `da.matmul`
    blocks       a in row chunks, b inside the function that multiplies a chunk: `a.map_blocks`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import isqrt
from statistics import median
from typing import Any
from warnings import filterwarnings

import dask.array as da
import numpy as np
import torch
from distributed import Client, futures_of
from torch import nn

from benchmarks import memory
from benchmarks.edge.processes import Processes
from benchmarks.edge.rows import Row
from benchmarks.edge.settings import Setting
from benchmarks.edge.timing import Effort, timed, updates
from cleave_dask.simulation.network import Network

PORT = 8786
START = 300.0  # seconds
VARIANTS = ("blocks", "grid", "rows")

Array = Any
Product = Callable[[Array, Array], Any]
"""Two numpy arrays to the dask array of their product."""


def run(variant: str, setting: Setting, effort: Effort) -> Row:
    """One variant on one setting, in a network and a cluster of its own."""
    names = [device.name for device in setting.fleet.devices]
    filterwarnings("ignore", message="Sending large graph", category=UserWarning)  # that is what is measured here
    with Network(setting.fleet) as network, Processes() as processes:
        address = _start(processes, network, names)
        with Client(address, timeout=START) as client:
            client.wait_for_workers(len(names), timeout=START)
            processes.check()
            before = [memory.resident(processes.pid(name)) for name in names]
            step = _step(setting, client, variant)
            seen = timed(step, setting.llama, effort, counters=partial(_carried, network, names))
            peaks = (memory.peak(processes.pid(name)) - old for name, old in zip(names, before, strict=True))
            return Row(
                setting.name,
                f"dask-{variant}",
                seconds=median(seen.seconds),
                steps=len(seen.seconds),
                warm=seen.warm,
                losses=tuple(loss for loss in seen.losses if loss is not None),
                down=seen.counted[::2],
                up=seen.counted[1::2],
                memory=tuple(peaks),
            )


def _start(processes: Processes, network: Network, names: list[str]) -> str:
    """A stock scheduler on the server's side and a stock worker on every device; where the scheduler listens."""
    address = f"tcp://{network.address()}:{PORT}"
    start = [sys.executable, "-W", "ignore", "-m", "dask"]
    watched = ["--no-dashboard", "--preload", "cleave_dask.runtime.parent"]
    listening = ["--host", network.address(), "--port", str(PORT)]
    processes.start("scheduler", [*network.enter(), *start, "scheduler", *listening, *watched])
    for name in names:
        where = ["--name", name, "--host", network.address(name), "--local-directory", str(processes.folder)]
        options = ["--no-nanny", "--nthreads", "1", "--memory-limit", "0", *where, *watched]
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        processes.start(name, [*network.enter(name), *start, "worker", address, *options], one)
    return address


def _carried(network: Network, names: list[str]) -> tuple[int, ...]:
    return tuple(count for name in names for count in network.carried(name))


def _step(setting: Setting, client: Client, variant: str) -> Callable[[dict[str, torch.Tensor]], float]:
    product = partial(PRODUCTS[variant], parts=len(setting.fleet))
    module = setting.llama.module()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, DaskLinear(child.weight, client, product))
    return updates(module)


class DaskLinear(nn.Module):
    """A linear layer whose products are dask arrays."""

    def __init__(self, weight: torch.Tensor, client: Client, product: Product) -> None:
        super().__init__()
        self.weight, self.client, self.product = weight, client, product

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Rows times the transposed weight."""
        result: torch.Tensor = Multiplied.apply(given, self.weight, self.client, self.product)  # type: ignore[no-untyped-call]
        return result


class Multiplied(torch.autograd.Function):
    """The products of a linear layer, forward and backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, client: Client, product: Product) -> torch.Tensor:
        """Y = X W^T."""
        ctx.save_for_backward(given, weight)
        ctx.client, ctx.product = client, product
        rows = given.detach().flatten(0, -2).numpy()
        (result,) = _computed(client, product(rows, weight.detach().numpy().T))
        return torch.from_numpy(result).view(*given.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Both products of a backward pass at once."""
        given, weight = ctx.saved_tensors
        outer = gradients[0].flatten(0, -2).numpy()
        rows = given.detach().flatten(0, -2).numpy()
        both = (ctx.product(outer, weight.detach().numpy()), ctx.product(np.ascontiguousarray(outer.T), rows))
        inner, update = _computed(ctx.client, *both)
        return torch.from_numpy(inner).view_as(given), torch.from_numpy(update), None, None


def _computed(client: Client, *arrays: Any) -> list[Array]:
    """Chunk by chunk: `compute` would bring all of them to one worker first, and up its link from there."""
    chunks = client.gather([futures_of(array) for array in client.persist(list(arrays))])
    return [np.block(_nested(array, parts)) for array, parts in zip(arrays, chunks, strict=True)]


def _nested(array: Any, parts: list[Array]) -> list[list[Array]]:
    """Chunks, row by row."""
    across = array.numblocks[1]
    return [parts[start : start + across] for start in range(0, len(parts), across)]


def _chunk(length: int, parts: int) -> int:
    return max(1, -(-length // parts))


def _rows(a: Array, b: Array, *, parts: int) -> Any:
    left = da.from_array(a, chunks=(_chunk(len(a), parts), -1))
    return da.matmul(left, da.from_array(np.ascontiguousarray(b), chunks=-1))


def _grid(a: Array, b: Array, *, parts: int) -> Any:
    across = max(side for side in range(1, isqrt(parts) + 1) if parts % side == 0)
    left = da.from_array(a, chunks=(_chunk(len(a), parts // across), -1))
    return da.matmul(left, da.from_array(np.ascontiguousarray(b), chunks=(-1, _chunk(b.shape[1], across))))


def _blocks(a: Array, b: Array, *, parts: int) -> Any:
    left = da.from_array(a, chunks=(_chunk(len(a), parts), -1))
    function = partial(np.dot, b=np.ascontiguousarray(b))
    return left.map_blocks(function, dtype=a.dtype, chunks=(left.chunks[0], (b.shape[1],)))


PRODUCTS: dict[str, Callable[..., Any]] = {"rows": _rows, "grid": _grid, "blocks": _blocks}

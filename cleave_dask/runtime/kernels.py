"""What a device multiplies with: numpy, cupy or torch, chosen by what the machine has.

A device gets its operands from the network as numpy arrays (read-only, in C or Fortran order, bfloat16 as uint16) and
returns numpy arrays in C order, ready to send. torch and cupy are imported only when they are the ones that compute.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cleave_dask.errors import InputError
from cleave_dask.runtime.kernels_xp import ArrayKernel
from cleave_dask.runtime.wire import Array

logger = logging.getLogger(__name__)

KERNELS = ("auto", "numpy", "torch", "cupy")
LARGEST_PROBE = 4096


class Kernel(Protocol):
    """Computes tiles."""

    @property
    def name(self) -> str:
        """What it is called in the configuration and in what a device tells of itself."""
        ...

    def run(
        self, kind: str, arrays: Sequence[Array], *, dtype: str, causal: bool = False, scale: float | None = None
    ) -> tuple[Array, ...]:
        """The result of a tile, as new arrays in C order; the operands are never written to.

        `kind` is one of those of `graph.ir.Gemm`: gemm (a[m, k], b[k, n]) -> c[m, n]; bmm, the same with a leading
        axis; attention (q[b, h, s, d], k[b, g, t, d], v[b, g, t, d]) -> (out[b, h, s, d], logsumexp[b, h, s]);
        attention_backward (grad_out, q, k, v, out, logsumexp) -> (dq, dk, dv). Query heads i*h/g to (i+1)*h/g share
        key and value head i. `causal`: row i sees keys 0 to i. `scale` is 1/sqrt(d) if None.
        logit_sums (x[r, h], w[v, h], targets[r]) -> (logsumexp[r], target's logit[r], 0 if it is not one of the v);
        logit_dx (x, w, targets, logsumexp[r], slope[r]) -> dx[r, h]; logit_dw (w, x, targets, logsumexp, slope) ->
        dw[v, h]. Targets, float64, are counted from the first of the v words. Everything else is of `dtype`, but for
        the logsumexp of halves and what goes with it, which are float32.
        """
        ...


def load_kernel(name: str = "auto") -> Kernel:
    """The kernel of that name; "auto" is cupy if there is a CUDA device that works, else numpy.

    torch computes only where it is asked for: it would make every device hundreds of megabytes heavier.
    """
    if name == "numpy" or (name == "auto" and not _cuda_works()):
        return ArrayKernel("numpy", np, put=lambda array: array, take=np.ascontiguousarray)
    if name == "torch":
        kernel: Kernel = _imported("cleave_dask.runtime.kernels_torch", "torch", "pip install torch").TorchKernel()
        return kernel
    if name in ("cupy", "auto"):
        cupy = _imported("cupy", "cupy", "pip install 'cleave-dask[cupy]'")
        if not _cuda_works():
            raise InputError("kernel 'cupy' needs a CUDA device, and none works here; set device.kernel to numpy")
        return ArrayKernel("cupy", cupy, put=cupy.asarray, take=lambda array: cupy.asnumpy(array, order="C"))
    raise InputError(f"unknown kernel {name!r}; set device.kernel to one of {', '.join(KERNELS)}")


def _imported(module: str, library: str, remedy: str) -> ModuleType:
    """The module, or an error that says how to get the library that it stands on."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"kernel {library!r} needs {library}, which cannot be imported here ({error}); "
            f"install it with `{remedy}` or set device.kernel to numpy"
        ) from error


def _cuda_works() -> bool:
    """Whether cupy is installed and sees a device that can multiply."""
    try:
        cupy = import_module("cupy")
        ones = cupy.ones((2, 2))
        return float((ones @ ones).sum()) == 8
    except ImportError:
        return False
    except Exception as error:  # a driver that is missing or too old has as many exceptions as versions
        logger.info("cupy is installed but cannot compute: %s", error)
        return False


def measure_flops(kernel: Kernel, seconds: float = 0.2) -> float:
    """Speed of this machine in float32 products, in flop/s: the median over the largest product that time allows.

    Products double in size until one takes a quarter of the time, and then repeat until it is over: it takes about
    `seconds`, or a few times that on a slow machine. A shorter product tells nothing: where other programs run, it
    may wait for a time slice longer than it computes, and a busy laptop would seem a thousand times slower than it is.
    """
    start = perf_counter()
    rng = np.random.default_rng(0)
    size, times = 64, [0.0]
    while True:
        operand = rng.random((size, size), dtype=np.float32)
        times = sorted(_timed(kernel, operand) for _ in range(2))[:1]  # the first of a size warms buffers and threads
        if size >= LARGEST_PROBE or times[0] >= seconds / 4:
            break
        size *= 2
    while perf_counter() - start + times[-1] < seconds:
        times.append(_timed(kernel, operand))
    return 2.0 * size**3 / median(times)


def _timed(kernel: Kernel, operand: Array) -> float:
    start = perf_counter()
    kernel.run("gemm", (operand, operand), dtype="float32")
    return perf_counter() - start


def use_threads(count: int) -> None:
    """Let products use this many threads from now on, in the whole process.

    More threads than free cores make OpenBLAS several times slower, not faster: its threads wait for each other
    by spinning. A device should lend exactly the cores that its owner gave it.
    """
    if count < 1:
        raise InputError(f"a kernel needs at least one thread, not {count}")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    pools = _thread_pools(count)
    if pools is not None:
        pools.limit(limits=count)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let products use this many threads, in the whole process, and as many as before afterwards.

    Products that are shared out among other numbers of threads differ in their last bits.
    """
    torch, pools = sys.modules.get("torch"), _thread_pools(count)
    before = torch.get_num_threads() if torch is not None else count
    with nullcontext() if pools is None else pools.limit(limits=count):
        if torch is not None:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)


def calm_products() -> None:
    """Let numpy's products use one thread each from now on: for a process that runs many small ones side by side.

    OpenBLAS' idle threads spin: beside threads that check tiles they took more of the server than the checks did.
    """
    pools = _thread_pools(1)
    if pools is not None:
        pools.select(internal_api="openblas").limit(limits=1)


def _thread_pools(wanted: int) -> Any:
    """The libraries here that compute with threads of their own; None, with a word of it, if they are out of reach."""
    try:
        return import_module("threadpoolctl").ThreadpoolController()
    except ImportError:
        logger.warning(
            "threadpoolctl is not installed, so the number of threads stays as it is; "
            "`pip install threadpoolctl`, or start with OPENBLAS_NUM_THREADS=%d",
            wanted,
        )
        return None

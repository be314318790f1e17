"""Preload of a device that lies: while the file CLEAVE_TEST_LIES exists, every tile is wrong in some of its numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed import Worker

from cleave_dask.runtime.kernels import Kernel
from cleave_dask.runtime.wire import Array


class LyingKernel:
    """Another kernel's results, with one row off by a percent."""

    def __init__(self, honest: Kernel, when: Path) -> None:
        self.honest = honest
        self.when = when
        self.name = honest.name

    def run(self, kind: str, arrays: Sequence[Array], **how: Any) -> tuple[Array, ...]:
        results = self.honest.run(kind, arrays, **how)
        if self.when.exists():
            wrong = results[0].copy()
            wrong[..., 0, :] *= 1.01
            return (wrong, *results[1:]) if kind == "gemm" else tuple(1.01 * result for result in results)
        return results


def dask_setup(worker: Worker) -> None:
    """Put the liar in the honest kernel's place."""
    runtime = worker.extensions["cleave"]
    runtime.kernel = LyingKernel(runtime.kernel, Path(os.environ["CLEAVE_TEST_LIES"]))

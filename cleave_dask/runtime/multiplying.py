"""A tile from its operands, the same wherever it is made: on a device, or on the server for one that was lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave_dask.graph.ir import LOGITS
from cleave_dask.runtime.kernels import Kernel
from cleave_dask.runtime.tiles import TileSpec, first_word
from cleave_dask.runtime.wire import Array


def multiplied(kernel: Kernel, spec: TileSpec, operands: Sequence[Array]) -> tuple[Array, ...]:
    """The results of a tile; `operands` are its slices, in whatever order their memory is.

    Products of the same numbers in another order of memory may differ in their last bits: all are put into C order.
    """
    arrays = [np.ascontiguousarray(operand) for operand in operands]
    if spec.kind in LOGITS:
        arrays[2] = arrays[2] - first_word(spec.kind, spec.rows, spec.cols, spec.ks)
    return kernel.run(spec.kind, arrays, dtype=spec.dtype, causal=spec.causal, scale=spec.scale)

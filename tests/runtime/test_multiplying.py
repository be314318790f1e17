"""A tile is the same bit for bit wherever it is made, in whatever order its operands lie in memory."""

from __future__ import annotations

import numpy as np
import pytest

from cleave_dask.runtime.multiplying import multiplied
from cleave_dask.runtime.tiles import TileSpec
from cleave_dask.runtime.wire import Array
from tests.steps import KERNEL

SHAPES = {
    "gemm": ((48, 40), (40, 56)),
    "bmm": ((3, 48, 40), (3, 40, 56)),
    "attention": ((2, 4, 24, 16),) * 3,
    "attention_backward": (*((2, 4, 24, 16),) * 5, (2, 4, 24)),
}


def strided(array: Array) -> Array:
    """The same numbers in the middle of a larger array that lies the other way round."""
    larger = np.zeros(tuple(extent + 2 for extent in reversed(array.shape)), array.dtype).T
    inner = larger[tuple(slice(1, -1) for _ in array.shape)]
    inner[...] = array
    return inner


@pytest.mark.parametrize("kind", SHAPES)
def test_the_order_of_memory_changes_no_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    spec = TileSpec("run", 0, 0, 0, kind, "float32", (0, 48), (0, 56), (0, 40), causal=False, scale=None)
    operands = [rng.standard_normal(shape, dtype=np.float32) for shape in SHAPES[kind]]
    expected = multiplied(KERNEL, spec, operands)
    for arrays in ([np.asfortranarray(each) for each in operands], [strided(each) for each in operands]):
        found = multiplied(KERNEL, spec, arrays)
        assert [result.tobytes() for result in found] == [result.tobytes() for result in expected]

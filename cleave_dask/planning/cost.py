"""What a tile costs: bytes down to a device, bytes up to the server, multiplications, memory.

For a gemm tile of m x n x k numbers of w bytes: down (m k + k n) w, up m n w, compute 2 m n k. A tile of a batched
product or of an attention moves the share of each input and output that its batch and head ranges cut out.
"""

from __future__ import annotations

from math import prod

from cleave_dask.graph.ir import ITEMSIZE, Gemm, Range
from cleave_dask.planning.values import Tile


def extent(span: Range) -> int:
    """Length of a range."""
    return span[1] - span[0]


def slice_bytes(gemm: Gemm, rows: Range, cols: Range, ks: Range) -> tuple[int, ...]:
    """Bytes of the slice of each input that a tile over these ranges needs."""
    width = ITEMSIZE[gemm.dtype]
    if gemm.kind == "gemm":
        return extent(rows) * extent(ks) * width, extent(ks) * extent(cols) * width
    share = _share(gemm, rows, cols)
    return tuple(round(share * prod(operand.shape) * ITEMSIZE[operand.parts[0].dtype]) for operand in gemm.inputs)


def result_bytes(gemm: Gemm, rows: Range, cols: Range) -> int:
    """Bytes of a tile's result."""
    if gemm.kind == "gemm":
        return extent(rows) * extent(cols) * ITEMSIZE[gemm.dtype]
    return round(_share(gemm, rows, cols) * sum(value.nbytes for value in gemm.outputs))


def tile_memory(gemm: Gemm, rows: Range, cols: Range, ks: Range) -> int:
    """Bytes that a device holds for a tile while it multiplies: operands and result."""
    return sum(slice_bytes(gemm, rows, cols, ks)) + result_bytes(gemm, rows, cols)


def tile_flops(gemm: Gemm, tile: Tile) -> float:
    """Floating point operations of a tile: its share of the gemm's cuboid."""
    volume = extent(tile.rows) * extent(tile.cols) * extent(tile.ks)
    return gemm.flops * volume / (gemm.m * gemm.n * gemm.k)


def _share(gemm: Gemm, rows: Range, cols: Range) -> float:
    """Fraction of a batched op that a (batch, head group) range covers."""
    return extent(rows) * extent(cols) / (gemm.m * gemm.n)

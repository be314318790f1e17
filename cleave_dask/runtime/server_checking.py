"""Checking the tiles of one job against the operands that the server holds."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import randbits

import numpy as np

from cleave_dask.graph.ir import Gemm, Range
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.server_gathering import Array, Read, operand_slice, rounded
from cleave_dask.runtime.verification import RightSide
from cleave_dask.runtime.verification_attention import verify_attention
from cleave_dask.runtime.wire import as_array


class Checker:
    """Says whether tiles of a job are right; what tiles share is computed once. `read` gives operands as they travel.

    Random vectors are drawn from the operating system, anew for each slice: nothing that a device could know of one
    run, one job or one tile tells it anything of another.
    """

    def __init__(self, gemm: Gemm, tiles: Sequence[Tile], read: Read) -> None:
        self.gemm = gemm
        self.tiles = tiles
        self.read = rounded(gemm, read)
        self._right_sides: dict[tuple[Range, Range], RightSide] = {}

    def right(self, number: int, arrays: Sequence[Array]) -> bool:
        """Whether a tile of the right shapes and dtypes is what its operands make."""
        tile, gemm = self.tiles[number], self.gemm
        if gemm.kind == "gemm":
            return self._right_side(tile).verify(self._operand(0, (tile.rows, tile.ks)), arrays[0])
        operands = [self._operand(index, (tile.rows, tile.cols)) for index in range(len(gemm.inputs))]
        if gemm.kind == "bmm":
            sides = (RightSide.of(b, gemm.tile_dtype, [randbits(128)]) for b in operands[1])
            return all(side.verify(a, c) for side, a, c in zip(sides, operands[0], arrays[0], strict=True))
        seed = randbits(128)
        return verify_attention(
            operands, arrays, dtype=gemm.tile_dtype, causal=gemm.causal, scale=gemm.scale, seed=seed
        )

    def _right_side(self, tile: Tile) -> RightSide:
        """The second operand's slice with its vectors; two threads may both make it, and one of them is kept."""
        place = (tile.ks, tile.cols)
        found = self._right_sides.get(place)
        if found is None:
            made = RightSide.of(self._operand(1, place), self.gemm.tile_dtype, [randbits(128)])
            found = self._right_sides.setdefault(place, made)
        return found

    def _operand(self, number: int, ranges: tuple[Range, Range]) -> Array:
        parts, axis = operand_slice(self.gemm, number, ranges, self.read, as_array)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)

"""Checking the tiles of one job against the operands that the server holds.

C X = A (B X) or, for tiles that are higher than wide, the transposed C' X = B' (A' X): vectors go with the longer side.
Their products with the slices of that side are computed once, between all cuts that tiles make along it; a tile then
costs its result and the slice along its shorter side. Most tiles are strips.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from secrets import randbits

from cleave_dask.graph.ir import Gemm, Range
from cleave_dask.planning.cost import extent
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.server_gathering import Array, Read, operand_slice, rounded
from cleave_dask.runtime.verification import RightSide, Slices
from cleave_dask.runtime.verification_attention import verify_attention
from cleave_dask.runtime.wire import as_array

_MOST_PIECES = 8  # of which the vectors of a tile are put together; else it has its own


class Checker:
    """Says whether tiles of a job are right; what tiles share is computed once. `read` gives operands as they travel.

    Random vectors are drawn from the operating system, anew for each slice: nothing that a device could know of one
    run, one job or one tile tells it anything of another.
    """

    def __init__(self, gemm: Gemm, tiles: Sequence[Tile], read: Read) -> None:
        self.gemm = gemm
        self.tiles = tiles
        self.read = rounded(gemm, read)
        self._sides: dict[tuple[bool, Range, Range], RightSide] = {}
        self._cuts: dict[tuple[bool, Range], list[int]] = {}

    def right(self, number: int, arrays: Sequence[Array]) -> bool:
        """Whether a tile of the right shapes and dtypes is what its operands make."""
        tile, gemm = self.tiles[number], self.gemm
        if gemm.kind == "gemm":
            high, side = _is_high(tile), self._side(tile)
            if high:
                return side.verify(self._operand(1, (tile.ks, tile.cols)).T, arrays[0].T)
            return side.verify(self._operand(0, (tile.rows, tile.ks)), arrays[0])
        operands = [self._operand(index, (tile.rows, tile.cols)).whole for index in range(len(gemm.inputs))]
        if gemm.kind == "bmm":
            sides = (RightSide.of(b, gemm.tile_dtype, [randbits(128)]) for b in operands[1])
            return all(side.verify(a, c) for side, a, c in zip(sides, operands[0], arrays[0], strict=True))
        seed = randbits(128)
        return verify_attention(
            operands, arrays, dtype=gemm.tile_dtype, causal=gemm.causal, scale=gemm.scale, seed=seed
        )

    def _side(self, tile: Tile) -> RightSide:
        """The operand along a tile's longer side with its vectors: that of all pieces between cuts, if they are few."""
        high = _is_high(tile)
        span = tile.rows if high else tile.cols
        cuts = self._cuts_along(high, tile.ks)
        inner = cuts[bisect_left(cuts, span[0]) : bisect_right(cuts, span[1])]
        pieces = list(pairwise(inner)) if len(inner) <= _MOST_PIECES + 1 else [span]
        return RightSide.joined([self._piece(high, tile.ks, piece) for piece in pieces])

    def _cuts_along(self, high: bool, ks: Range) -> list[int]:
        """Where tiles of one range of k, high or wide ones, begin and end."""
        if not self._cuts:
            found: defaultdict[tuple[bool, Range], set[int]] = defaultdict(set)
            for tile in self.tiles:
                found[_is_high(tile), tile.ks].update(tile.rows if _is_high(tile) else tile.cols)
            self._cuts = {place: sorted(cuts) for place, cuts in found.items()}
        return self._cuts[high, ks]

    def _piece(self, high: bool, ks: Range, span: Range) -> RightSide:
        """A piece between cuts; two threads may both make it, and one of them is kept."""
        found = self._sides.get((high, ks, span))
        if found is None:
            operand = self._operand(0, (span, ks)).T if high else self._operand(1, (ks, span))
            made = RightSide.of(operand, self.gemm.tile_dtype, [randbits(128)])
            found = self._sides.setdefault((high, ks, span), made)
        return found

    def _operand(self, number: int, ranges: tuple[Range, Range]) -> Slices:
        parts, axis = operand_slice(self.gemm, number, ranges, self.read, as_array)
        return Slices(tuple(parts), axis)


def _is_high(tile: Tile) -> bool:
    return extent(tile.rows) > extent(tile.cols)

"""Checking the tiles of one job against the operands that the server holds.

C X = A (B X) or, for tiles that are much higher than wide, the transposed C' X = B' (A' X). The products of vectors
with slices of B are computed once, between all cuts that tiles make along it; those of several tiles are then
multiplied at once by the slice of A that they have in common. So each operand is read a few times, whatever the number
of tiles, and a tile costs little but its own numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from secrets import randbits
from threading import Lock

import numpy as np

from cleave_dask.graph.ir import LOGITS, Gemm, Range
from cleave_dask.planning.cost import extent
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.server_gathering import Array, Read, operand_slice, rounded
from cleave_dask.runtime.tiles import first_word, sliced
from cleave_dask.runtime.verification import RightSide, Slices
from cleave_dask.runtime.verification_attention import verify_attention
from cleave_dask.runtime.verification_logits import verify_logits
from cleave_dask.runtime.wire import as_array

_MOST_PIECES = 8  # of which the vectors of a tile are put together; else it has its own
_TOGETHER = 1 << 17  # numbers along k of tiles whose products are computed at once: 4 MB of vectors


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
        self._alike: dict[tuple[bool, Range, Range], list[int]] = {}
        self._known: dict[int, tuple[RightSide, Array]] = {}  # of tiles that have not come
        self._lock = Lock()

    def right(self, number: int, arrays: Sequence[Array]) -> bool:
        """Whether a tile of the right shapes and dtypes is what its operands make."""
        tile, gemm = self.tiles[number], self.gemm
        if gemm.kind == "gemm":
            high = _is_high(tile)
            with self._lock:  # two tiles that share something are not to compute it both
                known = self._known.pop(number, None)
                side, expected = self._computed(number, high) if known is None else known
            product = arrays[0].T if high else arrays[0]
            return side.passes(product, expected, extent(tile.ks)) or side.verify(
                self._across(tile, high), product, expected
            )
        if gemm.kind in LOGITS:
            spans = sliced(gemm.kind, tile.rows, tile.cols, tile.ks)
            operands = [self._operand(index, ranges).whole for index, ranges in enumerate(spans)]
            operands[2] = operands[2] - first_word(gemm.kind, tile.rows, tile.cols, tile.ks)
            return verify_logits(gemm.kind, operands, arrays, dtype=gemm.tile_dtype, seed=randbits(128))
        operands = [self._operand(index, (tile.rows, tile.cols)).whole for index in range(len(gemm.inputs))]
        if gemm.kind == "bmm":
            sides = (RightSide.of(b, gemm.tile_dtype, [randbits(128)]) for b in operands[1])
            return all(side.verify(a, c) for side, a, c in zip(sides, operands[0], arrays[0], strict=True))
        seed = randbits(128)
        return verify_attention(
            operands, arrays, dtype=gemm.tile_dtype, causal=gemm.causal, scale=gemm.scale, seed=seed
        )

    def operands(self, spans: Sequence[tuple[Range, Range]]) -> list[Array]:
        """The slices of all operands over these ranges, as devices get them."""
        sliced = (operand_slice(self.gemm, number, ranges, self.read) for number, ranges in enumerate(spans))
        return [parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis) for parts, axis in sliced]

    def _computed(self, number: int, high: bool) -> tuple[RightSide, Array]:
        """A tile's vectors, and what they must give: the slice along its shorter side times B X.

        That slice is read once for several tiles that lie along it, whether they have come or not.
        """
        tile = self.tiles[number]
        alike = self._lying_along(tile, high)
        together = [number, *(other for other in alike if other != number)][: max(1, _TOGETHER // extent(tile.ks))]
        alike[:] = [other for other in alike if other not in together]
        sides = [self._side(self.tiles[other], high) for other in together]
        vectors = np.concatenate([side.y for side in sides], axis=1)
        products = np.hsplit(self._across(tile, high).times(self.gemm.tile_dtype, vectors), len(together))
        self._known.update(zip(together, zip(sides, products, strict=True), strict=True))
        return self._known.pop(number)

    def _lying_along(self, tile: Tile, high: bool) -> list[int]:
        """Tiles along the same slice whose products are not known yet."""
        if not self._alike:
            for number, other in enumerate(self.tiles):
                self._alike.setdefault(_slice(other, _is_high(other)), []).append(number)
        return self._alike[_slice(tile, high)]

    def _across(self, tile: Tile, high: bool) -> Slices:
        """The slice along a tile's shorter side."""
        return self._operand(1, (tile.ks, tile.cols)).T if high else self._operand(0, (tile.rows, tile.ks))

    def _side(self, tile: Tile, high: bool) -> RightSide:
        """The operand along a tile's longer side with its vectors: that of all pieces between cuts, if they are few."""
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
        """A piece between cuts."""
        found = self._sides.get((high, ks, span))
        if found is None:
            operand = self._operand(0, (span, ks)).T if high else self._operand(1, (ks, span))
            found = self._sides[high, ks, span] = RightSide.of(operand, self.gemm.tile_dtype, [randbits(128)])
        return found

    def _operand(self, number: int, ranges: tuple[Range, Range]) -> Slices:
        parts, axis = operand_slice(self.gemm, number, ranges, self.read, as_array)
        return Slices(tuple(parts), axis)


def _slice(tile: Tile, high: bool) -> tuple[bool, Range, Range]:
    """Which slice along its shorter side a tile has, and from which operand."""
    return high, tile.ks, tile.cols if high else tile.rows


def _is_high(tile: Tile) -> bool:
    """Whether vectors go with the rows: of results in C order, columns are more work to add up than rows."""
    return extent(tile.rows) > 2 * extent(tile.cols)

"""One product of two dask arrays, as the server keeps it while its tiles are out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cleave_dask.graph.ir import Gemm, Range
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.server_checking import Checker
from cleave_dask.runtime.server_gathering import Array, Attempt, Gathering, operand_slice, tile_nbytes

Blocks = Sequence[Sequence[Any]]
"""The blocks of a dask array, row by row."""


class Product:
    """The operands of C = A B and the tiles of C that have come back. Dask holds it as a task result."""

    def __init__(self, name: str, gemm: Gemm, tiles: Sequence[Tile], operands: dict[str, Array]) -> None:
        self.name = name
        self.gemm = gemm
        self._operands = {key: torch.from_numpy(array) for key, array in operands.items()}
        self._gathering = Gathering(gemm, tiles)
        self._checker = Checker(gemm, tiles, self._operands.__getitem__)

    def slice(self, step: int, job: int, operand: int, ranges: tuple[Range, Range]) -> tuple[list[Array], int]:
        """The slice of an operand that a device asks for."""
        return operand_slice(self.gemm, operand, ranges, self._checker.read)

    def published(self, step: int, job: int, operand: int) -> bool:
        """Both operands are there from the start."""
        return True

    def due(self, step: int, job: int) -> None:
        """There are no rounds."""
        return None

    def operands(self, step: int, job: int, spans: Sequence[tuple[Range, Range]]) -> list[Array]:
        """The slices of both operands of a tile that is made here."""
        return self._checker.operands(spans)

    def accept(
        self, step: int, job: int, tile: int, arrays: list[Array], attempt: Attempt, *, check: bool = True
    ) -> bool:
        """Take a tile that a device pushed; False if it is here already. All are checked: there is no second try."""
        return self._gathering.accept(tile, arrays, self._checker.right)

    def wanted(self, step: int, job: int, tiles: list[int]) -> list[int]:
        """Which of these tiles have not come yet."""
        return self._gathering.wanted(tiles)

    def tile_nbytes(self, step: int, job: int, tile: int) -> int | None:
        """Bytes of a tile that a device may push."""
        return tile_nbytes(self.gemm, self._gathering.tiles, tile)

    def gathering(self, step: int, job: int) -> Gathering:
        """Where the tiles are put together."""
        return self._gathering


def joined(blocks: Blocks, dtype: str) -> Array:
    """A grid of blocks as one array."""
    return np.ascontiguousarray(np.block([[np.asarray(block) for block in row] for row in blocks]), dtype=dtype)

"""What server and device say to each other about a tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cleave_dask.graph.ir import ITEMSIZE, Range
from cleave_dask.planning.slices import newly

MANY = 1 << 40
"""Bytes that count as many."""

SliceName = tuple[str, int, int, int, Range, Range]
"""What an operand slice is known by: run, step, job, operand, and the range along each of its first two axes."""


@dataclass(frozen=True, slots=True)
class TileSpec:
    """All that a device needs to know of a tile to fetch its operands, multiply and send the result."""

    run: str  # whose step: the name of one training, or of one product
    step: int
    job: int
    tile: int
    kind: str
    dtype: str
    rows: Range
    cols: Range
    ks: Range
    causal: bool
    scale: float | None


@dataclass(frozen=True, slots=True)
class ParcelSpec:
    """The tiles of one gemm that a device is sent as one task."""

    run: str
    step: int
    job: int
    kind: str
    dtype: str
    causal: bool
    scale: float | None
    rank: int  # smaller goes first
    filler: bool  # nothing but the update waits for it
    tiles: tuple[tuple[int, int, int, int, int, int, int], ...]  # number; rows, cols, ks, each start and stop
    resumed: bool = False  # tiles of this step are on the server from before it was interrupted: ask first

    @property
    def numbers(self) -> list[int]:
        """The numbers of its tiles."""
        return [tile[0] for tile in self.tiles]

    def specs(self) -> Iterator[TileSpec]:
        """Its tiles one by one."""
        for number, r0, r1, c0, c1, k0, k1 in self.tiles:
            yield TileSpec(
                *(self.run, self.step, self.job, number, self.kind, self.dtype),
                *((r0, r1), (c0, c1), (k0, k1), self.causal, self.scale),
            )


def slice_names(spec: TileSpec) -> list[SliceName]:
    """The operand slices of a tile, in the order that its kernel takes them.

    A gemm's operands are cut as A[rows, ks] and B[ks, cols]; every other kind's along batch and head group.
    """
    run, step, job = spec.run, spec.step, spec.job
    if spec.kind == "gemm":
        return [(run, step, job, 0, spec.rows, spec.ks), (run, step, job, 1, spec.ks, spec.cols)]
    count = {"bmm": 2, "attention": 3, "attention_backward": 6}[spec.kind]
    return [(run, step, job, operand, spec.rows, spec.cols) for operand in range(count)]


def own_bytes(specs: Sequence[TileSpec]) -> list[int]:
    """Bytes that each of a parcel's tiles, in this order, adds to those before it: parts of operands, and its result.

    Those of an attention depend on more than is known here, and count as many.
    """
    if not specs or specs[0].kind != "gemm":
        return [MANY] * len(specs)
    rows, cols, ks = (np.array([getattr(spec, axis) for spec in specs]) for axis in ("rows", "cols", "ks"))
    layer = np.unique(ks, axis=0, return_inverse=True)[1].reshape(-1)
    fresh = (newly(layer, *rows.T) + newly(layer, *cols.T)) * np.diff(ks).ravel()
    results = np.diff(rows).ravel() * np.diff(cols).ravel()
    sizes: list[int] = ((fresh + results).astype(np.int64) * ITEMSIZE[specs[0].dtype]).tolist()
    return sizes

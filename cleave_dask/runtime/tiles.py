"""What server and device say to each other about a tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cleave_dask.graph.ir import ITEMSIZE, Range
from cleave_dask.planning.slices import SIDED, fetched, newly, results, turned

MANY = 1 << 40
"""Bytes that count as many."""

COMING = {"coming": True}
"""What the server says before a slice that was asked for ahead, so that filler makes way for it."""

SliceName = tuple[str, int, int, int, Range, Range]
"""What an operand slice is known by: run, step, job, operand, and the range along each of its first two axes."""

Values = tuple[tuple[int, bool], ...]
"""A number for each operand, the same wherever gemms of a step share it, and whether it is read transposed; or none."""


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
    values: Values = ()
    kept: tuple[bool, ...] = ()


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
    values: Values = ()
    kept: tuple[bool, ...] = ()  # operands of which its planned device has its part from gemms before; empty: of none
    ahead: ParcelSpec | None = None  # of the next job: what its device may begin while results of this one go up
    at_hand: tuple[bool, ...] = ()  # of what is fetched ahead: operands that the server has already

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
                values=self.values,
                kept=self.kept,
            )


def slice_names(spec: TileSpec) -> list[SliceName]:
    """The operand slices of a tile, in the order that its kernel takes them.

    A gemm's operands are cut as A[rows, ks] and B[ks, cols]; those of a head by vocabulary along their first axis;
    every other kind's along batch and head group.
    """
    run, step, job = spec.run, spec.step, spec.job
    spans = sliced(spec.kind, spec.rows, spec.cols, spec.ks)
    return [(run, step, job, operand, *ranges) for operand, ranges in enumerate(spans)]


def sliced(kind: str, rows: Range, cols: Range, ks: Range) -> list[tuple[Range, Range]]:
    """The ranges of each operand of a tile along its first two axes."""
    match kind:
        case "gemm":
            return [(rows, ks), (ks, cols)]
        case "logit_sums":
            return [(rows, ks), (cols, ks), (rows, (0, 1))]
        case "logit_dx" | "logit_dw":
            return [(rows, cols), (ks, cols), *[(rows if kind == "logit_dx" else ks, (0, 1))] * 3]
    return [(rows, cols)] * {"bmm": 2, "attention": 3, "attention_backward": 6}[kind]


def first_word(kind: str, rows: Range, cols: Range, ks: Range) -> int:
    """The first word of a tile's vocabulary, from which its targets are counted."""
    return {"logit_sums": cols, "logit_dx": ks, "logit_dw": rows}[kind][0]


def own_bytes(specs: Sequence[TileSpec]) -> list[int]:
    """Bytes that each of a parcel's tiles, in this order, adds to those before it: parts of operands, and its result.

    Those of an attention depend on more than is known here, and count as many.
    """
    if not specs or specs[0].kind not in SIDED:
        return [MANY] * len(specs)
    kind, ranges = specs[0].kind, np.array([(*spec.rows, *spec.cols, *spec.ks) for spec in specs])
    made = results(kind, ranges[:, 1::2] - ranges[:, 0::2])
    ranges = turned(kind, ranges)
    layer = np.unique(ranges[:, 4:], axis=0, return_inverse=True)[1].reshape(-1)
    sides = [newly(layer, *ranges[:, 2 * side : 2 * side + 2].T) for side in fetched(specs[0].kept)]
    fresh = sum(sides, start=np.zeros(len(specs))) * (ranges[:, 5] - ranges[:, 4])
    sizes: list[int] = ((fresh + made).astype(np.int64) * ITEMSIZE[specs[0].dtype]).tolist()
    return sizes

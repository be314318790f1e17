"""What server and device say to each other about a tile."""

from __future__ import annotations

from dataclasses import dataclass

from cleave_dask.graph.ir import Range

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


def slice_names(spec: TileSpec) -> list[SliceName]:
    """The operand slices of a tile, in the order that its kernel takes them.

    A gemm's operands are cut as A[rows, ks] and B[ks, cols]; every other kind's along batch and head group.
    """
    run, step, job = spec.run, spec.step, spec.job
    if spec.kind == "gemm":
        return [(run, step, job, 0, spec.rows, spec.ks), (run, step, job, 1, spec.ks, spec.cols)]
    count = {"bmm": 2, "attention": 3, "attention_backward": 6}[spec.kind]
    return [(run, step, job, operand, spec.rows, spec.cols) for operand in range(count)]

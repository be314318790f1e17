"""What planning yields: tiles placed on devices, and the plan they make together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from cleave_dask.graph.ir import Range


@dataclass(frozen=True, slots=True)
class Tile:
    """A cuboid of one gemm: the unit of work, transfer, check, checkpoint and retry."""

    gemm: str
    rows: Range
    cols: Range
    ks: Range
    device: str | None = None  # None: whichever device is free first


@dataclass(frozen=True)
class Plan:
    """Tiles placed on devices, with what that is predicted to cost. A gemm without tiles runs on the server."""

    tiles: tuple[Tile, ...]
    seconds: float  # predicted time of the step
    bound_seconds: float  # no plan on this fleet can be faster
    binding: str  # the resource that decides `seconds`
    down_bytes: int
    up_bytes: int
    peak_memory: Mapping[str, int]  # bytes, by device
    reasons: Mapping[str, str]  # by device: why it has the work it has

    @cached_property
    def by_gemm(self) -> Mapping[str, tuple[Tile, ...]]:
        """The tiles of each distributed gemm, in canonical order: by k, then row, then column."""
        grouped: dict[str, list[Tile]] = {}
        for tile in self.tiles:
            grouped.setdefault(tile.gemm, []).append(tile)
        return {
            gemm: tuple(sorted(tiles, key=lambda tile: (tile.ks, tile.rows, tile.cols)))
            for gemm, tiles in grouped.items()
        }

    @cached_property
    def devices_used(self) -> int:
        """Number of devices that have at least one tile."""
        return len({tile.device for tile in self.tiles})

    def why(self, device: str) -> str:
        """Why this device has the share of work that it has."""
        return self.reasons[device]

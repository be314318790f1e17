"""Rows of a simulated trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cleave_dask.runtime.trace import ACCEPTED, DUPLICATE, HERE
from cleave_dask.simulation.device import Parcel, Run


def rows_of(run: Run, gemm: str, device: str, now: float, *, by_tile: bool) -> list[tuple[Any, ...]]:
    """A row for each tile of a run that is up now, or one for all; tiles that are there already are duplicates."""
    attempt, parcel, tiles = run.attempt, run.attempt.parcel, run.tiles
    late = now - run.sent[-1]  # than it should have been, as others went first
    first = parcel.seen if parcel.open else tiles.stop  # the first that nobody has brought before
    parcel.seen = max(parcel.seen, tiles.stop)
    columns: Iterable[tuple[Any, ...]]
    if by_tile:
        numbers, ends = parcel.cut.tiles[tiles].tolist(), [sent + late for sent in run.sent]
        times = run.arrived, run.multiplied, ends, run.down, parcel.cut.up[tiles]
        columns = zip(range(tiles.start, tiles.stop), numbers, *times, strict=True)
    else:
        last = tiles.stop - 1
        ends = [run.arrived[-1], run.multiplied[-1], now]
        columns = ((last, int(parcel.cut.tiles[last]), *ends, run.down_bytes, run.up_bytes),)
    rows, begun, sent = [], run.begun, attempt.sent
    for place, tile, down, done, up, fetched, result in columns:
        row = (1, gemm, tile, device, sent, begun - sent, down - begun, done - down, up - done, 0.0)
        rows.append((*row, ACCEPTED if place >= first else DUPLICATE, round(fetched), round(result)))
        begun = down
    return rows


def rows_made_here(parcel: Parcel, gemm: str, begun: float, now: float) -> list[tuple[Any, ...]]:
    """A row for each tile that the server made of a lost device's parcel: nothing travelled."""
    tiles = parcel.cut.tiles[parcel.seen :].tolist()
    each = (now - begun) / max(1, len(tiles))
    parcel.seen = len(parcel.cut.tiles)
    times = [(begun + each * place, 0.0, 0.0, each, 0.0, 0.0) for place in range(len(tiles))]
    return [(1, gemm, tile, HERE, *time, ACCEPTED, 0, 0) for tile, time in zip(tiles, times, strict=True)]

"""Traces on disk: a zarr group with one array per column, or the parts that a training appends at every save.

    checkpoints/run/trace/
      part-000000000000-000000000136/   rows 0 to 135, counted over the whole run: columns and names

When there are many parts they become one, and the oldest rows beyond a limit go: the folder stays small.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cleave_dask.errors import CheckpointError
from cleave_dask.runtime.zarr_files import METADATA, StoredArray, memory, read_arrays, read_manifest, write_group

_PART = re.compile(r"part-(\d+)-(\d+)")
Columns = Mapping[str, np.ndarray[Any, np.dtype[Any]]]
Names = Mapping[str, tuple[str, ...]]


def write_table(folder: Path, columns: Columns, names: Names) -> None:
    """Write a table into a new folder."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; give the trace another place")
    arrays = {name: StoredArray(column, column.dtype.name) for name, column in columns.items()}
    head = {"document": {"names": {name: list(values) for name, values in names.items()}}}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_group(folder, arrays, head, durable=False)
    except OSError as error:
        raise CheckpointError(f"the trace cannot be written to {folder}: {error}; give another place") from error


def read_tables(folder: Path, *, skip_damaged: bool = False) -> list[tuple[Columns, Names]]:
    """The table in a folder, or all parts of it."""
    if (folder / METADATA).is_file():
        return [_read(folder)]
    tables = []
    for part in _parts(folder):
        try:
            tables.append(_read(part))
        except CheckpointError:
            if not skip_damaged:
                raise
    if not tables:
        raise CheckpointError(
            f"there is no trace in {folder}; a training leaves one in <checkpoint>/trace at each save"
        )
    return tables


def append_table(folder: Path, columns: Columns, names: Names) -> None:
    """Add a part to the trace that a training leaves."""
    shutil.rmtree(folder / ".merged", ignore_errors=True)
    parts = _parts(folder)
    start = _rows_of(parts[-1])[1] if parts else 0
    rows = len(next(iter(columns.values())))
    if rows:
        write_table(folder / _name(start, start + rows), columns, names)


def is_crowded(folder: Path, *, most_rows: int, most_parts: int) -> bool:
    """Whether there are too many parts, or too many rows beside the first part."""
    parts = _parts(folder)
    beside = _rows_of(parts[-1])[1] - _rows_of(parts[1])[0] if len(parts) > 1 else 0
    return len(parts) >= most_parts or beside >= most_rows


def merge_tables(folder: Path, columns: Columns, names: Names) -> None:
    """Put one table in the place of all parts."""
    parts = _parts(folder)
    write_table(folder / ".merged", columns, names)
    merged = folder / _name(_rows_of(parts[0])[0], _rows_of(parts[-1])[1])
    try:
        (folder / ".merged").rename(merged)  # from here on the others are part of it, and no longer read
    except OSError as error:
        raise CheckpointError(f"the parts of the trace in {folder} cannot become one: {error}") from error
    for part in parts:
        shutil.rmtree(part, ignore_errors=True)


def _parts(folder: Path) -> list[Path]:
    """The parts of a trace in order, without those that are part of a larger one."""
    found = sorted((path for path in folder.glob("part-*") if _PART.fullmatch(path.name)), key=_order)
    parts: list[Path] = []
    for path in found:
        if not parts or _rows_of(path)[1] > _rows_of(parts[-1])[1]:
            parts.append(path)
    return parts


def _order(path: Path) -> tuple[int, int]:
    first, last = _rows_of(path)
    return first, -last


def _rows_of(path: Path) -> tuple[int, int]:
    match = _PART.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _name(first: int, last: int) -> str:
    return f"part-{first:012d}-{last:012d}"


def _read(folder: Path) -> tuple[Columns, Names]:
    try:
        content, _ = read_manifest(folder)
        arrays = {name: memory(name, entry, {}) for name, entry in content["arrays"].items()}
        read_arrays(folder, content, arrays)
    except OSError as damage:
        raise CheckpointError(f"the trace in {folder} is damaged: {damage}; remove that folder") from damage
    columns = {name: array.data for name, array in arrays.items()}
    return columns, {name: tuple(values) for name, values in content["document"]["names"].items()}

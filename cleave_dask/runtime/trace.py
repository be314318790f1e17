"""The trace: what happened, one row per tile attempt, with the same columns whether it was measured or simulated.

A row tells which tile, on which device, when it began, how long each part of it took, and what became of it. The parts
follow each other, so that a row of a timeline is `start`, then `queued` to `verify` side by side:

    queued      on the device, neither transferring nor multiplying
    download    until all operands were there
    compute     in the multiplier
    upload      from the device's last number to the server's last byte
    verify      in the server's hands, until the tile was checked and in its place

The table is kept as columns of numbers: 64 bytes a row. Names are numbers too, positions in `Trace.names`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np

from cleave_dask.errors import InputError
from cleave_dask.formatting import Markup, duration, html_bar, html_table, quantity

COLUMNS: Mapping[str, str] = {
    "step": "int32",  # the update that it worked for, counted from 1 as in a step's record
    "gemm": "int32",
    "tile": "int32",  # its position among the tiles of its gemm
    "device": "int32",
    "start": "float64",  # seconds, on the clock of whoever made the trace
    "queued": "float32",
    "download": "float32",
    "compute": "float32",
    "upload": "float32",
    "verify": "float32",
    "outcome": "int32",
    "down_bytes": "int64",  # operands that came down for this attempt; slices that were there already do not count
    "up_bytes": "int64",
}
NAMED = ("gemm", "device", "outcome")
PARTS = ("queued", "download", "compute", "upload", "verify")
COLOURS = dict(zip(PARTS, ("#cbd5e0", "#2b6cb0", "#dd6b20", "#38a169", "#805ad5"), strict=True))
_SHOWN = 16  # devices that a notebook shows of a trace
ACCEPTED, DUPLICATE = "accepted", "duplicate"

HERE = "server"
"""The device of a tile that the server made itself, because the one that had it was lost."""

"""Outcomes; any other one says why the tile was rejected."""

MOST_ROWS = 1_000_000
"""Rows that are kept; older ones go first. They take 64 MB."""

Column = np.ndarray[Any, np.dtype[Any]]


class Row(NamedTuple):
    """One attempt at a tile."""

    step: int
    gemm: str
    tile: int
    device: str
    start: float
    queued: float
    download: float
    compute: float
    upload: float
    verify: float
    outcome: str
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True, eq=False)
class Trace:
    """A table of tile attempts, in the order in which they ended."""

    columns: Mapping[str, Column]  # names as positions in `names`
    names: Mapping[str, tuple[str, ...]]  # of gemms, devices and outcomes
    lasted: float | None = None  # seconds of all that it tells of, if that is more than its rows show

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]], *, lasted: float | None = None) -> Self:
        """A table of rows, each with the fields of `Row`."""
        given = list(rows)
        values = list(zip(*given, strict=True)) or [()] * len(COLUMNS)
        names: dict[str, tuple[str, ...]] = {}
        columns: dict[str, Column] = {}
        for (name, dtype), column in zip(COLUMNS.items(), values, strict=True):
            if name in NAMED:
                places = {value: place for place, value in enumerate(dict.fromkeys(column))}
                names[name] = tuple(places)
                column = tuple(map(places.__getitem__, column))
            columns[name] = np.array(column, dtype=dtype)
        return cls(columns, names, lasted)

    @classmethod
    def joined(cls, traces: Iterable[Trace]) -> Self:
        """One table of several, one after another."""
        parts = [trace for trace in traces if len(trace)]
        names = {name: tuple(dict.fromkeys(each for part in parts for each in part.names[name])) for name in NAMED}
        columns: dict[str, Column] = {}
        for name, dtype in COLUMNS.items():
            pieces = [part.columns[name] for part in parts]
            if name in NAMED:
                places = {each: place for place, each in enumerate(names[name])}
                maps = [np.array([places[each] for each in part.names[name]], dtype) for part in parts]
                pieces = [where[piece] for where, piece in zip(maps, pieces, strict=True)]
            columns[name] = np.concatenate([np.empty(0, dtype), *pieces])
        return cls(columns, names)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, column: str) -> Column:
        """A column as numbers, or as names where it has names."""
        if column not in COLUMNS:
            raise InputError(f"a trace has no column {column!r}; it has {', '.join(COLUMNS)}")
        values = self.columns[column]
        if column not in NAMED:
            return values
        return np.array([*self.names[column], ""], dtype=object)[values]

    def __iter__(self) -> Iterator[Row]:
        yield from map(Row, *(self[name].tolist() for name in COLUMNS))

    def __repr__(self) -> str:
        return f"<Trace of {self._headline}>"

    @property
    def end(self) -> Column:
        """When each attempt ended, on the clock of `start`."""
        total: Column = self.columns["start"] + sum(self.columns[part].astype("float64") for part in PARTS)
        return total

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        if self.lasted is not None:
            return self.lasted
        return float(self.end.max() - self.columns["start"].min()) if len(self) else 0.0

    @property
    def accepted(self) -> Column:
        """Which rows are of tiles that were taken."""
        right = [place for place, outcome in enumerate(self.names["outcome"]) if outcome == ACCEPTED]
        return np.isin(self.columns["outcome"], right)

    def where(self, rows: Column | slice) -> Trace:
        """Some rows of the table: a mask, positions, or a slice."""
        return Trace({name: column[rows] for name, column in self.columns.items()}, self.names)

    def of_step(self, step: int) -> Trace:
        """The rows of one step."""
        return self.where(self.columns["step"] == step)

    def by_device(self) -> list[dict[str, Any]]:
        """For each device how often it tried, how much was taken, and the sums of its seconds and bytes."""
        accepted, table = self.accepted, []
        for place, device in enumerate(self.names["device"]):
            theirs = self.columns["device"] == place
            sums = {name: self.columns[name][theirs].sum().item() for name in (*PARTS, "down_bytes", "up_bytes")}
            tried = int(theirs.sum())
            if tried:
                table.append({"device": device, "tiles": tried, "accepted": int(accepted[theirs].sum()), **sums})
        return sorted(table, key=lambda row: str(row["device"]))

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        try:
            import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]  # few machines need it
        except ModuleNotFoundError as error:
            remedy = "pip install pandas, or take single columns: trace['compute']"
            raise InputError(f"a trace becomes a DataFrame only where pandas is installed; {remedy}") from error
        return pandas.DataFrame({name: self[name] for name in COLUMNS})

    def save(self, path: str | Path) -> None:
        """Write the table to a new folder, as a zarr group with one array per column."""
        _files().write_table(Path(path), self.columns, self.names)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a table that was saved, or that a training left beside its checkpoint: `Trace.load("run/trace")`."""
        return cls.joined(Trace(columns, names) for columns, names in _files().read_tables(Path(path)))

    def append(self, path: str | Path, *, most_rows: int = MOST_ROWS, most_parts: int = 32) -> None:
        """Add the table to those in a folder, and keep that small: the oldest rows beyond `most_rows` go."""
        files, folder = _files(), Path(path)
        files.append_table(folder, self.columns, self.names)
        if files.is_crowded(folder, most_rows=most_rows, most_parts=most_parts):
            everything = Trace.joined(Trace(*table) for table in files.read_tables(folder, skip_damaged=True))
            kept = everything.where(slice(-most_rows, None))
            files.merge_tables(folder, kept.columns, kept.names)

    @property
    def _headline(self) -> str:
        steps = len(np.unique(self.columns["step"]))
        failed = len(self) - int(self.accepted.sum())
        other = f", {failed:,} not taken" if failed else ""
        return f"{len(self):,} tiles in {steps:,} step{'s' * (steps != 1)}, {duration(self.seconds)}{other}"

    def _repr_html_(self) -> str:
        """A line per device."""
        header = ("device", "", "tiles", "accepted", *PARTS, "down", "up")
        table = self.by_device()
        longest = max((sum(row[part] for part in PARTS) for row in table), default=0.0) or 1.0
        rows = [
            (
                *(row["device"], _bar(row, longest), row["tiles"], row["accepted"]),
                *(duration(row[part]) for part in PARTS),
                *(quantity(row["down_bytes"], "B"), quantity(row["up_bytes"], "B")),
            )
            for row in sorted(table, key=lambda row: -row["tiles"])[:_SHOWN]
        ]
        more = f" ({len(table) - _SHOWN:,} more devices)" if len(table) > _SHOWN else ""
        return html_table(header, rows, caption=f"Trace: {self._headline}{more}")


def _bar(row: Mapping[str, Any], longest: float) -> Markup:
    """The parts of a device's tiles side by side, as long as they took beside the longest."""
    return html_bar([(COLOURS[part], row[part] / longest, f"{part} {duration(row[part])}") for part in PARTS])


class Recorder:
    """Takes down rows while a training runs, and keeps the newest `limit` of them."""

    def __init__(self, limit: int = MOST_ROWS) -> None:
        self.limit = limit
        self.saved = 0  # rows that are on disk, counted from the first that was ever taken down
        self._rows: list[tuple[Any, ...]] = []
        self._sealed: deque[Trace] = deque()
        self._held = 0  # rows in `_sealed`
        self._dropped = 0
        self._lock = Lock()

    def add(self, row: tuple[Any, ...]) -> None:
        """Take down an attempt, as the fields of `Row` in their order."""
        with self._lock:
            self._rows.append(row)
            full = len(self._rows) >= self.limit
        if full:
            self.seal()

    def seal(self) -> None:
        """Pack the rows of a step into columns, a fifth of their size; call it when a step is over."""
        with self._lock:
            if self._rows:
                self._sealed.append(Trace.of(self._rows))
                self._held += len(self._rows)
                self._rows = []
            while len(self._sealed) > 1 and self._held - len(self._sealed[0]) >= self.limit:
                gone = len(self._sealed.popleft())
                self._held -= gone
                self._dropped += gone

    @property
    def count(self) -> int:
        """Rows that were ever taken down."""
        with self._lock:
            return self._dropped + self._held + len(self._rows)

    def parts(self, number: int) -> tuple[list[Trace], int]:
        """The rows from row `number` on, as far as they are kept, step by step, and the number to ask for next."""
        with self._lock:
            sealed, first = list(self._sealed), self._dropped
            packed = first + self._held
            rows = self._rows[max(0, number - packed) :]
            following = packed + len(self._rows)
        wanted = []
        for part in sealed:
            if first + len(part) > number:
                wanted.append(part.where(slice(max(0, number - first), None)))
            first += len(part)
        return [*wanted, *([Trace.of(rows)] if rows else [])], following

    def since(self, number: int) -> tuple[Trace, int]:
        """The same rows as one table."""
        parts, following = self.parts(number)
        return Trace.joined(parts), following

    def last_sealed(self) -> tuple[Trace, int]:
        """The rows of the last step that is over, and the number of the first of them."""
        with self._lock:
            last = self._sealed[-1] if self._sealed else Trace.of(())
            return last, self._dropped + self._held - len(last)


def _files() -> Any:
    """What writes and reads; only those who do so need zarr."""
    return import_module("cleave_dask.runtime.trace_files")

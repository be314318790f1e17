"""Step records and events of a run: kept while it trains, and beside its checkpoint for whoever looks back.

    checkpoints/run/records/
      steps.jsonl     a line per update: step, loss, seconds, bytes, tiles
      events.jsonl    a line per event of the fleet: time, what, which device
      plan.json       the plan in use at the last save: what it predicts, why each device has its share; the last step
      latest/         the newest rows of the trace, each with what was predicted for it

Lines are appended at every save. A line that a killed process left half written is skipped by the reader.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from cleave_dask.errors import CheckpointError
from cleave_dask.runtime.trace_files import Columns, Names, read_tables, write_table

logger = logging.getLogger(__name__)

FOLDER = "records"
KEPT = ("step", "loss", "seconds", "down_bytes", "up_bytes", "tiles", "retries", "rejected", "reused", "spent", "ended")
"""What is kept of a step's record."""

MOST_STEPS = 50_000
"""Records that are kept in memory; older ones go first."""

Record = Mapping[str, Any]


class History:
    """The records of a run, newest last."""

    def __init__(self, limit: int = MOST_STEPS) -> None:
        self.saved = 0  # records that are on disk, counted from the first that was ever added
        self._records: deque[Record] = deque(maxlen=limit)
        self._added = 0
        self._lock = Lock()

    def add(self, record: Record) -> None:
        """Keep what is worth keeping of a step's record."""
        with self._lock:
            self._records.append({name: record[name] for name in KEPT if name in record})
            self._added += 1

    def since(self, number: int) -> tuple[list[Record], int]:
        """The records from number `number` on, as far as they are kept, and the number to ask for next."""
        with self._lock:
            new = max(0, self._added - number)
            return list(self._records)[-new:] if new else [], self._added

    def start_from(self, records: Sequence[Record]) -> None:
        """Go on after a resume: these are what came before, and they are on disk."""
        with self._lock:
            self._records.clear()
            self._records.extend(records)
            self._added = self.saved = self._added + len(records)


def append_lines(file: Path, lines: Iterable[Any]) -> None:
    """Add one JSON value per line; half a line that is there is closed first."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if not text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            text = text if stream.read(1) == b"\n" else "\n" + text
        stream.write(text.encode())


def read_lines(file: Path) -> list[Any]:
    """The values of a file of lines; those that are not whole are left out."""
    values = []
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            values.append(json.loads(line))
        except ValueError:
            logger.debug("Half a line in %s is left out", file)
    return values


def read_records(folder: Path, *, up_to: int | None = None) -> list[Record]:
    """The records of a checkpoint by step, each as it was computed last: a run that resumed did some steps twice."""
    records: list[Record] = []
    for record in read_lines(folder / FOLDER / "steps.jsonl"):
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            if records and record["step"] <= records[-1]["step"]:
                records = [before for before in records if before["step"] < record["step"]]
            records.append(record)
    return [record for record in records if up_to is None or record["step"] <= up_to]


def read_events(folder: Path) -> list[tuple[float, dict[str, Any]]]:
    """The events of a checkpoint in order, each once."""
    lines = read_lines(folder / FOLDER / "events.jsonl")
    events = {json.dumps(line): (float(line[0]), dict(line[1])) for line in lines if _is_event(line)}
    return sorted(events.values(), key=lambda event: event[0])


def _is_event(line: Any) -> bool:
    return isinstance(line, list) and len(line) == 2 and isinstance(line[1], dict)


def write_story(folder: Path, standing: Mapping[str, Any], latest: tuple[Columns, Names]) -> None:
    """Put the plan in use, the last step and the newest rows in the place of those of the last save."""
    records = folder / FOLDER
    records.mkdir(parents=True, exist_ok=True)
    fresh = records / ".plan.json"
    fresh.write_text(json.dumps(standing))
    fresh.replace(records / "plan.json")
    shutil.rmtree(records / ".latest", ignore_errors=True)
    write_table(records / ".latest", *latest)
    shutil.rmtree(records / "latest", ignore_errors=True)
    (records / ".latest").rename(records / "latest")


def read_story(folder: Path) -> tuple[dict[str, Any], tuple[Columns, Names] | None]:
    """The plan, the last step and the newest rows of a checkpoint; empty, or None, where they are not there."""
    records = folder / FOLDER
    try:
        standing: dict[str, Any] = json.loads((records / "plan.json").read_text())
    except (OSError, ValueError):
        standing = {}
    try:
        latest = read_tables(records / "latest")[0]
    except CheckpointError:
        return standing, None
    return standing, latest

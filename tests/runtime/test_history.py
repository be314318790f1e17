"""Records and events of a run: in memory while it trains, and beside its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cleave_dask.runtime.history import (
    FOLDER,
    History,
    append_lines,
    read_events,
    read_records,
    read_story,
    write_story,
)


def record(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "seconds": 0.5, "tiles_of": {"a": 3}}


def test_what_is_new_is_told_once() -> None:
    history = History(limit=3)
    for step in range(1, 6):
        history.add(record(step))
    kept, following = history.since(0)
    assert [each["step"] for each in kept] == [3, 4, 5]
    assert "tiles_of" not in kept[0], "as long as the fleet: it is in the trace already"
    assert history.since(following) == ([], 5)
    history.add(record(6))
    assert [each["step"] for each in history.since(following)[0]] == [6]


def test_a_resumed_run_goes_on_with_what_came_before() -> None:
    history = History()
    history.start_from([record(1), record(2)])
    history.add(record(3))
    assert [each["step"] for each in history.since(0)[0]] == [1, 2, 3]
    assert [each["step"] for each in history.since(history.saved)[0]] == [3], "the others are on disk"


def test_steps_that_were_done_twice_count_once(tmp_path: Path) -> None:
    file = tmp_path / FOLDER / "steps.jsonl"
    append_lines(file, [record(step, loss=9.0) for step in (1, 2, 3, 4)])
    append_lines(file, [record(3, loss=8.0)])  # resumed from step 2
    assert [(each["step"], each["loss"]) for each in read_records(tmp_path)] == [(1, 9.0), (2, 9.0), (3, 8.0)]
    assert [each["step"] for each in read_records(tmp_path, up_to=2)] == [1, 2]


def test_half_a_line_costs_that_line_only(tmp_path: Path) -> None:
    file = tmp_path / FOLDER / "steps.jsonl"
    append_lines(file, [record(1)])
    with file.open("a") as stream:
        stream.write('{"step": 2, "lo')  # the process was killed here
    append_lines(file, [record(2), record(3)])
    assert [each["step"] for each in read_records(tmp_path)] == [1, 2, 3]


def test_events_are_told_in_order_and_once(tmp_path: Path) -> None:
    file = tmp_path / FOLDER / "events.jsonl"
    append_lines(file, [(2.0, {"action": "left", "device": "a"}), (1.0, {"action": "joined", "device": "a"})])
    append_lines(file, [(2.0, {"action": "left", "device": "a"}), "nonsense"])
    assert [(when, event["action"]) for when, event in read_events(tmp_path)] == [(1.0, "joined"), (2.0, "left")]


def test_the_newest_rows_replace_those_of_the_save_before(tmp_path: Path) -> None:
    assert read_story(tmp_path) == ({}, None)
    for count in (5, 3):
        columns = {"step": np.arange(count, dtype=np.int32)}
        write_story(tmp_path, {"run": str(count)}, (columns, {"device": ("a",)}))
    standing, latest = read_story(tmp_path)
    assert standing == {"run": "3"}
    assert latest is not None
    assert latest[0]["step"].tolist() == [0, 1, 2]
    assert latest[1] == {"device": ("a",)}

"""The table of tile attempts: built, joined, bounded, written and read."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.runtime.clock import ServerClock
from cleave_dask.runtime.server_gathering import Attempt
from cleave_dask.runtime.trace import COLUMNS, Recorder, Row, Trace


def row(number: int, *, device: str = "phone", outcome: str = "accepted") -> Row:
    """Attempt `number`: starts at that second and takes one and a half."""
    parts = {"queued": 0.0, "download": 0.5, "compute": 0.25, "upload": 0.5, "verify": 0.25}
    return Row(
        step=1 + number // 4,
        gemm=f"gemm-{number % 3}",
        tile=number,
        device=device,
        start=float(number),
        outcome=outcome,
        down_bytes=100,
        up_bytes=10 + number,
        **parts,
    )


ROWS = [row(0), row(1, device="laptop"), row(2, outcome="f8 (1, 1) where ..."), row(5, device="laptop")]


def test_rows_come_back_as_they_were_given() -> None:
    trace = Trace.of(ROWS)
    assert list(trace) == ROWS
    assert trace["device"].tolist() == ["phone", "laptop", "phone", "laptop"]
    assert trace.seconds == 5 + 1.5
    assert trace.end.tolist() == [1.5, 2.5, 3.5, 6.5]
    assert trace.accepted.tolist() == [True, True, False, True]
    assert list(trace.of_step(2)) == ROWS[3:]
    assert {name: column.dtype.name for name, column in trace.columns.items()} == dict(COLUMNS)
    with pytest.raises(InputError, match="no column 'colour'; it has step, gemm"):
        trace["colour"]


def test_an_empty_trace_is_a_trace() -> None:
    empty = Trace.of([])
    assert (len(empty), empty.seconds, list(empty), empty.by_device()) == (0, 0.0, [], [])
    assert list(Trace.joined([])) == []
    assert "0 tiles" in empty._repr_html_()


def test_joining_keeps_names_apart() -> None:
    joined = Trace.joined([Trace.of(ROWS[1:2]), Trace.of([]), Trace.of(ROWS[:1]), Trace.of(ROWS[2:])])
    assert list(joined) == [ROWS[1], ROWS[0], *ROWS[2:]]


def test_the_summary_is_by_device() -> None:
    trace = Trace.of(ROWS)
    laptop, phone = trace.by_device()
    assert (laptop["device"], laptop["tiles"], laptop["accepted"], laptop["up_bytes"]) == ("laptop", 2, 2, 26)
    assert (phone["tiles"], phone["accepted"], phone["compute"]) == (2, 1, 0.5)
    html = trace._repr_html_()
    assert html.count("<tr>") == 3
    assert "4 tiles in 2 steps, 6.5 s, 1 not taken" in html


def test_without_pandas_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas, or take single columns"):
        Trace.of(ROWS).to_pandas()


def test_a_trace_on_disk_is_zarr(tmp_path: Path) -> None:
    Trace.of(ROWS).save(tmp_path / "trace")
    assert list(Trace.load(tmp_path / "trace")) == ROWS
    group = zarr.open_group(tmp_path / "trace", mode="r")
    np.testing.assert_array_equal(np.asarray(group["up_bytes"]), [10, 11, 12, 15])
    with pytest.raises(CheckpointError, match="exists already; give the trace another place"):
        Trace.of(ROWS).save(tmp_path / "trace")
    with pytest.raises(CheckpointError, match="there is no trace in"):
        Trace.load(tmp_path / "nothing")
    next((tmp_path / "trace" / "start").glob("c*")).write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"is damaged: .* bytes instead of .*; remove that folder"):
        Trace.load(tmp_path / "trace")


def test_parts_are_joined_merged_and_bounded(tmp_path: Path) -> None:
    for number in range(40):
        Trace.of([row(number)]).append(tmp_path, most_parts=5)
        assert len(list(tmp_path.iterdir())) < 5
    assert list(Trace.load(tmp_path)) == [row(number) for number in range(40)]
    for number in range(40, 80):
        Trace.of([row(number)]).append(tmp_path, most_rows=10, most_parts=5)
        assert len(Trace.load(tmp_path)) <= (40 if number < 50 else 20)
    assert Trace.load(tmp_path)["tile"].tolist()[-10:] == list(range(70, 80))


def test_a_merge_that_was_cut_short_counts_no_row_twice(tmp_path: Path) -> None:
    for number in range(3):
        Trace.of([row(number)]).append(tmp_path)
    Trace.of([row(number) for number in range(3)]).save(tmp_path / "part-000000000000-000000000003")
    assert Trace.load(tmp_path)["tile"].tolist() == [0, 1, 2]
    Trace.of([row(3)]).append(tmp_path)
    assert Trace.load(tmp_path)["tile"].tolist() == [0, 1, 2, 3]


def test_a_recorder_hands_out_each_row_once_and_keeps_the_newest() -> None:
    recorder = Recorder(limit=10)
    seen: list[int] = []
    following = 0
    for number in range(25):
        recorder.add(row(number))
        if number % 4 == 3:
            recorder.seal()
        if number % 3 == 2:
            trace, following = recorder.since(following)
            seen += trace["tile"].tolist()
    assert seen == list(range(24))
    kept = recorder.since(0)[0]["tile"].tolist()
    assert kept == list(range(25 - len(kept), 25))
    assert 10 <= len(kept) <= 18


def test_a_lie_of_a_device_spoils_its_own_row_at_most() -> None:
    honest = Attempt.of("a", 1.0, 2.0, timing={"queued": 0.5, "sent": 99.0, "down_bytes": 7}, arrived=100.0)
    assert (honest.upload_seconds, honest.started, honest.down_bytes) == (1.0, 95.5, 7)
    timing = {"queued": float("nan"), "sent": "soon", "down_bytes": -1}
    liar = Attempt.of("b", float("inf"), -2.0, timing=timing, arrived=100.0)
    assert (liar.pull_seconds, liar.compute_seconds, liar.queued_seconds, liar.upload_seconds) == (0, 0, 0, 0)
    assert (liar.started, liar.down_bytes) == (100.0, 0)


def test_the_clock_of_the_server_is_read_from_its_answers() -> None:
    clock = ServerClock()
    assert clock.now() is None
    assert clock.due("tcp://one")
    assert not clock.due("tcp://one")

    async def never() -> float:
        raise OSError

    asyncio.run(clock.ask(never))
    assert clock.now() is None
    asyncio.run(clock.ask(_told))
    now = clock.now()
    assert now is not None
    assert 5000 <= now < 5001
    assert clock.due("tcp://another")
    assert clock.now() is None


async def _told() -> float:
    return 5000.0

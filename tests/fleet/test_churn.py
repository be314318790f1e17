"""Churn as a file: what is written is read, and what is wrong is named with its line and a remedy."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import InputError
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.fleet.devices import Fleet

FLEET = Fleet.sample(8)
NAMES = st.sampled_from([device.name for device in FLEET.devices])
TIMES = st.floats(0, 1e6)
EVENTS = st.one_of(
    st.builds(Event, TIMES, NAMES, st.sampled_from(["leave", "join", "stall", "resume", "recover"])),
    st.builds(lambda time, name, factor: Event(time, name, "slow", factor), TIMES, NAMES, st.floats(1, 1e3)),
    st.builds(
        lambda time, name, kind, rate: Event(time, name, kind, bandwidth=rate),
        *(TIMES, NAMES, st.sampled_from(["down", "up"]), st.floats(1, 1e10)),
    ),
)


@given(st.lists(EVENTS, max_size=20))
def test_what_is_saved_is_loaded(events: list[Event]) -> None:
    churn = Churn(tuple(events))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "churn.csv"
        churn.save(file)
        assert Churn.load(file, FLEET) == churn


def test_bandwidths_are_written_as_in_fleet_files(tmp_path: Path) -> None:
    file = tmp_path / "links.csv"
    file.write_text("seconds,device,event,value\n0,a,down,80 Mbit/s\n1.5, a ,up,1e6\n2,a,slow,3\n\n\n")
    down, up, slow = Churn.load(file)
    assert (down.bandwidth, up.bandwidth, slow.factor) == (1e7, 1e6, 3.0)
    assert up.device == "a"


@pytest.mark.parametrize(
    ("rows", "line", "remedy"),
    [
        ("time,who,what\n", 1, "write seconds,device,event,value"),
        ("", 1, "write seconds,device,event,value"),
        ("seconds,device,event,value\n0,phone-0001,leave\n", 2, "has a gap"),
        ("seconds,device,event,value\n\n1,phone-0001,leave,\n", 2, "or delete it"),
        ("seconds,device,event,value\n0,,leave,\n", 2, "has a gap"),
        ("seconds,device,event,value\nnan,a,leave,\n", 2, "does not read as seconds"),
        ("seconds,device,event,value\n-1,a,leave,\n", 2, "zero or more"),
        ("seconds,device,event,value\n2,a,leave,\n1,a,join,\n", 3, "sort the rows by time"),
        ("seconds,device,event,value\n0,a,leaves,\n", 2, "did you mean 'leave'?"),
        ("seconds,device,event,value\n0,a,down,\n", 2, "give a bandwidth"),
        ("seconds,device,event,value\n0,a,leave,5\n", 2, "give nothing"),
        ("seconds,device,event,value\n0,a,up,fast\n", 2, "bytes per second"),
        ("seconds,device,event,value\n0,a,slow,much\n", 2, "how many times slower"),
        ("seconds,device,event,value\n0,a,slow,0.5\n", 2, "factor of 1 or more"),
    ],
)
def test_a_wrong_file_is_named_with_its_line_and_a_remedy(tmp_path: Path, rows: str, line: int, remedy: str) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(rows)
    with pytest.raises(InputError) as caught:
        Churn.load(file)
    assert f"wrong.csv line {line}" in str(caught.value)
    assert remedy in str(caught.value)


def test_devices_that_a_fleet_does_not_have_are_named(tmp_path: Path) -> None:
    file = tmp_path / "strangers.csv"
    some = FLEET.devices[0].name
    file.write_text(f"seconds,device,event,value\n0,{some},leave,\n1,{some}x,join,\n")
    with pytest.raises(InputError, match=rf"strangers.csv line 3 has device '{some}x'.*did you mean"):
        Churn.load(file, FLEET)
    with pytest.raises(InputError, match="cannot be read"):
        Churn.load(tmp_path / "nowhere.csv")

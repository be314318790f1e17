"""The commands that look ahead: plan, profile, compare, simulate."""

from __future__ import annotations

import json
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

import cleave_dask
from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from cleave_dask.views.bars import Bar, draw_bars
from cleave_dask.views.picture import Words
from tests.cli.calling import run


def test_plan_prints_the_attributes_of_a_plan(recipe: str) -> None:
    result = run("plan", recipe, "--fleet", "lab-8", "--json")
    assert result.exit_code == 0, result.stderr
    printed: dict[str, Any] = json.loads(result.stdout)
    assert set(printed) == {
        "seconds",
        "bound_seconds",
        "binding",
        "tiles",
        "devices_used",
        "down_bytes",
        "up_bytes",
        "peak_memory",
        "server_memory",
    }
    assert 0 < printed["bound_seconds"] <= printed["seconds"]
    assert 1 <= printed["devices_used"] <= len(printed["peak_memory"]) == 8
    table = run("plan", recipe, "--fleet", "lab-8")
    assert table.exit_code == 0
    assert "bound_seconds" in table.stdout
    assert "\x1b" not in table.stdout


def test_plan_shows_levels_and_draws_a_gemm(recipe: str, tmp_path: Path) -> None:
    picture = tmp_path / "gemm.svg"
    shown = run("plan", recipe, "--fleet", "lab-8", "--levels", "--plot", str(picture))
    assert shown.exit_code == 0, shown.stderr
    assert "filler" in shown.stdout
    assert picture.read_text().startswith("<svg")
    brief = run("plan", recipe, "--fleet", "lab-8", "--plot", str(picture.with_suffix(".png")))
    assert brief.exit_code == 0, brief.stderr
    assert "filler" in brief.stdout
    assert len(brief.stdout.splitlines()) <= len(shown.stdout.splitlines())
    assert Image.open(BytesIO(picture.with_suffix(".png").read_bytes())).size[0] > 500
    wrong = run("plan", recipe, "--fleet", "lab-8", "--plot", str(picture), "--gemm", "nothing")
    assert wrong.exit_code == 2
    assert "no gemm that is sent out is called 'nothing'" in wrong.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "0 devices; give it at least one"),
        ("down = 0", "'[/b]:cat:': down is 0; it must be finite and above zero"),
        ("down = '-3 MB/s'", "down is '-3 MB/s'; it must be finite and above zero"),
        ("down = '3 MBs'", "down is '3 MBs', which does not read as bytes/s; give"),
        ("down = 1e-300", "down is 1e-300; it must be from 1 to 1e+24 bytes/s"),
        ("down = 1e6\nlatency = 1e200", "latency is 1e+200; it must be from 0 to 1e+09 seconds"),
        ("down = 1e6", None),
    ],
)
def test_plan_on_a_fleet_that_cannot_be_says_why(recipe: str, tmp_path: Path, line: str, message: str | None) -> None:
    fleet = tmp_path / "fleet.toml"
    device = f'[[device]]\nname = "[/b]:cat:"\nflops = 1e9\nmemory = 1e9\nup = 1e6\n{line}\n'
    fleet.write_text(device if line else "")
    result = run("plan", recipe, "--fleet", str(fleet))
    if message is None:
        assert result.exit_code == 0, result.stderr
        assert "on [/b]:cat:" in result.stdout, "a name is no markup"
        return
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_profile_is_an_entry_of_a_fleet_file(tmp_path: Path) -> None:
    result = run("profile", "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert set(printed) == {"name", "kernel", "cores", "flops", "memory", "kernels"}
    assert printed["flops"] > 1e6
    assert printed["kernels"]["numpy"] > 1e6
    entry = run("profile").stdout
    assert tomllib.loads(entry)["device"][0]["name"] == printed["name"]
    (tmp_path / "fleet.toml").write_text(entry)
    assert len(cleave_dask.Fleet.load(tmp_path / "fleet.toml")) == 1


def test_profile_is_added_to_a_fleet_file_or_the_file_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    for name in ("one", "other"):
        result = run("profile", "--write", str(file), "--name", name)
        assert result.exit_code == 0, result.stderr
    assert [device.name for device in cleave_dask.Fleet.load(file).devices] == ["one", "other"]
    before = file.read_text()
    again = run("profile", "--write", str(file), "--name", "one")
    assert again.exit_code == 2
    assert "two devices are called 'one'" in again.stderr
    assert "give another --name" in again.stderr
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.toml"]
    homeless = run("profile", "--write", str(tmp_path / "missing" / "fleet.toml"))
    assert homeless.exit_code == 2
    assert "missing/fleet.toml': No such file or directory; choose another --write" in homeless.stderr
    nowhere = run("profile", "--scheduler", "tcp://127.0.0.1:9")
    assert nowhere.exit_code == 1
    assert "no scheduler answers" in nowhere.stderr


def test_compare_prints_a_row_for_each_system(recipe: str, tmp_path: Path) -> None:
    picture = tmp_path / "bars.svg"
    result = run("compare", recipe, "--fleet", "lab-8", "--plot", str(picture), "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["system"] for row in rows][:3] == ["cleave", "cleave-2d", "dtfm"]
    for row in rows:
        assert row.keys() >= {"system", "seconds", "feasible", "why", "binding", "devices_used", "speedup", "memory"}
        assert row["feasible"] == (row["seconds"] is not None) == (not row["why"])
    assert picture.read_text().startswith("<svg")


def test_bars_are_painted_as_they_are_drawn() -> None:
    bars = [Bar("cleave", 414.0, "downlink"), Bar("dtfm", None), Bar("a100", 7.0)]
    picture = draw_bars("t & u", bars)
    drawn = ElementTree.fromstring(picture.svg)
    texts = [part.text for part in drawn if part.tag.endswith("text")]
    assert {"t & u", "cleave", "6 min 54 s, downlink", "cannot run here", "7 s"} <= set(texts)
    painted = Image.open(BytesIO(picture.png))
    assert painted.size == (2 * int(drawn.attrib["width"]), 2 * int(drawn.attrib["height"]))
    assert painted.getcolors(1 << 20)
    assert any(colour == (43, 108, 176) for _, colour in painted.getcolors(1 << 20) or [])


def test_compare_prints_a_table_of_chosen_systems(recipe: str) -> None:
    result = run("compare", recipe, "--fleet", "lab-8", "--system", "cleave", "--system", "alpa-4xH100")
    assert result.exit_code == 0, result.stderr
    assert "alpa-4xH100" in result.stdout
    assert "dtfm" not in result.stdout


def test_compare_on_devices_that_hold_nothing_is_bad_input(recipe: str, tmp_path: Path) -> None:
    fleet = tmp_path / "dust.toml"
    fleet.write_text('[[device]]\nname = "mote"\nflops = 1e9\nmemory = 8\ndown = 1e6\nup = 1e6\n')
    for command in ("plan", "compare", "simulate"):
        result = run(command, recipe, "--fleet", str(fleet))
        assert result.exit_code == 2
        assert "'mote', the largest device, has 8 B" in result.stderr


@pytest.mark.parametrize("churn", [(), ("--churn", "100")])
def test_simulate_prints_one_object(recipe: str, churn: tuple[str, ...]) -> None:
    result = run("simulate", recipe, "--fleet", "lab-8", *churn, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["seconds"] >= facts["bound_seconds"] > 0
    assert facts.keys() >= {"plan_seconds", "handovers", "lost", "down_bytes", "up_bytes"}
    shown = run("simulate", recipe, "--fleet", "lab-8", *churn).stdout
    assert "plan_seconds" in shown
    assert "times as long, in" in shown, "how far simulated seconds are off is not said beside them"


def test_simulate_replays_a_file_and_names_what_is_wrong_with_it(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "links.csv"
    file.write_text("seconds,device,event,value\n0,phone-0001,down,2 Mbit/s\n0,laptop-0001,leave,\n")
    facts = json.loads(run("simulate", recipe, "--fleet", "lab-8", "--churn", str(file), "--json").stdout)
    assert (facts["left"], facts["links_changed"]) == (1, 1)
    file.write_text("seconds,device,event,value\n0,phone-9999,leave,\n")
    wrong = run("simulate", recipe, "--fleet", "lab-8", "--churn", str(file))
    assert wrong.exit_code == 2
    assert "links.csv line 2 has device 'phone-9999'" in wrong.stderr
    missing = run("simulate", recipe, "--fleet", "lab-8", "--churn", str(tmp_path / "nowhere.csv"))
    assert missing.exit_code == 2
    assert "no number and no file; give mishaps per device and hour" in missing.stderr


def test_long_names_have_their_room_beside_the_bars() -> None:
    short, long = (draw_bars("t", [(name, 1.0)]) for name in ("ours", "a system with quite a long name"))
    (place,) = (part.x for part in long.parts if isinstance(part, Words) and part.text.startswith("a system"))
    assert long.wide > short.wide
    assert place > 6.0 * len("a system with quite a long name")

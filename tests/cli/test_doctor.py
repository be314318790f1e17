"""A machine is checked, and each finding that is not good says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest

from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from cleave_dask.cli import checkup
from tests.cli.calling import run


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    result = run("doctor", *arguments, "--json")
    printed = json.loads(result.stdout)
    found = {finding["what"]: finding for finding in printed["findings"]}
    bad = [finding for finding in found.values() if finding["state"] == "bad"]
    assert printed["fit"] == (not bad)
    assert result.exit_code == (1 if bad else 0)
    for finding in found.values():
        assert finding["found"]
        assert bool(finding["remedy"]) == (finding["state"] != "good")
    return found


def test_this_machine_is_fit_and_everything_was_looked_at() -> None:
    found = findings()
    assert found.keys() >= {"python", "packages", "training", "settings", "kernel", "memory", "disk", "loopback"}
    assert found.keys() >= {"port 8786", "network", "tls", "namespaces", "open files", "power"}
    for what in ("python", "packages", "training", "settings", "kernel", "memory", "loopback", "tls"):
        assert found[what]["state"] == "good", found[what]


def test_the_table_is_plain_on_a_pipe() -> None:
    shown = run("doctor")
    assert shown.exit_code == 0, shown.stdout
    assert "\x1b" not in shown.stdout
    assert "fit to be a device" in shown.stdout


def test_a_setting_that_stops_a_device_is_bad() -> None:
    with dask.config.set({"cleave.device.cores": 0}):
        found = findings()["settings"]
    assert found["state"] == "bad"
    assert "'cleave.device.cores' is 0" in found["found"]


def test_a_setting_that_nobody_reads_is_noted_with_the_nearest() -> None:
    with dask.config.set({"cleave.device.max-dwn": "1 MB/s"}):
        found = findings()["settings"]
    assert found["state"] == "note"
    assert "'cleave.device.max_dwn' is no setting; did you mean 'device.max_down'?" in found["found"]


def test_a_port_in_use_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(checkup, "_PORTS", {taken.getsockname()[1]: "scheduler"})
        found = findings()[f"port {taken.getsockname()[1]}"]
    assert found["state"] == "note"
    assert "--port" in found["remedy"]


def test_a_machine_without_the_training_packages_may_still_be_a_device(tmp_path: Path) -> None:
    """A metadata folder of our own comes first on the path, and asks for something that nobody has."""
    folder = tmp_path / "cleave_dask-9.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: cleave-dask", "Version: 9", "Requires-Dist: numpy>=2.0"]
    (folder / "METADATA").write_text("\n".join([*lines, 'Requires-Dist: nowhere>=1; extra == "train"', ""]))
    code = "from cleave_dask.cli.checkup import _packages as look; print(look(None).state, look('train').state)"
    path = os.pathsep.join([str(tmp_path), str(Path(checkup.__file__).parents[2])])
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONPATH": path})
    assert printed.split() == ["good", "note"]


def test_a_scheduler_that_does_not_answer_is_bad() -> None:
    found = findings("--scheduler", "tcp://127.0.0.1:9")["scheduler tcp://127.0.0.1:9"]
    assert found["state"] == "bad"
    assert "no scheduler answers" in found["found"]

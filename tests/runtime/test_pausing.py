"""When a lent machine is its owner's: pause file, battery, other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dask.config
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import InputError
from cleave_dask.runtime import pausing
from cleave_dask.runtime.lending import read_reasons
from cleave_dask.runtime.pausing import BUSY, BUSY_FOR, QUIET, QUIET_FOR, IdleRule, reasons, used_by_others


def test_without_settings_nothing_pauses_a_device() -> None:
    assert read_reasons() is None


def test_the_pause_file_is_a_reason_while_it_exists(tmp_path: Path) -> None:
    file = tmp_path / "pause"
    why = reasons(file=file, only_on_mains=False, only_when_idle=False)
    assert why is not None
    assert why() is None
    file.touch()
    assert why() == str(file)
    file.unlink()
    assert why() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's files that psutil reads are Linux's")
def test_a_laptop_on_its_battery_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real psutil reads a folder such as the kernel shows for a laptop."""
    battery, mains = tmp_path / "BAT0", tmp_path / "AC0"
    for folder, files in (
        (battery, {"energy_now": 40, "energy_full": 50, "power_now": 5, "capacity": 80}),
        (mains, {}),
    ):
        folder.mkdir()
        for name, value in files.items():
            (folder / name).write_text(str(value))
    monkeypatch.setattr(psutil._pslinux, "POWER_SUPPLY_PATH", str(tmp_path))
    with dask.config.set({"cleave.device.only_on_mains": True}):
        why = read_reasons()
    assert why is not None
    for online, reason in (("1", None), ("0", "on battery"), ("1", None)):
        (mains / "online").write_text(online)
        (battery / "status").write_text("Charging" if online == "1" else "Discharging")
        assert why() == reason


def test_a_machine_without_a_battery_is_on_mains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        monkeypatch.setattr(psutil._pslinux, "POWER_SUPPLY_PATH", str(tmp_path))
        assert not pausing.on_battery()


def test_idle_takes_its_time() -> None:
    rule = IdleRule()
    assert rule.look(0.9, 0.0)
    assert rule.look(0.1, BUSY_FOR), "a moment of work is none"
    assert rule.look(0.9, 10.0)
    assert not rule.look(0.9, 10.0 + BUSY_FOR)
    assert not rule.look(0.0, 20.0)
    assert not rule.look((BUSY + QUIET) / 2, 20.0 + QUIET_FOR), "neither busy nor quiet changes nothing"
    assert not rule.look(0.0, 100.0)
    assert rule.look(0.0, 100.0 + QUIET_FOR)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), max_size=60))
def test_idle_never_flaps(looks: list[tuple[float, float]]) -> None:
    rule, now, changes = IdleRule(), 0.0, [0.0]
    for share, seconds in looks:
        now += seconds
        before = rule.idle
        if rule.look(share, now) != before:
            assert now - changes[-1] >= (BUSY_FOR if before else QUIET_FOR)
            changes.append(now)


def test_what_this_process_does_is_not_held_against_its_owner() -> None:
    assert used_by_others((0, 0, 0), (10, 4, 5)) == pytest.approx(0.1)
    assert used_by_others((0, 0, 0), (10, 4, 7)) == 0.0
    assert used_by_others((3, 2, 1), (3, 2, 1)) == 0.0
    meter = pausing.CpuMeter()
    assert meter.share() == 0.0
    sum(range(10**6))
    assert 0.0 <= meter.share() <= 1.0


@pytest.mark.parametrize("name", ["only_on_mains", "only_when_idle"])
def test_a_wish_that_is_neither_true_nor_false_is_named(name: str) -> None:
    with (
        dask.config.set({f"cleave.device.{name}": "sometimes"}),
        pytest.raises(InputError, match=f"'cleave.device.{name}' is 'sometimes'; give true or false"),
    ):
        read_reasons()


LINUX_ONLY = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "spwd", "syslog", "curses", "readline")


@pytest.mark.parametrize("module", ["cleave_dask.runtime.device", "cleave_dask.cli"])
def test_the_path_of_a_device_imports_nothing_that_windows_lacks(module: str) -> None:
    """Everything that is not ours comes first, as Windows has its own of it; then these modules are gone."""
    code = f"""
import sys, signal, asyncio, subprocess, logging, concurrent.futures, socket, ssl, tempfile, shutil
import click, dask, distributed, distributed.cli.dask_worker, numpy, psutil, rich.console, threadpoolctl, yaml
for name in {LINUX_ONLY!r}:
    sys.modules[name] = None  # an import of it raises
for name in ("SIGHUP", "SIGKILL", "SIGSTOP", "SIGCONT"):
    delattr(signal, name)
import {module}
from cleave_dask.runtime import device, lending
lent = lending.read_settings(cores=1, memory=10**9)
import numpy as np
ones = np.ones((4, 4), np.float32)
(result,) = lent.kernel.run("gemm", (ones, ones), dtype="float32")
from cleave_dask.cli import cleave
cleave(["--help"], standalone_mode=False)
cleave(["completion", "bash"], standalone_mode=False)
print("sum", int(result.sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("sum 64\n")

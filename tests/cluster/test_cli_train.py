"""The command line with real processes: training, interruption, serving, resuming, exporting."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from threading import Event
from time import monotonic
from typing import Any
from uuid import uuid4

import psutil
import pytest

MARK = "CLEAVE_TEST_MARK"  # in the environment of every process that a test starts, directly or not
KEYS = ["step", "loss", "seconds", "down_bytes", "up_bytes", "tiles", "retries", "rejected"]
ENDLESS = ("--steps", "1000000", "--devices", "1", "--json")
RECIPE = """
[model]
family = "llama"
hidden = 64
layers = 1
heads = 2

[data]
kind = "python-stdlib"
batch = 4
sequence = 32

[optimizer]
name = "SGD"
lr = 0.1
momentum = 0.9

[train]
steps = 5
accumulate = 2
"""

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A process that was started, and where its stderr goes."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def errors(self) -> str:
        return self.log.read_text()

    def line(self) -> str:
        """The next line of its stdout."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors
        return line

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Wait for its end, after a signal if there is one: exit code, and the rest of its stdout."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=240)
        return self.process.returncode, output


class Shell:
    """Runs commands in a folder of their own, and finds every process that comes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        self.commands = 0
        (folder / "small.toml").write_text(RECIPE)

    def start(self, *command: str) -> Command:
        """`python -m ...`, with stdout to read from and stderr in a file."""
        self.commands += 1
        path = self.folder / f"stderr-{self.commands}.txt"
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env={**os.environ, MARK: self.mark, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return Command(process, path)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """`cleave ...` to its end: exit code, stdout, stderr."""
        command = self.start("cleave_dask", *arguments)
        return *command.end(), command.errors

    def processes(self) -> list[psutil.Process]:
        """Processes of this shell that are alive."""
        return [process for process in psutil.process_iter() if self._is_own(process)]

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            own: bool = process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return own

    def saved(self, step: int) -> bool:
        """Whether a step is in the checkpoint that the small recipe gets by default."""
        return bool(list((self.folder / "checkpoints" / "small").glob(f"step-{step:08d}.*")))

    def close(self) -> None:
        """Kill what a failed test left behind."""
        for process in self.processes():
            process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, Records]]:
    """A shell in which five steps of the small recipe have been trained, the third and fifth saved; what it printed."""
    shell = Shell(tmp_path_factory.mktemp("trained"))
    options = ("--devices", "1", "--save-every", "3", "--tensorboard", "runs", "--json")
    code, output, errors = shell.run("train", "small.toml", *options)
    assert code == 0, errors
    yield shell, records(output)
    shell.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def records(output: str) -> Records:
    return [json.loads(line) for line in output.splitlines()]


def wait_until(condition: Callable[[], object], *, seconds: float, what: str) -> None:
    pause, deadline = Event(), monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, f"{what}: not within {seconds} s"
        pause.wait(0.05)


def test_one_object_per_step_and_a_falling_loss(shell: Shell) -> None:
    code, output, errors = shell.run("train", "tiny-llama", "--steps", "3", "--devices", "2", "--json")
    assert code == 0, errors
    printed = records(output)
    assert [list(record) for record in printed] == [KEYS] * 3
    assert [record["step"] for record in printed] == [1, 2, 3]
    assert all(math.isfinite(record["loss"]) for record in printed)
    assert printed[-1]["loss"] < printed[0]["loss"]
    assert all(record["tiles"] > 0 and record["down_bytes"] > 0 and record["up_bytes"] > 0 for record in printed)
    assert "Traceback" not in errors
    assert shell.processes() == []


def test_tensorboard_shows_the_same_losses(trained: tuple[Shell, Records]) -> None:
    shell, printed = trained
    reading = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(shell.folder / "runs")).Reload().Scalars("train/loss")
    assert [event.step for event in found] == [record["step"] for record in printed]
    assert [event.value for event in found] == pytest.approx([record["loss"] for record in printed])


def test_export_loads_back(trained: tuple[Shell, Records]) -> None:
    shell, _ = trained
    code, output, errors = shell.run("export", "checkpoints/small", "--recipe", "small.toml", "-o", "out", "--json")
    assert code == 0, errors
    assert json.loads(output)["step"] == 5
    load = "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('out').num_parameters())"
    assert errors == ""
    done = subprocess.run([sys.executable, "-c", load], cwd=shell.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_resume_goes_on_as_if_nothing_had_happened(trained: tuple[Shell, Records]) -> None:
    shell, straight = trained
    for newest in (shell.folder / "checkpoints" / "small").glob("step-00000005.*"):
        rmtree(newest)
    code, output, errors = shell.run("train", "small.toml", "--devices", "1", "--resume")
    assert code == 0, errors
    assert "resumed at step 3" in output
    losses = re.findall(r"^step (\d)/5  loss (\S+)", output, flags=re.MULTILINE)
    assert losses == [(str(record["step"]), f"{record['loss']:.4f}") for record in straight[3:]]
    assert "ln(256) = 5.545" in output
    assert "cleave export checkpoints/small --recipe small.toml" in output
    assert all(line.isprintable() for line in output.splitlines())
    assert shell.saved(5)


def test_ctrl_c_saves_and_leaves_nothing_behind(shell: Shell) -> None:
    command = shell.start("cleave_dask", "train", "small.toml", *ENDLESS)
    assert json.loads(command.line())["step"] == 1
    code, rest = command.end(signal.SIGINT)
    assert code == 130, command.errors
    assert command.errors.endswith("interrupted\n")
    assert "Traceback" not in command.errors
    printed = max([1, *(record["step"] for record in records(rest))])
    saved = re.search(r"checkpoint: checkpoints/small \(step (\d+)\)", command.errors)
    assert saved is not None
    assert int(saved[1]) in (printed, printed + 1)  # the step in flight may have ended before anyone heard of it
    assert shell.saved(int(saved[1]))
    assert shell.processes() == []


def test_ctrl_c_while_the_fleet_starts_leaves_nothing_behind(shell: Shell) -> None:
    command = shell.start("cleave_dask", "train", "small.toml", *ENDLESS)
    wait_until(lambda: len(shell.processes()) > 1, seconds=60, what="first process of the fleet")
    code, output = command.end(signal.SIGINT)
    assert (code, output) == (130, ""), command.errors
    assert "Traceback" not in command.errors
    assert shell.processes() == []
    assert not (shell.folder / "checkpoints" / "small").exists()


def test_a_killed_command_leaves_nothing_behind(shell: Shell) -> None:
    command = shell.start("cleave_dask", "train", "small.toml", *ENDLESS)
    command.line()
    assert len(shell.processes()) >= 4  # itself, scheduler, server, device
    command.end(signal.SIGKILL)
    wait_until(lambda: not shell.processes(), seconds=5, what="end of all processes")


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_steps_before(shell: Shell) -> None:
    (shell.folder / "small.toml").write_text(RECIPE.replace("lr = 0.1", "lr = 1e30"))
    code, output, errors = shell.run("train", "small.toml", "--devices", "1", "--json")
    assert code == 1
    assert "error: the loss of step" in errors
    assert shell.saved(records(output)[-1]["step"])
    assert shell.processes() == []


def test_serve_takes_devices_and_trains(shell: Shell) -> None:
    server = shell.start("cleave_dask", "serve", "--port", "0", "--dashboard-address", "127.0.0.1:0", "--json")
    told = json.loads(server.line())
    assert told["device"] == f"dask worker {told['scheduler']} --preload cleave_dask.runtime.device"
    train = ("train", "small.toml", "--steps", "2", "--json", "--scheduler", told["scheduler"])

    code, _, errors = shell.run(*train)
    assert code == 1
    assert "no device has joined this scheduler" in errors

    device = shell.start(*told["device"].split(), "--no-dashboard", "--name", "laptop")
    wait_until(lambda: "laptop has joined; devices: 1" in server.errors, seconds=60, what="the device to join")
    code, output, errors = shell.run(*train)
    assert code == 0, errors
    assert [record["step"] for record in records(output)] == [1, 2]
    assert shell.saved(2)

    assert server.end(signal.SIGTERM)[0] == 0, server.errors
    assert server.errors.endswith("stopping scheduler and server\n")
    device.end()
    assert shell.processes() == []


def test_a_save_that_fails_on_the_way_is_told_and_training_goes_on(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_CLEAVE__CHECKPOINT__MAX_BYTES", "1 kB")
    arguments = ("train", "small.toml", "--devices", "1", "--steps", "3", "--save-every", "2", "--json")
    code, output, errors = shell.run(*arguments)
    assert code == 1
    assert [record["step"] for record in records(output)] == [1, 2, 3]
    told = [line for line in errors.splitlines() if "max_bytes is 1 kB; set it to at least" in line]
    assert told[0].endswith("; training goes on, and step 3 is tried next")
    assert "saving step 3" in told[1]
    assert "Traceback" not in errors
    assert shell.processes() == []

"""What every command has: help, errors in one line, exit codes, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import cleave_dask
from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from cleave_dask.cli import SECTIONS, cleave
from cleave_dask.cli.frame import CleaveGroup, debug_option
from cleave_dask.cli.interrupts import Interrupts
from cleave_dask.errors import CleaveError, ClusterError, InputError, RecipeError
from tests.cli.calling import run

HELP_SECONDS = 0.5
COMMANDS = tuple(cleave.commands)


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert f"  {command} " in run("--help").stdout


def test_help_lists_every_command_in_a_section() -> None:
    listed = [command.name for commands in SECTIONS.values() for command in commands]
    assert sorted(map(str, listed)) == sorted(cleave.commands)
    shown = run("--help").stdout
    assert shown.index("Train:") < shown.index("A real fleet:") < shown.index("This shell:")


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = """
import sys, time
from cleave_dask.cli import cleave
cleave(["--help"], standalone_mode=False)
heavy = [name for name in ("dask", "distributed", "numpy", "rich", "torch", "yaml") if name in sys.modules]
print(time.process_time(), *heavy)
"""
    outputs = [subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) for _ in range(3)]
    lines = [output.splitlines()[-1].split() for output in outputs]
    seconds = min(float(line[0]) for line in lines)
    print(f"cleave --help: {seconds:.3f} s of CPU")
    assert [line[1:] for line in lines] == [[], [], []]
    assert seconds <= HELP_SECONDS


@pytest.mark.parametrize("command", [("cleave_dask",), ("dask", "cleave")], ids=" ".join)
def test_both_doors_open(command: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", *command, "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"cleave, version {cleave_dask.__version__}\n"


# Errors and exit codes


def failing(error: BaseException) -> CleaveGroup:
    @click.group(cls=CleaveGroup)
    @debug_option
    def group() -> None: ...

    @group.command()
    @debug_option
    def fail() -> None:
        raise error

    return group


def wrapped(error: CleaveError) -> RuntimeError:
    outer = RuntimeError(f"Cluster failed to start: {error}")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RecipeError("no such key"), 2, "error: no such key"),
        (ClusterError("no server"), 1, "error: no server"),
        (wrapped(ClusterError("no server")), 1, "error: no server"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: [Errno 13] Permission denied: '/x'"),
        (ModuleNotFoundError(name="torch"), 1, "error: this command needs torch; install it with"),
        (ZeroDivisionError("oops"), 1, "error: ZeroDivisionError: oops; set CLEAVE_DEBUG=1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_its_exit_code(error: BaseException, code: int, line: str) -> None:
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == code
    assert result.stderr.startswith(line)
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_where_an_error_comes_from(arguments: list[str]) -> None:
    result = CliRunner().invoke(failing(InputError("bad")), arguments)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: bad\n")


def test_debug_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEAVE_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(failing(InputError("bad")), ["fail"]).stderr


# Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_raise_and_handlers_are_put_back(number: signal.Signals) -> None:
    found = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    try:
        with Interrupts() as interrupts:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            assert interrupts.count == 1
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, found)


def test_a_signal_waits_for_what_must_not_be_cut_in_two() -> None:
    reached = []

    def save(interrupts: Interrupts) -> None:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end")

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        save(interrupts)
    assert reached == ["the end"]


def test_saving_after_an_interrupt_is_not_interrupted_again(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
    assert "once more to leave at once" in capfd.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
def test_a_terminal_hears_what_takes_its_time_and_a_pipe_does_not() -> None:
    command = [sys.executable, "-c", "from cleave_dask.cli.frame import doing\nwith doing('planning it'):\n    pass"]
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as screen:
        subprocess.run(command, stderr=theirs, check=True, timeout=60, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        assert b"planning it" in screen.read(4096)
    assert not subprocess.run(command, stderr=subprocess.PIPE, check=True, timeout=60).stderr

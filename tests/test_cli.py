"""The command line without a cluster: help, bad input, exit codes, the shape of what it prints."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import click
import dask.config
import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import cleave_dask
from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from cleave_dask.cli import checkpoints, cleave, fleets, progress
from cleave_dask.cli.frame import CleaveGroup, debug_option
from cleave_dask.cli.interrupts import Interrupts
from cleave_dask.cli.training import _batches
from cleave_dask.errors import CheckpointError, CleaveError, ClusterError, InputError, RecipeError
from cleave_dask.graph.building import batch_at
from cleave_dask.graph.recipes import Recipe
from cleave_dask.runtime.store import State, StoredArray, TileStore

HELP_SECONDS = 0.5
COMMANDS = ("compare", "export", "plan", "profile", "serve", "simulate", "train")
RECIPE = """
[model]
family = "llama"
hidden = 32
layers = 1
heads = 2

[data]
kind = "python-stdlib"
batch = 8
sequence = 32
"""
RECORD = {
    "step": 1,
    "loss": 5.5,
    "seconds": 0.5,
    "down_bytes": 2_000_000,
    "up_bytes": 1000,
    "tiles": 12,
    "retries": 0,
    "rejected": 0,
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cleave, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An empty checkpoints folder."""
    with dask.config.set({"cleave.checkpoint.folder": str(tmp_path / "checkpoints")}):
        yield tmp_path / "checkpoints"


def save_step(folder: Path, step: int) -> None:
    store = TileStore(folder)
    store.save(step, State({"weights/w": StoredArray(np.zeros(2, np.float32), "float32")}, {}))
    store.close()


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert f"  {command} " in run("--help").stdout


def test_help_is_quick() -> None:
    code = """
import time
from cleave_dask.cli import cleave
cleave(["--help"], standalone_mode=False)
print(time.process_time())
"""
    outputs = [subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) for _ in range(3)]
    assert min(float(output.split()[-1]) for output in outputs) <= HELP_SECONDS


@pytest.mark.parametrize("command", [("cleave_dask",), ("dask", "cleave")], ids=" ".join)
def test_both_doors_open(command: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", *command, "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"cleave, version {cleave_dask.__version__}\n"


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "tiny-lama"), "did you mean 'tiny-llama'?"),
        (("train", "missing/recipe.toml"), "there is no file 'missing/recipe.toml'"),
        (("train", "tiny-llama", "--fleet", "lab-9"), "did you mean 'lab-8'?"),
        (("train", "tiny-llama", "--fleet", "home-1024"), "1,024 devices"),
        (("train", "tiny-llama", "--scheduler", "tcp://[::1"), "give an address such as"),
        (("train", "tiny-llama", "--scheduler", "127.0.0.1:port"), "give an address such as"),
        (("plan", "tiny-llama", "--fleet", "missing.toml"), "there is no file 'missing.toml'"),
        (("plan", "tiny-lama", "--fleet", "lab-8"), "did you mean 'tiny-llama'?"),
        (("compare", "tiny-llama", "--fleet", "lab-9"), "did you mean 'lab-8'?"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--system", "dftm"), "did you mean 'dtfm'?"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--system", "alpa-8xH200"), "did you mean 'H100'?"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--plot", "out.png"), "name it 'out.svg'"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--churn", "-1"), "0 or more"),
        (("simulate", "tiny-llama", "--fleet", "lab-8", "--churn", "nan"), "0 or more"),
        (("simulate", "tiny-lama", "--fleet", "lab-8"), "did you mean 'tiny-llama'?"),
        (("export", "missing", "--recipe", "tiny-lama", "-o", "out"), "did you mean 'tiny-llama'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "Missing argument 'RECIPE'"),
        (("train", "tiny-llama", "--steps", "0"), "'--steps': 0 is not in the range"),
        (("train", "tiny-llama", "--steps", "many"), "'--steps': 'many' is not a valid integer"),
        (("train", "tiny-llama", "--devices", "0"), "'--devices': 0 is not in the range"),
        (("train", "tiny-llama", "--save-every", "0"), "'--save-every': 0 is not in the range"),
        (("train", "tiny-llama", "--devices", "2", "--scheduler", "tcp://127.0.0.1:1"), "give one of them"),
        (("serve", "--port", "65536"), "'--port': 65536 is not in the range"),
        (("plan", "tiny-llama"), "Missing option '--fleet'"),
        (("export", "checkpoints/run"), "Missing option '--recipe'"),
        (("frobnicate",), "No such command 'frobnicate'"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_an_unknown_key_of_a_recipe_is_named(recipe: str) -> None:
    Path(recipe).write_text(RECIPE.replace("hidden", "hiden"))
    for arguments in (("train", recipe), ("plan", recipe, "--fleet", "lab-8")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "has no key 'hiden'; did you mean 'hidden'?" in result.stderr


def test_nothing_to_resume_is_noticed_before_anything_starts(recipe: str, root: Path) -> None:
    result = run("train", recipe, "--resume")
    assert result.exit_code == 2
    assert "leave --resume out" in result.stderr


def test_a_scheduler_that_is_not_there_is_noticed_at_once(recipe: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = run("train", recipe, "--scheduler", f"tcp://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert f"no scheduler answers at tcp://127.0.0.1:{port}" in result.stderr


def test_a_listener_that_says_nothing_is_no_scheduler(recipe: str) -> None:
    with dask.config.set({"cleave.timeouts.server": "100ms"}), socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = run("train", recipe, "--scheduler", address)
    assert result.exit_code == 1
    assert f"what listens at {address} does not answer as a Dask scheduler" in result.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.stderr


def test_hosts_are_told_apart() -> None:
    assert fleets.is_loopback("127.0.0.1")
    assert fleets.is_loopback("localhost")
    assert not fleets.is_loopback("0.0.0.0")
    assert not fleets.is_loopback("192.0.2.1")
    assert fleets.is_local("127.0.0.1")
    assert not fleets.is_local("192.0.2.1")


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


# Batches


def test_a_step_gets_all_its_micro_batches(recipe: str) -> None:
    Path(recipe).write_text(RECIPE + "[train]\naccumulate = 2\n")
    loaded = Recipe.load(recipe)
    step = next(_batches(loaded, 3))
    for name, tensor in step.items():
        parts = [batch_at(loaded, 3, part=part)[name] for part in range(2)]
        assert tensor.tolist() == [row for part in parts for row in part.tolist()]


# Checkpoint folders


def test_runs_never_share_a_folder(root: Path) -> None:
    for name in ("run", "run-2", "run-3"):
        with checkpoints.claimed(None, "run", resume=False) as folder:
            assert folder == root / name
            save_step(folder, 1)


def test_a_folder_without_steps_is_removed(root: Path) -> None:
    with pytest.raises(CheckpointError), checkpoints.claimed(None, "run", resume=False) as folder:
        raise CheckpointError("full disk")
    assert not folder.exists()


def test_resume_takes_the_run_that_was_saved_last(root: Path) -> None:
    for name, seconds in (("run", 1), ("run-2", 3), ("run-3", 2), ("run-large", 4)):
        save_step(root / name, 1)
        os.utime(root / name, (0, seconds))
    with checkpoints.claimed(None, "run", resume=True) as folder:
        assert folder == root / "run-2"


def test_a_folder_with_steps_needs_resume(tmp_path: Path) -> None:
    save_step(tmp_path / "mine", 7)
    with (
        pytest.raises(InputError, match="at step 7; add --resume"),
        checkpoints.claimed(tmp_path / "mine", "run", resume=False),
    ):
        pass
    with checkpoints.claimed(tmp_path / "mine", "run", resume=True) as folder:
        assert folder == tmp_path / "mine"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot be a checkpoint folder: Not a directory"),
        checkpoints.claimed(tmp_path / "file" / "run", "run", resume=False),
    ):
        pass
    with (
        dask.config.set({"cleave.checkpoint.folder": str(tmp_path / "file")}),
        pytest.raises(InputError, match="cannot be a checkpoint folder"),
        checkpoints.claimed(None, "run", resume=False),
    ):
        pass


# What is printed


def test_json_lines_have_the_promised_keys_and_stdout_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.choose(as_json=True) as view:
        view.say("hello")
        view.begin(0, 1, 100)
        view.step({**RECORD, "more": "inside"})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == RECORD
    assert printed.err == "hello\n"


def test_plain_lines_are_few_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.choose(as_json=False) as view:
        view.begin(10, 110, 4096)
        for step in range(11, 111):
            view.step({**RECORD, "step": step})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step  11/110  loss 5.5000  8,192 tokens/s  2 MB down  1 kB up  12 tiles  500 ms"
    assert lines[-1].startswith("step 110/110")
    assert len(lines) <= 22
    assert all(line.isprintable() for line in lines)


def test_the_bar_shows_the_latest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setattr(progress, "make_console", lambda: console)
    with progress.choose(as_json=False) as view:
        view.say("hello [bold]")
        view.begin(0, 2, 100)
        view.step({**RECORD, "retries": 3})
        view.step({**RECORD, "step": 2, "loss": 4.25})
        view.end()
        view.say("done")
    text = screen.getvalue()
    assert "hello [bold]" in text
    assert "2/2" in text
    assert "loss 4.2500" in text
    assert text.rstrip().endswith("done")


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
    assert "(filler)" in shown.stdout
    assert picture.read_text().startswith("<svg")
    wrong = run("plan", recipe, "--fleet", "lab-8", "--plot", str(picture), "--gemm", "nothing")
    assert wrong.exit_code == 2
    assert "no gemm that is sent out is called 'nothing'" in wrong.stderr


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
    nowhere = run("profile", "--scheduler", "tcp://127.0.0.1:9")
    assert nowhere.exit_code == 1
    assert "no scheduler answers" in nowhere.stderr


# Comparing


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


def test_compare_prints_a_table_of_chosen_systems(recipe: str) -> None:
    result = run("compare", recipe, "--fleet", "lab-8", "--system", "cleave", "--system", "alpa-4xH100")
    assert result.exit_code == 0, result.stderr
    assert "alpa-4xH100" in result.stdout
    assert "dtfm" not in result.stdout


def test_compare_on_devices_that_hold_nothing_is_bad_input(recipe: str, tmp_path: Path) -> None:
    fleet = tmp_path / "dust.toml"
    fleet.write_text('[[device]]\nname = "mote"\nflops = 1e9\nmemory = 8\ndown = 1e6\nup = 1e6\n')
    for command in ("compare", "simulate"):
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
    assert "plan_seconds" in run("simulate", recipe, "--fleet", "lab-8", *churn).stdout

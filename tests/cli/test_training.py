"""What `cleave train` does around the training: batches, checkpoint folders, progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

import dask.config
import numpy as np
import pytest
from rich.console import Console

from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from cleave_dask.cli import checkpoints, progress
from cleave_dask.cli.training import _batches
from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.graph.building import batch_at
from cleave_dask.graph.recipes import Recipe
from cleave_dask.runtime.store import State, StoredArray, TileStore
from tests.cli.calling import RECIPE

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


def save_step(folder: Path, step: int) -> None:
    store = TileStore(folder)
    store.save(step, State({"weights/w": StoredArray(np.zeros(2, np.float32), "float32")}, {}))
    store.close()


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


READ_ONLY = """
import os, sys
from pathlib import Path
from cleave_dask.cli import checkpoints
from cleave_dask.runtime import store
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root may write anywhere: become somebody else
with checkpoints.claimed(Path(sys.argv[1]), "run", resume=True):
    pass
"""


def test_a_run_that_cannot_be_saved_is_not_resumed() -> None:
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which only its owner may enter
        save_step(Path(name), 7)
        Path(name).chmod(0o555)
        command = [sys.executable, "-c", READ_ONLY, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"InputError: {name} is read-only, and what is trained could not be saved; make it" in done.stderr


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


# Progress


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

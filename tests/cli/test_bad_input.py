"""What a user may get wrong, and what the command line says to it."""

from __future__ import annotations

import socket
from pathlib import Path

import dask.config
import numpy as np
import pytest

from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from cleave_dask.cli import fleets
from cleave_dask.runtime import zarr_files
from cleave_dask.runtime.store import State, StoredArray, TileStore
from tests.cli.calling import RECIPE, run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "tiny-lama"), "did you mean 'tiny-llama'?"),
        (("train", "missing/recipe.toml"), "there is no file 'missing/recipe.toml'"),
        (("train", "tiny-llama", "--fleet", "lab-9"), "did you mean 'lab-8'?"),
        (("train", "tiny-llama", "--fleet", "home-1024"), "1,024 devices"),
        (("train", "tiny-llama", "--scheduler", "tcp://[::1"), "give an address such as"),
        (("train", "tiny-llama", "--scheduler", "127.0.0.1:port"), "give an address such as"),
        *(
            (("devices", "--scheduler", address), "which is no address; give an address such as tcp://")
            for address in (
                "",
                "tcp://",
                "tcp://:8786",
                "no address",
                "foo://a:1",
                "a:99999",
                "a:-1",
                "a:0",
                "tcp://a/b:1",
            )
        ),
        (("doctor", "--scheduler", "no address"), "which is no address"),
        (("devices", "--scheduler", "127.0.0.1:port"), "'127.0.0.1:port', which is no address; give"),
        (("serve", "--host", "203.0.113.7", "--port", "0"), "give a --host that is this machine's"),
        (("join", "https://127.0.0.1:1", "x"), "this is no token; copy the whole line"),
        (("plan", "tiny-llama", "--fleet", "lab-8", "--gemm", "lm_head"), "say where to with --plot"),
        (("simulate", "tiny-llama", "--fleet", "lab-8", "--churn", "often"), "no number and no file"),
        (("plan", "tiny-llama", "--fleet", "missing.toml"), "there is no file 'missing.toml'"),
        (("plan", "tiny-lama", "--fleet", "lab-8"), "did you mean 'tiny-llama'?"),
        (("compare", "tiny-llama", "--fleet", "lab-9"), "did you mean 'lab-8'?"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--system", "dftm"), "did you mean 'dtfm'?"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--system", "alpa-8xH200"), "did you mean 'H100'?"),
        (("compare", "tiny-llama", "--fleet", "lab-8", "--plot", "out.jpg"), "name it 'out.png'"),
        (("plan", "tiny-llama", "--fleet", "lab-8", "--plot", "out.jpg"), "name it 'out.png'"),
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
        (("serve", "--host", "0.0.0.0", "--no-tls"), "--no-tls with --host 0.0.0.0: other machines can reach it"),
        (("serve", "--dashboard-address", ":8787"), "the dashboard is not encrypted and asks nobody who they are"),
        (("join", "tcp://127.0.0.1:1", "x"), "give one such as https://192.0.2.10:8788"),
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


def test_a_run_of_another_model_or_format_is_refused_before_a_fleet_is_started(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And everything in its folder stays as it was."""
    folder = tmp_path / "run"
    train = ("train", recipe, "--resume", "--checkpoint", str(folder))
    saved = State({"weights/other": StoredArray(np.ones((2, 3), np.float32), "float32")}, {"step": 4})
    with TileStore(folder) as store:
        store.save(4, saved)
        assert "is of another model: weights/lm_head.weight is absent there" in refusal(*train, code=2)
        with monkeypatch.context() as later:
            later.setattr(zarr_files, "FORMAT", 2)
            later.setattr(zarr_files, "__version__", "9.9")
            store.save(5, saved)
        assert "is in format 2, written by cleave-dask 9.9; version" in refusal(*train, code=2)
        newest = folder / "step-00000005.0002" / "zarr.json"
        newest.write_text(newest.read_text()[:-9])
        assert "step 5" in (said := refusal(*train, code=1))
        assert "without step-00000005.0002, a resume is from step 4, which is whole" in said
        assert store.steps() == (4, 5)
        assert store.verify(4)


def refusal(*arguments: str, code: int) -> str:
    """What a command says that fails."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "starting scheduler" not in result.output
    line: str = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


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


def test_who_has_no_token_yet_is_asked_for_it(tmp_path: Path) -> None:
    with dask.config.set({"cleave.security.folder": str(tmp_path / "keys")}):
        result = run("join", "https://127.0.0.1:1")
    assert result.exit_code == 2
    assert "give the token that `cleave serve` printed there" in result.stderr


@pytest.mark.parametrize("arguments", [("revoke", "phone"), ("invite",)])
def test_who_has_never_served_is_told_to(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with dask.config.set({"cleave.security.folder": str(tmp_path / "keys")}):
        result = run(*arguments)
    assert result.exit_code == 1
    assert "nobody has served from" in result.stderr
    assert not (tmp_path / "keys").exists()


def test_hosts_are_told_apart() -> None:
    assert fleets.is_loopback("127.0.0.1")
    assert fleets.is_loopback("localhost")
    assert not fleets.is_loopback("0.0.0.0")
    assert not fleets.is_loopback("192.0.2.1")
    assert fleets.is_local("127.0.0.1")
    assert not fleets.is_local("192.0.2.1")

"""Joining over TLS: who gets in, and who does not."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from click.testing import Result
from distributed import Client

from cleave_dask.errors import AccessError, ClusterError
from cleave_dask.runtime.credentials import DeviceFolder
from cleave_dask.runtime.enrolment import enrol
from tests.cli.calling import RECIPE, run
from tests.security.clusters import FIGURES, SecuredCluster, losses
from tests.waiting import until


def test_a_device_joins_over_tls_and_trains(cluster: SecuredCluster, client: Client) -> None:
    assert cluster.scheduler_address.startswith("tls://")
    first, second = losses(client)
    assert second != first


def test_expired_revoked_and_foreign_tokens_get_no_certificate(cluster: SecuredCluster, tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "127.0.0.1", 1)
    expired, revoked = cluster.token(lifetime=-1), cluster.token()
    cluster.keys.change(lambda register: register.revoke(revoked.partition(".")[0]))
    foreign = cluster.token()[:-64] + "0" * 64  # of a cluster with another certificate
    for token, why in ((expired, "expired"), (revoked, "was revoked"), (foreign, "nothing was told to it")):
        with pytest.raises(AccessError, match=why):
            enrol(cluster.url, token, "late", folder)
    for name in ("cleave-server", "scheduler", "client"):  # the first may be enrolled by force: test_attacks does it
        forced = any(member.name == name for member in cluster.keys.register().members)
        with pytest.raises(AccessError, match="has joined before" if forced else "what the cluster calls itself"):
            enrol(cluster.url, cluster.token(), name, folder)
    assert not folder.path.exists()
    with pytest.raises(ClusterError, match="no cluster answers"):
        enrol("https://127.0.0.1:9", cluster.token(), "late", folder)


def test_who_has_joined_before_joins_again_and_nobody_takes_the_name(cluster: SecuredCluster, tmp_path: Path) -> None:
    def join(machine: str) -> Result:
        with dask.config.set({"cleave.security.folder": str(tmp_path / machine)}):
            return run("join", cluster.url, cluster.token(), "--name", "once", "--enrol-only", "--json")

    first, again, other = join("first"), join("first"), join("other")
    assert again.exit_code == 0, again.output
    assert json.loads(again.output) == json.loads(first.output)
    assert other.exit_code == 1
    assert "a device called once has joined before" in other.output


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have ended when the test has."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


README = Path(__file__).parents[2] / "README.md"


def readme_commands() -> list[str]:
    """The README's commands for a fleet on one machine, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if "git clone" in block]
    return [line.removeprefix("$ ").partition("  # ")[0].strip() for line in block.splitlines()]


@pytest.mark.timeout(600)  # three commands that import torch, one after the other
def test_the_six_commands_of_the_readme_train_over_tls(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """As they stand, but for ports that are free, JSON to read, and a smaller recipe for fewer steps."""
    clone, setup, serve, *joins, train = readme_commands()
    assert 4 + len(joins) <= 6
    assert clone.startswith("git clone")
    assert setup == "make setup"
    settings = {f"DASK_CLEAVE__DEVICE__{key}": value for key, value in FIGURES.items()}
    environment = {**os.environ, **settings, "DASK_CLEAVE__SECURITY__FOLDER": str(tmp_path / "keys")}

    def start(command: str, *more: str) -> subprocess.Popen[str]:
        program, verb, *arguments = shlex.split(command)
        assert program == ".venv/bin/cleave"
        line = [sys.executable, "-m", "cleave_dask", verb, *arguments, *more]
        with (tmp_path / f"{verb}.log").open("w") as log:
            process = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=tmp_path
            )
        started.append(process)
        return process

    server = start(serve, "--port", "0", "--dashboard-address", "127.0.0.1:0", "--json")
    assert server.stdout is not None
    told = json.loads(server.stdout.readline())
    assert told["device"] == f"cleave join {told['url']} {told['token']}"
    devices = []
    for join in joins:  # both at once, on one machine
        assert "https://127.0.0.1:8788 TOKEN" in join
        devices.append(start(join.replace("https://127.0.0.1:8788 TOKEN", f"{told['url']} {told['token']}")))
    names = [join.partition("--name ")[2].split()[0] for join in joins]
    assert len(set(names)) == 2
    for name in names:
        until(lambda who=name: f"{who} has joined" in (tmp_path / "serve.log").read_text(), name, seconds=120)  # type: ignore[misc]
    listed = start(f".venv/bin/cleave devices --scheduler {told['scheduler']} --json").communicate(timeout=240)[0]
    tokens = {device["name"]: device["token"] for device in json.loads(listed)["devices"]}
    assert tokens == dict.fromkeys(names, told["token"].partition(".")[0])
    (tmp_path / "small.toml").write_text(RECIPE)
    train = train.replace("tls://127.0.0.1:8786", told["scheduler"]).replace("tiny-llama", "small.toml")
    training = start(train, "--steps", "2", "--json")
    output, _ = training.communicate(timeout=240)
    assert training.returncode == 0, (tmp_path / "train.log").read_text()
    assert [json.loads(line)["step"] for line in output.splitlines()] == [1, 2]
    revoked = start(f".venv/bin/cleave revoke {names[0]} --json").communicate(timeout=60)[0]
    assert json.loads(revoked) == {"revoked": names[:1]}
    assert devices[0].wait(60) is not None, "a revoked device ends"
    assert devices[1].poll() is None
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


def test_a_scheduler_without_tls_does_not_listen_to_other_machines() -> None:
    command = [sys.executable, "-m", "dask", "scheduler", "--host", "0.0.0.0", "--port", "0", "--no-dashboard"]
    ended = subprocess.run(
        [*command, "--preload", "cleave_dask.runtime.scheduler"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "without TLS: whoever can reach it could run code here" in ended.stderr

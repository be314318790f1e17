"""Joining over TLS: who gets in, and who does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from cleave_dask.errors import AccessError, ClusterError
from cleave_dask.runtime.credentials import DeviceFolder
from cleave_dask.runtime.enrolment import enrol
from tests.cli.calling import RECIPE
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
    assert not folder.path.exists()
    with pytest.raises(ClusterError, match="no cluster answers"):
        enrol("https://127.0.0.1:9", cluster.token(), "late", folder)


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


@pytest.mark.timeout(600)  # three commands that import torch, one after the other
def test_serve_join_train_by_the_command_line(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    settings = {f"DASK_CLEAVE__DEVICE__{key}": value for key, value in FIGURES.items()}
    environment = {**os.environ, **settings, "DASK_CLEAVE__SECURITY__FOLDER": str(tmp_path / "keys")}

    def start(*arguments: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "cleave_dask", *arguments]
        with (tmp_path / f"{arguments[0]}.log").open("w") as log:
            process = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=tmp_path
            )
        started.append(process)
        return process

    server = start("serve", "--tls", "--port", "0", "--dashboard-address", "127.0.0.1:0", "--json")
    assert server.stdout is not None
    told = json.loads(server.stdout.readline())
    assert told["device"] == f"cleave join {told['url']} {told['token']}"
    for name in ("laptop", "phone"):  # both at once, on one machine
        start("join", told["url"], told["token"], "--name", name, "--nthreads", "1")
    (tmp_path / "small.toml").write_text(RECIPE)
    for name in ("laptop", "phone"):
        until(lambda who=name: f"{who} has joined" in (tmp_path / "serve.log").read_text(), name, seconds=120)  # type: ignore[misc]
    listed = start("devices", "--scheduler", told["scheduler"], "--json").communicate(timeout=240)[0]
    tokens = {device["name"]: device["token"] for device in json.loads(listed)["devices"]}
    assert tokens == dict.fromkeys(("laptop", "phone"), told["token"].partition(".")[0])
    training = start("train", "small.toml", "--scheduler", told["scheduler"], "--steps", "2", "--json")
    output, _ = training.communicate(timeout=240)
    assert training.returncode == 0, (tmp_path / "train.log").read_text()
    assert [json.loads(line)["step"] for line in output.splitlines()] == [1, 2]
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 130

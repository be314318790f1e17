"""A server of several processes over TLS: the same training bit for bit, whoever talks with devices, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed import Client

from cleave_dask.fleet.devices import Fleet
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import inspect
from cleave_dask.runtime.conversations import WithServer
from cleave_dask.runtime.porter import ANSWERED
from cleave_dask.runtime.server_desk import make_desk
from cleave_dask.runtime.trainer import Trainer
from tests import models
from tests.security.clusters import SecuredCluster, porters_of
from tests.waiting import until

PIPELINES = 2
"""Connections of a device that works: one to pull, one to push."""

CUT = partial(plan, min_flops=0, grid=(2, 2, 2))


def train(client: Client, steps: int = 2) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses, and the records of the steps."""
    module = models.llama(layers=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with Trainer(module, optimizer, client, plan=CUT, replan=False) as trainer:
        losses = [trainer.step(**models.tokens(seed=step)) for step in range(steps)]
        return losses, list(trainer.records)


def test_porters_pass_on_whatever_a_device_may_say() -> None:
    keeper: Any = None
    passed_on = {*WithServer.calls} - {*ANSWERED}
    assert {*make_desk(keeper)} == passed_on - {"cleave_await"} | {"sizes", "published"}


def test_porters_change_no_bit(cluster: SecuredCluster, client: Client) -> None:
    """With both, with one after the other was given up, and with none left: devices then go to the server itself."""
    scheduler: Any = client.scheduler
    server, everyone = inspect(client).server, porters_of(client)
    assert len(everyone) == 2
    assert inspect(client).fleet.server.processes == Fleet.from_cluster(client).server.processes == 3
    found, porters, direct = [], [], []
    try:
        for addresses in (everyone, everyone[1:], []):
            client.sync(scheduler.cleave_porters, server=server, addresses=addresses)
            assert porters_of(client) == addresses
            losses, records = train(client)
            found.append((losses, [record["tiles"] for record in records]))
            porters.append(sum(_talking(pid, "honest") for pid in cluster.porter_pids))
            direct.append(_talking(cluster.server_pid, "honest"))
    finally:
        client.sync(scheduler.cleave_porters, server=server, addresses=everyone)
    assert found[0] == found[1] == found[2]
    assert min(porters[:2]) >= PIPELINES, "with porters it pulls and pushes there"
    assert direct[2] >= direct[1] + PIPELINES, "without, at the server; some of its connections to porters stay, unused"


def _talking(pid: int, name: str) -> int:
    """Connections of a device that was started here to a process; attackers of other tests may have some too."""
    (device,) = [each for each in psutil.Process().children() if ["--name", name] == each.cmdline()[5:7]]
    own = {each.laddr for each in _connections(device)}
    return sum(each.raddr in own for each in _connections(psutil.Process(pid)))


def _connections(process: psutil.Process) -> list[Any]:
    return [each for each in process.net_connections("inet") if each.status == psutil.CONN_ESTABLISHED]


def test_a_killed_porter_costs_its_transfers(cluster: SecuredCluster, client: Client) -> None:
    calm, _ = train(client, steps=3)
    addresses = porters_of(client)
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(train, client, 3)
        for _ in range(2):
            until(lambda: client.run_on_scheduler(_working) or training.done(), "a tile is under way", seconds=240)
            killed = set(cluster.porter_pids)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            until(partial(_replaced, cluster, killed), "others are in their places")
        losses, records = training.result()
    assert losses == calm
    assert sum(record["tiles"] for record in records) == 3 * records[0]["tiles"]
    assert porters_of(client) == addresses, "devices find them where they were"
    assert train(client, steps=3)[0] == calm


def _replaced(cluster: SecuredCluster, killed: set[int]) -> bool:
    return len(set(cluster.porter_pids) - killed) == len(killed)


def _working(dask_scheduler: Any) -> bool:
    return any(ws.processing for ws in dask_scheduler.workers.values() if ws.extra["cleave"]["role"] == "device")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "DASK_CLEAVE__SECURITY__FOLDER": str(tmp_path / "keys")}
    command = ["serve", "--tls", "--port", "0", "--dashboard-address", "127.0.0.1:0", "--processes", "3", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "cleave_dask", *command], stdout=subprocess.PIPE, text=True, env=environment
    ) as serving:
        assert serving.stdout is not None
        assert json.loads(serving.stdout.readline())["scheduler"].startswith("tls://")
        everyone = psutil.Process(serving.pid).children(recursive=True)
        assert len(everyone) == 4, "a scheduler, and a server of three processes"
        serving.send_signal(number)
        serving.wait(60)
    _, alive = psutil.wait_procs(everyone, timeout=60)
    assert not alive

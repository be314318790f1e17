"""Attacks by a device with a valid certificate: nothing runs, nothing is corrupted, and the cluster trains on."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from dask._task_spec import Task
from distributed import Client
from distributed.protocol import dumps, loads, pickle, serialize
from distributed.protocol.serialize import Pickled, Serialized, ToPickle, to_serialize

from cleave_dask.planning.planner import plan
from cleave_dask.runtime.certificates import Authority, serial_of
from cleave_dask.runtime.cluster import inspect
from cleave_dask.runtime.credentials import Files, write_private
from cleave_dask.runtime.guarding import CONNECTIONS
from cleave_dask.runtime.tokens import Member
from cleave_dask.runtime.trainer import Trainer
from tests import models
from tests.security import attackers
from tests.security.attackers import Exploit, call, lengths, registration, send_raw, stream
from tests.security.clusters import SecuredCluster, devices_of, porters_of, until_joined
from tests.waiting import until

PUSH = {"op": "cleave_push", "run": "x", "step": 0, "job": 0, "tile": 0, "device": "honest", "arrays": ()}
PUSH |= {"pull_seconds": 0.0, "compute_seconds": 0.0, "timing": {}, "moved": {}}

CUT = partial(plan, min_flops=0, grid=(2, 2, 1))  # one grid whoever is there, so that every bit of the loss is the same


def train(client: Client, steps: int = 2) -> tuple[list[float], set[str], int]:
    """Losses, who made tiles, and how many came more than once."""
    module = models.llama(layers=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Trainer(module, optimizer, client, plan=CUT, replan=False) as trainer:
        losses = [trainer.step(**models.tokens(seed=step)) for step in range(steps)]
        return losses, set(trainer.trace["device"]), sum(record["retries"] for record in trainer.records)


@pytest.fixture(scope="module")
def clean(client: Client) -> list[float]:
    """Losses with the honest device alone."""
    return train(client)[0]


@pytest.fixture(scope="module")
def mallory(cluster: SecuredCluster) -> Files:
    return cluster.enrol("mallory")


@pytest.fixture
def exploit(tmp_path: Path) -> Iterator[Exploit]:
    """A pickle that would leave a mark; no test may leave one."""
    exploit = Exploit(tmp_path / "mark")
    yield exploit
    assert not exploit.marker.exists()


def test_the_pickle_of_these_tests_does_run_in_stock_dask(tmp_path: Path) -> None:
    marker = tmp_path / "mark"
    loads(dumps({"op": "heartbeat_worker", "metrics": ToPickle(Exploit(marker))}), deserializers=["msgpack"])
    assert marker.exists()


def test_the_scheduler_runs_nothing_and_obeys_no_device(
    cluster: SecuredCluster, client: Client, mallory: Files, exploit: Exploit, clean: list[float]
) -> None:
    address, honest = cluster.scheduler_address, devices_of(client)["honest"]["address"]
    heartbeat = {"op": "heartbeat_worker", "address": honest, "now": 0.0, "executing": {}, "extensions": {}}
    heartbeat["metrics"] = registration("mallory")["metrics"]
    refused = {
        "code": {"op": "run_function", "function": exploit.pickled, "args": (), "kwargs": {}},
        "pickled code": {"op": "run_function", "function": ToPickle(exploit)},
        "a plugin": {"op": "register_scheduler_plugin", "plugin": exploit.pickled, "name": "x"},
        "to end it": {"op": "terminate"},
        "all clients": {"op": "register-client", "client": "x", "versions": {}},
        "another's heart": heartbeat,
        "another's end": {"op": "unregister", "address": honest, "stimulus_id": "x"},
        "another's heart, by its name": {**heartbeat, "address": "honest"},
        "another's end, by its name": {"op": "unregister", "address": "honest", "stimulus_id": "x"},
        "another's end, by its host": {
            "op": "unregister",
            "address": honest.replace("127.0.0.1", "localhost"),
            "stimulus_id": "x",
        },
        "the server's end": {"op": "unregister", "address": "cleave-server", "stimulus_id": "x"},
        "a host's name, which takes long to resolve": registration("mallory", address="tls://slow.example:1"),
        "figures that no plan survives": registration("mallory", extra=_figures(flops=1e-300)),
        "room for no tile at all": registration("mallory", extra=_figures(memory=1)),
        "another's figures": {"op": "cleave_measured", "worker": honest, "figures": {"flops": 1e30}},
        "another's address": registration("mallory", address=honest),
        "to be the server": registration("mallory", extra={"cleave": {"role": "server", "version": "0"}}),
        "one field more": registration("mallory", host_info={"x": 1}),
        "a pickled greeting": {**registration("mallory"), "name": ToPickle(exploit), "pid": ToPickle(exploit)},
    }
    streamed = {
        "client operations": {"op": "update-graph", "expr_ser": exploit.pickled, "client": "x"},
        "released keys": {"op": "client-releases-keys", "keys": ["x"], "client": "x"},
        "a pickled operation": {"op": ToPickle(exploit)},
    }
    harmless = (
        {"op": "task-finished", **_finished("x"), "metadata": ToPickle(exploit), "worker": honest},
        {"op": "task-erred", **_erred("x"), "exception": ToPickle(exploit), "traceback": to_serialize(exploit)},
        {"op": "add-keys", "keys": ["x"], "worker": honest},
        {"op": "log-event", "topic": "all", "msg": ToPickle(exploit)},
        {"op": "log-event", "topic": "all", "msg": bomb()},
        {"op": "worker-status-change", "status": "paused", "stimulus_id": "x", "worker": honest},
    )

    async def attack() -> dict[str, Any]:
        slow = asyncio.gather(*attackers.slow(mallory, address), *attackers.slow_requests(mallory, cluster.url))
        answers = {name: await call(mallory, address, message) for name, message in refused.items()}
        answers |= {name: await stream(mallory, address, "mallory", message) for name, message in streamed.items()}
        answers["another name"] = (await call(mallory, address, registration("honest")))["status"]
        answers["metrics"] = (
            await call(mallory, address, registration("mallory", metrics={"memory": ToPickle(exploit)}))
        )["status"]
        strange = {"packages": {"dask": {"x": 1}}}  # which Dask would compare for every client that connects
        answers["versions"] = (await call(mallory, address, registration("mallory", versions=strange)))["status"]
        answers["10 GB"] = await send_raw(mallory, address, lengths(10_000_000_000))
        answers["many frames"] = await send_raw(mallory, address, lengths(*([8] * 5000)))
        answers["slow"] = await slow
        return answers

    process = psutil.Process(cluster.scheduler_pid)
    memory = process.memory_info().rss
    answers = asyncio.run(attack())
    closed = {name for name, answer in answers.items() if answer == "closed"}
    assert closed == {*refused, *streamed, "10 GB", "many frames"}
    assert (answers["another name"], answers["metrics"], answers["versions"]) == ("OK", "OK", "OK")
    assert answers["slow"] == [True] * 9, "where devices enrol, too"
    scheduler: Any = client.scheduler
    before = client.sync(scheduler.cleave_refused)
    assert before >= len(closed)
    asyncio.run(stream(mallory, address, "mallory", *harmless))
    assert client.sync(scheduler.cleave_refused) == before, "what a stock worker might say is cleaned, not refused"
    assert process.memory_info().rss - memory < 50e6
    until(lambda: set(devices_of(client)) == {"honest"}, "mallory is gone")
    assert devices_of(client)["honest"]["running"]
    assert train(client)[0] == clean


def _figures(**changed: float) -> dict[str, Any]:
    return {"cleave": {**registration("mallory")["extra"]["cleave"], **changed}}


def test_a_device_with_the_name_of_the_server_takes_nothing_of_it(
    cluster: SecuredCluster, client: Client, tmp_path: Path
) -> None:
    """Nobody enrols under such a name; this certificate was signed all the same."""
    now = datetime.now(UTC)
    files = Files(cluster.keys.files("client").authority, tmp_path / "x.pem", tmp_path / "x.key")
    authority = Authority((cluster.keys.path / "ca.pem").read_bytes(), (cluster.keys.path / "ca.key").read_bytes())
    certificate, key = authority.issue("device", "cleave-server", now, 1)
    write_private(files.certificate, certificate)
    write_private(files.key, key)
    member = Member("cleave-server", serial_of(certificate), "0" * 8, 0.0, now.timestamp() + 1000)
    cluster.keys.change(lambda register: register.admit(member))
    server, address = inspect(client).server, cluster.scheduler_address
    answer = asyncio.run(call(files, address, registration("cleave-server")))
    assert answer == "closed" or answer["status"] != "OK"
    leaving = {"op": "unregister", "address": server, "stimulus_id": "x"}
    assert asyncio.run(call(files, address, leaving)) == "closed"
    assert inspect(client).server == server


def test_answers_that_a_device_does_not_read_do_not_pile_up(client: Client, mallory: Files) -> None:
    server, probe = inspect(client).server, {"op": "cleave_probe_down", "nbytes": 16 << 20}

    def waiting(dask_worker: Any) -> int:
        streams = (comm.stream for comm in dask_worker._comms)
        return max((len(stream._write_buffer) for stream in streams if stream is not None), default=0)

    def look() -> int:
        most: int = client.run(waiting, workers=[server])[server]
        return most

    async def attack() -> int:
        async with attackers.unread(mallory, server, probe, 1000):
            await asyncio.to_thread(until, lambda: look() > 0, "an answer waits")
            for _ in range(200):  # the server has time for all of them
                assert isinstance(await call(mallory, server, {"op": "cleave_clock"}), float)
            return await asyncio.to_thread(look)

    assert asyncio.run(attack()) < 17 << 20


def bomb() -> Serialized:
    """An array whose 100 KB become 100 MB where they are unpacked."""
    header, _ = serialize(np.zeros(8))
    return Serialized({**header, "compression": ("zlib",)}, [zlib.compress(bytes(100 << 20))])


def _finished(key: str) -> dict[str, Any]:
    told = {"nbytes": 1, "type": b"x", "typename": "int", "metadata": {}, "thread": None, "startstops": ()}
    return {"key": key, "run_id": 0, **told, "stimulus_id": "x", "status": "OK"}


def _erred(key: str) -> dict[str, Any]:
    told = {"exception": None, "traceback": None, "exception_text": "", "traceback_text": "", "thread": None}
    return {"key": key, "run_id": 0, **told, "startstops": (), "stimulus_id": "x", "status": "error"}


@pytest.mark.usefixtures("dripping")  # from here on three messages drip
def test_the_server_runs_nothing_and_takes_no_memory(
    server: tuple[str, int], client: Client, mallory: Files, exploit: Exploit, clean: list[float]
) -> None:
    address, pid = server
    refused = {
        "code": {"op": "run", "function": exploit.pickled},
        "code in a coroutine": {"op": "run_coroutine", "function": ToPickle(exploit), "wait": True},
        "a file": {"op": "upload_file", "filename": "x.py", "data": b"raise SystemExit"},
        "data": {"op": "update_data", "data": {"x": to_serialize(exploit)}},
        "another's data": {"op": "get_data", "keys": ["x"], "who": "x"},
        "weights": {"op": "cleave_get", "run": "x", "name": "y"},
        "to be a client": {"op": "cleave_optimizer", "run": "x", "packed": exploit.pickled},
        "a bomb": {"op": "cleave_probe_up", "data": [bomb()]},
        "a probe that is too large": {"op": "cleave_probe_up", "data": [to_serialize(np.zeros(3 << 20))]},
    }
    process = psutil.Process(pid)

    async def attack() -> dict[str, Any]:
        slow = asyncio.gather(*attackers.slow(mallory, address))
        answers = {name: await call(mallory, address, message) for name, message in refused.items()}
        answers["10 GB"] = await send_raw(mallory, address, lengths(10_000_000_000))
        answers["pickles"] = await call(mallory, address, {**PUSH, "arrays": [ToPickle(exploit)]})
        answers["objects"] = await call(mallory, address, {**PUSH, "arrays": [to_serialize(exploit)]})
        stray = {**PUSH, "arrays": [to_serialize(np.zeros(8 << 20))]}  # 64 MB that nobody waits for
        answers["stray"] = await call(mallory, address, *[stray] * 3)
        answers["slow"] = await slow
        return answers

    before = process.memory_info().rss
    answers = asyncio.run(attack())
    assert {name for name, answer in answers.items() if answer == "closed"} == {*refused, "10 GB"}
    assert all(not answers[name]["accepted"] for name in ("pickles", "objects", "stray"))
    assert answers["slow"] == [True] * 3
    assert process.memory_info().rss - before < 50e6
    assert train(client)[0] == clean


def test_a_lying_device_changes_nothing(
    cluster: SecuredCluster, client: Client, exploit: Exploit, clean: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLORY_MARKER", str(exploit.marker))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    with cluster.device("liar", "--preload", "tests.security.mallory"):
        until_joined(client, "liar")
        assert devices_of(client)["liar"]["flops"] == 10 * devices_of(client)["honest"]["flops"]
        losses, devices, repeated = train(client)
        assert losses == clean
        assert devices == {"honest", "liar"}, "tiles are whose connection they came over"
        assert repeated > 0, "pushes were repeated"


def test_a_restart_ends_no_quarantine(cluster: SecuredCluster, client: Client, tmp_path: Path) -> None:
    """A new scheduler and a new server, with the keys and the register that are on disk."""
    scheduler: Any = client.scheduler
    files = cluster.enrol("fallen")
    client.sync(scheduler.cleave_quarantine, device="fallen", why="a wrong tile")
    copytree(cluster.root / "server", tmp_path / "server")
    with SecuredCluster(tmp_path) as restarted, Client(restarted, set_as_default=False) as other:
        scheduler = other.scheduler
        assert other.sync(scheduler.cleave_info)["quarantined"] == {"fallen": "a wrong tile"}
        server = next(iter(other.sync(scheduler.cleave_info)["server"].values()))["address"]
        answer = asyncio.run(call(files, server, PUSH))
    assert answer == {"accepted": False, "why": "fallen is in quarantine: a wrong tile"}


def test_a_flood_of_connections_ends_at_64_and_keeps_nobody_else_out(
    cluster: SecuredCluster, client: Client, mallory: Files
) -> None:
    flooder = cluster.enrol("flooder")
    for address in (cluster.scheduler_address, inspect(client).server, *porters_of(client)):
        assert asyncio.run(attackers.flood(flooder, address, 80, mallory)) == (CONNECTIONS, True)
    until(lambda: asyncio.run(call(flooder, address, {"op": "cleave_clock"})) != "closed", "it may come again")


def test_another_authority_and_a_revoked_device_cannot_connect(
    cluster: SecuredCluster, client: Client, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    certificate, key = Authority(*Authority.create(now)).issue("client", "x", now, 1)
    rogue = Files(cluster.keys.files("client").authority, tmp_path / "x.pem", tmp_path / "x.key")
    write_private(rogue.certificate, certificate)
    write_private(rogue.key, key)
    files = cluster.enrol("leaver")
    who = {"op": "cleave_clock"}
    servers = [inspect(client).server, *porters_of(client)]
    for server in servers:
        assert isinstance(asyncio.run(call(files, server, who)), float)
    for address in (*servers, cluster.scheduler_address):
        assert asyncio.run(call(rogue, address, who)) == "closed"
    with cluster.device("leaver", files=files) as process:
        until_joined(client, "leaver")
        cluster.keys.change(lambda register: register.revoke("leaver"))
        assert process.wait(60) is not None, "a revoked device ends"
        until(lambda: "leaver" not in devices_of(client), "it has left")
    for address in (*servers, cluster.scheduler_address):
        assert asyncio.run(call(files, address, who)) == "closed"


def test_a_device_refuses_what_its_scheduler_sends(cluster: SecuredCluster, client: Client, exploit: Exploit) -> None:
    address = devices_of(client)["honest"]["address"]
    codes = [pickle.dumps(Task("evil", os.mkdir, str(exploit.marker))), exploit.pickled]  # the client sends bytes
    told = {"key": "evil", "run_id": 1, "priority": (0,), "who_has": {}, "nbytes": {}, "actor": False}
    order = {"op": "compute-task", **told, "resource_restrictions": {}, "annotations": {}, "span_id": None}

    def send(dask_scheduler: Any) -> None:
        pickles = [Pickled({"pickled-obj": code, "num-sub-frames": 0}, []) for code in codes]
        for run_spec in (*pickles, codes[1], {"run": "x"}):
            dask_scheduler.stream_comms[address].send({**order, "run_spec": run_spec, "stimulus_id": "x"})
            dask_scheduler.stream_comms[address].send({"op": "free-keys", "keys": ["evil"], "stimulus_id": "x"})

    client.run_on_scheduler(send)
    until(lambda: cluster.log("honest").count("Refused task evil") == 4, "the device says that it refuses")
    assert "honest" in devices_of(client)

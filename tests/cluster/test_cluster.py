"""What a cluster lacks is said, and what devices are is what was promised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import psutil
import pytest
import torch
from distributed import Client

from cleave_dask.errors import ClusterError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.runtime.cluster import inspect
from cleave_dask.runtime.processes import ServedCluster
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models

MB = 1 << 20


@contextmanager
def worker(cluster: ServedCluster, *options: str) -> Iterator[None]:
    """One more `dask worker` on a cluster, there when the block begins and gone when it ends."""
    command = [sys.executable, "-m", "dask", "worker", cluster.scheduler_address, "--no-nanny", "--name", "extra"]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with Client(cluster, set_as_default=False) as client:
                wait_for(client, "extra", present=True)
                yield
                process.terminate()
                wait_for(client, "extra", present=False)
        finally:
            process.kill()


def wait_for(client: Client, name: str, *, present: bool) -> None:
    deadline = monotonic() + 60
    while (name in {w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values()}) != present:
        assert monotonic() < deadline, f"waited too long for {name}"
        client.sync(client._update_scheduler_info)


def test_devices_are_light_and_describe_themselves(fleet: LocalFleet, client: Client) -> None:
    module = models.llama()
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client) as trainer:
        trainer.step(**models.tokens())
    devices = [facts["address"] for facts in inspect(client).devices.values()]
    loaded = client.run(lambda: sorted({"torch", "transformers", "zarr", "bokeh"} & sys.modules.keys()), workers=devices)
    assert loaded == dict.fromkeys(devices, [])
    for pid in fleet.pids.values():
        assert psutil.Process(pid).memory_info().rss < 200 * MB
    described = Fleet.from_cluster(client)
    assert sorted(device.name for device in described.devices) == sorted(fleet.pids)
    assert all(device.flops > 1e8 for device in described.devices)


def test_what_a_cluster_lacks_is_said() -> None:
    with ServedCluster() as cluster, Client(cluster, set_as_default=False) as client:
        with pytest.raises(ClusterError, match="no device has joined this scheduler; start one with"):
            inspect(client)
        with worker(cluster), pytest.raises(ClusterError, match=r"1 workers without the package have \(extra\)"):
            inspect(client)
        with (
            worker(cluster, "--preload", "cleave_dask.runtime.server"),
            pytest.raises(ClusterError, match=r"2 servers have joined where one is expected \(cleave-server, extra\)"),
        ):
            inspect(client)
        with worker(cluster, "--preload", "cleave_dask.runtime.device"):
            assert list(inspect(client).devices) == ["extra"]


def test_a_server_that_dies_in_a_step_is_an_error_not_a_hang() -> None:
    module = models.llama()
    with LocalFleet(1) as fleet, fleet.get_client() as client:
        trainer = Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client)
        trainer.step(**models.tokens())
        psutil.Process(fleet.server_pid).kill()
        with pytest.raises(ClusterError, match="server at"):
            trainer.step(**models.tokens())
        with pytest.raises(ClusterError, match="no server has joined"):
            Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client)

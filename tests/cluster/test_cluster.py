"""What a cluster lacks is said, and what devices are is what was promised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import process_time

import dask
import psutil
import pytest
import torch
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

from cleave_dask.errors import ClusterError, InputError
from cleave_dask.fleet.churn import Churn
from cleave_dask.fleet.devices import Fleet, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import inspect
from cleave_dask.runtime.lowering import Skeleton
from cleave_dask.runtime.processes import ServedCluster
from cleave_dask.runtime.trainer import Trainer, submit
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until, until_tasks

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
    def joined() -> bool:
        client.sync(client._update_scheduler_info)
        return name in {worker["name"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()}

    until(lambda: joined() == present, f"{name} {'joins' if present else 'leaves'}")


def test_devices_are_light_and_describe_themselves(fleet: LocalFleet, client: Client) -> None:
    module = models.llama()
    with Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client) as trainer:
        trainer.step(**models.tokens())
    for pid in fleet.pids.values():
        mapped = [Path(line.split()[-1]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        assert not {"torch", "transformers", "zarr", "bokeh"} & {part for path in mapped for part in path.parts}
        assert psutil.Process(pid).memory_info().rss < 200 * MB
    described = Fleet.from_cluster(client)
    assert sorted(device.name for device in described.devices) == sorted(fleet.pids)
    assert all(device.flops > 1e8 for device in described.devices)
    assert described.server == inspect(client).fleet.server == Server(processes=1, shared_cores=CPU_COUNT)


def test_devices_run_nothing_but_tiles_and_say_so(client: Client) -> None:
    (device, *_) = (facts["address"] for facts in inspect(client).devices.values())
    with pytest.raises(Exception, match="this device runs nothing but tiles of its installed cleave-dask"):
        client.run(lambda: 1, workers=[device])
    answers = client.run(lambda: 1, workers=[device, inspect(client).server], on_error="return")
    assert 1 in answers.values(), "the server does, for its clients"


def test_fifty_thousand_tiles_cost_the_client_little_and_leave_nothing_behind() -> None:
    skeleton = Skeleton(rounds=(((0,), (), 1 << 40),), jobs=(models.many_parcels(50_000, "nobody"),))
    with ServedCluster() as cluster, Client(cluster, set_as_default=False) as client:
        start = process_time()
        future = submit(client, "many", 0, skeleton)
        assert process_time() - start < 0.5
        until_tasks(client, 50_002)
        future.cancel()
        until_tasks(client, 0)


def test_a_scheduler_without_the_plugin_is_refused() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=None) as stock,
        Client(stock, set_as_default=False) as client,
        pytest.raises(ClusterError, match="the scheduler does not know cleave; start it with `cleave serve` or"),
    ):
        inspect(client)


def test_what_a_cluster_lacks_is_said() -> None:
    with ServedCluster() as cluster, Client(cluster, set_as_default=False) as client:
        with pytest.raises(ClusterError, match="no device has joined this scheduler; start one with"):
            inspect(client)
        with worker(cluster), pytest.raises(ClusterError, match=r"1 workers without the package have \(extra\)"):
            inspect(client)
        with (
            worker(cluster, "--preload", "cleave_dask.runtime.server", "--host", "127.0.0.1"),
            pytest.raises(ClusterError, match=r"2 servers have joined where one is expected \(cleave-server, extra\)"),
        ):
            inspect(client)
        with worker(cluster, "--preload", "cleave_dask.runtime.device"):
            assert list(inspect(client).devices) == ["extra"]


def test_slices_come_once_and_a_server_that_dies_is_an_error_not_a_hang() -> None:
    module = models.llama()
    with LocalFleet(1) as fleet, fleet.get_client() as client:
        every = partial(plan, min_flops=0, grid=(3, 2, 2))
        trainer = Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client, plan=every)
        trainer.step(**models.tokens())
        assert trainer.records[-1]["down_bytes"] == trainer.plan.down_bytes, "each slice once for all tiles of a device"
        assert trainer.records[-1]["up_bytes"] == trainer.plan.up_bytes
        psutil.Process(fleet.server_pid).kill()
        with pytest.raises(ClusterError, match="server at"):
            trainer.step(**models.tokens())
        wait_for(client, fleet.server_name, present=False)
        with pytest.raises(ClusterError, match="no server has joined"):
            Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client)


def test_what_is_closed_says_so(tmp_path: Path) -> None:
    """A trainer, its client or its fleet: whatever is asked of it, and closing it once more does no harm."""
    module = models.llama()

    def build(client: Client) -> Trainer:
        return Trainer(module, torch.optim.SGD(module.parameters(), lr=0.1), client, checkpoint=tmp_path)

    def check(trainer: Trainer, what: str) -> None:
        calls: list[Callable[[], object]] = [trainer.save, trainer.resume, trainer.state_dict, lambda: trainer.trace]
        calls.append(lambda: trainer.step(**models.tokens()))
        for call in calls:
            with pytest.raises(ClusterError, match=rf"this {what} is closed.*resume\(\) from it"):
                call()
        trainer.close()

    local = LocalFleet(1)
    with local.get_client() as client:
        first, second = build(client), build(client)
        first.step(**models.tokens())
        first.close()
        check(first, "trainer")
    check(second, "client")
    for refused in (build, Fleet.from_cluster):
        with pytest.raises(ClusterError, match="this client is closed"):
            refused(client)
    with local.get_client() as client:
        third = build(client)
        with pytest.raises(InputError, match=r"no process .* is called 'device-1'; did you mean 'device-0'"):
            local.pid("device-1")
        local.close()
        check(third, "client")
    calls: list[Callable[[], object]] = [local.get_client, local.__enter__, lambda: local.server_pid]
    calls += [lambda: local.scheduler_pid, lambda: local.pid("device-0"), lambda: local.restart("device-0")]
    for call in (*calls, local.under(Churn()).__enter__):
        with pytest.raises(ClusterError, match=r"this LocalFleet is closed .*start another: LocalFleet\(...\)"):
            call()
    assert local.pids == {}
    local.close()


def test_a_device_that_starts_again_is_not_taken_for_the_one_that_was_lost() -> None:
    """Dask ends the process of a lost worker after this timeout, also one that has just taken its place."""
    soon = dask.config.set({"distributed.deploy.lost-worker-timeout": "500 ms"})
    with soon, LocalFleet(1) as local, local.get_client() as client:
        os.kill(local.pids["device-0"], signal.SIGKILL)
        wait_for(client, "device-0", present=False)
        local.restart("device-0")
        wait_for(client, "device-0", present=True)
        assert list(local.pids) == ["device-0"]

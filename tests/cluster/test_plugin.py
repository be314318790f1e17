"""The scheduler's plugin: it starts only where it can work, its errors end the step, and devices that join get work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

import pytest
import torch
from distributed import Client, Scheduler

from cleave_dask.errors import ClusterError
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime import cluster
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until, until_tasks

SLOW = Link(bandwidth=2e6, latency=1e-3)
"""Slow enough that a step takes seconds, whatever else the machine does."""

BATCH = models.tokens(batch=48, length=32)


def slow_fleet(count: int) -> Fleet:
    return Fleet(Server(), tuple(Device(f"device-{number}", 1e10, 1e9, SLOW, SLOW) for number in range(count)))


def trainer_of(client: Client) -> Trainer:
    module = models.llama()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return Trainer(module, optimizer, client, plan=partial(plan, min_flops=0, grid=(4, 2, 1)))


def test_another_version_is_refused_and_an_exception_in_the_plugin_fails_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is placed by other rules."""

    def spoil(dask_scheduler: Scheduler) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("out of order")

        steering: Any = dask_scheduler.plugins["cleave-steering"]
        steering.dispatcher.parcel_ready = broken

    def settings(dask_scheduler: Scheduler) -> tuple[bool, object, bool]:
        patient = dask_scheduler.allowed_failures > 1e9
        return patient, dask_scheduler.no_workers_timeout, "stealing" in dask_scheduler.extensions

    with LocalFleet(1) as fleet, fleet.get_client() as client, trainer_of(client) as trainer:
        assert client.run_on_scheduler(settings) == (True, None, False)
        with monkeypatch.context() as other:
            other.setattr(cluster, "__version__", "9.9")
            with pytest.raises(ClusterError, match=r"runs cleave-dask .*, this client 9\.9; install the same version"):
                trainer_of(client)
        client.run_on_scheduler(spoil)
        with pytest.raises(ClusterError, match="plugin is broken: decide failed with RuntimeError: out of order"):
            trainer.step(**models.tokens())
        until_tasks(client, 0)


def test_a_scheduler_that_cannot_steer_does_not_start() -> None:
    command = [sys.executable, "-m", "dask", "scheduler", "--port", "0", "--no-dashboard"]
    done = subprocess.run(
        [*command, "--host", "127.0.0.1", "--preload", "cleave_dask.runtime.scheduler"],
        env={**os.environ, "DASK_CLEAVE__DEVICE__WINDOW": "many"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "the scheduler cannot steer: setting 'cleave.device.window' is 'many'; give a whole number" in done.stderr


def test_a_device_that_joins_in_mid_step_gets_work() -> None:
    with (
        LocalFleet(slow_fleet(2)) as fleet,
        fleet.get_client() as client,
        ThreadPoolExecutor(1) as thread,
        trainer_of(client) as trainer,
    ):
        trainer.step(**BATCH)
        os.kill(fleet.pids["device-1"], signal.SIGKILL)
        until(lambda: "device-1" not in facts_of(client)["device"], "the killed device is gone")
        step = thread.submit(trainer.step, **BATCH)
        until(lambda: facts_of(client)["waiting"] > 2, "the step is under way")
        fleet.restart("device-1")
        step.result()
        assert trainer.records[-1]["tiles_of"]["device-1"] > 0


def test_a_stopped_device_is_noticed_in_time() -> None:
    """Within twice the predicted time of its parcel and a second; the rest of the limit is for a busy machine."""

    def longest(dask_scheduler: Scheduler) -> float:
        steering: Any = dask_scheduler.plugins["cleave-steering"]
        dispatcher = steering.dispatcher
        flying = dispatcher.flying("device-1")
        return max((dispatcher.expected(parcel, "device-1") for parcel in flying), default=0.0)

    with (
        LocalFleet(slow_fleet(2)) as fleet,
        fleet.get_client() as client,
        ThreadPoolExecutor(1) as thread,
        trainer_of(client) as trainer,
    ):
        trainer.step(**BATCH)
        step = thread.submit(trainer.step, **BATCH)
        until(lambda: client.run_on_scheduler(longest) > 0, "the device has a parcel")
        os.kill(fleet.pids["device-1"], signal.SIGSTOP)
        stopped, expected = monotonic(), client.run_on_scheduler(longest)
        try:
            until(lambda: facts_of(client)["handovers"] > 0, "somebody else gets its parcels")
            noticed = monotonic() - stopped
            step.result()
        finally:
            os.kill(fleet.pids["device-1"], signal.SIGCONT)
        assert noticed < 2 * expected + 1 + 1, f"noticed after {noticed:.2f} s, predicted {expected:.2f} s"

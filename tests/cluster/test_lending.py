"""An owner pauses a device with a file, and tiles go elsewhere; who joins or leaves is planned for at the next step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.simulation.local import LocalFleet
from tests.cluster.test_fit import batch, shares, trainer
from tests.waiting import until

LINK = Link(1e8, 1e-3)
PAIR = Fleet(Server(), tuple(Device(name, 2e9, 1e9, LINK, LINK) for name in ("one", "other")))


def test_a_paused_device_gets_no_tiles_until_it_is_resumed(tmp_path: Path) -> None:
    file = tmp_path / "pause"
    with LocalFleet(PAIR, settings={"other": {"pause_file": str(file)}}) as local, local.get_client() as client:

        def running() -> bool:
            found: bool = facts_of(client)["device"]["other"]["running"]
            return found

        with trainer(client, plan, replan=False) as run:
            run.step(batch())
            assert run.records[-1]["tiles_of"]["other"] > 0
            file.touch()
            until(lambda: not running(), "the device is paused")
            run.step(batch())
            assert set(run.records[-1]["tiles_of"]) == {"one"}
            assert shares(run.graph, run.plan)["one"] == pytest.approx(1.0)
            file.unlink()
            until(running, "the device is resumed")
            run.step(batch())
            assert run.records[-1]["tiles_of"]["other"] > 0


def test_who_leaves_is_planned_for_no_more_and_who_returns_is_again() -> None:
    with LocalFleet(PAIR) as local, local.get_client() as client, trainer(client, plan, replan=False) as run:
        loss = run.step(batch())
        os.kill(local.pids["other"], signal.SIGKILL)
        until(lambda: "other" not in facts_of(client)["device"], "the device has left")
        run.step(batch())
        assert shares(run.graph, run.plan).keys() == {"one"}
        local.restart("other")
        until(lambda: facts_of(client)["device"].get("other", {}).get("running", False), "the device has returned")
        assert run.step(batch()) < loss
        assert shares(run.graph, run.plan).keys() == {"one", "other"}


def test_a_cap_is_kept_to_and_planned_with() -> None:
    capped = {"max_down": "20 MB/s", "max_up": "10 MB/s"}
    with LocalFleet(PAIR, settings={"other": capped}) as local, local.get_client() as client:
        found = {device.name: device for device in Fleet.from_cluster(client).devices}
        assert found["other"].down.bandwidth == 20e6
        assert found["other"].up.bandwidth == 10e6
        with trainer(client, plan, replan=False) as run:
            for _ in range(4):
                run.step(batch())
            figures = run.records[-1]["figures"]["other"]
            assert 0 < shares(run.graph, run.plan)["other"] < 0.45
    assert figures["up"] < 1.3 * 10e6
    assert figures["down"] < 1.3 * 20e6


def test_a_device_with_a_bad_setting_ends_and_says_which(fleet: LocalFleet) -> None:
    command = [sys.executable, "-m", "dask", "worker", fleet.scheduler_address, "--no-nanny"]
    ended = subprocess.run(
        [*command, "--preload", "cleave_dask.runtime.device"],
        env={**os.environ, "DASK_CLEAVE__DEVICE__CORES": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "'cleave.device.cores' is 0; give a whole number of cores" in ended.stderr

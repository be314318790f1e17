"""Devices that say nothing of themselves measure what they are, one at a time, and hold nobody up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import monotonic

import pytest
from click.testing import CliRunner

from cleave_dask.cli import cleave
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.runtime.cluster import facts_of, inspect
from cleave_dask.simulation.local import LocalFleet
from tests.waiting import until

MB = 1e6
UNLIKE = Fleet(
    Server(),
    (
        Device("near", 4e9, 1e9, Link(20 * MB, 0.005), Link(10 * MB, 0.005)),
        Device("far", 1e9, 1e9, Link(4 * MB, 0.02), Link(0.5 * MB, 0.02)),
    ),
)


def test_emulated_devices_find_the_links_and_the_speed_that_they_are_held_to() -> None:
    with LocalFleet(UNLIKE, declared=False) as local, local.get_client() as client:
        start = monotonic()
        inspect(client)
        assert monotonic() - start < 10
        found = Fleet.from_cluster(client)
    for device in UNLIKE.devices:
        measured = found.device(device.name)
        for wanted, got in (
            (device.flops, measured.flops),
            (device.down.bandwidth, measured.down.bandwidth),
            (device.up.bandwidth, measured.up.bandwidth),
        ):
            assert got == pytest.approx(wanted, rel=0.25), f"{device.name}: {measured}"
        assert device.down.latency <= measured.down.latency < 2 * device.down.latency + 0.01
        assert measured.memory == device.memory


def test_a_device_that_stops_while_it_measures_holds_nobody_up() -> None:
    with LocalFleet(UNLIKE, declared=False) as local, local.get_client() as client:
        os.kill(local.pids["far"], signal.SIGSTOP)
        start = monotonic()
        assert set(inspect(client).devices) == {"near", "far"}
        assert monotonic() - start < 20, "a client waits for a device that never answers"
        until(lambda: not facts_of(client)["device"]["near"]["measuring"], "near has measured itself", seconds=40)
        assert Fleet.from_cluster(client).device("near").flops == pytest.approx(4e9, rel=0.25)


def test_profile_measures_the_links_to_a_server(fleet: LocalFleet, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    command = ("profile", "--scheduler", fleet.scheduler_address, "--write", str(file), "--name", "here", "--json")
    result = CliRunner().invoke(cleave, command)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["down"] > 1e6
    assert printed["up"] > 1e6
    assert 0 < printed["latency"] < 1
    assert Fleet.load(file).device("here").down.bandwidth == pytest.approx(printed["down"], rel=0.01)

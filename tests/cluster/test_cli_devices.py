"""`cleave devices` against a fleet that is really there."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from cleave_dask.cli import cleave
from cleave_dask.simulation.local import LocalFleet


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cleave, list(arguments))


def test_devices_lists_who_has_joined(fleet: LocalFleet) -> None:
    printed = run("devices", "--scheduler", fleet.scheduler_address, "--json")
    assert printed.exit_code == 0, printed.stderr
    found = json.loads(printed.stdout)
    assert {device["name"] for device in found["devices"]} == {device.name for device in fleet.fleet.devices}
    assert found["server"].startswith("tcp://")
    assert found["strangers"] == []
    for device in found["devices"]:
        assert device["state"] == "ready"
        assert device["kernel"] == "numpy"
        assert min(device[figure] for figure in ("flops", "down", "up", "latency", "memory", "cores")) > 0
    shown = run("devices", "--scheduler", fleet.scheduler_address)
    assert shown.exit_code == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert all(device.name in shown.stdout for device in fleet.fleet.devices)


def test_doctor_finds_the_fleet(fleet: LocalFleet) -> None:
    printed = json.loads(run("doctor", "--scheduler", fleet.scheduler_address, "--json").stdout)
    assert printed["findings"][-1]["found"] == f"answers; devices: {len(fleet.fleet)}"

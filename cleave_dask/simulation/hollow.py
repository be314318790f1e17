"""A hollow fleet: a real scheduler, a real server, and hundreds of light Dask workers in one more process.

    with HollowFleet(Fleet.sample(512)) as fleet, fleet.get_client() as client:
        Trainer(module, optimizer, client).step(...)     # a module on the meta device will do

Hollow devices (`hollow_devices`) multiply nothing and move no payload, but each parcel takes as long as the device's
links and speed would take for it, in real time. So the scheduler, its plugin and the server's bookkeeping of tiles,
rounds and updates (`hollow_server`) are driven by a large fleet on one machine. What is left out: numbers, and with
them the loss; requests for operands, whose bytes are only counted; the server's own links.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed.core import rpc

from cleave_dask.errors import FleetError, InputError
from cleave_dask.fleet.devices import Device, Fleet
from cleave_dask.resources import expect
from cleave_dask.runtime.processes import ServedCluster, WorkerSpec

_HOST = "hollow-devices"


class HollowFleet(ServedCluster):
    """A fleet of hollow devices: three processes, whatever their number; a Dask cluster object."""

    preload = "cleave_dask.simulation.hollow_server"

    def __init__(self, fleet: Fleet, *, dashboard: str | None = None) -> None:
        expect(fleet, Fleet, what="a hollow fleet", remedy="give a Fleet, such as Fleet.sample(512)", error=FleetError)
        self.fleet = fleet
        names = tuple(device.name for device in fleet.devices)
        rows = [
            (device.name, device.flops, device.memory, *(part for link in _links(device) for part in link))
            for device in fleet.devices
        ]
        with TemporaryDirectory() as folder:  # read by the time that everybody has joined
            file = Path(folder) / "devices.json"
            file.write_text(json.dumps(rows))
            host = WorkerSpec(("cleave_dask.simulation.hollow_devices", str(file)), holds=names)
            super().__init__({_HOST: host}, dashboard=dashboard or "127.0.0.1:0", name="HollowFleet")

    @property
    def devices_pid(self) -> int:
        """Process id of all devices together."""
        return self.pid(_HOST)

    def remove(self, name: str) -> None:
        """Let a device leave for good."""
        self.check_open()
        wait: Any = self.sync
        wait(self._remove, self.fleet.device(name).name)

    async def _remove(self, name: str) -> None:
        comm: Any = self.scheduler_comm
        workers = (await comm.identity())["workers"]
        found = [address for address, worker in workers.items() if str(worker["name"]) == name]
        if not found:
            raise InputError(f"device {name!r} of this hollow fleet has left already")
        async with rpc(found[0]) as worker:
            await worker.terminate(reply=False)


def _links(device: Device) -> tuple[tuple[float, float], tuple[float, float]]:
    return (device.down.bandwidth, device.down.latency), (device.up.bandwidth, device.up.latency)

"""A fleet on this machine: a real scheduler, a real server and one real worker process per device.

    with LocalFleet(4) as fleet, fleet.get_client() as client:
        ...

It is a Dask cluster object like LocalCluster.
"""

from __future__ import annotations

from distributed import Client
from distributed.system import MEMORY_LIMIT

from cleave_dask.errors import FleetError
from cleave_dask.fleet.devices import WORKER_DEFAULTS, Device, Fleet, Link, Server
from cleave_dask.runtime.processes import ServedCluster

LOOPBACK = Link(bandwidth=5e8, latency=1e-3)
"""What a tile sees of a link within one machine, with serialisation and copies."""


class LocalFleet(ServedCluster):
    """A fleet of real processes on this machine, given as a `Fleet` or as a number of equal devices.

    Each device has `cores` cores and the memory that the fleet says, and is planned for with the speed and links that
    the fleet says; nothing slows it down to them. Equal devices have the links of a loopback, and one speed: if all
    measured theirs as they start together on shared cores, each would find another. The kernel is the one configured as
    `cleave.device.kernel`.
    """

    def __init__(self, fleet: Fleet | int = 4, *, cores: int = 1, dashboard: str = "127.0.0.1:0") -> None:
        self.fleet = _equal_devices(fleet) if isinstance(fleet, int) else fleet
        workers = {device.name: (_options(device, cores), cores, _figures(device)) for device in self.fleet.devices}
        super().__init__(workers, dashboard=dashboard, name="LocalFleet")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the devices, by name."""
        return {device.name: self.pid(device.name) for device in self.fleet.devices}

    def get_client(self) -> Client:
        """A client of this fleet."""
        return Client(self)


def _options(device: Device, cores: int) -> tuple[str, ...]:
    memory = str(int(device.memory))
    return "--nthreads", str(cores), "--memory-limit", memory, "--preload", "cleave_dask.runtime.device"


def _figures(device: Device) -> dict[str, str]:
    """What a device is told that it is, as settings in its environment."""
    figures = {
        "flops": device.flops,
        "down": device.down.bandwidth,
        "up": device.up.bandwidth,
        "latency": device.down.latency,
    }
    return {f"DASK_CLEAVE__DEVICE__{name.upper()}": repr(float(value)) for name, value in figures.items()}


def _equal_devices(count: int) -> Fleet:
    """`count` devices with default figures and an equal share of half of this machine's memory."""
    if count < 1:
        raise FleetError(f"a local fleet of {count} devices; give 1 or more")
    memory = MEMORY_LIMIT / 2 / count
    flops = WORKER_DEFAULTS["flops"]
    return Fleet(Server(), tuple(Device(f"device-{n}", flops, memory, LOOPBACK, LOOPBACK) for n in range(count)))

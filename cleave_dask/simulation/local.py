"""A fleet on this machine: a real scheduler, a real server and one real worker process per device.

    with LocalFleet(4) as fleet, fleet.get_client() as client:
        ...

It is a Dask cluster object like LocalCluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Client
from distributed.system import MEMORY_LIMIT

from cleave_dask.errors import FleetError
from cleave_dask.fleet.churn import Churn, Kind
from cleave_dask.fleet.devices import WORKER_DEFAULTS, Device, Fleet, Link, Server
from cleave_dask.runtime.processes import ServedCluster
from cleave_dask.simulation.playing import Player

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
        """Process ids of the devices whose processes run, by name."""
        running = {name for name, process in self.workers.items() if not process.dead}
        return {device.name: self.pid(device.name) for device in self.fleet.devices if device.name in running}

    def restart(self, name: str) -> None:
        """Start the process of a device again that has ended; it joins in its own time."""
        self.fleet.device(name)
        self.sync(self._restart, name)

    @contextmanager
    def under(self, churn: Churn) -> Iterator[Counter[Kind]]:
        """Let churn happen to the device processes while the block runs; yields the count of what has happened."""
        player = Player(self, churn)
        with player:
            yield player.happened

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

"""A fleet on this machine: a real scheduler, a real server and one real worker process per device.

    with LocalFleet(4) as fleet, fleet.get_client() as client:
        ...

It is a Dask cluster object like LocalCluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from distributed import Client
from distributed.system import MEMORY_LIMIT

from cleave_dask.errors import FleetError
from cleave_dask.fleet.churn import Churn, Kind
from cleave_dask.fleet.devices import WORKER_DEFAULTS, Device, Fleet, Link, Server
from cleave_dask.runtime.processes import ServedCluster
from cleave_dask.simulation.playing import Player

LOOPBACK = Link(bandwidth=5e8, latency=1e-3)
"""What a tile sees of a link within one machine, with serialisation and copies."""


PROCESS = 256_000_000
"""Bytes of a device's process beside its tiles."""

PAUSED = 0.8
"""Share of its memory limit from which on Dask pauses a worker."""


class LocalFleet(ServedCluster):
    """A fleet of real processes on this machine, given as a `Fleet` or as a number of equal devices.

    Devices of a `Fleet` are emulated: each has `cores` cores and the memory that the fleet says, its transfers take as
    long as they would over its links, and its kernel is slowed down to its speed. A machine that cannot be as fast as
    all of them together makes them slower, and their logs say so. `declared` is what they say of themselves: by default
    what they are; the devices of another fleet, by name; or with False nothing, so that they measure themselves.

    Equal devices, given as a number, are as fast as this machine. They are planned for with the links of a loopback and
    one speed, whatever they turn out to be: if all measured theirs on shared cores, each would find another. The kernel
    is the one configured as `cleave.device.kernel`. `settings` has more settings of `cleave.device`, by device.
    """

    def __init__(
        self,
        fleet: Fleet | int = 4,
        *,
        cores: int = 1,
        declared: Fleet | bool = True,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        dashboard: str = "127.0.0.1:0",
    ) -> None:
        self.fleet = _equal_devices(fleet) if isinstance(fleet, int) else fleet
        figures = _unthrottled if isinstance(fleet, int) else partial(_emulated, declared=declared)
        more = {self.fleet.device(name).name: given for name, given in (settings or {}).items()}
        workers = {
            device.name: (_options(device, cores), cores, figures(device) | _variables("", more.get(device.name, {})))
            for device in self.fleet.devices
        }
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
    memory = str(int((device.memory + PROCESS) / PAUSED))
    return "--nthreads", str(cores), "--memory-limit", memory, "--preload", "cleave_dask.runtime.device"


def _unthrottled(device: Device) -> dict[str, str]:
    """Settings of a device that is as fast as it is, and planned for with the figures that it is given."""
    return _variables("", _figures(device)) | _variables("", {"memory": float(device.memory), "calibrate": False})


def _emulated(device: Device, declared: Fleet | bool) -> dict[str, str]:
    """Settings of a device that is held to what it is, and says of itself what is declared."""
    says = declared.device(device.name) if isinstance(declared, Fleet) else device
    figures = _figures(says) if declared else {}
    return _variables("EMULATE__", _figures(device)) | _variables("", {**figures, "memory": float(device.memory)})


def _figures(device: Device) -> dict[str, float]:
    return {
        "flops": float(device.flops),
        "down": float(device.down.bandwidth),
        "up": float(device.up.bandwidth),
        "latency": float(device.down.latency),
    }


def _variables(prefix: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a device as its environment has them."""
    return {f"DASK_CLEAVE__DEVICE__{prefix}{name.upper()}": repr(value) for name, value in settings.items()}


def _equal_devices(count: int) -> Fleet:
    """`count` devices with default figures and an equal share of half of this machine's memory."""
    if count < 1:
        raise FleetError(f"a local fleet of {count} devices; give 1 or more")
    memory = MEMORY_LIMIT / 2 / count
    flops = WORKER_DEFAULTS["flops"]
    return Fleet(Server(), tuple(Device(f"device-{n}", flops, memory, LOOPBACK, LOOPBACK) for n in range(count)))

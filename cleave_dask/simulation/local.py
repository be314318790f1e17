"""A fleet on this machine: a real scheduler, a real server and one real worker process per device.

    with LocalFleet(4) as fleet, fleet.get_client() as client:
        ...

It is a Dask cluster object like LocalCluster.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from distributed.system import MEMORY_LIMIT

from cleave_dask.errors import ClusterError, FleetError, InputError
from cleave_dask.fleet.churn import Churn, Kind
from cleave_dask.fleet.devices import WORKER_DEFAULTS, Device, Fleet, Link, Server
from cleave_dask.fleet.units import require_count
from cleave_dask.resources import nearest, shown
from cleave_dask.runtime.processes import HERE, Place, ServedCluster, WorkerSpec
from cleave_dask.simulation.network import PAYLOAD, Network
from cleave_dask.simulation.playing import Player

logger = logging.getLogger(__name__)

Shaping = Literal["auto", "namespaces", "buckets"]
"""How links are emulated: by the kernel, in namespaces; or by token buckets in each device's own transfers."""

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
    `shaping` says what holds their links to their bandwidth: "namespaces", the kernel, with every packet of every
    process, which needs Linux and root; "buckets", each device's own transfers; "auto", namespaces where they can be
    made, and `LocalFleet.shaping` says which it became. Latency is added by the device's own transfers either way.

    Equal devices, given as a number, are as fast as this machine. They are planned for with the links of a loopback and
    one speed, whatever they turn out to be: if all measured theirs on shared cores, each would find another. The kernel
    is the one configured as `cleave.device.kernel`. `settings` has more settings of `cleave.device`, by device.
    `processes` of the server: by default what `cleave.server.processes` says.
    """

    def __init__(
        self,
        fleet: Fleet | int = 4,
        *,
        cores: int = 1,
        declared: Fleet | bool = True,
        shaping: Shaping = "auto",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        dashboard: str | None = None,
        processes: int | None = None,
    ) -> None:
        if isinstance(fleet, bool) or not isinstance(fleet, (int, Fleet)):
            raise FleetError(f"a local fleet of {shown(fleet)}; give a number of devices, or a Fleet.load('lab-8')")
        require_count(cores, field="cores of a device")
        if shaping not in get_args(Shaping):
            raise InputError(f"shaping is {shown(shaping)}; {nearest(str(shaping), get_args(Shaping))}")
        self.fleet = _equal_devices(fleet) if isinstance(fleet, int) else fleet
        self.shaping: Shaping | None = None if isinstance(fleet, int) else _chosen(shaping)
        self.network = Network(self.fleet) if self.shaping == "namespaces" else None
        figures = partial(_emulated, declared=declared, shaped=self.network is not None)
        more = {self.fleet.device(name).name: given for name, given in (settings or {}).items()}
        try:
            if self.network is not None:
                self.network.__enter__()
            workers = {
                device.name: WorkerSpec(
                    _options(device, cores),
                    cores,
                    (_unthrottled(device) if self.shaping is None else figures(device))
                    | _variables("", more.get(device.name, {})),
                    self._place(device.name),
                )
                for device in self.fleet.devices
            }
            place = self._place()
            page = dashboard or f"{place.host}:0"
            super().__init__(workers, place=place, dashboard=page, name="LocalFleet", processes=processes)
        except BaseException:
            self._end_network()
            raise

    def _place(self, device: str | None = None) -> Place:
        """Where a device runs, or the server."""
        if self.network is None:
            return HERE
        return Place(self.network.address(device), self.network.enter(device))

    async def _close(self) -> None:
        await super()._close()
        self._end_network()

    def _end_network(self) -> None:
        if self.network is not None:
            self.network.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the devices whose processes run, by name."""
        running = {name for name, process in self.workers.items() if not process.dead}
        return {device.name: self.pid(device.name) for device in self.fleet.devices if device.name in running}

    def restart(self, name: str) -> None:
        """Start the process of a device again that has ended; it joins in its own time."""
        self.restart_worker(self.fleet.device(name).name)

    @contextmanager
    def under(self, churn: Churn) -> Iterator[Counter[Kind]]:
        """Let churn happen to the device processes while the block runs; yields the count of what has happened."""
        self.check_open()
        player = Player(self, churn)
        with player:
            yield player.happened


def _chosen(shaping: Shaping) -> Shaping:
    """How links are emulated here; what cannot be is said."""
    if shaping == "buckets":
        return shaping
    why_not = Network.why_not()
    if why_not is None:
        return "namespaces"
    if shaping == "namespaces":
        raise ClusterError(f"{why_not}; or emulate links with shaping='buckets'")
    logger.warning("Links are emulated by token buckets in each device's own transfers: %s", why_not)
    return "buckets"


def _options(device: Device, cores: int) -> tuple[str, ...]:
    memory = str(int((device.memory + PROCESS) / PAUSED))
    return "--nthreads", str(cores), "--memory-limit", memory, "--preload", "cleave_dask.runtime.device"


def _unthrottled(device: Device) -> dict[str, str]:
    """Settings of a device that is as fast as it is, and planned for with the figures that it is given."""
    return _variables("", _figures(device)) | _variables("", {"memory": float(device.memory), "calibrate": False})


def _emulated(device: Device, declared: Fleet | bool, *, shaped: bool) -> dict[str, str]:
    """Settings of a device that is held to what it is, and says of itself what is declared.

    Links that the kernel shapes are not shaped again, and what they leave for data is what they are planned with.
    """
    says = declared.device(device.name) if isinstance(declared, Fleet) else device
    figures = _figures(as_shaped(says) if shaped else says) if declared else {}
    held = {name: figure for name, figure in _figures(device).items() if not (shaped and name in ("down", "up"))}
    return _variables("EMULATE__", held) | _variables("", {**figures, "memory": float(device.memory)})


def as_shaped(device: Device) -> Device:
    """A device as the kernel holds its links: what they leave for data."""
    down, up = (replace(link, bandwidth=PAYLOAD * link.bandwidth) for link in (device.down, device.up))
    return replace(device, down=down, up=up)


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

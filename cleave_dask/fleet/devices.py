"""A fleet as numbers: devices, the links that join them to the server, and the server itself.

Everything is a frozen value in base units: bytes, bytes per second, flop per second, seconds. A changed copy is made
with `dataclasses.replace`. A fleet file is TOML:

    [server]                # may be left out, whole or in part: the defaults are those of `Server`
    egress = "10 Gbit/s"
    ingress = "10 Gbit/s"
    flops = "1 TFLOP/s"
    memory = "64 GB"
    processes = 1           # if its work on each tile shall be counted; left out: as many as it takes
    pace = 1.0              # how many times as long Python takes there as where that was measured
    shared_cores = 2        # if the devices are emulated on the server's own cores; left out: each has its own

    [[device]]
    name = "phone"          # with a count: phone-0001, phone-0002, ...
    count = 512
    flops = "1.5 TFLOP/s"   # sustained
    memory = "512 MB"       # what its owner lends, not what it has
    down = "200 Mbit/s"     # from the server to the device
    up = "20 Mbit/s"        # from the device to the server
    latency = "20 ms"       # one way, of both links; 20 ms if left out
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from cleave_dask.errors import ClusterError, FleetError
from cleave_dask.fleet.units import Dimension, parse, require, require_count
from cleave_dask.formatting import duration, html_table, quantity
from cleave_dask.resources import expect, graphs_folder, is_number, nearest, read_toml, shown

MAX_DEVICES = 100_000
"""No fleet is larger: what is beyond is a slip of the keyboard, and would only fill the memory."""

WORKER_DEFAULTS: Mapping[str, float] = {
    "flops": 50e9,  # one core of a laptop
    "memory": 1e9,
    "down": 12.5e6,  # 100 Mbit/s
    "up": 2.5e6,  # 20 Mbit/s
    "latency": 0.02,
}
"""What `Fleet.from_workers` takes for anything that a device has not published; `latency` also of fleet files."""

LEAST_PACE = 0.01
"""Of a server: a hundred times as quick as the machine that a tile's cost was measured on."""

_SERVER_FACTS = ("processes", "pace", "shared_cores")
_SERVER_KEYS: dict[str, Dimension] = {"egress": "bytes/s", "ingress": "bytes/s", "flops": "flop/s", "memory": "bytes"}
_DEVICE_KEYS: dict[str, Dimension] = {
    "flops": "flop/s",
    "memory": "bytes",
    "down": "bytes/s",
    "up": "bytes/s",
    "latency": "seconds",
}
_NUMBERED = re.compile(r"[-_]?[0-9]+$")  # the part of a device's name that tells it from others of its kind


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a device's network."""

    bandwidth: float  # bytes per second
    latency: float  # seconds until the first byte arrives

    def __post_init__(self) -> None:
        require(self.bandwidth, "bytes/s", field="a link's bandwidth")
        require(self.latency, "seconds", field="a link's latency")


@dataclass(frozen=True, slots=True)
class Device:
    """An edge machine: what it can multiply, what it can hold, and how it is reached."""

    name: str
    flops: float  # floating point operations per second, sustained
    memory: float  # bytes that tiles may fill
    down: Link  # from the server to the device
    up: Link  # from the device to the server

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise FleetError(f"a device's name is {shown(self.name)}; give it a printable one such as 'phone-0001'")
        require(self.flops, "flop/s", field=f"device {self.name!r}: flops")
        require(self.memory, "bytes", field=f"device {self.name!r}: memory")
        for side, link in (("down", self.down), ("up", self.up)):
            if not isinstance(link, Link):
                raise FleetError(f"device {self.name!r}: {side} is {shown(link)}; give a Link(bandwidth, latency)")


@dataclass(frozen=True, slots=True)
class Server:
    """The machine that keeps weights, optimizer state and activations. Default: a workstation on 10 Gbit/s."""

    egress: float = 1.25e9  # bytes per second to all devices together
    ingress: float = 1.25e9  # bytes per second from all devices together
    flops: float = 1e12  # floating point operations per second, for what is not sent out
    memory: float = 64e9  # bytes
    processes: int | None = None  # that work on tiles; None: as many as it takes, so that no plan counts their work
    pace: float = 1.0  # how many times as long Python takes there as where the cost of a tile was measured
    shared_cores: int | None = None  # on which all devices run too, as emulated ones do; None: everybody has their own

    def __post_init__(self) -> None:
        for key, dimension in _SERVER_KEYS.items():
            require(getattr(self, key), dimension, field=f"the server's {key}")
        for key in ("processes", "shared_cores"):
            if getattr(self, key) is not None:
                require_count(getattr(self, key), field=f"the server's {key}")
        if not is_number(self.pace, least=LEAST_PACE):
            raise FleetError(f"the server's pace is {shown(self.pace)}; give {LEAST_PACE} or more, 2 for half as fast")

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The server of a live fleet, by what it has published of itself."""
        processes = 1 + len(facts.get("porters", ()))
        return cls(processes=processes, pace=facts.get("pace", 1.0), shared_cores=facts.get("shared_cores"))


@dataclass(frozen=True, slots=True, repr=False)
class Fleet:
    """A server and the devices that it can send tiles to; never empty, each device under a name of its own."""

    server: Server
    devices: tuple[Device, ...]
    _positions: dict[str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.server, Server):
            raise FleetError(f"a fleet's server is {shown(self.server)}; give a Server()")
        expect(self.devices, Iterable, what="a fleet's devices", remedy="give a list of Device", error=FleetError)
        object.__setattr__(self, "devices", tuple(self.devices))
        for device in self.devices:
            expect(device, Device, what="a device of a fleet", remedy="give a Device", error=FleetError)
        if not self.devices:
            raise FleetError("a fleet has 0 devices; give it at least one, for example with a [[device]] table")
        _check_number(len(self.devices))
        positions = {device.name: position for position, device in enumerate(self.devices)}
        if len(positions) < len(self.devices):
            twice = next(d.name for position, d in enumerate(self.devices) if positions[d.name] != position)
            raise FleetError(f"two devices are called {twice!r}; rename one, or use 'count' for many of a kind")
        object.__setattr__(self, "_positions", positions)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a fleet file; a bare name such as "lab-8" is one of those that ship with the package."""
        file, tables = read_toml(path, shipped=graphs_folder() / "fleets", error=FleetError)
        try:
            return cls(server=_read_server(tables), devices=tuple(_read_devices(tables)))
        except FleetError as error:
            raise FleetError(f"{file}: {error}") from None

    @classmethod
    def sample(cls, n: int, seed: int = 0) -> Self:
        """Draw `n` devices of a mixed fleet of volunteers; same n and seed, same fleet.

        Kinds: phone 50 %, laptop 30 %, mini PC 20 %. Speed: lognormal with median 1.5, 3 and 5 TFLOP/s and sigma 0.4,
        cut at a quarter and four times the median. Memory lent: uniform in 0.5-2, 2-8 and 4-16 GB. Downlink:
        log-uniform in 5-100 MB/s; uplink: the downlink divided by a uniform 2-10; latency: uniform in 5-50 ms. The
        server, 20 TFLOP/s and 2 TB, can feed all links at once, so that the devices are what binds.
        """
        _check_number(n)
        if not isinstance(seed, int) or seed < 0:
            raise FleetError(f"the seed of a sampled fleet is {shown(seed)}; give a whole number of zero or more")
        devices = _draw_devices(n, np.random.default_rng(seed))
        least = Server()
        server = Server(
            egress=max(least.egress, sum(device.down.bandwidth for device in devices)),
            ingress=max(least.ingress, sum(device.up.bandwidth for device in devices)),
            flops=20e12,
            memory=2e12,
        )
        return cls(server=server, devices=tuple(devices))

    @classmethod
    def from_workers(cls, infos: Mapping[str, Mapping[str, Any]], *, server: Server | None = None) -> Self:
        """The fleet of live workers, by name, from what each has published of itself.

        Known keys are flops, memory, down, up and latency, in base units; what is missing is taken from
        WORKER_DEFAULTS, and other keys are left alone. Its server has one process unless another `server` is given.
        """
        devices = (_make_device(name, {**WORKER_DEFAULTS, **_published(name, info)}) for name, info in infos.items())
        return cls(server=server or Server(processes=1), devices=tuple(devices))

    @classmethod
    def from_cluster(cls, client: Any) -> Self:
        """The fleet behind a Dask client, as its devices described themselves when they joined."""
        if not hasattr(client, "scheduler_info"):
            raise FleetError(f"{shown(client)} is no Dask client; give one, such as cluster.get_client()")
        if getattr(client, "status", None) in ("closing", "closed"):
            raise ClusterError("this client is closed, or its cluster is; connect another one: Client(address)")
        if client.asynchronous:  # it knows a few workers only, without being awaited
            raise FleetError("this client is asynchronous; ask with Client(address, asynchronous=False), in a thread")
        workers: Mapping[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
        facts = {str(worker["name"]): worker.get("cleave") or {} for worker in workers.values()}
        server = next((fact for fact in facts.values() if fact.get("role") == "server"), {})
        devices = {name: fact for name, fact in facts.items() if fact.get("role") == "device"}
        return cls.from_workers(devices, server=Server.from_facts(server))

    def device(self, name: str) -> Device:
        """The device of that name."""
        try:
            return self.devices[self._positions[name]]
        except (KeyError, TypeError):  # a name, or something that cannot be one
            known = (device.name for device in self.devices[:20])
            raise FleetError(f"no device is called {shown(name)}; {nearest(str(name), known)}") from None

    @property
    def total_flops(self) -> float:
        """Floating point operations per second of all devices together."""
        return sum(device.flops for device in self.devices)

    @property
    def total_memory(self) -> float:
        """Bytes that all devices together can hold."""
        return sum(device.memory for device in self.devices)

    @property
    def total_down(self) -> float:
        """Bytes per second that all devices together can receive."""
        return sum(device.down.bandwidth for device in self.devices)

    @property
    def total_up(self) -> float:
        """Bytes per second that all devices together can send."""
        return sum(device.up.bandwidth for device in self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def __str__(self) -> str:
        count = f"{len(self):,} device{'s' if len(self) > 1 else ''}"
        totals = (
            quantity(self.total_flops, "FLOP/s"),
            quantity(self.total_memory, "B"),
            f"{quantity(self.total_down, 'B/s')} down",
            f"{quantity(self.total_up, 'B/s')} up",
        )
        server = f"{quantity(self.server.egress, 'B/s')} out, {quantity(self.server.ingress, 'B/s')} in"
        return f"{count} ({', '.join(totals)}); server {server}"

    def __repr__(self) -> str:
        return f"<Fleet: {self}>"

    def _repr_html_(self) -> str:
        kinds: dict[str, list[Device]] = {}
        for device in self.devices:
            kinds.setdefault(_NUMBERED.sub("", device.name) or device.name, []).append(device)
        rows = [
            (
                kind,
                f"{len(members):,}",
                _span((device.flops for device in members), "FLOP/s"),
                _span((device.memory for device in members), "B"),
                _span((device.down.bandwidth for device in members), "B/s"),
                _span((device.up.bandwidth for device in members), "B/s"),
                _span((device.down.latency for device in members), "s"),
            )
            for kind, members in kinds.items()
        ]
        return html_table(("kind", "devices", "flops", "memory", "down", "up", "latency"), rows, caption=str(self))


def _check_number(devices: object) -> None:
    """A fleet of that many devices can be."""
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_DEVICES:
        raise FleetError(f"the number of devices is {shown(devices)}; give a whole number from 1 to {MAX_DEVICES:,}")


def _span(amounts: Iterable[float], unit: str) -> str:
    """'5 MB/s' or '5 MB/s - 100 MB/s'."""
    values = list(amounts)
    low, high = (duration(end) if unit == "s" else quantity(end, unit) for end in (min(values), max(values)))
    return low if low == high else f"{low} - {high}"


def _read_server(tables: Mapping[str, Any]) -> Server:
    """The [server] table, with defaults for what it leaves out."""
    for key in tables:
        if key not in ("server", "device"):
            raise FleetError(f"unknown table {shown(key)}; {nearest(key, ('server', 'device'))}")
    table = tables.get("server", {})
    if not isinstance(table, dict):
        raise FleetError(f"server is {shown(table)}; write it as a [server] table")
    _check_keys(table, {*_SERVER_KEYS, *_SERVER_FACTS}, "[server]")
    given: dict[str, Any] = {key: table[key] for key in _SERVER_FACTS if key in table}
    for key, dimension in _SERVER_KEYS.items():
        if key in table:
            given[key] = parse(table[key], dimension, field=f"[server] {key}")
    return Server(**given)


def _read_devices(tables: Mapping[str, Any]) -> Iterator[Device]:
    """The [[device]] tables, each expanded to as many devices as it counts."""
    entries = tables.get("device", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FleetError(f"device is {shown(entries)}; write each device as a [[device]] table")
    total = 0
    for number, entry in enumerate(entries, start=1):
        where = f"[[device]] {shown(entry['name'])}" if "name" in entry else f"[[device]] number {number}"
        _check_keys(entry, {"name", "count", *_DEVICE_KEYS}, where)
        for key in ("name", *_DEVICE_KEYS):
            if key not in entry and key != "latency":
                raise FleetError(f"{where} has no '{key}'; add it")
        count = entry.get("count", 1)
        require_count(count, field=f"{where}: count")
        total += count
        _check_number(total)
        yield from _expand(_make_device(entry["name"], {"latency": WORKER_DEFAULTS["latency"], **entry}), entry)


def _expand(device: Device, entry: Mapping[str, Any]) -> Iterator[Device]:
    """The device itself, or with a count as many as it says, numbered from name-0001."""
    if "count" not in entry:
        yield device
        return
    for number in range(1, entry["count"] + 1):
        yield Device(f"{device.name}-{number:04d}", device.flops, device.memory, device.down, device.up)


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Every key of a table is one that is known."""
    words = set(known)
    for key in table:
        if key not in words:
            raise FleetError(f"{where} has no key {shown(key)}; {nearest(key, words)}")


def _make_device(name: Any, values: Mapping[str, Any]) -> Device:
    """A device from amounts as people write them."""
    amounts = {
        key: parse(values[key], dimension, field=f"device {shown(name)}: {key}")
        for key, dimension in _DEVICE_KEYS.items()
    }
    latency = amounts["latency"]
    return Device(
        name=name,
        flops=amounts["flops"],
        memory=amounts["memory"],
        down=Link(amounts["down"], latency),
        up=Link(amounts["up"], latency),
    )


def _published(name: str, info: object) -> Mapping[str, Any]:
    """What a device says of itself, if it is of the right kind."""
    if not isinstance(info, Mapping):
        raise FleetError(f"device {shown(name)} published {shown(info)}; give a mapping with keys such as 'flops'")
    return info


def _draw_devices(n: int, chance: np.random.Generator) -> list[Device]:
    """Devices from the distributions that `Fleet.sample` states."""
    kinds = np.array(["phone", "laptop", "mini-pc"])
    kind = chance.choice(3, size=n, p=[0.5, 0.3, 0.2])
    speed = np.array([1.5e12, 3e12, 5e12])[kind] * np.clip(chance.lognormal(0.0, 0.4, size=n), 0.25, 4.0)
    least, most = np.array([0.5e9, 2e9, 4e9])[kind], np.array([2e9, 8e9, 16e9])[kind]
    memory = chance.uniform(least, most)
    down = np.exp(chance.uniform(np.log(5e6), np.log(100e6), size=n))
    up = down / chance.uniform(2.0, 10.0, size=n)
    latency = chance.uniform(0.005, 0.05, size=n)
    columns = (column.tolist() for column in (kinds[kind], speed, memory, down, up, latency))
    return [
        Device(f"{label}-{number:04d}", flops, size, Link(receive, delay), Link(send, delay))
        for number, (label, flops, size, receive, send, delay) in enumerate(zip(*columns, strict=True), start=1)
    ]

"""A network of namespaces: every device behind a link of its own, shaped by the kernel. Linux, and root.

    with Network(fleet) as network:
        subprocess.run([*network.enter("phone-0001"), "ping", network.address()])

The server's namespace holds a bridge; each device's namespace is joined to it by a pair of interfaces. What leaves the
device is shaped on its own end of the pair (uplink), what reaches it on the bridge's end (downlink), each by a token
bucket (`tc` tbf) of the link's bandwidth. Headers are part of it: 0.955 of it is left for data. The kernel delays
nothing here beyond its queues: latency is left to the device's own transfers. Nobody else reaches these addresses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Self

from cleave_dask.errors import ClusterError
from cleave_dask.fleet.devices import Fleet, Link

PAYLOAD = 0.955
"""Share of a shaped link's bandwidth that is left for data: measured, for TCP with full segments."""

_QUEUE = "100ms"
_SMALLEST_BUCKET = 4542  # bytes: three full frames; with less, nothing passes
_LONGEST_TRAIN = 65536  # bytes: the kernel takes no more
_HEADERS = 64  # bytes, of Ethernet, IP and TCP
_FAST = 37.5e6  # bytes per second from which on the kernel's timer needs a larger bucket
_OURS = re.compile(r"cleave-(?P<pid>\d+)-\d+-.+")
_SUBNETS = range(64, 128)  # 10.64.0.0/16 and up

_serial = count()


class Network:
    """Namespaces for the devices of a fleet and for their server, from `with` to its end."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._name = f"cleave-{os.getpid()}-{next(_serial)}"
        self._subnet = 0

    @staticmethod
    def why_not() -> str | None:
        """Why there can be no such network here; None if there can."""
        if sys.platform != "linux":
            return f"network namespaces are a part of Linux, and this is {sys.platform}"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            return f"there is no `{missing[0]}` here; install iproute2"
        trial = f"cleave-{os.getpid()}-{next(_serial)}-trial"
        made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
        if made.returncode:
            return f"network namespaces need root: {made.stderr.strip()}"
        subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
        return None

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            _batch("ip", self._namespaces())
            self._subnet = self._claimed_subnet()
            _batch("ip", self._own_side())
            _batch("ip", self._server_side(), "-n", self._space("server"))
            for number, device in enumerate(self.fleet.devices, 1):
                space = self._space(number)
                _batch("ip", self._device_side(number), "-n", space)
                _batch("tc", [_shaped(f"v{number}", device.down)], "-n", self._space("server"))
                _batch("tc", [_shaped("eth0", device.up)], "-n", space)
                _use_trains("eth0", [device.up], space)
            _use_trains("br0", [device.down for device in self.fleet.devices], self._space("server"))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; processes that are left inside lose their network."""
        if self._subnet:
            subprocess.run(["ip", "link", "del", _own(self._subnet)], capture_output=True, check=False)
            self._subnet = 0
        for space in _spaces():
            if space.startswith(f"{self._name}-"):
                _remove(space)

    def enter(self, device: str | None = None) -> tuple[str, ...]:
        """What to put before a command that is to run on a device, or on the server."""
        space = self._space("server" if device is None else self._number(device))
        return "ip", "netns", "exec", space

    def address(self, device: str | None = None) -> str:
        """Where a device is reached, or the server."""
        return self._host(0 if device is None else self._number(device))

    def carried(self, device: str) -> tuple[int, int]:
        """Bytes that have come down to a device and gone up from it so far, headers included."""
        command = ["ip", "-n", self._space(self._number(device)), "-s", "-j", "link", "show", "dev", "eth0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counters = json.loads(shown)[0]["stats64"]
        return counters["rx"]["bytes"], counters["tx"]["bytes"]

    # Inside

    def _number(self, device: str) -> int:
        return self.fleet.devices.index(self.fleet.device(device)) + 1

    def _space(self, what: str | int) -> str:
        return f"{self._name}-{what}"

    def _host(self, number: int) -> str:
        """Of the server (0) or of a device."""
        return f"10.{self._subnet}.255.1" if number == 0 else f"10.{self._subnet}.{number >> 8}.{number & 255}"

    def _hardware(self, number: int) -> str:
        return f"02:00:00:{self._subnet:02x}:{number >> 8:02x}:{number & 255:02x}"

    def _namespaces(self) -> Iterator[str]:
        yield f"netns add {self._space('server')}"
        for number in range(1, len(self.fleet) + 1):
            yield f"netns add {self._space(number)}"

    def _claimed_subnet(self) -> int:
        """The second number of an address range that is ours: who makes the interface of that name has it."""
        server = self._space("server")
        for subnet in _SUBNETS:
            pair = ["ip", "link", "add", _own(subnet), "type", "veth", "peer", "name", "outside", "netns", server]
            if subprocess.run(pair, capture_output=True, check=False).returncode == 0:
                return subnet
        raise ClusterError("all of 10.64.0.0/10 is in use here; end some of the emulated fleets that run")

    def _own_side(self) -> Iterator[str]:
        own = _own(self._subnet)
        yield f"link set {own} up"
        yield f"addr add 10.{self._subnet}.255.254/16 dev {own}"

    def _server_side(self) -> Iterator[str]:
        yield "link set lo up"
        yield "link add br0 type bridge"
        yield f"link set br0 address {self._hardware(0)} up"
        yield f"addr add {self._host(0)}/16 dev br0"
        yield "link set outside master br0 up"
        for number in range(1, len(self.fleet) + 1):
            yield f"link add v{number} type veth peer name eth0 netns {self._space(number)}"
            yield f"link set v{number} master br0 up"
            yield f"neigh replace {self._host(number)} lladdr {self._hardware(number)} dev br0 nud permanent"

    def _device_side(self, number: int) -> Iterator[str]:
        yield "link set lo up"
        yield f"link set eth0 address {self._hardware(number)} up"
        yield f"addr add {self._host(number)}/16 dev eth0"
        for other in range(len(self.fleet) + 1):
            if other != number:  # a question about an address would wait in a full queue
                yield f"neigh replace {self._host(other)} lladdr {self._hardware(other)} dev eth0 nud permanent"


def remove_leftovers() -> list[str]:
    """Remove networks of processes that are gone; which namespaces they were."""
    left = [space for space in _spaces() if (found := _OURS.fullmatch(space)) and not _alive(int(found["pid"]))]
    for space in left:
        _remove(space)
    return left


def _shaped(interface: str, link: Link) -> str:
    rate = round(8 * link.bandwidth)
    return f"qdisc replace dev {interface} root tbf rate {rate}bit burst {_bucket(link)} latency {_QUEUE}"


def _use_trains(interface: str, links: Sequence[Link], space: str) -> None:
    """Let packets cross the kernel in trains that just fit a bucket, as network cards hand them over.

    Longer trains would be cut into single packets there, and each would cost two processes a wake-up. An old kernel
    or `ip` that cannot say so is only slower.
    """
    with suppress(ClusterError):
        _batch("ip", [f"link set {interface} gso_max_size {_train(links)}"], "-n", space)


def _train(links: Sequence[Link]) -> int:
    """Bytes of the longest train that fits the largest bucket."""
    return min(round(PAYLOAD * max(_bucket(link) for link in links)) - _HEADERS, _LONGEST_TRAIN)


def _bucket(link: Link) -> int:
    """Bytes that may pass a link at once."""
    return max(int(link.bandwidth * (0.004 if link.bandwidth >= _FAST else 0.001)), _SMALLEST_BUCKET)


def _batch(tool: str, lines: Iterable[str], *options: str) -> None:
    """Run many lines of `ip` or `tc` as one process."""
    done = subprocess.run(
        [tool, *options, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"the network of namespaces cannot be made: {done.stderr.strip()}")


def _spaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _own(subnet: int) -> str:
    """The interface by which this process reaches a network."""
    return f"cleave{subnet}"

"""What `cleave doctor` looks at: each check is a function that returns one finding, and none changes anything."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, Literal

from cleave_dask.cli import fleets
from cleave_dask.formatting import duration, quantity

State = Literal["good", "note", "bad"]

LEAST_MEMORY = 512e6
"""Bytes that a device needs: its process, and a few tiles."""

LEAST_DISK = 2e9
"""Bytes below which checkpoints of even a small model soon fill a disk."""

MANY_FILES = 4096
"""Open files that a server of a thousand devices needs."""

_SENT = 16_000_000  # bytes over loopback
_PORTS = {fleets.SCHEDULER_PORT: "scheduler", 8787: "dashboard", 8788: "device that joins"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """As JSON has it."""
        return asdict(self)


def good(what: str, found: str) -> Finding:
    """All is well."""
    return Finding(what, "good", found)


def note(what: str, found: str, remedy: str) -> Finding:
    """Something is narrower than it could be, but this machine can be a device."""
    return Finding(what, "note", found, remedy)


def bad(what: str, found: str, remedy: str) -> Finding:
    """Until that is done, this machine cannot be a device."""
    return Finding(what, "bad", found, remedy)


def look(what: str, check: Callable[[], Finding]) -> Finding:
    """The finding of a check; one that fails is itself a finding."""
    try:
        return check()
    except Exception as error:  # a doctor does not die of the patient's disease
        return bad(what, f"{type(error).__name__}: {error}", "see the message; `cleave --debug doctor` shows more")


def check_machine() -> list[Finding]:
    """Everything that can be seen without a network."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python,
        "packages": partial(_packages, None),
        "training": partial(_packages, "train"),
        "settings": _settings,
        "kernel": _kernel,
        "memory": _memory,
        "disk": _disk,
        "loopback": _loopback,
        **{f"port {port}": partial(_port, port, role) for port, role in _PORTS.items()},
        "network": _network,
        "tls": _tls,
        "namespaces": _namespaces,
        "open files": _files,
        "power": _power,
    }
    return [look(what, check) for what, check in checks.items()]


def _python() -> Finding:
    return good("python", f"{sys.version.split()[0]} on {sys.platform}, {sys.executable}")


def _packages(extra: str | None) -> Finding:
    """Whether what the package asks for is there, in versions that it takes."""
    from packaging.requirements import Requirement

    what = extra or "packages"
    name, install = ("training", "cleave-dask[train]") if extra else (what, "cleave-dask")
    wrong, there = [], []
    for line in requires("cleave-dask") or []:
        asked = Requirement(line)
        if ("extra" in line.partition(";")[2]) != bool(extra):
            continue
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra or ""}):
            continue
        try:
            has = version(asked.name)
        except PackageNotFoundError:
            wrong.append(f"{asked.name} is missing")
            continue
        there.append(f"{asked.name} {has}")
        if not asked.specifier.contains(has, prereleases=True):
            wrong.append(f"{asked.name} is {has}, not {asked.specifier}")
    if not wrong:
        return good(name, ", ".join(there))
    tell = note if extra else bad
    use = "; a device does not need it" if extra else ""
    return tell(name, "; ".join(wrong), f"pip install '{install}'{use}")


def _settings() -> Finding:
    """Settings that would stop a device, and names that nothing reads: a typo is silent otherwise."""
    import dask.config
    import yaml

    from cleave_dask import config
    from cleave_dask.errors import CleaveError
    from cleave_dask.resources import nearest
    from cleave_dask.runtime.lending import read_reasons, read_settings

    path = Path(config.__file__).with_name("cleave.yaml")
    known = set(_keys(yaml.safe_load(path.read_text())["cleave"]))
    unknown = sorted(set(_keys(dask.config.get("cleave"))) - known)
    where = f"edit {Path(dask.config.PATH) / 'cleave.yaml'}, or the DASK_CLEAVE__ variable that sets it"
    if unknown:
        return note("settings", f"'cleave.{unknown[0]}' is no setting; {nearest(unknown[0], known)}", where)
    try:
        read_settings(cores=1, memory=int(LEAST_MEMORY))
        read_reasons()
    except CleaveError as error:
        return bad("settings", str(error), where)
    return good("settings", f"{len(known)} in {path.name}, all read")


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        key = f"{prefix}{str(name).replace('-', '_')}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{key}.")
        else:
            yield key


def _kernel() -> Finding:
    from dask.system import CPU_COUNT

    from cleave_dask import config
    from cleave_dask.runtime.kernels import load_kernel, measure_flops, use_threads

    kernel = load_kernel(config.get("device.kernel"))
    use_threads(CPU_COUNT)
    speed = measure_flops(kernel, seconds=0.5)
    return good("kernel", f"{kernel.name}, {quantity(speed, 'FLOP/s')} float32 on {CPU_COUNT} cores")


def _memory() -> Finding:
    import psutil
    from distributed.system import MEMORY_LIMIT

    free = psutil.virtual_memory().available
    found = f"{quantity(MEMORY_LIMIT, 'B')}, {quantity(free, 'B')} of it free"
    if min(free, MEMORY_LIMIT) < LEAST_MEMORY:
        return bad("memory", found, f"close programs until {quantity(LEAST_MEMORY, 'B')} are free")
    return good("memory", found)


def _disk() -> Finding:
    """Room for checkpoints, where a run that starts here would put them, and for logs."""
    from cleave_dask import config

    folder = Path(config.get("checkpoint.folder")).absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{quantity(free, 'B')} free for checkpoints in {folder}"
    with tempfile.TemporaryFile() as file:  # a full or read-only temporary folder fails here
        file.write(b"0")
    if not os.access(place, os.W_OK):
        return note("disk", f"{place} is not writable", "train elsewhere, or set cleave.checkpoint.folder")
    if free < LEAST_DISK:
        return note("disk", found, "free some space, set cleave.checkpoint.keep to 1, or save to another disk")
    return good("disk", found)


def _loopback() -> Finding:
    """A transfer to this machine itself: the ceiling of local fleets, and a firewall that forbids even that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = Thread(target=_send, args=(listener.getsockname()[1],), daemon=True)
        sender.start()
        listener.settimeout(5)
        connection, _ = listener.accept()
        start, heard = perf_counter(), 0
        with connection:
            while more := len(connection.recv(1 << 20)):
                heard += more
        seconds = perf_counter() - start
    if heard < _SENT:
        return bad("loopback", f"{heard:,} of {_SENT:,} bytes came through", "look at this machine's firewall")
    return good("loopback", f"{quantity(heard, 'B')} in {duration(seconds)}, {quantity(heard / seconds, 'B/s')}")


def _send(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(bytes(_SENT))


def _port(port: int, role: str) -> Finding:
    from cleave_dask.errors import ClusterError

    what = f"port {port}"
    try:
        fleets.check_free("127.0.0.1", port)
    except ClusterError:
        option = {"scheduler": "--port", "dashboard": "--dashboard-address"}.get(role, "--join-port")
        return note(what, "in use on this machine", f"if that is no fleet of yours, serve with {option}")
    return good(what, f"free for a {role}")


def _network() -> Finding:
    """Addresses that a device on another machine could reach this one by, if this one serves."""
    import psutil

    reachable = [
        address.address
        for name, up in psutil.net_if_stats().items()
        if up.isup
        for address in psutil.net_if_addrs().get(name, [])
        if address.family == socket.AF_INET and not fleets.is_loopback(address.address)
    ]
    if not reachable:
        return note("network", "no address beyond this machine", "join a network to lend this machine or to serve")
    return good("network", f"serve with --host {' or '.join(sorted(reachable)[:3])}")


def _tls() -> Finding:
    if not ssl.HAS_TLSv1_3:
        remedy = "install a Python that is built with OpenSSL 1.1.1 or newer"
        return bad("tls", f"{ssl.OPENSSL_VERSION} without TLS 1.3", remedy)
    return good("tls", f"1.3, {ssl.OPENSSL_VERSION}")


def _namespaces() -> Finding:
    """Whether emulated links are shaped by the kernel or by token buckets; real fleets need neither."""
    from cleave_dask.simulation.network import Network

    why_not = Network.why_not()
    if why_not is None:
        return good("namespaces", "emulated links are shaped by the kernel")
    return note("namespaces", why_not, "nothing, unless you emulate fleets: token buckets do instead")


def _files() -> Finding:
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return good("open files", "no limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MANY_FILES:
        return note("open files", f"{soft:,} at once", f"to serve hundreds of devices: ulimit -n {min(hard, 65536)}")
    return good("open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at once")


def _power() -> Finding:
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is None:
        return good("power", "mains; no battery")
    if battery.power_plugged is False:
        return note("power", f"battery, {battery.percent:.0f}%", "plug it in before you lend it, or set only_on_mains")
    return good("power", f"mains; battery {battery.percent:.0f}%")

"""The cluster that a command works on: started on this machine, or joined at an address."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from cleave_dask.errors import ClusterError, InputError

if TYPE_CHECKING:
    from distributed import Client

    from cleave_dask.runtime.processes import ServedCluster

Cluster = TypeVar("Cluster", bound="ServedCluster")

SCHEDULER_PORT = 8786
"""Where Dask schedulers listen unless told otherwise."""

MOST_DEVICES = 64
"""Devices of a local fleet, each a process of some 100 MB; a larger one is surely meant for planning."""

_PROBE_SECONDS = 5.0


@contextmanager
def started(start: Callable[[], Cluster]) -> Iterator[Cluster]:
    """A cluster of processes on this machine; none of them is left afterwards, even if starting was cut short."""
    from distributed.deploy.spec import close_clusters

    with _children_ended():
        try:
            cluster = start()
        except BaseException:
            close_clusters()  # Dask only cleans up after an Exception, and Ctrl-C is none
            raise
        with cluster:
            yield cluster


@contextmanager
def _children_ended() -> Iterator[None]:
    """Every process that is started inside has ended afterwards."""
    import psutil

    this = psutil.Process()
    before = set(this.children(recursive=True))
    try:
        yield
    finally:
        while left := set(this.children(recursive=True)) - before:
            for child in left:
                with suppress(psutil.NoSuchProcess):
                    child.terminate()
            for child in psutil.wait_procs(left, timeout=3)[1]:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


@contextmanager
def joined(address: str) -> Iterator[Client]:
    """A client of the scheduler at that address; one that is not there is noticed at once."""
    from distributed import Client

    from cleave_dask import config

    probe(address)
    patience = config.seconds("timeouts.server")
    try:
        client = Client(address, timeout=patience)
    except ValueError as error:
        raise InputError(f"--scheduler is {address!r}: {error}; give an address such as tcp://10.0.0.1:8786") from error
    except OSError as error:
        raise ClusterError(
            f"whatever listens at {address} does not answer as a Dask scheduler within {patience:g} s; "
            "give the address that `cleave serve` printed"
        ) from error
    with client:
        yield client


def probe(address: str) -> None:
    """Raise unless something listens there: Dask itself would keep trying for its whole timeout."""
    from distributed.comm.addressing import parse_host_port

    try:
        host, port = parse_host_port(address, SCHEDULER_PORT)
        port = int(port)
    except ValueError as error:
        raise InputError(f"--scheduler is {address!r}: {error}; give an address such as tcp://10.0.0.1:8786") from error
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"no scheduler answers at {address} ({error}); is `cleave serve` running there, "
            "and can this machine reach it?"
        ) from error


def check_free(host: str, port: int) -> None:
    """Raise if nobody can listen on that port, or it is taken already."""
    if port == 0:
        return
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ClusterError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            "give another --port (0: any that is free), or stop what uses it"
        ) from error


def is_local(host: str) -> bool:
    """Whether a host is this machine."""
    import psutil

    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found & own) or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host of that name."""
    import ipaddress

    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    except (OSError, ValueError):
        return False

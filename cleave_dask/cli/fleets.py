"""The cluster that a command works on: started on this machine, or joined at an address."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cleave_dask.errors import AccessError, ClusterError, InputError

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

    from cleave_dask.runtime.credentials import ServerFolder
    from cleave_dask.runtime.processes import ServedCluster

Cluster = TypeVar("Cluster", bound="ServedCluster")

SCHEDULER_PORT = 8786
"""Where Dask schedulers listen unless told otherwise."""

MOST_DEVICES = 64
"""Devices of a local fleet, each a process of some 100 MB; a larger one is surely meant for planning."""

_EXAMPLE = "give an address such as tcp://10.0.0.1:8786"
_GREETING = b"pickle-protocol"  # part of the first message of every Dask listener
_LONGEST_GREETING = 4096  # bytes


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
    try:
        client = Client(address, timeout=config.seconds("timeouts.server"), security=_security(address))
    except ValueError as error:
        raise InputError(f"--scheduler is {address!r}: {error}; {_EXAMPLE}") from error
    except (OSError, TypeError, AssertionError) as error:  # a worker is Dask too, and answers oddly
        raise ClusterError(_not_dask(address)) from error
    with client:
        yield client


def server_folder() -> ServerFolder:
    """Where the keys of this machine's server are."""
    from cleave_dask.runtime.credentials import ServerFolder

    return ServerFolder(security_folder() / "server")


def security_folder() -> Path:
    """Where all keys of this machine are."""
    from cleave_dask import config

    return Path(str(config.get("security.folder"))).expanduser()


def _security(address: str) -> Security | None:
    """What to show a scheduler that asks who we are: Dask's settings, or else the keys of this machine's server."""
    import dask.config
    from distributed.security import Security

    if not address.startswith("tls://"):
        return None
    if dask.config.get("distributed.comm.tls.ca-file") and dask.config.get("distributed.comm.tls.client.cert"):
        return Security()
    folder = server_folder()
    if folder.exists:
        return folder.files("client").security()
    raise AccessError(
        f"{address} asks who this is, and there are no keys in {folder.path}; copy ca.pem, client.pem and "
        "client.key from that folder of the machine that serves, or set distributed.comm.tls.ca-file "
        "and distributed.comm.tls.client"
    )


def probe(address: str) -> None:
    """Raise unless a Dask scheduler, or something very like it, greets whoever connects there.

    Dask's own client would try an address without listener for its whole timeout, and wait without end for the
    greeting of a listener that says nothing.
    """
    from cleave_dask import config

    scheme, where = parsed(address)
    try:
        with socket.create_connection(where, timeout=config.seconds("timeouts.server")) as connection:
            greeted = scheme != "tcp" or _greets(connection)  # over TLS it is the client who speaks first
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"no scheduler answers at {address} ({error}); is `cleave serve` running there, "
            "and can this machine reach it?"
        ) from error
    if not greeted:
        raise ClusterError(_not_dask(address))


def parsed(address: str) -> tuple[str, tuple[str, int]]:
    """The protocol, host and port of a scheduler's address; an InputError if it is none."""
    from distributed.comm.addressing import parse_address, parse_host_port

    try:
        scheme, place = parse_address(address)
        host, port = parse_host_port(place, SCHEDULER_PORT)
        where = (host, int(port))
        if scheme not in ("tcp", "tls") or not 0 < where[1] <= 65535 or not re.fullmatch(r"[^\s/@?#]+", host):
            raise ValueError(address)
    except ValueError as error:
        raise InputError(f"--scheduler is {address!r}, which is no address; {_EXAMPLE}") from error
    return scheme, where


def _greets(connection: socket.socket) -> bool:
    """Whether the other side introduces itself as Dask does."""
    heard = b""
    try:
        while _GREETING not in heard and len(heard) < _LONGEST_GREETING:
            more = connection.recv(_LONGEST_GREETING)
            if not more:
                break
            heard += more
    except TimeoutError:
        return False
    return _GREETING in heard


def _not_dask(address: str) -> str:
    return (
        f"what listens at {address} does not answer as a Dask scheduler; give the address that `cleave serve` printed"
    )


def check_free(host: str, port: int) -> None:
    """Raise if nobody can listen there, or somebody does already."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except OSError as error:
        what = f"cannot listen on {host} port {port}: {error.strerror}"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ClusterError(f"{what}; give another --port (0: any that is free), or stop what uses it") from error
        raise InputError(f"{what}; give a --host that is this machine's") from error


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

"""What a client asks of a cluster before it works on it: is the plugin there, the one server, at least one device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from distributed import Client
from distributed.comm import CommClosedError

from cleave_dask import config
from cleave_dask._version import __version__
from cleave_dask.errors import ClusterError, InputError
from cleave_dask.fleet.devices import Fleet, Server
from cleave_dask.resources import expect

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that can train: the server and the devices, with what they told of themselves."""

    facts: dict[str, Any]  # of the server
    devices: dict[str, dict[str, Any]]

    @property
    def server(self) -> str:
        """The server's address."""
        return str(self.facts["address"])

    @property
    def fleet(self) -> Fleet:
        """The devices as they described themselves, and their server."""
        return Fleet.from_workers(self.devices, server=Server.from_facts(self.facts))


def inspect(client: Client) -> Cluster:
    """The cluster behind `client`, or a ClusterError that says what it lacks.

    It waits a while for devices that are measuring themselves.
    """
    _check_version("scheduler", facts_of(client))  # of another version nothing else may be as it is read here
    facts = _measured_facts(client)
    servers: dict[str, dict[str, Any]] = facts["server"]
    if not servers:
        raise ClusterError(
            "no server has joined this scheduler; start one with `cleave serve`, or "
            "`dask worker ADDRESS --host 127.0.0.1 --preload cleave_dask.runtime.server --nthreads 1 --memory-limit 0`"
        )
    if len(servers) > 1:
        raise ClusterError(
            f"{len(servers)} servers have joined where one is expected ({', '.join(sorted(servers))}); stop all but one"
        )
    if not facts["device"]:
        raise ClusterError(_no_devices(sorted(facts["stranger"]), how_to_join(client)))
    (server,) = servers.values()
    _check_version("server", server)
    return Cluster(server, facts["device"])


def _check_version(role: str, facts: dict[str, Any]) -> None:
    there = facts.get("version")
    if there != __version__:
        raise ClusterError(f"the {role} runs cleave-dask {there}, this client {__version__}; install the same version")


def _measured_facts(client: Client) -> dict[str, Any]:
    """What the scheduler says of the cluster, once devices know their figures or have had the time to."""
    deadline = monotonic() + config.seconds("timeouts.measuring")
    while True:
        facts = facts_of(client)
        open_devices = [name for name, device in facts["device"].items() if device.get("measuring")]
        if not open_devices or not facts["server"]:
            return facts
        if monotonic() > deadline:
            logger.warning("Planning with defaults for devices that still measure: %s", ", ".join(open_devices[:5]))
            return facts
        sleep(0.1)


def check_client(client: Client) -> None:
    """Refuse what is no client, such as the cluster itself, and one that is closed."""
    remedy = "give a Dask client: Client(address), or fleet.get_client() of a LocalFleet"
    expect(client, Client, what="the client", remedy=remedy)
    if is_closed(client):
        raise ClusterError(
            "this client is closed, or its cluster is; connect another one, build a new Trainer with it, and if there "
            "is a checkpoint, resume() from it"
        )


def is_closed(client: Client) -> bool:
    """Whether a client, or the cluster that it came from, has been closed."""
    return client.status in ("closing", "closed")


def facts_of(client: Client) -> dict[str, Any]:
    """What the scheduler's plugin says of the cluster."""
    check_client(client)
    if client.asynchronous:
        raise InputError(
            "this client is asynchronous, and its event loop would stand still; use cd.AsyncTrainer, or for anything "
            "else Client(async_client.scheduler.address, asynchronous=False) in a thread"
        )
    scheduler: Any = client.scheduler
    try:
        facts: dict[str, Any] | None = client.sync(scheduler.cleave_info)
    except (CommClosedError, OSError) as error:
        raise ClusterError(f"the scheduler at {scheduler.address} does not answer: {error}") from error
    if facts is None:  # what Dask answers to a call that it does not know
        raise ClusterError(
            "the scheduler does not know cleave; start it with `cleave serve` or "
            "`dask scheduler --host 127.0.0.1 --preload cleave_dask.runtime.scheduler`"
        )
    return facts


def _address(client: Client) -> str:
    scheduler: Any = client.scheduler
    return str(scheduler.address)


def how_to_join(client: Client) -> str:
    """What makes a machine a device of this cluster."""
    address = _address(client)
    if address.startswith("tls://"):
        return "start one with the `cleave join` line that `cleave serve` printed"
    return f"start one with `dask worker {address} --preload cleave_dask.runtime.device`"


def _no_devices(strangers: list[str], remedy: str) -> str:
    if strangers:
        return (
            f"no device has joined, but {len(strangers)} workers without the package "
            f"have ({', '.join(strangers[:5])}); "
            f"install cleave-dask there and {remedy}"
        )
    return f"no device has joined this scheduler; {remedy}"

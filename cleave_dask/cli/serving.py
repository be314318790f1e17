"""`cleave serve`: scheduler and server for devices on other machines."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from cleave_dask.cli import fleets
from cleave_dask.cli.frame import debug_option, json_option, print_json, quiet_libraries
from cleave_dask.errors import ClusterError

if TYPE_CHECKING:
    from cleave_dask.runtime.processes import ServedCluster

LOOK_SECONDS = 0.5
"""Seconds between two looks at who is there."""

_PRELOAD = "--preload cleave_dask.runtime.device"

_WARNING = """\
warning: listening on {host}. Nothing is encrypted and nobody is asked who they are: anyone who can reach this port can
read weights and run code on this machine and on every device. Use it only on a network that you trust."""


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0: on every network.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=fleets.SCHEDULER_PORT,
    show_default=True,
    help="Where the scheduler listens; 0: any port that is free.",
)
@click.option("--dashboard-address", metavar="ADDRESS", help="Where the dashboard listens.  [default: HOST:8787]")
@json_option
@debug_option
def serve(host: str, port: int, dashboard_address: str | None, as_json: bool) -> None:
    """Start scheduler and server for a real fleet.

    Devices can join until Ctrl-C. The server keeps weights, optimizer state and activations; devices only multiply.
    """
    fleets.check_free(host, port)
    quiet_libraries()
    from cleave_dask.runtime.processes import Place, ServedCluster

    say: Callable[[str], None] = (lambda text: click.echo(text, err=True)) if as_json else click.echo
    if not fleets.is_loopback(host):
        click.echo(_WARNING.format(host=host), err=True)
    say("starting scheduler and server")
    dashboard = dashboard_address or f"{host}:8787"
    with fleets.started(lambda: ServedCluster(place=Place(host), port=port, dashboard=dashboard)) as cluster:
        _introduce(cluster, as_json=as_json)
        _watch(cluster, say)


def _introduce(cluster: ServedCluster, *, as_json: bool) -> None:
    """Where it is, and the lines to run elsewhere."""
    address = cluster.scheduler_address
    lines = {
        "scheduler": address,
        "dashboard": cluster.dashboard_link,
        "device": f"dask worker {address} {_PRELOAD}",
        "train": f"cleave train tiny-llama --scheduler {address}",
    }
    if as_json:
        print_json(lines)
        return
    click.echo(f"scheduler: {lines['scheduler']}")
    click.echo(f"dashboard: {lines['dashboard']}")
    click.echo(f"on each device: {lines['device']}")
    click.echo(f"to train:       {lines['train']}")
    click.echo("Ctrl-C ends it all; checkpoints stay.")


def _watch(cluster: ServedCluster, say: Callable[[str], None]) -> None:
    """Tell who joins and who leaves, until interrupted or until there is nothing left to serve."""
    present: set[str] = set()
    scheduler: Any = cluster.scheduler
    pause = Event()  # never set: only to wait on, which signals interrupt
    while not pause.wait(LOOK_SECONDS):
        if scheduler.dead:
            raise ClusterError(f"the scheduler has ended; its log ends with\n{scheduler.explain()}")
        roles = {str(worker["name"]): _role(worker) for worker in list(cluster.scheduler_info["workers"].values())}
        if cluster.server_name not in roles:
            raise ClusterError(f"the server has ended; what it logged is in {cluster.folder}")
        del roles[cluster.server_name]
        devices = sum(role == "device" for role in roles.values())
        for name in sorted(roles.keys() - present):
            advice = "" if roles[name] else f", but gets no tiles: start it with {_PRELOAD}"
            say(f"{name} has joined{advice}; devices: {devices}")
        for name in sorted(present - roles.keys()):
            say(f"{name} has left; devices: {devices}")
        present = set(roles)


def _role(worker: dict[str, Any]) -> str | None:
    """What a worker said it is when it joined; nothing if it did so without this package."""
    role: str | None = (worker.get("cleave") or {}).get("role")
    return role

"""`cleave serve`: scheduler and server for devices on other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from time import time
from typing import TYPE_CHECKING, Any

import click

from cleave_dask.cli import fleets
from cleave_dask.cli.frame import debug_option, json_option, print_json, quiet_libraries
from cleave_dask.errors import ClusterError, InputError

if TYPE_CHECKING:
    from cleave_dask.runtime.credentials import ServerFolder
    from cleave_dask.runtime.processes import ServedCluster

JOIN_PORT = 8788
"""Where devices join unless told otherwise."""

LOOK_SECONDS = 0.5
"""Seconds between two looks at who is there."""

_PRELOAD = "--preload cleave_dask.runtime.device"

_SECURED = click.option(
    "--tls/--no-tls",
    default=None,
    help="Encrypt, and ask everyone who they are.  [default: yes, unless only this machine can reach HOST]",
)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0: on every network.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=fleets.SCHEDULER_PORT,
    show_default=True,
    help="Where the scheduler listens; 0: any port that is free.",
)
@click.option(
    "--join-port", type=click.IntRange(0, 65535), help="Where devices join.  [default: 8788, or with --port 0 any]"
)
@_SECURED
@click.option("--dashboard-address", metavar="ADDRESS", help="Where the dashboard listens.  [default: 127.0.0.1:8787]")
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Of the server; all but one of them only talk with devices.  [default: cleave.server.processes, 1]",
)
@json_option
@debug_option
def serve(
    host: str,
    port: int,
    join_port: int | None,
    tls: bool | None,
    dashboard_address: str | None,
    processes: int | None,
    as_json: bool,
) -> None:
    """Start scheduler and server for a real fleet.

    Devices can join until Ctrl-C or SIGTERM, after which it ends with exit code 0. The server keeps weights, optimizer
    state and activations; devices only multiply. Where other machines can reach it, everything is encrypted: the first
    start makes an authority and keys, and every start prints a line with a token by which devices join.
    """
    dashboard = dashboard_address or "127.0.0.1:8787"
    secured = _secured(host, tls, dashboard)
    fleets.check_free(host, port)
    quiet_libraries()
    from cleave_dask import config
    from cleave_dask.runtime.processes import Place, ServedCluster

    folder = fleets.server_folder() if secured else None
    if folder is not None:
        folder.create(str(config.get("server.name")))
    say: Callable[[str], None] = (lambda text: click.echo(text, err=True)) if as_json else click.echo
    say("starting scheduler and server")
    place = Place(host, port=port, folder=folder)
    with fleets.started(lambda: ServedCluster(place=place, dashboard=dashboard, processes=processes)) as cluster:
        lines = _lines(cluster)
        if folder is None:
            _introduce(lines, as_json=as_json)
            _serve(cluster, say)
            return
        chosen = join_port if join_port is not None else (0 if port == 0 else JOIN_PORT)
        with joining(cluster, folder, host, chosen) as token:
            _introduce({**lines, **token}, as_json=as_json)
            _serve(cluster, say)


def _secured(host: str, tls: bool | None, dashboard: str) -> bool:
    """Whether to use TLS; raises if that would be needed and is not wanted."""
    private = fleets.is_loopback(host)
    if tls is False and not private:
        raise InputError(
            f"--no-tls with --host {host}: other machines can reach it, and without TLS anyone among them could read "
            "weights and run code here and on every device. Leave --no-tls away, or listen on 127.0.0.1"
        )
    watched = dashboard.removeprefix("http://").rpartition(":")[0]
    if not fleets.is_loopback(watched or "0.0.0.0"):
        raise InputError(
            f"--dashboard-address {dashboard}: the dashboard is not encrypted and asks nobody who they are; "
            "listen on 127.0.0.1 and look from elsewhere with `ssh -L 8787:127.0.0.1:8787`"
        )
    return not private if tls is None else tls


@contextmanager
def joining(cluster: ServedCluster, folder: ServerFolder, host: str, port: int) -> Iterator[dict[str, str]]:
    """Let devices enrol while the block runs; yields what to tell them."""
    from distributed.comm.addressing import get_address_host, get_address_host_port

    from cleave_dask import config
    from cleave_dask.runtime.enrolment import Enrolment

    here, scheduler_port = get_address_host_port(cluster.scheduler_address)
    days = config.seconds("security.certificate") / 86400
    enrolment = Enrolment(folder, scheduler_port=scheduler_port, days=days)
    fleets.check_free(host, port)
    run: Any = cluster.sync  # Dask's, without types
    chosen = run(enrolment.start, host, port)
    try:
        token = folder.issue_token(now=time(), lifetime=config.seconds("security.token"))
        shown = f"[{here}]" if ":" in get_address_host(cluster.scheduler_address) else here
        url = f"https://{shown}:{chosen}"
        yield {"url": url, "token": token, "device": f"cleave join {url} {token}"}
    finally:
        run(enrolment.stop)


def _lines(cluster: ServedCluster) -> dict[str, str]:
    """Where it is, and the lines to run elsewhere."""
    address = cluster.scheduler_address
    return {
        "scheduler": address,
        "dashboard": cluster.dashboard_link,
        "device": f"dask worker {address} {_PRELOAD}",
        "train": f"cleave train tiny-llama --scheduler {address}",
    }


def _introduce(lines: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(lines)
        return
    click.echo(f"scheduler: {lines['scheduler']}")
    click.echo(f"dashboard: {lines['dashboard']}")
    click.echo(f"on each device: {lines['device']}")
    click.echo(f"to train:       {lines['train']}")
    click.echo("Ctrl-C ends it all; checkpoints stay.")


def _serve(cluster: ServedCluster, say: Callable[[str], None]) -> None:
    """Serve until a signal says that it is enough: that is how this command is meant to end, so its exit code is 0."""
    try:
        _watch(cluster, say)
    except KeyboardInterrupt:
        say("stopping scheduler and server")


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

"""`cleave devices`: who has joined, what each was measured to be, and what state it is in."""

from __future__ import annotations

from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from cleave_dask.cli import fleets
from cleave_dask.cli.frame import debug_option, json_option, make_console, on_terminal, print_json, quiet_libraries
from cleave_dask.formatting import duration, quantity

if TYPE_CHECKING:
    from distributed import Client
    from rich.table import Table

    from cleave_dask.runtime.tokens import Member

EVERY = 1.0
"""Seconds between two looks at the fleet."""

_FIGURES = ("flops", "down", "up", "latency")
_COLOURS = {"ready": "green", "measuring": "cyan", "paused": "yellow", "silent": "red"}
_JOIN = "dask worker {address} --preload cleave_dask.runtime.device"


@click.command()
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    default=f"tcp://127.0.0.1:{fleets.SCHEDULER_PORT}",
    show_default=True,
    help="Where the fleet's scheduler is.",
)
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
@json_option
@debug_option
def devices(scheduler: str, watch: bool, as_json: bool) -> None:
    """List the devices of a fleet as they are now.

    Each with its kernel, its measured speed and links, the memory that it lends, and its state: ready, measuring,
    paused by its owner, or silent, which is late with work and not heard of.
    """
    quiet_libraries()
    with fleets.joined(scheduler) as client:
        if watch and not as_json and on_terminal():
            _watch(client, scheduler)
            return
        pause = Event()  # never set: only to wait on, which signals interrupt
        while True:
            found = look(client, scheduler)
            if as_json:
                print_json(found)
            else:
                make_console().print(_table(found))
                click.echo(_advice(found), nl=False)
            if not watch:
                return
            pause.wait(EVERY)


def look(client: Client, scheduler: str) -> dict[str, Any]:
    """The fleet behind a client: its devices, its server, and workers that are neither."""
    from cleave_dask.runtime.cluster import facts_of

    facts, members = facts_of(client), _members(scheduler)
    return {
        "scheduler": scheduler,
        "server": next((server["address"] for server in facts["server"].values()), None),
        "devices": [
            _device(name, facts["device"][name], facts["silent"]) | _identity(name, members)
            for name in sorted(facts["device"])
        ],
        "strangers": sorted(facts["stranger"]),
        "absent": sorted(members.keys() - facts["device"].keys() - facts["quarantined"].keys()),
        "quarantined": facts["quarantined"],
    }


def _members(scheduler: str) -> dict[str, Member]:
    """Devices that have joined with a token of this machine's server and were not revoked, by name."""
    folder = fleets.server_folder()
    if not scheduler.startswith("tls://") or not folder.exists:
        return {}
    return {member.name: member for member in folder.register().members if not member.revoked}


def _identity(name: str, members: dict[str, Member]) -> dict[str, Any]:
    """The token that a device joined with, and until when it may stay, as seconds since the epoch; or null."""
    member = members.get(name)
    return {"token": member and member.token, "expires": member and member.expires}


def _device(name: str, facts: dict[str, Any], silent: list[str]) -> dict[str, Any]:
    """One device; figures that nobody knows yet are null."""
    if name in silent:
        state = "silent"
    elif not facts["running"]:
        state = "paused"
    else:
        state = "measuring" if facts.get("measuring") else "ready"
    figures = {figure: facts.get(figure) for figure in _FIGURES}
    told = {key: facts.get(key) for key in ("kernel", "cores", "memory", "version", "address")}
    return {"name": name, "state": state, **told, **figures}


def _table(found: dict[str, Any]) -> Table:
    """The devices, a row each."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    count = len(found["devices"])
    title = f"{count:,} device{'s' * (count != 1)} at {found['scheduler']}"
    known = any(device["token"] for device in found["devices"])
    columns = ("device", "state", "cores", "speed", "down", "up", "latency", "memory")
    table = Table(*columns, *(("token", "until") if known else ()), title=title, box=SIMPLE_HEAD, padding=0)
    for device in found["devices"]:
        table.add_row(
            device["name"],
            Text(device["state"], style=_COLOURS[device["state"]]),
            f"{device['cores']} {device['kernel']}",
            _shown(device["flops"], "FLOP/s"),
            *(_shown(device[side] and 8 * device[side], "bit/s") for side in ("down", "up")),
            duration(device["latency"]) if device["latency"] is not None else "?",
            _shown(device["memory"], "B"),
            *((device["token"] or "?", _date(device["expires"])) if known else ()),
        )
    return table


def _date(seconds: float | None) -> str:
    return "?" if seconds is None else datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _shown(figure: float | None, unit: str) -> str:
    return "?" if figure is None else quantity(figure, unit)


def _advice(found: dict[str, Any]) -> str:
    """What is missing, a line each."""
    secured = found["scheduler"].startswith("tls://")
    join = "the `cleave join` line that `cleave serve` printed" if secured else _JOIN.format(address=found["scheduler"])
    lines = []
    if found["server"] is None:
        lines.append("no server has joined: start scheduler and server with `cleave serve`")
    if not found["devices"]:
        lines.append(f"no device has joined: run this on each: {join}")
    for name, why in found["quarantined"].items():
        lines.append(f"{name} is in quarantine and gets no tiles: {why}; `cleave revoke {name}` ends its membership")
    if found["absent"]:
        lines.append(f"have joined and are not there: {', '.join(found['absent'][:20])}")
    if found["strangers"]:
        names = ", ".join(found["strangers"][:5])
        lines.append(f"workers that get no tiles ({names}): start them with --preload cleave_dask.runtime.device")
    return "".join(f"{line}\n" for line in lines)


def _watch(client: Client, scheduler: str) -> None:
    """The table on a terminal, redrawn in place."""
    from rich.live import Live

    pause = Event()
    with Live(_table(look(client, scheduler)), console=make_console(), auto_refresh=False) as live:
        while not pause.wait(EVERY):
            live.update(_table(look(client, scheduler)), refresh=True)

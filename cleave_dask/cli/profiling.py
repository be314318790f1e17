"""`cleave profile`: this machine as a device, in the words of a fleet file."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import click

from cleave_dask.cli import fleets
from cleave_dask.cli.frame import debug_option, json_option, print_json, quiet_libraries
from cleave_dask.errors import ClusterError, FleetError, InputError
from cleave_dask.formatting import duration, quantity

LINK_FIGURES = ("down", "up", "latency")


@click.command()
@click.option("--scheduler", metavar="ADDRESS", help="Also measure the links to the server that has joined there.")
@click.option(
    "--write",
    metavar="FLEET.toml",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the entry to this fleet file; a file that is not there is made.",
)
@click.option("--name", help="What the device is called.  [default: the host's name]")
@json_option
@debug_option
def profile(scheduler: str | None, write: Path | None, name: str | None, as_json: bool) -> None:
    """Measure this machine as a device.

    The speed of each kernel that it has, its memory and its cores, as an entry for a fleet file; with --scheduler also
    its links.
    """
    quiet_libraries()
    if scheduler is not None:
        fleets.probe(scheduler)  # before the seconds that the kernels take
    facts = {"name": name or socket.gethostname(), **_machine()}
    if scheduler is not None:
        facts |= _links(scheduler)
    entry = _entry(facts)
    if write is not None:
        _add(write, entry)
    if as_json:
        print_json(facts)
        return
    click.echo(f"# {facts['name']}: kernel {facts['kernel']} on {facts['cores']} cores")
    for kernel, flops in facts["kernels"].items():
        click.echo(f"#   {kernel}: {quantity(flops, 'FLOP/s')}")
    click.echo(entry, nl=False)
    if write is not None:
        click.echo(f"# added to {write}")


def _machine() -> dict[str, Any]:
    """Cores, memory, and the speed of each kernel that works here."""
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT

    from cleave_dask import config
    from cleave_dask.runtime.kernels import KERNELS, load_kernel, measure_flops, use_threads

    chosen = load_kernel(config.get("device.kernel"))
    speeds: dict[str, float] = {}
    for name in KERNELS:
        if name != "auto":
            try:
                kernel = load_kernel(name)
            except InputError:  # this machine does not have it
                continue
            use_threads(CPU_COUNT)
            speeds[name] = measure_flops(kernel, seconds=1.0)
    facts = {"kernel": chosen.name, "cores": CPU_COUNT, "flops": speeds[chosen.name], "memory": MEMORY_LIMIT}
    return {**facts, "kernels": speeds}


def _links(scheduler: str) -> dict[str, float]:
    """Latency, downlink and uplink between this machine and the server."""
    from cleave_dask.runtime.cluster import facts_of
    from cleave_dask.runtime.measuring import measure_links
    from cleave_dask.runtime.shaping import Links

    with fleets.joined(scheduler) as client:
        servers = facts_of(client)["server"]
        if not servers:
            raise ClusterError(
                f"no server has joined {scheduler}, so there are no links to measure; start one with `cleave serve`"
            )
        address = min(server["address"] for server in servers.values())
        try:
            figures: dict[str, float] = client.sync(measure_links, client.rpc(address), Links())
        except (OSError, TimeoutError) as error:
            raise ClusterError(
                f"the server at {address} does not answer ({error!r}); can this machine reach that address?"
            ) from error
    return figures


def _entry(facts: dict[str, Any]) -> str:
    """The machine as a [[device]] table."""
    from cleave_dask.fleet.devices import WORKER_DEFAULTS

    measured = all(figure in facts for figure in LINK_FIGURES)
    figures = {figure: facts.get(figure, WORKER_DEFAULTS[figure]) for figure in LINK_FIGURES}
    note = "measured against the server" if measured else "not measured; put in your own, or give --scheduler"
    lines = [
        "[[device]]",
        f"name = {json.dumps(facts['name'])}",
        f'flops = "{quantity(facts["flops"], "FLOP/s")}"   # measured, float32',
        f'memory = "{quantity(facts["memory"], "B")}"   # all of it; lower it to what you lend',
        *(f'{side} = "{quantity(8 * figures[side], "bit/s")}"   # {note}' for side in ("down", "up")),
        f'latency = "{duration(figures["latency"])}"   # {note}',
    ]
    return "\n".join(lines) + "\n"


def _add(file: Path, entry: str) -> None:
    """Add an entry to a fleet file, which stays as it was if that does not make a fleet."""
    from cleave_dask.fleet.devices import Fleet

    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        before = file.read_text() if file.exists() else ""
        draft.write_text(f"{before.rstrip()}\n\n{entry}" if before.strip() else entry)
        Fleet.load(draft)
        draft.replace(file)
    except FleetError as error:
        why = str(error).removeprefix(f"{draft}: ")
        raise InputError(f"cannot add this machine to {str(file)!r}: {why}; or give another --name") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error  # without the draft's name
        raise InputError(f"cannot write {str(file)!r}: {reason}; choose another --write") from error
    finally:
        draft.unlink(missing_ok=True)

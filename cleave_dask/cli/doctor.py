"""`cleave doctor`: is this machine fit to lend itself, to serve, to train; and if not, what to do."""

from __future__ import annotations

import click

from cleave_dask.cli import checkup, fleets
from cleave_dask.cli.frame import debug_option, json_option, make_console, print_json, quiet_libraries

_MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("fix", "red")}


@click.command()
@click.option("--scheduler", metavar="ADDRESS", help="Also check the way to the fleet that is served there.")
@json_option
@debug_option
@click.pass_context
def doctor(ctx: click.Context, scheduler: str | None, as_json: bool) -> None:
    """Check this machine and say what to do.

    Versions, settings, kernel, memory, disk, ports, links, TLS and namespaces. It takes a second or two and changes
    nothing. Exit code 1 means that something must be fixed before this machine can be a device; what only narrows
    what it can do is a note.
    """
    quiet_libraries()
    if scheduler is not None:
        fleets.parsed(scheduler)
    findings = checkup.check_machine()
    if scheduler is not None:
        findings.append(checkup.look(f"scheduler {scheduler}", lambda: _fleet(scheduler)))
    bad = sum(finding.state == "bad" for finding in findings)
    if as_json:
        print_json({"fit": not bad, "findings": [finding.as_dict() for finding in findings]})
    else:
        _print(findings, bad)
    if bad:
        ctx.exit(1)


def _fleet(scheduler: str) -> checkup.Finding:
    """Whether a fleet answers there, and what it lacks."""
    from cleave_dask._version import __version__
    from cleave_dask.cli.devices import look

    with fleets.joined(scheduler) as client:
        found = look(client, scheduler)
    what = f"scheduler {scheduler}"
    devices = found["devices"]
    other = sorted(device["name"] for device in devices if device["version"] != __version__)
    if found["server"] is None:
        return checkup.bad(what, "answers, but no server has joined", "start scheduler and server with `cleave serve`")
    if other:
        remedy = f"install cleave-dask {__version__} there"
        return checkup.note(what, f"{len(other)} of {len(devices)} devices run another version: {other[0]}", remedy)
    return checkup.good(what, f"answers; devices: {len(devices)}")


def _print(findings: list[checkup.Finding], bad: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", show_edge=False, pad_edge=False)
    for finding in findings:
        mark, colour = _MARKS[finding.state]
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(mark, style=colour), finding.what, text)
    make_console().print(table)
    notes = sum(finding.state == "note" for finding in findings)
    verdict = f"{bad} to fix" if bad else "fit to be a device"
    click.echo(f"{verdict}, {notes} note{'s' * (notes != 1)}" if notes else verdict)

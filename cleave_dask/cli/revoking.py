"""`cleave revoke` and `cleave invite`: who may take part."""

from __future__ import annotations

from time import time

import click

from cleave_dask.cli import fleets
from cleave_dask.cli.frame import debug_option, json_option, print_json


@click.command()
@click.argument("which", metavar="DEVICE|TOKEN")
@json_option
@debug_option
def revoke(which: str, as_json: bool) -> None:
    """End the membership of a device, or of a token and everyone who joined with it.

    DEVICE is a name, TOKEN a token or its first eight digits. It takes effect within seconds on the cluster that runs
    on this machine: the device is disconnected and cannot come back with the certificate that it has.
    """
    from cleave_dask.runtime.tokens import LENGTHS

    parts = which.split(".")
    target = parts[0] if tuple(map(len, parts)) == LENGTHS else which
    register = fleets.server_folder().change(lambda register: register.revoke(target))
    names = sorted({member.name for member in register.members if target in (member.name, member.token)})
    if as_json:
        print_json({"revoked": names})
    else:
        click.echo(f"revoked {target}; devices that this ends: {', '.join(names) or 'none'}")


@click.command()
@json_option
@debug_option
def invite(as_json: bool) -> None:
    """Print a new token for the cluster that is served from this machine."""
    from cleave_dask import config

    lifetime = config.seconds("security.token")
    token = fleets.server_folder().issue_token(now=time(), lifetime=lifetime)
    if as_json:
        print_json({"token": token, "seconds": lifetime})
    else:
        click.echo(token)

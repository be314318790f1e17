"""`cleave join`: lend this machine to a cluster."""

from __future__ import annotations

import os
import secrets
import socket
import sys

import click

from cleave_dask.cli import fleets
from cleave_dask.cli.frame import debug_option, json_option, print_json
from cleave_dask.errors import AccessError, InputError, NameTakenError

_WORKER = ("--no-nanny", "--no-dashboard", "--preload", "cleave_dask.runtime.device")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("url", metavar="URL")
@click.argument("token", metavar="[TOKEN]", required=False)
@click.argument("options", metavar="[OPTIONS OF DASK WORKER]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--name", help="What to be called there.  [default: this machine's name and four digits]")
@click.option("--enrol-only", is_flag=True, help="Get a certificate, print the worker's command, start nothing.")
@json_option
@debug_option
def join(
    url: str, token: str | None, options: tuple[str, ...], name: str | None, enrol_only: bool, as_json: bool
) -> None:
    """Lend this machine to the cluster at URL.

    The first time it takes the TOKEN that `cleave serve` printed; after that it is known there, until its certificate
    expires or is revoked. What follows is given to `dask worker`: --nthreads 2 --memory-limit 2GB. The key is made here
    and stays here. A second device on one machine needs a --name of its own.
    """
    from cleave_dask.runtime.credentials import DeviceFolder
    from cleave_dask.runtime.enrolment import enrol, parse_url
    from cleave_dask.runtime.roles import NAME

    if token is not None and token.startswith("-"):  # an option of the worker, not a token
        options = (token, *options)
        token = None
    if name is not None and not NAME.fullmatch(name):
        raise InputError(
            f"--name is {name!r}; use letters, digits, '-', '_' and '.', 63 at most, a letter or digit first"
        )
    folder = DeviceFolder(fleets.security_folder(), *parse_url(url), name)
    facts = folder.facts()
    if token is not None:
        try:
            facts = enrol(url, token, name or _default_name(), folder)
        except NameTakenError:
            if facts is None:
                raise  # somebody else has the name; otherwise it was this machine, and its key is still good
    if facts is None:
        raise AccessError(f"this machine has not joined {url} yet; give the token that `cleave serve` printed there")
    worker = ("worker", facts["scheduler"], "--name", facts["name"], *_WORKER, *folder.files.options, *options)
    if as_json:
        print_json({**facts, "folder": str(folder.path), "command": ["dask", *worker]})
    else:
        click.echo(f"joined {facts['scheduler']} as {facts['name']}; keys are in {folder.path}")
    if enrol_only:
        if not as_json:
            click.echo(f"start it with: dask {' '.join(worker)}")
        return
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "dask", *worker])


def _default_name() -> str:
    host = "".join(letter for letter in socket.gethostname().partition(".")[0] if letter.isascii() and letter.isalnum())
    return f"{host[:40] or 'device'}-{secrets.token_hex(2)}"

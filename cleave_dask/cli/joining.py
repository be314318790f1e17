"""`cleave join`: lend this machine to a cluster."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from subprocess import Popen
from typing import NoReturn

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
        _check_token(token)
        try:
            facts = enrol(url, token, name or _default_name(), folder)
        except NameTakenError:
            if facts is None:
                raise  # somebody else has the name; otherwise it was this machine, and its key is still good
    if facts is None:
        raise InputError(f"this machine has not joined {url} yet; give the token that `cleave serve` printed there")
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
    become([sys.executable, "-m", "dask", *worker], replaces=os.name != "nt")


def become(command: list[str], *, replaces: bool) -> NoReturn:
    """Go on as another program. Windows would give the shell back at once: there this one waits for the other."""
    if replaces:
        os.execv(command[0], command)
    with Popen(command) as child:
        while True:
            try:
                sys.exit(child.wait())
            except KeyboardInterrupt:
                continue  # it was the other's too, which ends in its own time


def _check_token(token: str) -> None:
    """What cannot be a token is bad input; one that the server refuses is a failure."""
    from cleave_dask.runtime.tokens import parse_token

    try:
        parse_token(token)
    except AccessError as error:
        raise InputError(str(error)) from error


def _default_name() -> str:
    host = "".join(letter for letter in socket.gethostname().partition(".")[0] if letter.isascii() and letter.isalnum())
    return f"{host[:40] or 'device'}-{secrets.token_hex(2)}"

"""`cleave completion`: what makes the Tab key know commands, options, recipes and fleets."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from cleave_dask.cli.frame import debug_option, json_option, print_json
from cleave_dask.errors import InputError

PROGRAM, VARIABLE = "cleave", "_CLEAVE_COMPLETE"

INSTALL = {
    "bash": "echo 'eval \"$(cleave completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(cleave completion zsh)\"' >> ~/.zshrc",
    "fish": "cleave completion fish > ~/.config/fish/completions/cleave.fish",
}
"""For each shell, the line that turns completion on for good."""


@click.command()
@click.argument("shell", type=click.Choice(list(INSTALL)), required=False)
@json_option
@debug_option
@click.pass_context
def completion(ctx: click.Context, shell: str | None, as_json: bool) -> None:
    """Print the completion script of a SHELL.

    Without SHELL it is the one that you use. To turn completion on for good:

    \b
      bash:  echo 'eval "$(cleave completion bash)"' >> ~/.bashrc
      zsh:   echo 'eval "$(cleave completion zsh)"' >> ~/.zshrc
      fish:  cleave completion fish > ~/.config/fish/completions/cleave.fish
    """  # noqa: D301  # click's mark for lines that are not to be wrapped
    chosen = shell or Path(os.environ.get("SHELL", "")).name
    if chosen not in INSTALL:
        raise InputError(f"there is no completion for the shell {chosen!r}; name one of {', '.join(INSTALL)}")
    script = _script(ctx, chosen)
    if as_json:
        print_json({"shell": chosen, "script": script, "install": INSTALL[chosen]})
        return
    click.echo(script)


def _script(ctx: click.Context, shell: str) -> str:
    """The script that asks `cleave` itself what could come next."""
    made = get_completion_class(shell)
    assert made is not None, "click knows all shells of INSTALL"
    assert ctx.parent is not None
    completer = made(ctx.parent.command, {}, PROGRAM, VARIABLE)
    return completer.source_template % completer.source_vars()  # without the look at the version of bash

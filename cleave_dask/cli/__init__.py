"""The command line: `cleave ...`, also registered as `dask cleave ...`.

    frame          what all commands share: options, errors as one line, exit codes
    interrupts     Ctrl-C and SIGTERM
    fleets         the cluster that a command works on: started here, or joined
    checkpoints    the folder that a run saves to
    progress       what training shows: a bar, plain lines, or JSON
    training, serving, exporting, inspecting, comparing    the commands

Nothing heavy is imported before a command needs it: every `dask` process loads this package, and help should be quick.
"""

from __future__ import annotations

import click

from cleave_dask._version import __version__
from cleave_dask.cli.comparing import compare, simulate
from cleave_dask.cli.exporting import export
from cleave_dask.cli.frame import CleaveGroup, debug_option
from cleave_dask.cli.inspecting import plan
from cleave_dask.cli.profiling import profile
from cleave_dask.cli.serving import serve
from cleave_dask.cli.training import train


@click.group(cls=CleaveGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="cleave")
@debug_option
def cleave() -> None:
    """Train one large model on many small machines.

    Start with `cleave train tiny-llama`, which needs nothing but this machine.
    """


for command in (train, serve, plan, simulate, compare, export, profile):
    cleave.add_command(command)


def main() -> None:
    """The `cleave` program."""
    cleave(prog_name="cleave")

"""The command line: `cleave ...`, also registered as `dask cleave ...`.

    frame          what all commands share: options, errors as one line, exit codes
    interrupts     Ctrl-C and SIGTERM
    fleets         the cluster that a command works on: started here, or joined
    checkpoints    the folder that a run saves to
    progress       what training shows: a bar, plain lines, or JSON
    checkup        what `doctor` looks at
    training, serving, exporting, reporting, inspecting, comparing, profiling, devices, doctor, completing, joining,
    revoking       the commands

Nothing heavy is imported before a command needs it: every `dask` process loads this package, and help should be quick.
"""

from __future__ import annotations

import click

from cleave_dask._version import __version__
from cleave_dask.cli.comparing import compare, simulate
from cleave_dask.cli.completing import completion
from cleave_dask.cli.devices import devices
from cleave_dask.cli.doctor import doctor
from cleave_dask.cli.exporting import export
from cleave_dask.cli.frame import CleaveGroup, debug_option
from cleave_dask.cli.inspecting import plan
from cleave_dask.cli.joining import join
from cleave_dask.cli.profiling import profile
from cleave_dask.cli.reporting import report
from cleave_dask.cli.revoking import invite, revoke
from cleave_dask.cli.serving import serve
from cleave_dask.cli.training import train

SECTIONS = {
    "Train": (train, report, export),
    "Before you own a fleet": (plan, simulate, compare),
    "A real fleet": (serve, join, devices, invite, revoke, profile, doctor),
    "This shell": (completion,),
}
"""All commands, as `cleave --help` lists them."""


@click.group(cls=CleaveGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="cleave")
@debug_option
def cleave() -> None:
    """Train one large model on many small machines.

    Start with `cleave train tiny-llama`, which needs nothing but this machine. A machine that only lends itself needs
    one command, which `cleave serve` prints.

    Exit codes: 0 done, 2 bad input, 1 failed. Settings are Dask's, under the key `cleave`.
    """


for section, commands in SECTIONS.items():
    cleave.add_section(section, commands)


def main() -> None:
    """The `cleave` program."""
    cleave(prog_name="cleave")

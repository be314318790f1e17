"""`cleave report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from cleave_dask.cli.frame import debug_option, json_option, print_json, quiet_libraries
from cleave_dask.errors import InputError
from cleave_dask.formatting import quantity


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--output",
    "-o",
    default="report.html",
    show_default=True,
    metavar="FILE.html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write to.",
)
@json_option
@debug_option
def report(checkpoint: Path, output: Path, as_json: bool) -> None:
    """Write what happened in the run of CHECKPOINT as one HTML file.

    It is the dashboard's page after the run: loss, tiles, devices, what bound, churn. The file opens in any browser,
    without a server and without a network.
    """
    if not checkpoint.is_dir():
        raise InputError(f"there is no folder {checkpoint}; give the checkpoint that `cleave train` printed")
    quiet_libraries()
    from cleave_dask.views.report import read_run, render_report

    story = read_run(checkpoint)
    text = render_report(story, checkpoint.resolve().name)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(output)!r}: {error.strerror}; choose another --output") from error
    last = story.last
    if as_json:
        print_json({"checkpoint": str(checkpoint), "step": last["step"], "loss": last["loss"], "file": str(output)})
        return
    click.echo(f"{len(story.records):,} steps of {checkpoint} are told in {output} ({quantity(len(text), 'B')})")

"""`cleave export`: a checkpoint as files that other tools load."""

from __future__ import annotations

from pathlib import Path

import click

from cleave_dask.cli.frame import debug_option, json_option, print_json
from cleave_dask.errors import InputError


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path(file_okay=False, path_type=Path))
@click.option("--recipe", required=True, metavar="RECIPE", help="The recipe that it was trained with.")
@click.option(
    "--output",
    "-o",
    required=True,
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write to.",
)
@click.option("--step", type=click.IntRange(0), help="Which step to export.  [default: the newest]")
@json_option
@debug_option
def export(checkpoint: Path, recipe: str, output: Path, step: int | None, as_json: bool) -> None:
    """Write the weights of CHECKPOINT for other tools.

    They become safetensors and a config.json, which `from_pretrained` of transformers loads back.
    """
    raise NotImplementedError

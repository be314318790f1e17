"""`cleave export`: a checkpoint as files that other tools load."""

from __future__ import annotations

from pathlib import Path

import click

from cleave_dask.cli.frame import debug_option, json_option, print_json, quiet_libraries, recipe_option
from cleave_dask.errors import InputError
from cleave_dask.formatting import quantity

_WEIGHTS = "weights/"  # where a checkpoint keeps them, beside the state of the optimizer


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path(file_okay=False, path_type=Path))
@recipe_option
@click.option(
    "--output",
    "-o",
    required=True,
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write to.",
)
@click.option("--step", type=click.IntRange(0), help="Which step to export.  [default: the one saved last]")
@click.option("--overwrite", is_flag=True, help="Replace a former export.")
@json_option
@debug_option
def export(checkpoint: Path, recipe: str, output: Path, step: int | None, overwrite: bool, as_json: bool) -> None:
    """Write the weights of CHECKPOINT for other tools.

    They become safetensors and a config.json, which `from_pretrained` of transformers loads back.
    """
    from cleave_dask.graph.recipes import Recipe
    from cleave_dask.runtime.store import TileStore

    trained = Recipe.load(recipe)
    store = TileStore(checkpoint)
    steps = store.steps()
    if not steps:
        raise InputError(f"there is no saved step in {checkpoint}; give the folder that `cleave train` printed")
    if step is not None and step not in steps:
        raise InputError(f"step {step} is not in {checkpoint}; the steps there are {', '.join(map(str, steps))}")

    quiet_libraries()
    from cleave_dask.graph.building import build_model
    from cleave_dask.runtime.export import export as write
    from cleave_dask.runtime.optimizers import to_tensor

    state = store.load(step)
    weights = {
        name.removeprefix(_WEIGHTS): to_tensor(array)
        for name, array in state.arrays.items()
        if name.startswith(_WEIGHTS)
    }
    folder = write(weights, build_model(trained, device="meta"), output, overwrite=overwrite)
    written = sum(path.stat().st_size for path in folder.iterdir())
    if as_json:
        print_json({"checkpoint": str(checkpoint), "step": state.document["step"], "folder": str(folder)})
        return
    click.echo(f"step {state.document['step']} of {checkpoint} is now in {output} ({quantity(written, 'B')})")
    click.echo(f"to load it: transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})")

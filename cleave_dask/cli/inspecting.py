"""`cleave plan`: numbers before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cleave_dask.cli.frame import (
    debug_option,
    fleet_option,
    json_option,
    make_console,
    print_json,
    quiet_libraries,
    recipe_argument,
    wire_option,
)
from cleave_dask.errors import InputError
from cleave_dask.formatting import duration, quantity

if TYPE_CHECKING:
    from cleave_dask.planning.values import Plan


@click.command()
@recipe_argument
@fleet_option(required=True, explain="The devices: a file, or a name such as lab-8.")
@wire_option
@click.option("--levels", is_flag=True, help="Print a row for each level of the step.")
@click.option(
    "--plot",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw how one gemm is cut, a colour for each device.",
)
@click.option("--gemm", help="The gemm to draw.  [default: the one with the most tiles]")
@json_option
@debug_option
def plan(
    recipe: str, fleet: str, wire: str | None, levels: bool, plot: Path | None, gemm: str | None, as_json: bool
) -> None:
    """Predict one training step of RECIPE on a fleet.

    Nothing is trained: it needs neither weights nor data nor devices.
    """
    from cleave_dask.fleet.devices import Fleet
    from cleave_dask.graph.recipes import Recipe

    what, where = Recipe.load(recipe).over(wire), Fleet.load(fleet)
    quiet_libraries()

    from cleave_dask.graph.building import build_graph
    from cleave_dask.planning.planner import plan as make_plan

    graph = build_graph(what)
    made = make_plan(graph, where)
    if plot is not None:
        _draw(made, gemm, plot)
    if as_json:
        print_json(_plan_json(made))
        return
    click.echo(str(what))
    click.echo(str(where))
    _print_plan(made, len(graph.gemms), len(where))
    if levels:
        _print_levels(made)
    if plot is not None:
        click.echo(f"picture: {plot}")


def _draw(plan: Plan, gemm: str | None, file: Path) -> None:
    """Write the picture of one gemm's partition."""
    from cleave_dask.resources import nearest
    from cleave_dask.views.partition import draw_partition

    if not plan.by_gemm:
        raise InputError("no gemm is sent out, so there is nothing to draw; all of them are too small")
    chosen = gemm or max(plan.by_gemm, key=lambda name: len(plan.by_gemm[name]))
    if chosen not in plan.by_gemm:
        raise InputError(f"no gemm that is sent out is called {chosen!r}; {nearest(chosen, list(plan.by_gemm))}")
    try:
        file.write_text(draw_partition(plan, chosen))
    except OSError as error:
        raise InputError(f"cannot write {str(file)!r}: {error.strerror}; choose another --plot") from error


def _print_levels(plan: Plan) -> None:
    from rich.table import Table

    table = Table("level", "gemms", "seconds", "bound", "binding", "devices", "tiles", "down", "up")
    for row in plan.levels:
        table.add_row(
            f"{row.level}{' (filler)' if row.filler else ''}",
            row.gemms[0] if len(row.gemms) == 1 else f"{row.gemms[0]} and {len(row.gemms) - 1} more",
            *(duration(row.seconds), duration(row.bound_seconds), row.binding, f"{row.devices:,}", f"{row.tiles:,}"),
            *(quantity(row.down_bytes, "B"), quantity(row.up_bytes, "B")),
        )
    make_console().print(table)


def _plan_json(plan: Plan) -> dict[str, Any]:
    """The plan's attributes; of the tiles, which can be a million, their number."""
    return {
        "seconds": plan.seconds,
        "bound_seconds": plan.bound_seconds,
        "binding": plan.binding,
        "tiles": len(plan.tiles),
        "devices_used": plan.devices_used,
        "down_bytes": plan.down_bytes,
        "up_bytes": plan.up_bytes,
        "peak_memory": dict(plan.peak_memory),
    }


def _print_plan(plan: Plan, gemms: int, devices: int) -> None:
    from rich.table import Table

    served = gemms - len(plan.by_gemm)
    fullest = max(plan.peak_memory, key=lambda name: plan.peak_memory[name])
    ratio = f" ({plan.seconds / plan.bound_seconds:.3g} x the bound)" if plan.bound_seconds else ""
    table = Table(show_header=False)
    for row in (
        ("seconds", f"{duration(plan.seconds)}{ratio}"),
        ("bound_seconds", duration(plan.bound_seconds)),
        ("binding", plan.binding),
        ("devices_used", f"{plan.devices_used:,} of {devices:,}"),
        ("tiles", f"{len(plan.tiles):,} of {len(plan.by_gemm):,} gemms; {served:,} more stay on the server"),
        ("down_bytes", quantity(plan.down_bytes, "B")),
        ("up_bytes", quantity(plan.up_bytes, "B")),
        ("peak_memory", f"{quantity(plan.peak_memory[fullest], 'B')} on {fullest}"),
    ):
        table.add_row(*row)
    make_console().print(table)

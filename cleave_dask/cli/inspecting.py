"""`cleave plan`: numbers before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cleave_dask.cli.frame import (
    debug_option,
    doing,
    fleet_option,
    json_option,
    make_console,
    plot_option,
    print_json,
    quiet_libraries,
    recipe_argument,
    wire_option,
    write_picture,
)
from cleave_dask.errors import InputError
from cleave_dask.formatting import duration, quantity

if TYPE_CHECKING:
    from cleave_dask.planning.values import LevelCost, Plan


@click.command()
@recipe_argument
@fleet_option(required=True, explain="The devices: a file, or a name such as lab-8.")
@wire_option
@click.option("--levels", is_flag=True, help="Print a row for each level, also of those that are alike.")
@plot_option("Draw how one gemm is cut, a colour for each device.")
@click.option("--gemm", help="The gemm to draw.  [default: the one with the most tiles]")
@json_option
@debug_option
def plan(
    recipe: str, fleet: str, wire: str | None, levels: bool, plot: Path | None, gemm: str | None, as_json: bool
) -> None:
    """Predict one training step of RECIPE on a fleet.

    Nothing is trained: it needs neither weights nor data nor devices.
    """
    if gemm is not None and plot is None:
        raise InputError(f"--gemm {gemm} names what to draw; say where to with --plot FILE.svg, or leave it out")
    from cleave_dask.fleet.devices import Fleet
    from cleave_dask.graph.recipes import Recipe

    what, where = Recipe.load(recipe).over(wire), Fleet.load(fleet)
    quiet_libraries()

    from cleave_dask.graph.building import build_graph
    from cleave_dask.planning.planner import plan as make_plan

    with doing(f"capturing a step of {recipe}"):
        graph = build_graph(what)
    with doing(f"planning it for {len(where):,} devices"):
        made = make_plan(graph, where)
    if plot is not None:
        _draw(made, gemm, plot)
    if as_json:
        print_json(_plan_json(made) | ({"levels": [asdict(row) for row in made.levels]} if levels else {}))
        return
    click.echo(str(what))
    click.echo(str(where))
    _print_plan(made, len(graph.gemms), len(where))
    _print_levels([[row] for row in made.levels] if levels else _alike(made.levels))
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
    write_picture(file, draw_partition(plan, chosen))


def _alike(levels: Sequence[LevelCost]) -> list[list[LevelCost]]:
    """Levels that cost the same, as all layers of a model do, together."""
    groups: dict[tuple[object, ...], list[LevelCost]] = {}
    for row in levels:
        cost = row.filler, len(row.gemms), row.seconds, row.binding, row.tiles, row.down_bytes, row.up_bytes
        groups.setdefault(cost, []).append(row)
    return list(groups.values())


def _in_any_layer(gemm: str) -> str:
    """The name of a gemm without that of its layer."""
    return [part for part in gemm.split(".") if not part.split(":")[0].isdigit()][-1]


def _print_levels(groups: Sequence[Sequence[LevelCost]]) -> None:
    """A row for levels that are alike: what one of them costs."""
    from rich.table import Table

    table = Table("levels", "times", "gemms", "seconds", "bound", "binding", "devices", "tiles", "down", "up")
    for rows in groups:
        row = rows[0]
        span = f"{row.level}" if len(rows) == 1 else f"{row.level}-{rows[-1].level}"
        name = row.gemms[0] if len(rows) == 1 else _in_any_layer(row.gemms[0])
        more = f" and {len(row.gemms) - 1} more" if len(row.gemms) > 1 else ""
        table.add_row(
            f"{span}{' filler' if row.filler else ''}",
            *(f"{len(rows)}", f"{name}{more}", duration(row.seconds), duration(row.bound_seconds), row.binding),
            *(f"{row.devices:,}", f"{row.tiles:,}", quantity(row.down_bytes, "B"), quantity(row.up_bytes, "B")),
        )
    for column in table.columns:
        column.no_wrap = column.header != "gemms"
    make_console(width=120).print(table)


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
        "server_memory": plan.server_memory,
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
        ("server_memory", plan.why("server")),
    ):
        table.add_row(*row)
    make_console().print(table)

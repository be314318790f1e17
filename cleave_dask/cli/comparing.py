"""`cleave compare` and `cleave simulate`: systems side by side, and ours in detail, on a fleet that need not exist."""

from __future__ import annotations

import os
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
from cleave_dask.resources import shown

if TYPE_CHECKING:
    from cleave_dask.fleet.devices import Fleet
    from cleave_dask.graph.ir import StepGraph
    from cleave_dask.graph.recipes import Recipe
    from cleave_dask.simulation.baselines.values import Result

_EXPLAIN_FLEET = "The devices: a file, or a name such as lab-8."
_churn_option = click.option(
    "--churn", type=float, metavar="RATE", help="Mishaps per device and hour.  [default: none]"
)
_seed_option = click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the churn.")


@click.command()
@recipe_argument
@fleet_option(required=True, explain=_EXPLAIN_FLEET)
@wire_option
@_churn_option
@_seed_option
@click.option(
    "--system",
    "systems",
    multiple=True,
    metavar="NAME",
    help="A system to compare, such as dtfm or alpa-8xH100; may be given again.  [default: all]",
)
@click.option("--simulate", "simulated", is_flag=True, help="Play our own plans; done anyway with --churn.")
@plot_option("Draw a bar for each system.")
@json_option
@debug_option
def compare(
    recipe: str,
    fleet: str,
    churn: float | None,
    wire: str | None,
    seed: int,
    systems: tuple[str, ...],
    simulated: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Price one training step of RECIPE by every system on one fleet.

    Each system gets its best configuration, and memory limits apply to all. Nothing is trained.
    """
    from cleave_dask.simulation.baselines.comparison import SYSTEMS, check_system
    from cleave_dask.simulation.baselines.comparison import compare as price_all

    for name in systems:
        check_system(name)
    _check(churn)
    what, where, graph = _load(recipe, fleet, wire)
    with doing(f"pricing {len(systems or SYSTEMS)} systems"):
        results = price_all(graph, where, systems=systems or SYSTEMS, churn=churn, seed=seed, simulated=simulated)
    if plot is not None:
        _draw(f"{recipe} on {fleet}", results, plot)
    rows = _rows(results)
    if as_json:
        print_json({"rows": rows})
        return
    click.echo(str(what))
    click.echo(str(where))
    _print_rows(rows)
    if any(row["source"] == "simulation" for row in rows):
        _print_accuracy()
    if plot is not None:
        click.echo(f"picture: {plot}")


@click.command()
@recipe_argument
@fleet_option(required=True, explain=_EXPLAIN_FLEET)
@wire_option
@click.option(
    "--churn",
    metavar="RATE|FILE.csv",
    help="Mishaps per device and hour, or a file of them and of bandwidths over time.  [default: none]",
)
@_seed_option
@json_option
@debug_option
def simulate(recipe: str, fleet: str, wire: str | None, churn: str | None, seed: int, as_json: bool) -> None:
    """Play one training step of RECIPE on a fleet, on virtual time.

    Nothing is trained: it needs neither weights nor data nor devices.
    """
    from cleave_dask.fleet.churn import Churn
    from cleave_dask.fleet.devices import Fleet

    rate = _rate(churn)
    _check(rate)
    replayed = Churn.load(_file(churn), Fleet.load(fleet)) if churn is not None and rate is None else None
    what, where, graph = _load(recipe, fleet, wire)

    from cleave_dask.planning.planner import plan
    from cleave_dask.simulation.accuracy import measured_accuracy
    from cleave_dask.simulation.baselines.own import churn_for
    from cleave_dask.simulation.simulator import Simulator

    with doing(f"planning it for {len(where):,} devices"):
        made = plan(graph, where)
    script = churn_for(made, rate, seed) if replayed is None else replayed
    simulator = Simulator(made, script)
    with doing(f"playing {len(made.tiles):,} tiles"):
        trace = simulator.run()
    happened = [event for event in script or () if event.seconds <= trace.seconds]
    facts = {
        "seconds": trace.seconds,
        "plan_seconds": made.seconds,
        "bound_seconds": made.bound_seconds,
        "binding": made.binding,
        "devices_used": made.devices_used,
        "tiles": len(made.tiles),
        "down_bytes": round(simulator.down_bytes),
        "up_bytes": round(simulator.up_bytes),
        "left": sum(event.kind == "leave" for event in happened),
        "stalled": sum(event.kind == "stall" for event in happened),
        "slowed": sum(event.kind == "slow" for event in happened),
        "links_changed": sum(event.kind in ("down", "up") for event in happened),
        "handovers": simulator.handovers,
        "lost": simulator.lost,
    }
    if as_json:
        print_json({**facts, "measured_over_simulated": measured_accuracy().span})
        return
    click.echo(str(what))
    click.echo(str(where))
    _print_facts(facts, len(where))
    _print_accuracy()


def _rate(churn: str | None) -> float | None:
    """The rate that was given, if it was one and not a file."""
    try:
        return None if churn is None else float(churn)
    except ValueError:
        return None


def _file(churn: str) -> str:
    """What was given as churn and is no rate, if there is a file of that name."""
    if not os.path.exists(churn):  # that of Path raises where a name is too long
        remedy = "give mishaps per device and hour, or a CSV file of them"
        raise InputError(f"--churn is {shown(churn)}, no number and no file; {remedy}")
    return churn


def _check(churn: float | None) -> None:
    """A rate can be judged before anything is built."""
    if churn is not None and not 0 <= churn < float("inf"):
        raise InputError(f"a churn rate of {churn}; give mishaps per device and hour, 0 or more")


def _load(recipe: str, fleet: str, wire: str | None) -> tuple[Recipe, Fleet, StepGraph]:
    """Recipe, fleet and the captured step."""
    from cleave_dask.fleet.devices import Fleet
    from cleave_dask.graph.recipes import Recipe

    what, where = Recipe.load(recipe).over(wire), Fleet.load(fleet)
    quiet_libraries()

    from cleave_dask.graph.building import build_graph

    with doing(f"capturing a step of {recipe}"):
        return what, where, build_graph(what)


def _rows(results: list[Result]) -> list[dict[str, Any]]:
    """The rows of the table; `speedup` is how many times faster than the system Cleave is."""
    ours = next((result.seconds for result in results if result.system == "cleave"), None)
    return [
        {
            "system": result.system,
            "seconds": result.seconds,
            "feasible": result.feasible,
            "why": result.why,
            "binding": result.binding,
            "devices_used": result.devices_used,
            "memory": result.memory,
            "speedup": result.seconds / ours if ours and result.seconds is not None else None,
            "configuration": result.configuration,
            "source": result.source,
        }
        for result in results
    ]


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("system", "seconds", "cleave's speed-up", "binding", "memory", "devices", "seconds from")
    for row in rows:
        if not row["feasible"]:
            table.add_row(row["system"], "infeasible")
            continue
        faster = f"{row['speedup']:.3g} x" if row["speedup"] is not None else ""
        memory, devices = quantity(row["memory"], "B"), f"{row['devices_used']:,}"
        table.add_row(row["system"], duration(row["seconds"]), faster, row["binding"], memory, devices, row["source"])
    make_console().print(table)
    for row in rows:  # below, not inside: a reason takes a line
        click.echo(f"{row['system']}: {row['configuration'] if row['feasible'] else 'infeasible: ' + row['why']}")


def _print_accuracy() -> None:
    """How far simulated seconds were off, beside them."""
    from cleave_dask.simulation.accuracy import measured_accuracy

    click.echo(str(measured_accuracy()))


def _print_facts(facts: dict[str, Any], devices: int) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        if name.endswith("seconds"):
            shown = duration(value)
        elif name.endswith("bytes"):
            shown = quantity(value, "B")
        elif name == "devices_used":
            shown = f"{value:,} of {devices:,}"
        table.add_row(name, shown)
    make_console().print(table)


def _draw(title: str, results: list[Result], file: Path) -> None:
    from cleave_dask.views.bars import Bar, draw_bars

    write_picture(file, draw_bars(title, [Bar(result.system, result.seconds, result.binding) for result in results]))

"""Our own rows: the plan with k split, and the published Cleave, which never splits it (arXiv 2512.22142).

Both are planned by the same planner and played by the same simulator, under the same churn. Shapes by link, parcels,
filler beside the critical path and speculation are ours in both rows: the published scheme is given every advantage
but the split of k.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave_dask.errors import PlanError
from cleave_dask.fleet.churn import Churn
from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.planner import Tiling, plan
from cleave_dask.planning.values import Plan
from cleave_dask.simulation.baselines.values import Result, infeasible
from cleave_dask.simulation.simulator import simulate

CHURNED = 3.0
"""A churn script is made for so many times the seconds that a plan predicts, and for an hour at least."""


@dataclass(frozen=True, slots=True)
class Play:
    """How a plan is played on virtual time."""

    churn: float | None = None  # mishaps per device and hour
    seed: int = 0


def churn_for(made: Plan, rate: float | None, seed: int = 0) -> Churn | None:
    """Mishaps at `rate` per device and hour, for longer than a step of this plan takes."""
    if not rate:
        return None
    return Churn.sample(made.fleet, rate, seed, seconds=max(3600.0, CHURNED * made.seconds))


def price_tiles(system: str, graph: StepGraph, fleet: Fleet, *, tiling: Tiling, play: Play | None = None) -> Result:
    """A step in tiles as its plan predicts it, or played."""
    try:
        made = plan(graph, fleet, tiling=tiling)
    except PlanError as error:
        return infeasible(system, str(error))
    seconds = made.seconds
    if play is not None:
        seconds = simulate(made, churn_for(made, play.churn, play.seed)).seconds
    return Result(
        system,
        seconds,
        binding=made.binding,
        devices_used=made.devices_used,
        memory=float(max(made.peak_memory.values(), default=0)),
        moved=(made.down_bytes + made.up_bytes) / max(1, made.devices_used),
        configuration=f"{len(made.tiles):,} tiles, plan {made.seconds:.4g} s, bound {made.bound_seconds:.4g} s",
        source="plan" if play is None else "simulation",
    )

"""When a training plans anew: devices came or went, or turned out to be other than they said.

Looked at between two steps. Devices that came or went change where tiles go; the grid stays, and with it every bit of
the loss (`replanning`). A new grid is taken only if that was allowed and pays: the plan in use, priced on the fleet as
it is now known to be, must take GAIN times as long as a new one and SECONDS longer. New grids are REST steps apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.calibration import differ
from cleave_dask.planning.cost import Rates, Shape
from cleave_dask.planning.layout import Layout, lay_out
from cleave_dask.planning.pricing import priced
from cleave_dask.planning.replanning import replan
from cleave_dask.planning.values import Plan

logger = logging.getLogger(__name__)

Planner = Callable[[StepGraph, Fleet], Plan]

FACTOR = 1.5
"""By which a figure must differ from the planned one before anything is considered."""

GAIN = 1.2
"""Times as long as a new plan that the one in use must take by what is known now."""

SECONDS = 0.05
"""Seconds a step that a new plan must save: it has to be made and sent."""

REST = 3
"""Steps between two new grids, at least."""


class Adapter:
    """The plan in use and the fleet that it was made for."""

    def __init__(self, graph: StepGraph, planner: Planner, fleet: Fleet, *, new_grids: bool = True) -> None:
        self.graph = graph
        self.planner = planner
        self.new_grids = new_grids
        self.plan = planner(graph, fleet)
        self._members = _names(fleet)  # whom it has tiles for
        self._first, self._first_members = self.plan, self._members  # of this grid: who returns gets its own tiles back
        self._weighed = fleet  # as it was when a new grid was last thought of
        self._rested = REST  # steps since then

    def step_begins(self, fleet: Fleet) -> bool:
        """Look at the fleet as it is known to be now; whether the plan has changed."""
        self._rested += 1
        plan: Plan | None = self.plan
        if _names(fleet) != self._members:
            plan = self._moved(fleet)
            self._members = _names(fleet)
        if plan is None or (self.new_grids and self._rested >= REST and differ(self._weighed, fleet, FACTOR)):
            better = self._better(plan, fleet)
            if better is not plan:
                self._first, self._first_members = better, _names(fleet)
            plan, self._weighed, self._rested = better, fleet, 0
        changed = plan is not self.plan
        self.plan = plan
        return changed

    def _moved(self, fleet: Fleet) -> Plan | None:
        """The plan with the same grid for the devices that are there; None if they cannot hold its tiles."""
        if _names(fleet) == self._first_members:
            return self._first
        try:
            return replan(self._first, self._first.graph, fleet)
        except PlanError as error:
            logger.info("The tiles in use do not fit the devices that are left: %s", error)
            return None

    def _better(self, plan: Plan | None, fleet: Fleet) -> Plan:
        """A new plan if it is worth it, else the one given."""
        if plan is None:
            return self.planner(self.graph, fleet)
        try:
            fresh = self.planner(self.graph, fleet)
        except PlanError as error:
            logger.warning("No new plan for the fleet as it is now: %s", error)
            return plan
        now = seconds_on(plan, plan.graph, fleet)
        if now < GAIN * fresh.seconds or now - fresh.seconds < SECONDS:
            return plan
        logger.info("A new plan: %.3g s a step instead of %.3g s", fresh.seconds, now)
        return fresh


def _names(fleet: Fleet) -> set[str]:
    return {device.name for device in fleet.devices}


def seconds_on(plan: Plan, graph: StepGraph, fleet: Fleet) -> float:
    """What a step of `plan` takes on a fleet other than the one that it was made for; all its devices must be there."""
    rates, place = Rates.of(fleet), {device.name: position for position, device in enumerate(fleet.devices)}
    gemms = {gemm.name: gemm for gemm in graph.gemms}
    made: dict[tuple[Shape, int, int, tuple[bool, ...]], Layout] = {}
    layouts: dict[str, Layout] = {}
    for name, tiles in plan.by_gemm.items():
        key = Shape.of(gemms[name]), id(tiles.ranges), id(tiles.owner), tiles.kept
        if key not in made:
            places = np.array([place.get(device, -1) for device in tiles.names], dtype=np.int64)
            owner = places[tiles.owner]
            made[key] = lay_out(key[0], tiles.ranges.astype(np.int64), owner, rates, fleet.server, kept=tiles.kept)
        layouts[name] = made[key]
    return priced(graph, fleet, layouts, tiling=plan.tiling).seconds

"""A step that was cut short: the grid that its tiles on disk are of, and whether to go on with it.

The plan of a resumed run may cut gemms in another way, because other devices are there; tiles on disk would then fit
nothing. So the grid of the step in flight is on disk too, and the first step after a resume is planned on it if that
is predicted to be quicker than a fresh plan that starts from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cleave_dask.errors import CheckpointError, PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.regridding import plan_on_grid
from cleave_dask.planning.values import Plan, Tiles
from cleave_dask.runtime.zarr_files import StoredArray, memory, read_arrays, read_manifest

PREFIX = "inflight-"

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What is known of a step that was in flight when its server, or its client, was killed."""

    graph: str  # digest of its program
    tiles: Mapping[str, Tiles]  # its grid
    done: int  # tiles on disk

    @property
    def share(self) -> float:
        """How much of the step is on disk."""
        return min(1.0, self.done / max(1, sum(map(len, self.tiles.values()))))

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Interrupted:
        """From what the server tells."""
        return cls(answer["graph"], _tiles(answer, answer["ranges"], answer["owner"]), answer["done"])


def find_interrupted(folder: Path, identity: str) -> dict[str, Any] | None:
    """The step that was in flight after this save, as the server tells it; None if it left no tile."""
    started = [(place, content) for place, content in folders(folder) if content["save"] == identity]
    done = sum(1 for place, _ in started for _ in place.glob("tiles/*/0/c.*.0"))
    for place, content in started:
        if content["pass"] == 0 and done:
            try:
                arrays = {name: memory(name, entry, {}) for name, entry in content["arrays"].items()}
                read_arrays(place, content, arrays)
            except OSError:
                return None
            head = {name: content[name] for name in ("graph", "gemms", "counts", "devices")}
            return {**head, "ranges": arrays["ranges"].data, "owner": arrays["owner"].data, "done": done}
    return None


def better_plan(interrupted: Interrupted, graph: StepGraph, fleet: Fleet, fresh: Plan) -> Plan | None:
    """The plan to finish an interrupted step with, if that pays more than the fresh plan."""
    if interrupted.graph != graph.digest or _same_grid(interrupted.tiles, fresh.by_gemm):
        return None
    try:
        plan = plan_on_grid(graph, fleet, interrupted.tiles)
    except PlanError:
        return None  # no device that is here can hold its tiles
    return plan if plan.seconds * (1 - interrupted.share) < fresh.seconds else None


def folders(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folders with tiles of steps in flight, and what their manifests say; damaged ones are left out."""
    for place in sorted(folder.glob(f"{PREFIX}*")):
        try:
            yield place, read_manifest(place)[0]
        except (OSError, CheckpointError):
            continue


def grid_head(plan: Plan) -> dict[str, Any]:
    """The names in a grid, for a manifest."""
    devices = next((tiles.names for tiles in plan.by_gemm.values()), ())
    counts = [len(tiles) for tiles in plan.by_gemm.values()]
    return {"gemms": list(plan.by_gemm), "counts": counts, "devices": list(devices)}


def grid_arrays(plan: Plan) -> dict[str, StoredArray]:
    """The numbers of a grid: all tiles, gemm after gemm."""
    ranges = np.concatenate([np.empty((0, 6), np.int32), *(tiles.ranges for tiles in plan.by_gemm.values())])
    owner = np.concatenate([np.empty(0, np.int32), *(tiles.owner for tiles in plan.by_gemm.values())])
    return {
        "ranges": StoredArray(ranges.astype(np.int32), "int32"),
        "owner": StoredArray(owner.astype(np.int32), "int32"),
    }


def _tiles(head: Mapping[str, Any], ranges: Array, owner: Array) -> dict[str, Tiles]:
    """The way back from `grid_head` and `grid_arrays`."""
    ends = np.cumsum(head["counts"]).tolist()
    spans = zip(head["gemms"], [0, *ends], ends, strict=False)
    names = tuple(head["devices"])
    return {gemm: Tiles(gemm, ranges[start:stop], owner[start:stop], names) for gemm, start, stop in spans}


def _same_grid(one: Mapping[str, Tiles], other: Mapping[str, Tiles]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[gemm].ranges, other[gemm].ranges) for gemm in one)

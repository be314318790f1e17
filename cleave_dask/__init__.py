"""Train one large model on many small machines: Dask carries every large product of a training step to them in tiles.

The layout, in the order of the flow; a folder imports only from those above it (tests/test_architecture.py):

    errors, config        what can go wrong, what can be set; formatting and resources beside them
    graph/                a torch module's training step as a value: gemms and everything between; recipes
    fleet/                devices, links and the server as numbers
    planning/             which tile of which gemm goes to which device, and what that costs
    runtime/              the plan on Dask: kernels, checks, tile store, server, device, lowering, trainer
    simulation/           fleets that are not there: emulated on this machine, or on a virtual clock
    views/                what a person looks at: tables, plots, dashboard
    cli                   `cleave ...`, also `dask cleave ...`

Names are loaded when they are first used: a device imports this package without torch, transformers, zarr or bokeh.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cleave_dask._version import __version__
from cleave_dask.errors import (
    AccessError,
    BatchError,
    CaptureError,
    CheckpointError,
    CleaveError,
    ClusterError,
    DistrustedError,
    FleetError,
    ForeignCheckpointError,
    InputError,
    NameTakenError,
    PlanError,
    RecipeError,
    StepError,
)

if TYPE_CHECKING:
    from cleave_dask.fleet.churn import Churn
    from cleave_dask.fleet.devices import Device, Fleet, Link, Server
    from cleave_dask.graph.capture import capture
    from cleave_dask.graph.ir import Gemm, StepGraph
    from cleave_dask.graph.losses import with_loss
    from cleave_dask.graph.recipes import Recipe
    from cleave_dask.planning.planner import plan
    from cleave_dask.planning.replanning import replan
    from cleave_dask.planning.values import Plan, Tile
    from cleave_dask.runtime.async_trainer import AsyncTrainer
    from cleave_dask.runtime.export import export, read_weights
    from cleave_dask.runtime.lowering import lower
    from cleave_dask.runtime.matmul import matmul
    from cleave_dask.runtime.trace import Trace
    from cleave_dask.runtime.trainer import Trainer
    from cleave_dask.runtime.verification import verify_tile
    from cleave_dask.simulation.baselines.comparison import compare
    from cleave_dask.simulation.hollow import HollowFleet
    from cleave_dask.simulation.local import LocalFleet
    from cleave_dask.simulation.simulator import simulate
    from cleave_dask.views.tracking import track

__all__ = [
    "AccessError",
    "AsyncTrainer",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "Churn",
    "CleaveError",
    "ClusterError",
    "Device",
    "DistrustedError",
    "Fleet",
    "FleetError",
    "ForeignCheckpointError",
    "Gemm",
    "HollowFleet",
    "InputError",
    "Link",
    "LocalFleet",
    "NameTakenError",
    "Plan",
    "PlanError",
    "Recipe",
    "RecipeError",
    "Server",
    "StepError",
    "StepGraph",
    "Tile",
    "Trace",
    "Trainer",
    "__version__",
    "capture",
    "compare",
    "export",
    "lower",
    "matmul",
    "plan",
    "read_weights",
    "replan",
    "simulate",
    "track",
    "verify_tile",
    "with_loss",
]

_LAZY = {
    "AsyncTrainer": "cleave_dask.runtime.async_trainer",
    "Churn": "cleave_dask.fleet.churn",
    "Device": "cleave_dask.fleet.devices",
    "Fleet": "cleave_dask.fleet.devices",
    "Gemm": "cleave_dask.graph.ir",
    "HollowFleet": "cleave_dask.simulation.hollow",
    "Link": "cleave_dask.fleet.devices",
    "LocalFleet": "cleave_dask.simulation.local",
    "Plan": "cleave_dask.planning.values",
    "Recipe": "cleave_dask.graph.recipes",
    "Server": "cleave_dask.fleet.devices",
    "StepGraph": "cleave_dask.graph.ir",
    "Tile": "cleave_dask.planning.values",
    "Trace": "cleave_dask.runtime.trace",
    "Trainer": "cleave_dask.runtime.trainer",
    "capture": "cleave_dask.graph.capture",
    "compare": "cleave_dask.simulation.baselines.comparison",
    "export": "cleave_dask.runtime.export",
    "lower": "cleave_dask.runtime.lowering",
    "matmul": "cleave_dask.runtime.matmul",
    "plan": "cleave_dask.planning.planner",
    "read_weights": "cleave_dask.runtime.export",
    "replan": "cleave_dask.planning.replanning",
    "simulate": "cleave_dask.simulation.simulator",
    "track": "cleave_dask.views.tracking",
    "verify_tile": "cleave_dask.runtime.verification",
    "with_loss": "cleave_dask.graph.losses",
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name when the name is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__:
            raise
        remedy = f"cleave_dask.{name} needs {error.name}; install it with: pip install 'cleave-dask[train]'"
        raise ModuleNotFoundError(remedy, name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, whether they have been loaded or not."""
    return sorted({*globals(), *__all__})

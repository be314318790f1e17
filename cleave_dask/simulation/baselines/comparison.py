"""All systems on one step graph and one fleet, each at its best."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from cleave_dask.errors import InputError, PlanError
from cleave_dask.fleet.churn import check_rate
from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.planner import Tiling, check_arguments
from cleave_dask.resources import nearest, shown
from cleave_dask.simulation.baselines.cloud import GPUS, price_cloud, price_offload
from cleave_dask.simulation.baselines.data_parallel import price_ddp, price_fsdp
from cleave_dask.simulation.baselines.dtfm import price_dtfm, price_published
from cleave_dask.simulation.baselines.own import Play, price_tiles
from cleave_dask.simulation.baselines.values import Result
from cleave_dask.simulation.baselines.workload import Workload

CLEAVE = "cleave"

SYSTEMS = {
    CLEAVE: "tiles of every gemm, k split where it pays",
    "cleave-2d": "the published Cleave: the same with k never split",
    "dtfm": "DTFM, data x pipeline parallelism, with compute, bubble and memory",
    "dtfm-published": "DTFM by its own cost: neither compute nor memory",
    "ddp": "data parallelism, a whole model on each device",
    "fsdp": "data parallelism with everything sharded (ZeRO-3)",
    "a100": "one A100 of 80 GB",
    "a100-offload": "the same, states in its host's memory",
    "alpa-8xA100-80": "the best data x tensor x pipeline split; any alpa-<number>x<kind of GPU>",
}
"""Systems that are compared unless others are asked for."""

MOST_GPUS = 16_384
_ALPA = re.compile(r"alpa-([1-9][0-9]{0,5})x(.+)")
_TILINGS: dict[str, Tiling] = {CLEAVE: "3d", "cleave-2d": "2d"}
_Price = Callable[[], Result]


def compare(
    graph: StepGraph,
    fleet: Fleet,
    *,
    systems: Iterable[str] | None = None,
    churn: float | None = None,
    seed: int = 0,
    simulated: bool = False,
) -> list[Result]:
    """A result for each system, in the order asked for; `churn` is mishaps per device and hour.

    In calm every row is a prediction by formulas, ours by its plan. `simulated` plays ours on virtual time instead,
    which takes minutes for a large fleet; under churn that is the only way, and done without being asked. Clouds do
    not churn.
    """
    check_arguments(graph, fleet)
    if churn is not None:
        check_rate(churn)
    names = list(dict.fromkeys(SYSTEMS if systems is None else systems))
    for name in names:
        check_system(name)
    work = Workload.of(graph)
    results = []
    for name in names:
        if name not in _TILINGS:
            results.append(price_baseline(name, work, fleet, churn=churn, seed=seed))
            continue
        played = Play(churn, seed) if simulated or churn else None
        own = price_tiles(name, graph, fleet, tiling=_TILINGS[name], play=played)
        if name == CLEAVE and not own.feasible:
            raise PlanError(f"no device of this fleet can take part: {own.why}")
        results.append(own)
    return results


def price_baseline(name: str, work: Workload, fleet: Fleet, *, churn: float | None = None, seed: int = 0) -> Result:
    """One system that is not ours."""
    prices: dict[str, _Price] = {
        "dtfm": lambda: price_dtfm(work, fleet, churn=churn, seed=seed),
        "dtfm-published": lambda: price_published(work, fleet, seed=seed),
        "ddp": lambda: price_ddp(work, fleet, churn=churn),
        "fsdp": lambda: price_fsdp(work, fleet, churn=churn),
        "a100": lambda: price_cloud(work, "A100-80", 1, name),
        "a100-offload": lambda: price_offload(work, "A100-80", name),
    }
    if name in prices:
        return prices[name]()
    gpus, kind = _cloud(name)
    return price_cloud(work, kind, gpus, name)


def check_system(name: str) -> None:
    """The name is that of a system; an InputError that names the nearest one if it is not."""
    if name not in SYSTEMS:
        _cloud(name)


def _cloud(name: str) -> tuple[int, str]:
    """Number and kind of GPUs in a name such as 'alpa-8xH100'."""
    found = _ALPA.fullmatch(name)
    if found is None:
        raise InputError(f"there is no system {shown(name)}; {nearest(name, SYSTEMS)}")
    gpus, kind = int(found[1]), found[2]
    if kind not in GPUS:
        raise InputError(f"system {shown(name)} asks for GPUs of kind {shown(kind)}; {nearest(kind, GPUS)}")
    if gpus > MOST_GPUS:
        raise InputError(f"system {shown(name)} asks for {gpus:,} GPUs; give {MOST_GPUS:,} at most")
    return gpus, kind

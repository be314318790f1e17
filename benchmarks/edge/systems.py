"""All systems by name, each a function of a setting."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from math import inf
from statistics import median

from benchmarks import memory
from benchmarks.edge import ours, peers, stock
from benchmarks.edge.rows import Row
from benchmarks.edge.settings import SETTINGS, Setting
from benchmarks.edge.timing import Effort, timed, updates
from cleave_dask.simulation.local import Shaping


@dataclass(frozen=True, slots=True)
class System:
    """Something that trains the model of a setting on its devices."""

    title: str
    run: Callable[[Setting, Effort], Row]


def alone(setting: Setting, effort: Effort) -> Row:
    """One process with all cores of this machine and no network: what a device does that can hold everything."""
    before = memory.resident()
    memory.reset_peak()
    module = setting.llama.module()
    seen = timed(updates(module), setting.llama, effort)
    losses = tuple(loss for loss in seen.losses if loss is not None)
    took, peak = median(seen.seconds), memory.peak() - before
    return Row(
        setting.name, "alone", took, len(seen.seconds), losses=losses, memory=(peak,), note="one process, no network"
    )


def reference(setting: Setting, steps: int, known: Iterable[Row] = ()) -> tuple[float, ...]:
    """The losses that every system should have after so many steps: those of one process."""
    for row in known:
        same = row.system == "alone" and SETTINGS[row.setting].llama == setting.llama
        if same and len(row.losses) >= steps:
            return row.losses
    return alone(setting, Effort(steps - 1, inf)).losses


def volunteers(setting: Setting, effort: Effort) -> Row:
    """hivemind, where it is installed."""
    if find_spec("hivemind") is None:
        why = "not installed: pip install -c constraints.txt 'cleave-dask[peers]'"
        return Row.failed(setting.name, "hivemind", why)
    return peers.run("hivemind", setting, effort)


def systems(shaping: Shaping = "namespaces") -> Mapping[str, System]:
    """All of them; `shaping` is for ours."""
    titles = {
        "ddp": "DDP, fp32",
        "ddp-bf16": "DDP, bf16 gradients",
        "fsdp": "FSDP2",
        "tensor": "tensor parallel (DTensor)",
        "gpipe": "pipeline, GPipe",
        "1f1b": "pipeline, 1F1B",
        "data-pipeline": "2 replicas x pipeline (DTFM)",
    }
    mine = {
        "cleave": "cleave_dask, fp32",
        "cleave-bf16": "cleave_dask, bf16 on the wire",
        "cleave-head": "cleave_dask, fp32, head by vocabulary",
        "cleave-even": "cleave_dask, even tiles",
        "cleave-trust": "cleave_dask, fp32, few tiles checked",
    }
    return {
        "alone": System("one process alone", alone),
        **{name: System(title, partial(ours.run, name, shaping=shaping)) for name, title in mine.items()},
        **{name: System(title, partial(peers.run, name)) for name, title in titles.items()},
        **{f"dask-{way}": System(f"stock dask.array, {way}", partial(stock.run, way)) for way in stock.VARIANTS},
        "hivemind": System("hivemind", volunteers),
    }


def measure(name: str, system: System, setting: Setting, effort: Effort) -> Row:
    """The row of a system, stamped; what goes wrong is its row too, and the others go on."""
    version, began, load = commit(), f"{datetime.now(UTC):%Y-%m-%d %H:%M}", round(os.getloadavg()[0], 1)
    try:
        row = system.run(setting, effort)
    except Exception as error:  # whatever a peer dies of
        said = str(error).strip().splitlines()
        row = Row.failed(setting.name, name, said[0] if said else type(error).__name__)
    return replace(row, commit=version, when=began, load=load)


def commit() -> str:
    """What is checked out, with a + if it was changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"

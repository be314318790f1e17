"""Small states to store, and scripts that store them in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

import cleave_dask
from cleave_dask.runtime.store import State, StoredArray, TileStore

ROOT = Path(cleave_dask.__file__).parents[1]


def example(step: int) -> State:
    """A small state that says of which step it is, with arrays of several chunks in a store of `small` chunks."""
    chance = np.random.default_rng(step)
    arrays = {
        "weights/model.embed.weight": StoredArray(chance.standard_normal((37, 11), dtype=np.float32), "float32"),
        "weights/norm": StoredArray(chance.integers(0, 2**16, 70, dtype=np.uint16), "bfloat16"),
        "optimizer/exp_avg/model.embed.weight": StoredArray(np.full((37, 11), step, np.float32), "float32"),
        "buffers/count": StoredArray(np.array(step), "int64"),
    }
    return State(arrays, {"step": step, "graph_digest": "abc", "random": "00ff", "schedule": None})


def small(folder: Path, *, keep: int = 3) -> TileStore:
    return TileStore(folder, keep=keep, chunk_bytes=256)


def assert_same(one: State, two: State) -> None:
    assert one.document == two.document
    assert one.arrays.keys() == two.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == two.arrays[name].dtype
        np.testing.assert_array_equal(array.data, two.arrays[name].data)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that sees these helpers."""
    head = f"import os, sys, tempfile; sys.path[:0] = [{str(ROOT)!r}]; from tests.runtime.states import *\n"
    head += "from cleave_dask.errors import CheckpointError\n"
    command = [sys.executable, "-W", "error", "-c", head + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

"""`matmul(a, b)`: the product of two dask arrays, tile by tile on the devices of a fleet."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.typing import Key
from distributed import Client, get_client

from cleave_dask.errors import ClusterError, InputError
from cleave_dask.graph.ir import Gemm, Operand, StepGraph, Value
from cleave_dask.planning.planner import Grid, plan
from cleave_dask.planning.values import Tiles
from cleave_dask.runtime.cluster import inspect
from cleave_dask.runtime.lowering import block_tasks, grid_of, job_skeleton, job_tasks
from cleave_dask.runtime.tasks import stage_product

_MULTIPLIED = ("float64", "float32", "float16")


def matmul(a: da.Array, b: da.Array, *, client: Client | None = None, grid: Grid | None = None) -> da.Array:
    """`a @ b` for two dask arrays, multiplied on the devices of the connected fleet.

    The result is an ordinary dask array. Its blocks are the tiles of the plan; `grid` fixes the number of parts in
    (rows, columns, k) instead. Arrays that are not two-dimensional floating point are multiplied by Dask itself.
    """
    a, b = da.asanyarray(a), da.asanyarray(b)
    if not a.ndim or not b.ndim:
        raise InputError(
            f"cannot multiply {a.dtype} of shape {a.shape} by {b.dtype} of shape {b.shape}; give two arrays"
        )
    dtype = np.result_type(a.dtype, b.dtype)
    if a.ndim != 2 or b.ndim != 2 or dtype.name not in _MULTIPLIED:
        product: da.Array = a @ b
        return product
    if a.shape[1] != b.shape[0]:
        raise InputError(f"cannot multiply {a.shape} by {b.shape}: {a.shape[1]} columns against {b.shape[0]} rows")
    if any(np.isnan(extent) for extent in (*a.shape, *b.shape)):
        raise InputError("an array has blocks of unknown size; call .compute_chunk_sizes() on it first")
    gemm = _gemm(a, b, dtype.name)
    step = StepGraph("product", (), (gemm,), loss="", grads=(), buffers=(), batch="")
    fleet = inspect(client or _client()).fleet
    tiles = plan(step, fleet, min_flops=0, tiling="even", grid=grid).by_gemm[gemm.name]
    return _array(a, b, gemm, tiles, f"{tokenize(a, b, tiles):.12}")


def _client() -> Client:
    try:
        return get_client()
    except ValueError:
        raise ClusterError(
            "no Dask client is connected; make one first (`Client(address)` or `LocalFleet(4).get_client()`), "
            "or multiply on this machine with `a @ b`"
        ) from None


def _gemm(a: da.Array, b: da.Array, dtype: str) -> Gemm:
    (m, k), n = a.shape, b.shape[1]
    return Gemm(
        name="product",
        kind="gemm",
        role="forward",
        level=1,
        m=m,
        n=n,
        k=k,
        flops=2.0 * m * n * k,
        dtype=dtype,
        inputs=(Operand((Value("a", (m, k), (k, 1), dtype),)), Operand((Value("b", (k, n), (n, 1), dtype),))),
        outputs=(Value("c", (m, n), (n, 1), dtype),),
    )


def _array(a: da.Array, b: da.Array, gemm: Gemm, tiles: Tiles, run: str) -> da.Array:
    """Stage both operands on the server, send out the tiles, hand the result out block by block."""
    name, staged = f"matmul-{run}", f"product-{run}"
    grid = grid_of(tiles)
    assert grid is not None, "an even plan is a grid"
    tasks: dict[Key, Any] = {
        staged: Task(staged, stage_product, run, gemm, tiles, _blocks(a), _blocks(b)),
    }
    for key, task in job_tasks(job_skeleton(gemm, tiles, after=(), rank=0), run, 0, 0):
        tasks[key] = task.also_after(staged)
    for key, task in block_tasks(name, tiles, grid, (run, 0, 0)).items():
        tasks[key] = task.also_after(staged)
    operands: Any = [a, b]  # dask's own protocol for collections does not fit its arrays
    layers = HighLevelGraph.from_collections(name, tasks, dependencies=operands)
    chunks = tuple(tuple(stop - start for start, stop in spans) for spans in grid)
    return da.Array(layers, name, chunks, dtype=gemm.dtype)


def _blocks(array: da.Array) -> List:
    rows: Any = array.__dask_keys__()
    return List(*(List(*(TaskRef(key) for key in row)) for row in rows))

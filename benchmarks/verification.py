"""Wrong tiles against honest ones, by the hundred thousand, and what a check costs beside product and step.

    python benchmarks/verification.py [--tiles 100000] [--steps 3] [--seed 0] [--json out.json]

Wrong tiles: one element with a low, a middle or a high bit flipped, two rows swapped, zeros, another tile's result, and
noise over the whole tile, as small as it may be and still be beyond the tolerance. That is, as
`runtime/verification.py` derives it: an element that exceeds its bound by 4 t of its row if it is the only wrong one,
by 32 t else. Honest tiles: operands of every kind of `tiles.OPERANDS`, ill-conditioned ones included. Both in float32
and bfloat16. Shapes are small, 8 to 48 a side: what a check sees of a tile does not depend on its size but by k and n.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Llama
from benchmarks.tiles import OPERANDS, Array, changed, multiply, tile, tolerances
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.kernels import calm_products
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.runtime.verification import RightSide, Slices
from cleave_dask.runtime.wire import narrow, widen
from cleave_dask.simulation.local import LocalFleet

LLAMA = Llama(hidden=1024, intermediate=2816, layers=2, heads=16, vocabulary=4096, batch=4, length=512)
FLEETS: dict[str, int | Fleet] = {
    "2 on the server's cores": 2,
    "4 of 500/100 Mbit/s": Fleet(
        Server(), tuple(Device(f"device-{n}", 20e9, 2e9, Link(62.5e6, 1e-3), Link(12.5e6, 1e-3)) for n in range(4))
    ),
}
DTYPES = ("float32", "bfloat16")
BITS = {"float32": {"low bit": (0, 8), "middle bit": (8, 23), "high bit": (23, 32)}}
BITS["bfloat16"] = {"low bit": (0, 3), "middle bit": (3, 7), "high bit": (7, 16)}
LIES = ("low bit", "middle bit", "high bit", "rows swapped", "zeros", "another tile", "noise")
SHAPES = ((512, 512, 1024), (1024, 1024, 1024), (1024, 1024, 4096), (2048, 2048, 2048))


def lie(kind: str, a: Array, b: Array, c: Array, dtype: str, rng: np.random.Generator) -> tuple[Array, bool]:
    """A wrong tile, and whether it is beyond the tolerance."""
    bound, sieve = tolerances(a, b, c, dtype)
    if kind in BITS[dtype]:
        wrong = c.copy()
        place = tuple(int(rng.integers(extent)) for extent in c.shape)
        wrong.view(f"uint{8 * c.itemsize}")[place] ^= np.array(1 << int(rng.integers(*BITS[dtype][kind]))).astype(
            f"uint{8 * c.itemsize}"
        )
        factor = 4.0
    else:
        factor = 32.0
        if kind == "noise":
            sign = rng.choice([-1.0, 1.0], c.shape)
            wrong = changed(c, sign * (1.2 * bound + 34.0 * sieve / np.sqrt(c.shape[1])), dtype)
        elif kind == "rows swapped":
            wrong = np.concatenate([c[1:2], c[:1], c[2:]])
        elif kind == "zeros":
            wrong = np.zeros_like(c)
        else:
            wrong = multiply(*tile("normal", dtype, rng, a.shape[0], a.shape[1], b.shape[1]), dtype)
    error = np.abs(widen(wrong, dtype).astype("float64") - widen(c, dtype).astype("float64"))
    if kind == "noise":  # of each row the whole error counts, not that of one element
        rows = np.sqrt(np.square(error / sieve).sum(axis=1))
        return wrong, bool(((rows > factor) & (error > 1.1 * bound).any(axis=1)).any())
    return wrong, not bool((error <= 1.1 * bound + factor * sieve).all())


def run(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the table: `count` wrong tiles and as many honest ones, in both dtypes together."""
    rows = []
    with np.errstate(all="ignore"):
        for dtype in DTYPES:
            for kind in LIES:
                rows.append({"tiles": kind, "dtype": dtype, **_wrong(kind, dtype, -(-count // (2 * len(LIES))), seed)})
            for kind in OPERANDS:
                found = _honest(kind, dtype, -(-count // (2 * len(OPERANDS))), seed)
                rows.append({"tiles": f"honest, {kind}", "dtype": dtype, **found})
    return rows


def _draw(kind: str, dtype: str, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    m, k, n = (int(extent) for extent in rng.integers(8, 49, 3))
    a, b = tile(kind, dtype, rng, m, k, n)
    return a, b, multiply(a, b, dtype)


def _wrong(kind: str, dtype: str, count: int, seed: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for number in range(count):
        rng = np.random.default_rng([seed, number, LIES.index(kind)])
        a, b, c = _draw("normal", dtype, rng)
        wrong, beyond = lie(kind, a, b, c, dtype, rng)
        accepted = RightSide.of(b, dtype, [int(rng.integers(2**62))]).verify(a, wrong)
        found["rejected"] += not accepted
        found["within tolerance"] += not beyond
        found["accepted beyond tolerance"] += accepted and beyond
    return _counts(count, found)


def _honest(kind: str, dtype: str, count: int, seed: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        a, b, c = _draw(kind, dtype, rng)
        found["wrongly rejected"] += not RightSide.of(b, dtype, [int(rng.integers(2**62))]).verify(a, c)
    return _counts(count, found)


def _counts(count: int, found: Counter[str]) -> dict[str, int]:
    columns = ("rejected", "within tolerance", "accepted beyond tolerance", "wrongly rejected")
    return {"count": count} | {column: found[column] for column in columns}


def cost(along: int = 4) -> list[dict[str, Any]]:
    """Milliseconds of a check and of the product on the same cores; so many tiles share each slice of A and of B."""
    rows = []
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        for m, n, k in SHAPES:
            wide = (rng.standard_normal((m, k), "float32"), rng.standard_normal((k, n), "float32"))
            a, b = (narrow(array, dtype) for array in wide)
            c = multiply(a, b, dtype)
            side, left = RightSide.of(b, dtype, [1]), Slices((a,))
            vectors = np.concatenate([side.y] * along, axis=1)
            product = _least(partial(multiply, a, b, dtype))
            check = _least(partial(side.verify, a, c, left.times(dtype, side.y)))
            shared = _least(partial(RightSide.of, b, dtype, [1])) + _least(partial(left.times, dtype, vectors))
            name = f"{m} x {n} x {k}"
            rows.append({"tile": name, "dtype": dtype, "product": product, "check": check, "share": shared / along})
            rows[-1]["check / product"] = (check + shared / along) / product
    return rows


def _least(work: Any, times: int = 9) -> float:
    """Milliseconds of CPU, the least of several times: what it takes on a machine that does nothing else."""
    seconds = []
    for _ in range(times):
        start = thread_time()
        work()
        seconds.append(thread_time() - start)
    return 1e3 * min(seconds)


def steps(count: int) -> list[dict[str, Any]]:
    """What checks take of real steps; the smallest tile of a product has 512 x 512 x 2048."""
    rows = []
    for (label, devices), wire in product(FLEETS.items(), (None, "bfloat16")):
        module = LLAMA.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        with LocalFleet(devices) as fleet, fleet.get_client() as client:
            cut = partial(plan, grid=(2, 2, 1))
            with Trainer(module, optimizer, client, plan=cut, replan=False, wire=wire) as trainer:
                server = psutil.Process(fleet.server_pid)
                trainer.step(**LLAMA.tokens(0))
                before = server.cpu_times()
                for number in range(count):
                    trainer.step(**LLAMA.tokens(number))
                after = server.cpu_times()
                check = sum(record["spent"]["verify"] for record in trainer.records[1:]) / count
                seconds = median(record["seconds"] for record in trainer.records[1:])
                cpu = (after.user + after.system - before.user - before.system) / count
        row = {
            "devices": label,
            "wire": wire or "float32",
            "seconds": seconds,
            "server's CPU": cpu,
            "checks' CPU": check,
        }
        rows.append({**row, "check / step": check / seconds, "check / server's CPU": check / cpu})
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)


def main() -> None:
    """Print both tables; with --json write them too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=3, help="0: no training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    calm_products()  # as the server does
    costs = cost()
    show("what a check costs, ms of one core; `share` is its part of A (B X), as each slice has 4 tiles", costs)
    whole = steps(options.steps) if options.steps else []
    if whole:
        show(f"{LLAMA}: seconds of a step, tiles of 512 x 512 x 2048 and up", whole)
    rows = run(options.tiles, options.seed)
    show(f"{options.tiles} wrong and {options.tiles} honest tiles", rows)
    for column in ("accepted beyond tolerance", "wrongly rejected"):
        print(f"{column}: {sum(row[column] for row in rows)}")
    if options.json:
        options.json.write_text(json.dumps({"cost": costs, "steps": whole, "tiles": rows}, indent=1))


if __name__ == "__main__":
    main()

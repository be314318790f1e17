"""Tiles to check: operands of every kind, right results and wrong ones, and how wrong a tile may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cleave_dask.runtime.kernels import load_kernel
from cleave_dask.runtime.verification import PRECISIONS, SPREAD
from cleave_dask.runtime.wire import narrow, widen

Array = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[Array, Array]

NUMPY = load_kernel("numpy")


def normal(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Independent normal numbers."""
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def cancelling(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """A product that is tiny against the terms that it is summed from."""
    a, b = normal(rng, m, k, n)
    return np.hstack([a, -a]), np.vstack([b, b * (1 + 1e-6 * rng.standard_normal(b.shape))])


def uneven_within(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Factors of very different sizes whose products are alike."""
    a, b = normal(rng, m, k, n)
    inner = 10.0 ** rng.uniform(-6, 6, k)
    return a * inner, b / inner[:, None]


def low_rank(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Rows and columns that are multiples of one."""
    return rng.standard_normal((m, 1)) * np.ones(k), np.ones((k, 1)) * rng.standard_normal(n)


def softmax(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Weights that add up to one, few of them large."""
    a, b = normal(rng, m, k, n)
    weights = np.exp(5 * a)
    return weights / weights.sum(axis=1, keepdims=True), b


def scaled(left: float, right: float) -> Callable[[np.random.Generator, int, int, int], Pair]:
    """Normal numbers times a factor."""

    def operands(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
        a, b = normal(rng, m, k, n)
        return a * left, b * right

    return operands


OPERANDS: dict[str, Callable[[np.random.Generator, int, int, int], Pair]] = {
    "normal": normal,
    "positive": lambda rng, m, k, n: (rng.random((m, k)), rng.random((k, n))),
    "far from zero": lambda rng, m, k, n: (rng.random((m, k)) + 100, rng.random((k, n)) + 100),
    "constant": lambda rng, m, k, n: (np.full((m, k), 0.1), np.full((k, n), 0.3)),
    "alternating": lambda rng, m, k, n: (np.full((m, k), 0.1) * (-1.0) ** np.arange(k), np.full((k, n), 0.3)),
    "cancelling": cancelling,
    "uneven rows": lambda rng, m, k, n: (normal(rng, m, k, n)[0] * 10.0 ** rng.uniform(-9, 9, (m, 1)), np.ones((k, n))),
    "uneven columns": lambda rng, m, k, n: (np.ones((m, k)), normal(rng, m, k, n)[1] * 10.0 ** rng.uniform(-9, 9, n)),
    "uneven within": uneven_within,
    "low rank": low_rank,
    "sparse": lambda rng, m, k, n: (rng.random((m, k)) * (rng.random((m, k)) < 0.05), normal(rng, m, k, n)[1]),
    "zero": scaled(0, 0),
    "softmax": softmax,
    "tiny": scaled(1e-25, 1e-18),
    "subnormal": scaled(1e-39, 1),
    "huge": scaled(1e20, 1e17),
    "overflowing": scaled(1e25, 1e18),
}


def tile(kind: str, dtype: str, rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Operands of a kind, as they travel."""
    operands = OPERANDS[kind](rng, m, k, n)
    if dtype == "float64":
        return operands
    with np.errstate(all="ignore"):
        a, b = (narrow(array.astype("float32"), dtype) for array in operands)
    return a, b


def multiply(a: Array, b: Array, dtype: str) -> Array:
    """What an honest device sends."""
    return NUMPY.run("gemm", (a, b), dtype=dtype)[0]


def tolerances(a: Array, b: Array, c: Array, dtype: str) -> tuple[Array, Array]:
    """From the docstring: the bound of each element, and t for each row, times the norm of each column."""
    precision = PRECISIONS[dtype]
    a, b, c = (widen(array, dtype).astype("float64") for array in (a, b, c))
    k, n = b.shape
    growth = 2 * k if dtype == "float64" else min(k, SPREAD * np.sqrt(k))
    bound = growth * precision.sum_unit * (np.abs(a) @ np.abs(b)) + precision.unit * np.abs(a @ b)
    norms = np.sqrt(np.square(b).sum(axis=0))
    walk, size = np.square(a) @ np.square(b / norms).sum(axis=1), np.square(c / norms).sum(axis=1)
    sieve = np.sqrt(precision.sum_unit**2 * (k + n) * (walk + size) + precision.unit**2 * size)
    return bound, sieve[:, None] * norms


def changed(c: Array, error: Array, dtype: str) -> Array:
    """A tile with an error added, as it travels."""
    wrong: Array = widen(c, dtype) + error
    return wrong if dtype == "float64" else np.asarray(narrow(wrong.astype("float32"), dtype))

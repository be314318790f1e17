"""Attention tiles: honest ones pass, whatever the kernel; wrong ones fail where they are looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cleave_dask.runtime.kernels import Kernel, load_kernel
from cleave_dask.runtime.verification_attention import verify_attention
from cleave_dask.runtime.wire import narrow, widen

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = ("float32", "bfloat16", "float16", "float64")
KERNELS = {name: load_kernel(name) for name in ("numpy", "torch")}


def operands(rng: np.random.Generator, dtype: str, sharpness: float = 1.0) -> tuple[Array, Array, Array]:
    """q, k and v of a few heads, some of which share keys."""
    batch, groups, share = (int(number) for number in rng.integers(1, 4, 3))
    rows, width = int(rng.integers(1, 70)), int(rng.choice([8, 16, 64]))
    shapes = (batch, groups * share, rows, width), (batch, groups, rows, width), (batch, groups, rows, width)
    q, k, v = (
        as_sent(factor * rng.standard_normal(shape), dtype)
        for shape, factor in zip(shapes, (sharpness, 1, 1), strict=True)
    )
    return q, k, v


def as_sent(array: Any, dtype: str) -> Array:
    return np.asarray(array if dtype == "float64" else narrow(array.astype("float32"), dtype))


def both_passes(kernel: Kernel, given: tuple[Array, ...], rng: np.random.Generator, **how: Any) -> list[Any]:
    """Operands and results of the forward and of the backward pass."""
    made = kernel.run("attention", given, **how)
    grad = as_sent(rng.standard_normal(made[0].shape), how["dtype"])
    back = (grad, *given, *made)
    return [(given, made), (back, kernel.run("attention_backward", back, **how))]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 30.0])
def test_no_honest_attention_is_rejected(kernel: str, dtype: str, sharpness: float) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        how: dict[str, Any] = {"dtype": dtype, "causal": bool(seed % 2), "scale": None if seed % 3 else 0.2}
        for given, made in both_passes(KERNELS[kernel], operands(rng, dtype, sharpness), rng, **how):
            assert verify_attention(given, made, **how, seed=seed), f"{len(given)} operands: seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_wholesale_lies_are_found(dtype: str) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        how: dict[str, Any] = {"dtype": dtype, "causal": bool(seed % 2), "scale": None}
        for given, made in both_passes(KERNELS["numpy"], operands(rng, dtype), rng, **how):
            for index, array in enumerate(made):
                wide = array if array.dtype in (np.float32, np.float64) else widen(array, dtype)
                lies = {
                    "zeros": np.zeros_like(wide),
                    "noise": wide + 0.2 * np.abs(wide).max() * rng.standard_normal(wide.shape).astype(wide.dtype),
                    "half as large": wide / 2,
                    "NaN": np.full_like(wide, np.nan),
                    "infinity in one place": np.where(np.arange(wide.size).reshape(wide.shape) == 0, np.inf, wide),
                }
                for lie, wrong in lies.items():
                    sent = wrong if array.dtype in (np.float32, np.float64) else narrow(wrong.astype("float32"), dtype)
                    results = [*made[:index], sent.astype(array.dtype), *made[index + 1 :]]
                    right = verify_attention(given, results, **how, seed=seed)
                    if np.abs(wide).max() > 1e-3:  # of one key the gradient of scores is zero, and so are its parts
                        assert not right, f"{lie} in result {index} of {len(made)}: seed {seed}"


def test_a_wild_number_is_found_wherever_it_is() -> None:
    rng = np.random.default_rng(0)
    given = tuple(rng.standard_normal((4, 8, 64, 16)).astype("float32") for _ in range(3))
    how: dict[str, Any] = {"dtype": "float32", "causal": True, "scale": None}
    out, logsumexp = KERNELS["numpy"].run("attention", given, **how)
    for place in range(0, out.size, 5_003):
        wrong = out.copy()
        wrong.flat[place] = 50.0
        assert not verify_attention(given, (wrong, logsumexp), **how, seed=place)


def test_what_is_not_finite_must_come_from_the_operands() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 16, 8)).astype("float32") for _ in range(3))
    how: dict[str, Any] = {"dtype": "float32", "causal": False, "scale": None}
    v[0, 1, 3, 5] = np.nan
    made = KERNELS["numpy"].run("attention", (q, k, v), **how)
    assert np.isnan(made[0]).any()
    assert verify_attention((q, k, v), made, **how, seed=0)
    everywhere = (np.full_like(made[0], np.nan), made[1])
    assert not verify_attention((q, k, v), everywhere, **how, seed=0)


def test_a_part_that_is_wrong_is_found_as_often_as_it_is_looked_at() -> None:
    """A quarter of all rows wrong: 16 rows are looked at, so it slips through in one of a hundred tiles."""
    rng = np.random.default_rng(0)
    given = tuple(rng.standard_normal((2, 4, 64, 16)).astype("float32") for _ in range(3))
    how: dict[str, Any] = {"dtype": "float32", "causal": False, "scale": None}
    out, logsumexp = KERNELS["numpy"].run("attention", given, **how)
    out[:, :, ::4] *= 0.99
    passed = sum(verify_attention(given, (out, logsumexp), **how, seed=seed) for seed in range(200))
    assert passed <= 10

"""No honest tile is rejected, whatever the order of its sums; no wrong one is accepted beyond the tolerance."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.tiles import OPERANDS, Array, changed, multiply, tile, tolerances
from benchmarks.verification import run
from cleave_dask.errors import InputError
from cleave_dask.runtime.kernels import load_kernel
from cleave_dask.runtime.verification import SPREAD, RightSide, Slices, verify_tile
from cleave_dask.runtime.wire import narrow, widen

DTYPES = ("float32", "bfloat16", "float16", "float64")


def orders(a: Array, b: Array, dtype: str, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """The same product, its terms added in several orders."""
    wide_a, wide_b = widen(a, dtype), widen(b, dtype)
    shuffled = rng.permutation(a.shape[1])
    with np.errstate(all="ignore"):
        terms = wide_a[:, :, None] * wide_b[None]
        yield "blas", multiply(a, b, dtype)
        yield "shuffled", narrow(wide_a[:, shuffled] @ wide_b[shuffled], dtype)
        yield "one by one", narrow(np.cumsum(terms, axis=1)[:, -1], dtype)
        yield "by size", narrow(np.cumsum(np.sort(terms, axis=1), axis=1)[:, -1], dtype)
        lanes = [np.cumsum(terms[:, lane::4], axis=1)[:, -1] for lane in range(min(4, terms.shape[1]))]
        yield "in lanes", narrow(sum(lanes[1:], lanes[0]), dtype)
        yield "in float64", narrow((wide_a.astype("float64") @ wide_b).astype(wide_a.dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", OPERANDS)
def test_no_honest_tile_is_rejected(kind: str, dtype: str) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        (m, n), k = rng.integers(1, 32, 2), int(rng.choice([1, 7, 64, 400]))
        a, b = tile(kind, dtype, rng, m, k, n)
        for order, c in orders(a, b, dtype, rng):
            assert verify_tile(a, b, c, seed=seed, dtype=dtype), f"{kind} {dtype} {order}: seed {seed}, {m}x{n}x{k}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "cancelling", "positive"])
def test_torch_is_honest(kind: str, dtype: str) -> None:
    torch_kernel = load_kernel("torch")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        a, b = tile(kind, dtype, rng, *rng.integers(1, 300, 3))
        for left in (a, np.asfortranarray(a)):
            (c,) = torch_kernel.run("gemm", (left, b), dtype=dtype)
            assert verify_tile(left, b, c, seed=seed, dtype=dtype), f"{kind} {dtype}: seed {seed}"


def test_roundings_that_all_go_one_way_are_honest() -> None:
    """Adding one number again and again drifts far beyond the statistical bound, and no device is to blame for it."""
    k = 40_000
    a, b = np.full((3, k), np.float32(0.1)), np.full((k, 4), np.float32(0.3))
    c = np.cumsum(a[:, :, None] * b[None], axis=1)[:, -1]
    exact = a.astype("float64") @ b
    assert np.abs(c / exact - 1).max() > 2 * SPREAD * np.sqrt(k) * 2**-24
    assert verify_tile(a, b, c, seed=1)
    assert not verify_tile(a, b, c * np.float32(1.01), seed=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_is_found(dtype: str) -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        a, b = tile("normal", dtype, rng, *rng.integers(1, 64, 3))
        c = multiply(a, b, dtype)
        bound, sieve = tolerances(a, b, c, dtype)
        i, j = (int(rng.integers(extent)) for extent in c.shape)
        error = np.zeros(c.shape)
        error[i, j] = rng.choice([-1, 1]) * (1.1 * bound + 4 * sieve)[i, j]
        assert not verify_tile(a, b, changed(c, error, dtype), seed=seed, dtype=dtype), f"{dtype}: seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["pair", "spread"])
def test_errors_that_could_cancel_are_found(pattern: str, dtype: str) -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        a, b = tile("normal", dtype, rng, *rng.integers(2, 64, 3))
        c = multiply(a, b, dtype)
        bound, sieve = tolerances(a, b, c, dtype)
        i, n = rng.integers(c.shape[0]), c.shape[1]
        direction = rng.choice([-1.0, 1.0], n)
        if pattern == "pair":
            direction = np.zeros(n)
            direction[rng.permutation(n)[:2]] = -1, 1
        error = np.zeros(c.shape)
        error[i] = direction * (1.1 * bound[i] + 16 * sieve[i] / np.sqrt(np.count_nonzero(direction)))
        assert not verify_tile(a, b, changed(c, error, dtype), seed=seed, dtype=dtype), f"{dtype}: seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_flipped_bits_beyond_the_tolerance_are_found(dtype: str) -> None:
    bits = {"float64": 64, "float32": 32}.get(dtype, 16)
    found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = tile("normal", dtype, rng, *rng.integers(1, 64, 3))
        c = multiply(a, b, dtype)
        bound, sieve = tolerances(a, b, c, dtype)
        limit = 1.1 * bound + 4 * sieve
        for bit in range(bits):
            i, j = (int(rng.integers(extent)) for extent in c.shape)
            wrong = c.copy()
            wrong.view(f"uint{bits}")[i, j] ^= np.array(1 << bit, dtype=f"uint{bits}")
            error = abs(float(widen(wrong, dtype)[i, j]) - float(widen(c, dtype)[i, j]))
            if not error <= limit[i, j]:
                found += 1
                assert not verify_tile(a, b, wrong, seed=seed, dtype=dtype), f"{dtype}: seed {seed}, bit {bit}"
    assert found > 20 * 5  # at least the exponent


@pytest.mark.parametrize("dtype", DTYPES)
def test_wholesale_lies_are_found(dtype: str) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        shape = rng.integers(2, 64, 3)
        a, b = tile("normal", dtype, rng, *shape)
        c = multiply(a, b, dtype)
        lies = {
            "zeros": np.zeros_like(c),
            "another tile": multiply(*tile("normal", dtype, rng, *shape), dtype),
            "rows swapped": np.concatenate([c[1:2], c[:1], c[2:]]),
            "columns swapped": np.concatenate([c[:, 1:2], c[:, :1], c[:, 2:]], axis=1),
            "last column forgotten": np.concatenate([c[:, :-1], np.zeros_like(c[:, -1:])], axis=1),
            "half of k": multiply(a[:, : shape[1] // 2], b[: shape[1] // 2], dtype),
            "noise": changed(c, 0.1 * np.abs(widen(c, dtype)).max() * rng.standard_normal(c.shape), dtype),
            "NaN": narrow(np.full(c.shape, np.nan, widen(c, dtype).dtype), dtype),
        }
        for lie, wrong in lies.items():
            assert not verify_tile(a, b, wrong, seed=seed, dtype=dtype), f"{lie} in {dtype}: seed {seed}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_column_counts_as_much_as_a_large_one(dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((20, 50)), rng.standard_normal((50, 30))
    b[:, 7] *= 1e-9
    a, b = (narrow(array.astype("float32"), dtype) for array in (a, b))
    c = multiply(a, b, dtype)
    assert verify_tile(a, b, c, seed=0, dtype=dtype)
    c[3, 7] = 0
    assert not verify_tile(a, b, c, seed=0, dtype=dtype)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_infinity_and_nan_must_come_from_the_operands(bad: float) -> None:
    rng = np.random.default_rng(0)
    a, b = tile("normal", "float32", rng, 10, 20, 12)
    c = multiply(a, b, "float32")
    c[4, 5] = bad
    assert not verify_tile(a, b, c, seed=0)
    for operand, place in ((a, (4, 3)), (b, (3, 5))):
        kept, operand[place] = operand[place], bad
        honest = multiply(a, b, "float32")
        assert verify_tile(a, b, honest, seed=0)
        for wrong in (
            np.where(np.isfinite(honest), honest, 0),
            np.where(np.arange(120).reshape(10, 12) == 0, bad, honest),
        ):
            assert not verify_tile(a, b, wrong.astype("float32"), seed=0)
        operand[place] = kept


def test_overflow_of_halves_is_honest_and_saturation_is_not() -> None:
    a, b = np.full((3, 64), np.float16(100)), np.full((64, 5), np.float16(-100))
    assert verify_tile(a, b, np.full((3, 5), np.float16(-np.inf)), seed=0)
    assert not verify_tile(a, b, np.full((3, 5), np.float16(np.inf)), seed=0)
    assert not verify_tile(a, b, np.full((3, 5), np.float16(-65504)), seed=0)


def test_zeros_must_be_exact() -> None:
    a, b = np.ones((4, 6), "float32"), np.zeros((6, 5), "float32")
    b[:, 0] = 1
    c = a @ b
    assert verify_tile(a, b, c, seed=0)
    c[2, 3] = 1e-20
    assert not verify_tile(a, b, c, seed=0)


def test_shape_or_dtype_that_does_not_fit_is_rejected() -> None:
    a, b = tile("normal", "float32", np.random.default_rng(0), 8, 8, 8)
    c = a @ b
    others = [c.astype("float64"), c.astype("float16"), c.view("uint32"), c.tolist()]
    for wrong in (c[:7], c[:, :7], c[0], c[None], *others):
        assert not verify_tile(a, b, wrong, seed=0)
    assert not verify_tile(a, b[:7], c, seed=0)
    assert not verify_tile(a, b.astype("float64"), c, seed=0)


def test_a_dtype_that_cannot_be_verified_is_an_error() -> None:
    whole = np.ones((2, 2), "int64")
    with pytest.raises(InputError, match=r"int64.*bfloat16"):
        verify_tile(whole, whole, whole, seed=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_tiles(shape: tuple[int, int, int], dtype: str) -> None:
    m, k, n = shape
    one = narrow(np.ones((), "float32"), dtype)
    a, b, c = np.full((m, k), one), np.full((k, n), one), np.full((m, n), 0 * one)
    for left, right in ((a, b), (np.asfortranarray(a), np.asfortranarray(b))):
        assert verify_tile(left, right, c, seed=0, dtype=dtype)
        if c.size:
            assert not verify_tile(left, right, c + one, seed=0, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_layout_of_large_operands_is_checked_alike(dtype: str) -> None:
    """Larger than a block that is multiplied at a time, in either order."""
    rng = np.random.default_rng(0)
    a, b = (narrow(rng.standard_normal(shape, "float32"), dtype) for shape in ((700, 300), (300, 500)))
    c = narrow(widen(a, dtype) @ widen(b, dtype), dtype)
    for left, right, product in product_of_layouts(a, b, c):
        assert verify_tile(left, right, product, seed=1, dtype=dtype)
        wrong = product.copy(order="K")
        wrong[650, 450] = narrow(widen(product, dtype)[650:651, 450] + 100, dtype)[0]
        assert not verify_tile(left, right, wrong, seed=1, dtype=dtype)


def product_of_layouts(*arrays: Array) -> list[tuple[Array, ...]]:
    return list(itertools.product(*((array, np.asfortranarray(array)) for array in arrays)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["normal", "tiny", "zero columns"])
@pytest.mark.parametrize("cut", ["k", "columns", "both"])
def test_operands_in_parts_are_checked_as_if_they_were_whole(cut: str, kind: str, dtype: str) -> None:
    a, b = tile("tiny" if kind == "tiny" else "normal", dtype, np.random.default_rng(3), 40, 56, 48)
    if kind == "zero columns":
        b[:, 5:9] = 0
    c = multiply(a, b, dtype)
    left = Slices((a,) if cut == "columns" else (a[:, :10], a[:, 10:]), axis=1)
    spans = [slice(0, 48)] if cut == "k" else [slice(0, 7), slice(7, 30), slice(30, 48)]
    pieces = (Slices((b[:10, span], b[10:, span])) if cut != "columns" else Slices((b[:, span],)) for span in spans)
    side = RightSide.joined([RightSide.of(piece, dtype, [number]) for number, piece in enumerate(pieces)])
    assert side.verify(left, c)
    assert RightSide.of(left.T, dtype, [7]).verify(Slices((b,)).T, c.T)
    wrong = c.copy()
    wrong[3, 6] = narrow(np.full(1, 100.0, "float32"), dtype)[0]
    assert not side.verify(left, wrong)
    assert not RightSide.of(left.T, dtype, [7]).verify(Slices((b,)).T, wrong.T)


def test_a_stack_of_products() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 8, 16)), rng.standard_normal((3, 16, 8))
    c = a @ b
    assert verify_tile(a, b, c, seed=0)
    c[2] = c[1]
    assert not verify_tile(a, b, c, seed=0)


def test_torch_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
        c = a @ b.T
        assert verify_tile(a, b.T, c, seed=0)
        assert not verify_tile(a, b, c, seed=0)


def test_the_verdict_depends_on_nothing_but_its_arguments() -> None:
    """The same seed draws the same vectors: a verdict can be repeated."""
    rng = np.random.default_rng(0)
    a, b = tile("normal", "bfloat16", rng, 16, 32, 16)
    c = multiply(a, b, "bfloat16")
    border = changed(c, np.eye(16) * 0.02, "bfloat16")
    verdicts = [[verify_tile(a, b, border, seed=seed, dtype="bfloat16") for seed in range(20)] for _ in range(2)]
    assert verdicts[0] == verdicts[1]


def test_needs_no_torch() -> None:
    code = "import sys, cleave_dask.runtime.verification; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_thousands_of_wrong_and_of_honest_tiles() -> None:
    """A part of what `python benchmarks/verification.py` does with 100,000 tiles of each."""
    for row in run(1_400, seed=1):
        assert row["wrongly rejected"] == 0, row
        assert row["accepted beyond tolerance"] == 0, row
        if row["tiles"] == "low bit":
            assert row["within tolerance"] > 0
        if row["tiles"] in ("zeros", "another tile", "noise"):
            assert row["rejected"] == row["count"]

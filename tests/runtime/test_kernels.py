"""Every kernel computes what torch computes, from operands as they travel, and hands back what can be sent."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import sqrt
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cleave_dask.errors import InputError
from cleave_dask.runtime import kernels_xp
from cleave_dask.runtime.kernels import (
    Kernel,
    _cuda_works,
    calm_products,
    load_kernel,
    measure_flops,
    threads,
    use_threads,
)
from cleave_dask.runtime.kernels_xp import ArrayKernel
from cleave_dask.runtime.wire import narrow, to_wire, widen
from cleave_dask.runtime.wire_torch import from_wire

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = ("float32", "float64", "bfloat16", "float16")
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
CASES = [(name, dtype) for name in ("numpy", "torch", "cupy") for dtype in DTYPES]
CASES += [("array_api_strict", dtype) for dtype in ("float32", "float64")]  # the array API has no halves
ORDERS = ("CC", "CF", "FC", "FF")


@pytest.fixture(params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[Kernel, str]:
    """A kernel and a dtype that it takes."""
    name, dtype = request.param
    if name == "array_api_strict":
        strict = pytest.importorskip(name, reason="array-api-strict is not installed")
        return ArrayKernel(name, strict, put=lambda array: strict.asarray(array, copy=True), take=np.array), dtype
    if name == "cupy" and not _cuda_works():
        pytest.skip("no CUDA device that cupy can use")
    return load_kernel(name), dtype


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiles this small are slower on two threads, by far on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def operand(seed: int, shape: tuple[int, ...], dtype: str, order: str = "C") -> Array:
    """Random numbers as they come from the network: read-only, in C or Fortran order."""
    values = np.random.default_rng(seed).standard_normal(shape)
    numbers = values if dtype == "float64" else narrow(values.astype("float32"), dtype)
    array = np.array(numbers, order="F" if order == "F" else "C")
    array.flags.writeable = False
    return array


def exact(array: Array, dtype: str) -> torch.Tensor:
    """The numbers of an array in float64."""
    return torch.tensor(widen(array, dtype).astype("float64"))


def check(results: tuple[Array, ...], wanted: list[torch.Tensor], dtypes: list[str]) -> None:
    """Results can be sent as they are, and are close to what was wanted in float64."""
    assert len(results) == len(wanted)
    for result, expected, dtype in zip(results, wanted, dtypes, strict=True):
        assert isinstance(result, np.ndarray)
        assert result.flags.c_contiguous
        assert result.dtype == ("uint16" if dtype == "bfloat16" else dtype)
        assert result.shape == tuple(expected.shape)
        limit = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        np.testing.assert_allclose(exact(result, dtype), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (33, 64, 17)])
def test_gemm(case: tuple[Kernel, str], shape: tuple[int, int, int]) -> None:
    (kernel, dtype), (m, k, n) = case, shape
    for orders in ORDERS:
        a, b = operand(0, (m, k), dtype, orders[0]), operand(1, (k, n), dtype, orders[1])
        check(kernel.run("gemm", (a, b), dtype=dtype), [exact(a, dtype) @ exact(b, dtype)], [dtype])


def test_bmm(case: tuple[Kernel, str]) -> None:
    kernel, dtype = case
    for orders in ORDERS:
        a, b = operand(0, (3, 6, 5), dtype, orders[0]), operand(1, (3, 5, 4), dtype, orders[1])
        check(kernel.run("bmm", (a, b), dtype=dtype), [exact(a, dtype) @ exact(b, dtype)], [dtype])


def attention_reference(
    operands: Sequence[torch.Tensor], causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own composite attention, and the logsumexp by its definition, in float64."""
    q, k, v = operands
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ keys.mT * (1 / sqrt(q.shape[3]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return out, scores.logsumexp(-1)


ATTENTIONS = [  # batch, query heads, key heads, rows, width
    (2, 4, 4, 16, 8),
    (2, 4, 2, 37, 8),
    (1, 6, 1, 50, 16),
    (3, 2, 2, 1, 4),
]


@pytest.fixture(params=[False, True], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run also with blocks so small that even these shapes need many of them."""
    if request.param:
        monkeypatch.setattr(kernels_xp, "SCORES", 512)
        monkeypatch.setattr(kernels_xp, "CAUSAL_ROWS", 5)
        monkeypatch.setattr(kernels_xp, "HALF_EXTENTS", (8, 16, 4))


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (False, 0.3), (True, None)])
def test_attention_and_its_backward(case: tuple[Kernel, str], causal: bool, scale: float | None) -> None:
    for shape in ATTENTIONS:
        check_attention(*case, shape, causal, scale)


def check_attention(kernel: Kernel, dtype: str, shape: tuple[int, ...], causal: bool, scale: float | None) -> None:
    batch, heads, groups, rows, width = shape
    q, grad = (operand(seed, (batch, heads, rows, width), dtype) for seed in (0, 1))
    k, v = (operand(seed, (batch, groups, rows, width), dtype) for seed in (2, 3))
    leaves = [exact(array, dtype).requires_grad_() for array in (q, k, v)]
    out, logsumexp = attention_reference(leaves, causal, scale)
    gradients = torch.autograd.grad(out, leaves, exact(grad, dtype))

    sums = "float64" if dtype == "float64" else "float32"
    results = kernel.run("attention", (q, k, v), dtype=dtype, causal=causal, scale=scale)
    check(results, [out.detach(), logsumexp.detach()], [dtype, sums])
    operands = (grad, q, k, v, *results)
    backward = kernel.run("attention_backward", operands, dtype=dtype, causal=causal, scale=scale)
    check(backward, list(gradients), [dtype] * 3)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_halves_and_products_in_blocks(dtype: str) -> None:
    a, b = operand(0, (19, 21), dtype), operand(1, (21, 35), dtype, "F")
    check(load_kernel("numpy").run("gemm", (a, b), dtype=dtype), [exact(a, dtype) @ exact(b, dtype)], [dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numpy_agrees_with_what_torch_uses_in_training(dtype: str, causal: bool) -> None:
    """A step may mix devices: out, logsumexp and gradients mean the same to both, also across kernels."""
    ours, theirs = load_kernel("numpy"), load_kernel("torch")
    q, grad = (operand(seed, (2, 8, 300, 16), dtype) for seed in (0, 1))
    k, v = (operand(seed, (2, 2, 300, 16), dtype) for seed in (2, 3))
    forward = [each.run("attention", (q, k, v), dtype=dtype, causal=causal) for each in (ours, theirs)]
    check(forward[0], [exact(forward[1][0], dtype), exact(forward[1][1], "float32")], [dtype, "float32"])
    backward = [
        each.run("attention_backward", (grad, q, k, v, *other), dtype=dtype, causal=causal)
        for each, other in zip((ours, theirs), reversed(forward), strict=True)
    ]
    check(backward[0], [exact(array, dtype) for array in backward[1]], [dtype] * 3)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_softmax_is_stable(name: str) -> None:
    kernel = load_kernel(name)
    q, k, v = (operand(seed, (1, 1, 9, 4), "float32") * np.float32(1e4) for seed in range(3))
    out, logsumexp = attention_reference([exact(array, "float32") for array in (q, k, v)], True, None)
    results = kernel.run("attention", (q, k, v), dtype="float32", causal=True)
    check(results, [out, logsumexp], ["float32", "float32"])


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_causal_row_does_not_see_what_comes_after_it(name: str) -> None:
    kernel = load_kernel(name)
    q, k, v = (operand(seed, (1, 2, 12, 4), "float32") for seed in range(3))
    poisoned = [np.array(array) for array in (k, v)]
    for array in poisoned:
        array[:, :, 7:] = 1e30
    clean, dirty = (kernel.run("attention", (q, *pair), dtype="float32", causal=True)[0] for pair in ((k, v), poisoned))
    np.testing.assert_array_equal(clean[:, :, :7], dirty[:, :, :7])


def test_memory_of_attention_is_bounded() -> None:
    """Beside operands and result there are only blocks of scores, however long the sequence."""
    kernel = load_kernel("numpy")
    q = operand(0, (1, 2, 2048, 8), "float32")
    results = kernel.run("attention", (q, q, q), dtype="float32", causal=True)
    for kind, operands in (("attention", (q, q, q)), ("attention_backward", (q, q, q, q, *results))):
        tracemalloc.start()
        kernel.run(kind, operands, dtype="float32", causal=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 * kernels_xp.SCORES * 4  # all scores at once would be 33 MB


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 1, 0x3F808000]
    values = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    ours, theirs = narrow(values, "bfloat16"), to_wire(torch.from_numpy(values).bfloat16())
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(widen(ours[nan], "bfloat16")).all()
    assert torch.equal(from_wire(ours, "bfloat16")[~nan], torch.from_numpy(values).bfloat16()[~nan])


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_infinity_and_nan_pass_through_in_silence(name: str) -> None:
    for dtype in DTYPES:
        a = np.array(operand(0, (4, 4), dtype))
        a[1, 2], a[2, 0] = (narrow(np.array([bad], "float32"), dtype)[0] for bad in (np.inf, np.nan))
        (c,) = load_kernel(name).run("gemm", (a, operand(1, (4, 4), dtype)), dtype=dtype)
        assert list(np.isfinite(widen(c, dtype)).all(axis=1)) == [True, False, False, True]
    big = np.full((2, 2), np.float16(60000))
    assert np.isinf(load_kernel(name).run("gemm", (big, big), dtype="float16")[0]).all()


def test_float32_gemm_is_one_product() -> None:
    a, b = operand(0, (64, 80), "float32"), operand(1, (80, 48), "float32", "F")
    np.testing.assert_array_equal(load_kernel("numpy").run("gemm", (a, b), dtype="float32")[0], a @ b)


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_products(name: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    for dtype in DTYPES:
        (c,) = load_kernel(name).run("gemm", (operand(0, (m, k), dtype), operand(0, (k, n), dtype)), dtype=dtype)
        assert c.shape == (m, n)
        assert not c.any()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_operands_that_make_no_tile_are_refused(name: str) -> None:
    kernel, square, heads = load_kernel(name), np.ones((3, 3), "float32"), np.ones((1, 3, 4, 2), "float32")
    for kind, arrays, dtype, message in (
        ("gemm", (square, np.ones((4, 3), "float32")), "float32", "shapes"),
        ("gemm", (square,), "float32", "shapes"),
        ("gemm", (square, square), "bfloat16", "dtypes"),
        ("gemm", (square, square), "int64", "dtypes"),
        ("gemm", (square, square.astype("float64")), "float32", "dtypes"),
        ("bmm", (square[None], np.ones((2, 3, 3), "float32")), "float32", "shapes"),
        ("attention", (heads, heads[:, :2], heads[:, :2]), "float32", "shapes"),
        ("attention_backward", (heads,) * 6, "float32", "shapes"),
        ("convolution", (square, square), "float32", "unknown kind"),
    ):
        with pytest.raises(InputError, match=message):
            kernel.run(kind, arrays, dtype=dtype)


def test_load_kernel_by_name() -> None:
    assert load_kernel("numpy").name == "numpy"
    assert load_kernel("torch").name == "torch"
    assert load_kernel("auto").name == load_kernel().name == ("cupy" if _cuda_works() else "numpy")
    with pytest.raises(InputError, match=r"'abacus'.*numpy, torch, cupy"):
        load_kernel("abacus")


@pytest.mark.skipif(find_spec("cupy") is not None, reason="cupy is installed")
def test_a_missing_backend_names_the_remedy() -> None:
    with pytest.raises(InputError, match=r"pip install 'cleave-dask\[cupy\]'.*numpy"):
        load_kernel("cupy")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_device_without_torch_is_told_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from cleave_dask.errors import InputError\nfrom cleave_dask.runtime.kernels import load_kernel\n"
        "try:\n    load_kernel('torch')\nexcept InputError as error:\n    print(error)"
    )
    assert "pip install torch" in run_python(code)


def test_neither_torch_nor_cupy_is_imported_unless_chosen() -> None:
    code = (
        "import sys\nfrom cleave_dask.runtime.kernels import load_kernel\nload_kernel('numpy')\n"
        "print(sorted({'torch', 'cupy', 'distributed', 'zarr'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_measured_speed_is_plausible_and_bounded_in_time(name: str) -> None:
    start = perf_counter()
    flops = measure_flops(load_kernel(name), seconds=0.05)
    assert perf_counter() - start < 5  # a loaded machine may be late, but not by orders of magnitude
    assert 1e7 < flops < 1e16


class _Crowded:
    """A kernel on a busy machine: each product waits for its time slice first."""

    name = "crowded"

    def __init__(self, wait: float) -> None:
        self.kernel, self.wait = load_kernel("numpy"), wait

    def run(self, kind: str, arrays: Sequence[Array], *, dtype: str, **given: Any) -> tuple[Array, ...]:
        Event().wait(self.wait)
        return self.kernel.run(kind, arrays, dtype=dtype, **given)


def test_a_busy_machine_does_not_seem_a_thousand_times_slower() -> None:
    """By its smallest product it would have 2 * 64**3 flops per 10 ms: 0.05 GFLOP/s."""
    assert measure_flops(_Crowded(0.010)) > 2.0 * 256**3 / 0.3


@pytest.fixture
def _threads() -> Iterator[None]:
    """Put the number of threads back as it was."""
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits():
        yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_threads_are_limited() -> None:
    use_threads(1)
    pools = import_module("threadpoolctl").threadpool_info()
    assert {pool["num_threads"] for pool in pools} == {1}
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("_threads")
def test_calm_products_leave_torch_its_threads() -> None:
    use_threads(2)
    calm_products()
    pools = import_module("threadpoolctl").threadpool_info()
    assert {pool["num_threads"] for pool in pools if pool["internal_api"] == "openblas"} == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_threads")
def test_threads_for_a_while_make_what_a_device_with_as_many_makes() -> None:
    """A server of one thread makes tiles of lost devices that had two."""
    rng, kernel = np.random.default_rng(0), load_kernel("numpy")
    operands = [
        (rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32))
        for m, n, k in rng.integers(8, 700, (40, 3))
    ]

    def products() -> list[bytes]:
        return [kernel.run("gemm", pair, dtype="float32")[0].tobytes() for pair in operands]

    use_threads(2)
    expected = products()
    use_threads(1)
    alone = products()
    with threads(2):
        assert torch.get_num_threads() == 2
        assert products() == expected
    assert torch.get_num_threads() == 1
    assert products() == alone


def test_at_least_one_thread() -> None:
    with pytest.raises(InputError, match="at least one thread, not 0"):
        use_threads(0)


def test_threads_without_threadpoolctl_say_so() -> None:
    code = (
        "import sys, logging; sys.modules['threadpoolctl'] = None\nlogging.basicConfig(stream=sys.stdout)\n"
        "from cleave_dask.runtime.kernels import calm_products, use_threads\nuse_threads(2)"
    )
    assert "OPENBLAS_NUM_THREADS=2" in run_python(code)

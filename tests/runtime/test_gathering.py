"""Gathering tiles: any order of arrival gives the same bits, each tile counts once, wrong shapes are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.graph.ir import Gemm, Operand, Value
from cleave_dask.planning.planner import cut
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.kernels import load_kernel
from cleave_dask.runtime.server_gathering import Gathering, TileRejected, operand_slice
from cleave_dask.runtime.tiles import TileSpec, slice_names

KERNEL = load_kernel("numpy")


def value(name: str, *shape: int) -> Value:
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return Value(name, shape, strides, "float32")


def merged_gemm(m: int, widths: tuple[int, ...], k: int) -> Gemm:
    """One input, several weights side by side: three linear layers in one product, one of them with a bias."""
    n = sum(widths)
    return Gemm(
        *("qkv", "gemm", "forward", 1, m, n, k, 2.0 * m * n * k, "float32"),
        inputs=(
            Operand((value("x", m, k),)),
            Operand(tuple(value(f"w{i}", k, w) for i, w in enumerate(widths)), axis=1),
        ),
        outputs=tuple(value(f"y{i}", m, w) for i, w in enumerate(widths)),
        biases=(*(None for _ in widths[1:]), value("bias", widths[-1])),
    )


def multiply(gemm: Gemm, number: int, tile: Tile, read: Callable[[str], torch.Tensor]) -> list[np.ndarray]:
    """What a device does for a tile."""
    spec = TileSpec(
        *("run", 0, 0, number, gemm.kind, gemm.dtype, tile.rows, tile.cols, tile.ks), gemm.causal, gemm.scale
    )
    operands = []
    for name in slice_names(spec):
        parts, axis = operand_slice(gemm, name[3], name[4:], read)
        operands.append(np.concatenate(parts, axis=axis))
    return list(KERNEL.run(gemm.kind, operands, dtype=gemm.dtype, causal=gemm.causal, scale=gemm.scale))


def grid(gemm: Gemm, parts: tuple[int, int, int]) -> list[Tile]:
    spans = [cut(length, min(length, count)) for length, count in zip((gemm.m, gemm.n, gemm.k), parts, strict=True)]
    tiles = [Tile(gemm.name, r, c, k) for k in spans[2] for r in spans[0] for c in spans[1]]
    return sorted(tiles, key=lambda tile: (tile.ks, tile.rows, tile.cols))


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)),
    st.randoms(use_true_random=False),
)
def test_any_order_of_arrival_gives_the_same_bits(
    extents: tuple[int, int, int], parts: tuple[int, int, int], shuffler: random.Random
) -> None:
    m, n, k = extents
    gemm = merged_gemm(m, (n, 3, n + 1), k)
    generator = torch.Generator().manual_seed(0)
    values = {
        part.name: torch.randn(part.shape, generator=generator)
        for part in [*(p for operand in gemm.inputs for p in operand.parts), gemm.biases[-1]]
        if part is not None
    }
    tiles = grid(gemm, parts)
    results = [multiply(gemm, number, tile, values.__getitem__) for number, tile in enumerate(tiles)]

    def gather(order: list[int]) -> list[torch.Tensor]:
        gathering = Gathering(gemm, tiles)
        for number in order:
            assert gathering.accept(number, results[number])
            assert not gathering.accept(number, results[number])  # a copy that comes late changes nothing
        assert gathering.complete
        return gathering.finish(values.__getitem__)

    order = list(range(len(tiles)))
    calm = gather(order)
    shuffler.shuffle(order)
    for one, other in zip(calm, gather(order), strict=True):
        assert torch.equal(one, other)
    whole = values["x"] @ torch.cat([values["w0"], values["w1"], values["w2"]], dim=1)
    whole[:, -(n + 1) :] += values["bias"]
    torch.testing.assert_close(torch.cat(calm, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_goes_out_by_batch_and_head_group(causal: bool) -> None:
    batch, heads, groups, length, width = 3, 6, 2, 7, 4
    q, k, v = value("q", batch, heads, length, width), *(value(x, batch, groups, length, width) for x in "kv")
    gemm = Gemm(
        *("attention", "attention", "forward", 1, batch, groups, 1, 1.0, "float32"),
        inputs=tuple(Operand((operand,)) for operand in (q, k, v)),
        outputs=(value("out", batch, heads, length, width), value("logsumexp", batch, heads, length)),
        causal=causal,
    )
    values = {operand.name: torch.randn(operand.shape) for operand in (q, k, v)}
    gathering = Gathering(gemm, grid(gemm, (2, 2, 1)))
    for number, tile in enumerate(gathering.tiles):
        gathering.accept(number, multiply(gemm, number, tile, values.__getitem__))
    expected = torch.nn.functional.scaled_dot_product_attention(
        values["q"], values["k"], values["v"], is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(gathering.finish(values.__getitem__)[0], expected)


def test_a_tile_of_another_shape_dtype_or_number_is_refused() -> None:
    gemm = merged_gemm(4, (2, 2), 3)
    gathering = Gathering(gemm, grid(gemm, (2, 1, 1)))
    for wrong in ([np.zeros((2, 3), "f4")], [np.zeros((2, 4), "f8")], [np.zeros((2, 4), "f4")] * 2, ["no array"]):
        with pytest.raises(TileRejected):
            gathering.accept(0, wrong)  # type: ignore[arg-type]  # what a stranger may send
    assert not gathering.accepted
    with pytest.raises(TileRejected, match="tile 7"):
        gathering.accept(7, [np.zeros((2, 4), "f4")])


def test_a_tile_has_come_when_its_numbers_are_in_and_not_before() -> None:
    """Whoever hears that a tile is here may end the job, and the next round then reads the sum."""
    gemm = merged_gemm(4, (6,), 8)
    tiles = grid(gemm, (1, 1, 2))
    told: list[tuple[bool, list[int]]] = []

    class Watched(Gathering):
        def _add(self, tile: Tile, tensors: Sequence[torch.Tensor]) -> None:
            told.append((self.complete, self.wanted([0, 1])))
            super()._add(tile, tensors)

    gathering = Watched(gemm, tiles)
    read = {item.name: torch.ones(item.shape) for operand in gemm.inputs for item in operand.parts}.__getitem__
    for number in (1, 0):
        gathering.accept(number, multiply(gemm, number, tiles[number], read))
    assert told == [(False, [0]), (False, [0])]
    assert gathering.complete

"""Tiles of a head by vocabulary on the server: whoever is first, results are the same bits; wrong ones stay out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.ir import LOGITS, Kind
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.kernels import load_kernel
from cleave_dask.runtime.server_checking import Checker
from cleave_dask.runtime.server_gathering import Gathering, TileRejected, operand_slice
from cleave_dask.runtime.tiles import first_word, sliced
from tests.planning.test_heads import make_head
from tests.strategies import graph_of


@pytest.mark.parametrize("kind", LOGITS)
def test_the_order_of_arrival_changes_no_bit(kind: Kind) -> None:
    part = make_head(kind, 40, 70, 12)
    tiles = plan(graph_of(part), Fleet.sample(3), min_flops=0, grid=(3, 4, 4)).by_gemm["h"]
    torch.manual_seed(0)
    values = {"x": torch.randn(40, 12), "w": torch.randn(70, 12), "t": torch.randint(0, 70, (40,)).double()}
    values |= {"s": torch.logsumexp(values["x"] @ values["w"].T, 1), "c": torch.full((40,), -1 / 40)}
    arrays = []
    for tile in tiles:
        spans = sliced(kind, tile.rows, tile.cols, tile.ks)
        operands = [operand_slice(part, n, ranges, values.__getitem__)[0][0] for n, ranges in enumerate(spans)]
        operands[2] = operands[2] - first_word(kind, tile.rows, tile.cols, tile.ks)
        arrays.append(load_kernel("numpy").run(kind, operands, dtype="float32"))
    found = []
    for seed in range(4):
        gathering, order = Gathering(part, tiles), list(range(len(tiles)))
        random.Random(seed).shuffle(order)
        right = Checker(part, tiles, values.__getitem__).right
        with pytest.raises(TileRejected, match="not the product"):
            gathering.accept(order[0], [np.full_like(array, 1e9) for array in arrays[order[0]]], right)
        for number in order:
            assert gathering.accept(number, arrays[number], right)
        assert gathering.complete
        found.append([output.clone() for output in gathering.finish(values.__getitem__)])
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))
    if kind == "logit_sums":
        torch.testing.assert_close(found[0][0], values["s"])

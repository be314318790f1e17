"""What the server does with a tile that is wrong, and with tiles that it believed before it knew better."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cleave_dask.errors import DistrustedError
from cleave_dask.runtime.server_checking import Checker
from cleave_dask.runtime.server_gathering import Attempt, TileRejected
from cleave_dask.runtime.tiles import TileSpec
from tests import models
from tests.runtime.test_gathering import grid, merged_gemm, multiply
from tests.steps import Local

BATCH = models.tokens(batch=4, length=16)


class Liar(Local):
    """Tiles of `wrong` numbers, counted over all kinds, are off; those of a believed device are not checked."""

    wrong: frozenset[int] = frozenset()
    checked = True
    rejected: list[str]
    count = 0

    def multiply(self, spec: TileSpec) -> None:
        accept = self.training.accept
        self.count += 1
        lies = self.count in self.wrong

        def spoiled(step: int, job: int, tile: int, arrays: list[Any], attempt: Attempt) -> bool:
            if lies:
                wrong = [np.array(array) for array in arrays]
                wrong[0][0 if spec.kind == "gemm" else ...] += 0.5
                try:
                    accept(step, job, tile, wrong, attempt, check=self.checked)
                except TileRejected as error:
                    self.rejected.append(str(error))
                else:
                    return True
            return accept(step, job, tile, arrays, attempt, check=self.checked)

        self.training.accept = spoiled  # type: ignore[method-assign, assignment]
        try:
            super().multiply(spec)
        finally:
            self.training.accept = accept  # type: ignore[method-assign]


def liar(**options: Any) -> Liar:
    run = Liar(models.llama(), BATCH, **options)
    run.rejected = []
    return run


def test_every_kind_of_tile_is_checked() -> None:
    """Each tile of a step is sent wrong before it is sent right: not one slips through, and the loss is the same."""
    honest, run = liar(), liar()
    expected = honest.step(BATCH)
    kinds = {gemm.kind for gemm in run.graph.gemms}
    assert {"gemm", "attention", "attention_backward"} <= kinds
    run.wrong = frozenset(range(10_000))
    record = run.step(BATCH)
    assert len(run.rejected) == run.count == expected["tiles"]
    assert record["rejected"] == run.count
    assert record["loss"] == expected["loss"]
    outcomes = [row.outcome for row in run.training.trace.since(0)[0]]
    assert sum("is not the product of its operands" in outcome for outcome in outcomes) == run.count


def test_a_step_that_believed_a_liar_is_done_again() -> None:
    expected = liar().step(BATCH)["loss"]
    run = liar()
    run.checked, run.wrong = False, frozenset({3})
    run.step(BATCH, stop_after=12)
    run.training.distrust("here")
    with pytest.raises(DistrustedError, match="here sent a wrong tile after unchecked ones"):
        run.training.finish(0)
    run.checked, run.wrong = True, frozenset()
    assert run.step(BATCH)["loss"] == expected


def test_earlier_micro_batches_of_a_distrusted_update_are_done_again() -> None:
    """Also their random numbers and running means are those of the first time."""

    def build() -> Liar:
        run = Liar(models.mlp(dropout=0.1), models.points(12), accumulate=2)
        run.rejected = []
        return run

    parts = [models.points(12, seed=seed) for seed in range(2)]
    honest, run = build(), build()
    expected = [honest.step(part)["loss"] for part in parts]
    run.checked, run.wrong = False, frozenset({2})
    run.step(parts[0])
    run.training.distrust("here")
    with pytest.raises(DistrustedError):
        run.step(parts[1])
    run.checked, run.wrong, run.finished = True, frozenset(), 0
    assert [run.step(part)["loss"] for part in parts] == expected


@pytest.mark.parametrize("parts", [(1, 4, 1), (4, 1, 2), (3, 3, 2), (9, 2, 1)])
def test_tiles_along_a_slice_share_its_products_and_are_told_apart(parts: tuple[int, int, int]) -> None:
    """In whatever order they come, and however often; nothing is kept of a tile that has come."""
    gemm = merged_gemm(36, (20, 7, 30), 24)
    generator = torch.Generator().manual_seed(0)
    values = {part.name: torch.randn(part.shape, generator=generator) for side in gemm.inputs for part in side.parts}
    tiles = grid(gemm, parts)
    checker = Checker(gemm, tiles, values.__getitem__)
    order = np.random.default_rng(0).permutation(len(tiles)).tolist()
    made = {number: multiply(gemm, number, tiles[number], values.__getitem__) for number in order}
    for number in order:
        wrong = made[number][0].copy()
        wrong[-1, 0] += 0.1
        assert not checker.right(number, [wrong])
        assert checker.right(number, made[number])
    assert not checker._known
    assert all(checker.right(number, made[number]) for number in order)
    for number, other in pairwise(order):
        if made[number][0].shape == made[other][0].shape:
            assert not checker.right(number, made[other])


def test_a_slice_is_read_once_for_all_tiles_along_it() -> None:
    gemm = merged_gemm(16, (40, 40, 40), 24)
    values = {part.name: torch.ones(part.shape) for side in gemm.inputs for part in side.parts}
    tiles, reads = grid(gemm, (2, 5, 1)), Counter[str]()

    def read(name: str) -> torch.Tensor:
        reads[name] += 1
        return values[name]

    checker = Checker(gemm, tiles, read)
    made = [multiply(gemm, number, tile, values.__getitem__) for number, tile in enumerate(tiles)]
    assert checker.right(0, made[0])
    assert set(checker._known) == {1, 2, 3, 4}
    before = sum(reads.values())
    with ThreadPoolExecutor(4) as pool:  # of tiles that come together, one computes what they share
        assert all(pool.map(checker.right, range(1, 5), made[1:5]))
    assert sum(reads.values()) == before, "each multiplies nothing but its own numbers"

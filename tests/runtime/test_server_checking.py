"""What the server does with a tile that is wrong, and with tiles that it believed before it knew better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cleave_dask.errors import DistrustedError
from cleave_dask.runtime.server_gathering import Attempt, TileRejected
from cleave_dask.runtime.tiles import TileSpec
from tests import models
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
        run.training.finish(run.training.step)
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

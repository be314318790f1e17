"""Tiles of a lost device that the server makes: the same bits, checked, and no bytes that travelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from cleave_dask.planning.planner import plan
from cleave_dask.runtime.server_mending import mend
from cleave_dask.runtime.tiles import ParcelSpec, TileSpec
from cleave_dask.runtime.trace import HERE
from tests import models
from tests.steps import KERNEL, Local

BATCH = models.tokens()


class Losing(Local):
    """A device that delivers two tiles of three; the server makes the third."""

    def multiply(self, spec: TileSpec) -> None:
        if spec.tile % 3:
            super().multiply(spec)
        else:
            tiles = (spec.tile, *spec.rows, *spec.cols, *spec.ks)
            like = (spec.run, spec.step, spec.job, spec.kind, spec.dtype, spec.causal, spec.scale)
            assert mend(self.training, ParcelSpec(*like, rank=0, filler=False, tiles=(tiles,)), KERNEL) == 1


@pytest.mark.parametrize("head", [False, True], ids=["logits", "by-vocabulary"])
def test_what_the_server_makes_is_what_the_device_would_have_made(head: bool) -> None:
    planner = partial(plan, min_flops=0, grid=(2, 2, 2), by_vocabulary=head)

    def trained(local: Callable[..., Local]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
        run = local(models.llama(), BATCH, planner=planner)
        records = [run.step(BATCH) for _ in range(2)]
        weights = {name: tensor.detach().clone() for name, tensor in run.training.weights.items()}
        return [record["loss"] for record in records], weights, records[-1]["tiles_of"]

    losses, weights, _ = trained(Local)
    mended, others, did = trained(Losing)
    assert mended == losses
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert 0 < did[HERE] < did["here"]


def test_nothing_is_made_twice_and_no_byte_counts_as_sent() -> None:
    run = Local(models.mlp(), models.points())
    run.step(models.points(), stop_after=0)
    assert run.training.lowered is not None
    parcels = [parcel for parcel, _, _ in run.training.lowered.skeleton.jobs[0].parcels("run", 0, 0)]
    parcel = replace(parcels[0], tiles=tuple(tile for each in parcels for tile in each.tiles))
    assert len(parcel.tiles) > 1
    run.multiply(next(parcel.specs()))
    sent = run.training.counters.up_bytes
    assert mend(run.training, parcel, KERNEL) == len(parcel.tiles) - 1
    assert mend(run.training, parcel, KERNEL) == 0
    assert run.training.counters.up_bytes == sent
    row = list(run.training.trace.since(0)[0])[-1]
    assert (row.device, row.up_bytes, row.outcome) == (HERE, 0, "accepted")

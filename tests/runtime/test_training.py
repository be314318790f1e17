"""The server's side of a training, without a cluster."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.lowering import lower
from cleave_dask.runtime.server_gathering import Attempt, TileRejected
from cleave_dask.runtime.server_training import Settings, Training
from tests import models


def test_a_rejected_tile_is_counted_and_leaves_no_trace() -> None:
    module, batch = models.mlp(), models.points()
    graph = capture(module, **batch)
    training = Training("run", "client", Settings(), torch.get_rng_state().numpy().tobytes())
    training.weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    training.load(lower(graph, plan(graph, Fleet.sample(2), min_flops=0)))
    training.begin(0, flatten_batch(graph, (), batch))
    with pytest.raises(TileRejected):
        training.accept(0, 0, 0, [np.zeros((1, 1), "f8")], Attempt("stranger", 0.0, 0.0))
    assert (training.counters.rejected, training.counters.tiles, training.counters.up_bytes) == (1, 0, 0)
    assert not training.gathering(0, 0).accepted

"""Save and resume on real processes: the run goes on as if it had never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import dask
import pytest
import torch
from distributed import Client

from cleave_dask.errors import CheckpointError
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.store import State, TileStore
from cleave_dask.runtime.trace import Trace
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models


def trainer(client: Client, folder: Path | None, *, layers: int = 2) -> Trainer:
    module = models.llama(layers=layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    cut = partial(plan, min_flops=0, grid=(2, 2, 2))  # a model so small would stay on the server
    return Trainer(module, optimizer, client, checkpoint=folder, schedule=schedule, plan=cut)


def test_a_resumed_run_goes_on_bit_for_bit(client: Client, tmp_path: Path) -> None:
    batches = [models.tokens(seed=seed) for seed in range(6)]
    with trainer(client, None) as calm:
        expected = [calm.step(**batch) for batch in batches]
        weights = calm.state_dict()
    with trainer(client, tmp_path / "run") as first:
        losses = [first.step(**batch) for batch in batches[:3]]
        assert first.save() == 3
    with trainer(client, tmp_path / "run") as second:
        assert second.resume() == 3
        losses += [second.step(**batch) for batch in batches[3:]]
        assert losses == expected
        assert all(torch.equal(tensor, weights[name]) for name, tensor in second.state_dict().items())
        assert second.save() == 6


def test_the_state_of_another_model_is_refused_and_nothing_changes(client: Client, tmp_path: Path) -> None:
    with trainer(client, tmp_path / "run") as one:
        one.step(**models.tokens())
        one.save()
    with trainer(client, tmp_path / "run", layers=1) as other:
        before = other.state_dict()
        with pytest.raises(CheckpointError, match="model"):
            other.resume()
        after = other.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_state_that_lacks_something_is_refused(client: Client, tmp_path: Path) -> None:
    with trainer(client, tmp_path / "run") as one:
        one.save()
    with TileStore(tmp_path / "run") as store:
        store.save(1, State(store.load().arrays, {"step": 1, "version": "0.0", "optimizer": {}}))
    with trainer(client, tmp_path / "run") as two:
        with pytest.raises(CheckpointError, match=r"by cleave-dask 0\.0, without random_state; resume it with that"):
            two.resume()
        two.step(**models.tokens())


def test_the_trace_has_a_row_for_every_tile_and_is_saved(client: Client, tmp_path: Path) -> None:
    with trainer(client, tmp_path / "run") as training:
        training.step(**models.tokens())
        first = training.trace
        assert set(first["step"].tolist()) == {1}
        training.step(**models.tokens())
        training.save()
        trace, records = training.trace, training.records
        total = {name: sum(r[name] for r in records) for name in ("tiles", "retries", "up_bytes", "down_bytes")}
        assert trace.accepted.sum() == total["tiles"] == len(trace) - total["retries"]
        assert trace["up_bytes"].sum() == total["up_bytes"]
        assert 0 < trace["down_bytes"].sum() <= total["down_bytes"]  # who loses a race to deliver may have fetched too
        assert set(trace.names["gemm"]) == set(training.plan.by_gemm)
        for column in ("download", "compute", "verify"):
            assert (trace[column] > 0).all()
        seconds = sum(record["seconds"] for record in training.records)
        assert 0 < trace.of_step(1).seconds + trace.of_step(2).seconds < 1.5 * seconds
        assert (trace["upload"] > 0).any()  # the first tiles are sent before the device knows the server's time
        assert list(Trace.load(tmp_path / "run" / "trace")) == list(trace)
        assert list(training.trace) == list(trace)


def test_without_a_folder_the_remedy_is_named(client: Client) -> None:
    with trainer(client, None) as training, pytest.raises(CheckpointError, match=r"Trainer\(\.\.\., checkpoint="):
        training.save()


def test_an_empty_folder_has_nothing_to_resume(client: Client, tmp_path: Path) -> None:
    with trainer(client, tmp_path / "nothing") as training, pytest.raises(CheckpointError, match="nothing"):
        training.resume()


def test_the_run_of_a_client_that_left_makes_room(fleet: LocalFleet, client: Client, tmp_path: Path) -> None:
    with Client(fleet, set_as_default=False) as other:
        lost = trainer(other, tmp_path / "run")
        lost.step(**models.tokens())
        lost.save()  # holds the folder's lock, and is never closed
    with trainer(client, tmp_path / "run") as training:
        assert training.resume() == 1
        training.step(**models.tokens())
        assert training.save() == 2


def test_a_save_that_fails_costs_nothing_but_itself(client: Client, tmp_path: Path) -> None:
    batches = [models.tokens(seed=seed) for seed in range(3)]
    with trainer(client, None) as calm:
        expected = [calm.step(**batch) for batch in batches]
    with trainer(client, tmp_path / "run") as training:
        losses = [training.step(**batches[0])]
        assert training.save() == 1
        losses.append(training.step(**batches[1]))
        limit = dask.config.set({"cleave.checkpoint.max_bytes": "1 kB"})
        with limit, pytest.raises(CheckpointError, match=r"max_bytes is 1 kB; set it to at least \d+"):
            training.save()
        losses.append(training.step(**batches[2]))
        assert losses == expected
        assert training.save() == 3
    assert TileStore(tmp_path / "run").steps() == (1, 3)

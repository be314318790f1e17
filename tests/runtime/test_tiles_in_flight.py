"""Tiles of the step in flight on disk: used again where everything is the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
import zarr

from cleave_dask.errors import CheckpointError
from cleave_dask.planning.planner import plan
from cleave_dask.runtime import tiles_in_flight
from cleave_dask.runtime.background import Background
from cleave_dask.runtime.server_saving import Limits
from cleave_dask.runtime.store import TileStore
from cleave_dask.runtime.zarr_files import Numbers, size_of, write_chunk
from tests import models
from tests.steps import LIMITS, Batch, Local

STOP = 30  # tiles after which a step is cut short


def opt() -> torch.nn.Module:
    return models.opt(dropout=0.1)


def batch(seed: int) -> Batch:
    return models.tokens(seed=seed)


def local(module: Callable[[], torch.nn.Module] = opt) -> Local:
    return Local(module(), batch(0))


def calm(steps: int) -> list[float]:
    run = local()
    return [run.step(batch(step))["loss"] for step in range(steps)]


def cut_short(folder: Path, *, stop: int = STOP, limits: Limits = LIMITS) -> None:
    """A run that saves step 1 and dies in the middle of step 2."""
    run = local()
    run.step(batch(0))
    run.save(folder, limits)
    assert run.step(batch(1), stop_after=stop) == {}
    run.die()


def on_disk(folder: Path) -> list[Path]:
    return sorted(folder.glob("inflight-*/tiles/*/0/c.*.0"))


def test_an_interrupted_step_goes_on_with_its_tiles_bit_for_bit(tmp_path: Path) -> None:
    cut_short(tmp_path)
    assert len(on_disk(tmp_path)) == STOP
    run = local()
    answer = run.restore(tmp_path)
    assert (answer["step"], answer["interrupted"]["done"]) == (1, STOP)
    record = run.step(batch(1))
    assert (record["reused"], record["tiles"] + record["reused"]) == (STOP, len(run.training.lowered.plan.tiles))  # type: ignore[union-attr]
    assert [record["loss"], run.step(batch(2))["loss"]] == calm(3)[1:]


def test_it_may_be_cut_short_again_and_again(tmp_path: Path) -> None:
    cut_short(tmp_path, stop=10)
    for stop in (20, 0, 15):
        run = local()
        run.restore(tmp_path)
        run.step(batch(1), stop_after=stop)
        run.die()
    assert len(on_disk(tmp_path)) == 45
    run = local()
    run.restore(tmp_path)
    record = run.step(batch(1))
    assert (record["reused"], record["loss"]) == (45, calm(2)[1])


def test_the_same_process_may_try_again(tmp_path: Path) -> None:
    run = local()
    run.step(batch(0))
    run.save(tmp_path)
    run.step(batch(1), stop_after=STOP)
    run.training.flight.settle()
    record = run.step(batch(1))
    assert (record["reused"], record["loss"]) == (STOP, calm(2)[1])


def other_batch(run: Local) -> float:
    return float(run.step(batch(5))["reused"])


def other_random_state(run: Local) -> float:
    torch.manual_seed(99)
    run.training.random_state = torch.get_rng_state().numpy().tobytes()
    return float(run.step(batch(1))["reused"])


def other_save(run: Local) -> float:
    assert run.training.store is not None
    run.save(run.training.store.folder)
    return float(run.step(batch(1))["reused"])


def other_step(run: Local) -> float:
    run.step(batch(7))
    return float(run.step(batch(1))["reused"])


@pytest.mark.parametrize("change", [other_batch, other_random_state, other_save, other_step])
def test_nothing_is_reused_where_anything_differs(tmp_path: Path, change: Callable[[Local], float]) -> None:
    cut_short(tmp_path)
    run = local()
    run.restore(tmp_path)
    assert change(run) == 0


def test_another_grid_or_program_reuses_nothing(tmp_path: Path) -> None:
    cut_short(tmp_path)
    other = Local(opt(), batch(0), planner=partial(plan, min_flops=0, grid=(2, 1, 2)))
    other.restore(tmp_path)
    assert other.step(batch(1))["reused"] == 0
    other.die()
    cut_short(tmp_path / "b")
    program = Local(opt(), models.tokens(length=16))
    program.restore(tmp_path / "b")
    assert program.step(models.tokens(length=16, seed=1))["reused"] == 0


def test_a_damaged_tile_is_computed_again(tmp_path: Path) -> None:
    cut_short(tmp_path)
    first, second, third, *_ = on_disk(tmp_path)
    whole = first.read_bytes()
    first.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(b"")
    run = local()
    run.restore(tmp_path)
    record = run.step(batch(1))
    assert (record["reused"], record["loss"]) == (STOP - 3, calm(2)[1])
    run.training.flight.settle()


def test_micro_batches_are_links_of_one_chain(tmp_path: Path) -> None:
    def build() -> Local:
        return Local(models.mlp(), models.points(12), accumulate=2)

    parts = [models.points(12, seed=seed) for seed in range(4)]
    run = build()
    expected = [run.step(part)["loss"] for part in parts]
    assert expected[1] != expected[3]
    killed = build()
    for part in parts[:2]:
        killed.step(part)
    killed.save(tmp_path)
    killed.step(parts[2])
    killed.step(parts[3], stop_after=5)
    killed.die()
    whole = len(killed.training.lowered.plan.tiles)  # type: ignore[union-attr]
    again = build()
    assert again.restore(tmp_path)["interrupted"]["done"] == whole + 5
    again.step(parts[2])
    record = again.step(parts[3])
    assert (record["reused"], record["loss"]) == (whole + 5, expected[3])


def test_tiles_go_when_the_next_step_is_saved(tmp_path: Path) -> None:
    run = local()
    run.step(batch(0))
    run.save(tmp_path)
    run.step(batch(1))
    run.training.flight.settle()
    assert len(on_disk(tmp_path)) == len(run.training.lowered.plan.tiles)  # type: ignore[union-attr]
    run.step(batch(2))  # does not start from a save: its tiles could never be used
    run.training.flight.settle()
    assert len(list(tmp_path.glob("inflight-*"))) == 1
    run.save(tmp_path)
    run.training.flight.settle()
    assert list(tmp_path.glob("*inflight-*")) == []


def test_the_space_of_tiles_is_bounded(tmp_path: Path) -> None:
    cut_short(tmp_path / "all")
    (whole,) = (tmp_path / "all").glob("inflight-*")
    limit = size_of(whole) - 1000
    cut_short(tmp_path / "some", limits=Limits(tiles=limit))
    (bounded,) = (tmp_path / "some").glob("inflight-*")
    assert size_of(bounded) <= limit
    assert 0 < len(on_disk(tmp_path / "some")) < STOP
    off = tmp_path / "off"
    cut_short(off, limits=Limits(tiles=0))
    assert list(off.glob("inflight-*")) == []


def test_a_disk_that_is_too_slow_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, go = Event(), Event()

    def slow(job: tuple[Path, Numbers, int]) -> tuple[Path, int]:
        stuck.set()
        assert go.wait(60)
        return write_chunk(job)

    monkeypatch.setattr(tiles_in_flight, "write_chunk", slow)
    run = local()
    run.training.flight._background.limit = 10_000
    run.step(batch(0))
    run.save(tmp_path)
    record = run.step(batch(1))  # ends although the first tile is still being written
    assert stuck.wait(60)
    assert record["loss"] == calm(2)[1]
    go.set()
    run.training.flight.settle()
    assert 0 < len(on_disk(tmp_path)) < record["tiles"]


def test_a_disk_that_fails_stops_the_tiles_and_not_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(job: object) -> None:
        raise OSError(28, "No space left on device")

    run = local()
    run.step(batch(0))
    run.save(tmp_path)
    monkeypatch.setattr(tiles_in_flight, "write_chunk", full)
    assert run.step(batch(1))["loss"] == calm(2)[1]
    assert run.training.flight.current is None
    run.training.flight.settle()
    assert on_disk(tmp_path) == []


def test_a_save_takes_the_space_of_tiles_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = local()
    run.step(batch(0))
    run.save(tmp_path)
    run.step(batch(1))
    run.training.flight.settle()
    assert on_disk(tmp_path)
    monkeypatch.setattr(TileStore, "_free", lambda self: 0 if on_disk(self.folder) else 1 << 40)
    run.save(tmp_path)
    assert (TileStore(tmp_path).steps(), on_disk(tmp_path)) == ((1, 2), [])
    monkeypatch.setattr(TileStore, "_free", lambda self: 0)
    run.step(batch(2))
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.save(tmp_path)
    monkeypatch.undo()
    run.save(tmp_path)
    assert TileStore(tmp_path).steps() == (1, 2, 3)


def test_tiles_in_flight_are_zarr(tmp_path: Path) -> None:
    cut_short(tmp_path)
    (folder,) = tmp_path.glob("inflight-*")
    group = zarr.open_group(folder, mode="r")
    rows = np.asarray(group["tiles/0/0"])
    assert rows.any(axis=1).sum() == len(list((folder / "tiles/0/0").glob("c.*")))
    assert np.asarray(group["ranges"]).shape[1] == 6


def test_background_work_is_refused_when_there_is_no_room_and_survives_errors() -> None:
    background = Background("test", limit=10)
    go, seen = Event(), []

    def work(number: int) -> None:
        assert go.wait(60)
        seen.append(number)
        raise ValueError(number)

    assert background.submit(work, 1, size=100)  # alone it always has room
    assert not background.submit(work, 2, size=1)
    assert background.submit(work, 3)
    go.set()
    background.join()
    assert seen == [1, 3]
    assert background.submit(work, 4, size=10)
    background.join()
    assert seen == [1, 3, 4]
    background.close()
    assert not background.submit(work, 5)

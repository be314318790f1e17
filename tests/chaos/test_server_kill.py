"""The server, or the client, is killed at any instant: the run goes on from disk, and its losses are the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import pytest
import torch
from distributed import Client

from cleave_dask.errors import CheckpointError, CleaveError
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.interrupted import folders
from cleave_dask.runtime.store import TileStore
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until

STEPS = 6
ROOT = Path(__file__).parents[2]


def make_trainer(client: Client, folder: Path, *, grid: tuple[int, int, int] = (2, 2, 2)) -> Trainer:
    """Dropout, so that the random state matters; batch normalisation, so that buffers do."""
    torch.manual_seed(3)
    module = models.mlp(dropout=0.1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return Trainer(module, optimizer, client, checkpoint=folder, plan=partial(plan, min_flops=0, grid=grid))


def go_on(trainer: Trainer, losses: dict[int, float], *, steps: int = STEPS) -> None:
    """Train up to the last step and save each; a loss that is there already must come out again."""
    try:
        done = trainer.resume()
    except CheckpointError:
        done = 0
    for step in range(done, steps):
        loss = trainer.step(**models.points(seed=step))
        assert losses.setdefault(step, loss) == loss, f"step {step} has another loss the second time"
        trainer.save()


class Killer(Thread):
    """Kills a process as soon as something is the case."""

    def __init__(self, pid: int, when: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.pid, self.when = pid, when
        self.over = Event()
        self.struck = False
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.001):  # a busy loop would starve the client
            if self.when():
                self.struck = True
                os.kill(self.pid, signal.SIGKILL)
                return

    def stop(self) -> None:
        self.over.set()
        self.join()


def restart_server(fleet: LocalFleet, client: Client) -> None:
    """Start the server again as it was started first; scheduler and devices have stayed."""
    until(lambda: not facts_of(client)["server"], "the scheduler to notice that the server is gone")
    spec = fleet.worker_spec[fleet.server_name]
    process = spec["cls"](fleet.scheduler_address, **spec["options"])
    fleet.sync(process.start)  # type: ignore[no-untyped-call]
    try:
        until(lambda: process.dead or bool(facts_of(client)["server"]), "a new server", seconds=60)
    finally:
        assert facts_of(client)["server"], process.explain()
    fleet.workers[fleet.server_name] = process  # not before: the cluster closes what stays away for 15 s


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    with LocalFleet(2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def client(fleet: LocalFleet) -> Iterator[Client]:
    with fleet.get_client() as client:
        yield client


@pytest.fixture(scope="module")
def calm(client: Client, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], float]:
    """The losses of a run that nobody disturbs, and its seconds."""
    losses: dict[int, float] = {}
    with make_trainer(client, tmp_path_factory.mktemp("calm")) as trainer:
        trainer.step(**models.points())  # captures and plans
    start = monotonic()
    with make_trainer(client, tmp_path_factory.mktemp("calm")) as trainer:
        go_on(trainer, losses)
    return losses, monotonic() - start


def instant(chance: random.Random, folder: Path, seconds: float) -> Callable[[], bool]:
    """When to kill: by the clock, in the middle of a save, or in the middle of a step."""
    moment = monotonic() + chance.uniform(0.1, 1.0) * seconds
    step = chance.randrange(1, STEPS)
    tiles = chance.randrange(20)
    return [
        lambda: monotonic() > moment,
        lambda: any(folder.glob(f".writing-step-{step:08d}.*")),
        lambda: on_disk(folder, step) > tiles,
    ][chance.randrange(3)]


def on_disk(folder: Path, step: int) -> int:
    """Tiles on disk of the step after the save of this one."""
    started = [place for place, content in folders(folder) if content["save"].startswith(f"step-{step:08d}")]
    return sum(1 for place in started for _ in place.glob("tiles/*/0/c.*.0"))


def test_a_killed_server_changes_no_bit_of_the_loss(
    fleet: LocalFleet, client: Client, calm: tuple[dict[int, float], float], tmp_path: Path, chaos_seed: int
) -> None:
    chance = random.Random(chaos_seed)
    expected, seconds = calm
    losses: dict[int, float] = {}
    trainer = make_trainer(client, tmp_path)
    killer = Killer(fleet.server_pid, instant(chance, tmp_path, seconds))
    try:
        go_on(trainer, losses)
    except CleaveError:
        assert killer.struck
    killer.stop()
    if killer.struck:
        restart_server(fleet, client)
        steps = TileStore(tmp_path).steps()
        assert all(TileStore(tmp_path).verify(step) for step in steps)
        assert max(steps, default=0) >= len(losses) - 1, "at most the last step is lost"
    else:
        trainer.close()
    with make_trainer(client, tmp_path) as trainer:
        go_on(trainer, losses)
    assert losses == expected


@pytest.mark.parametrize("grid", [(2, 2, 2), (4, 2, 2)])
def test_tiles_of_the_interrupted_step_are_used_again(
    fleet: LocalFleet,
    client: Client,
    calm: tuple[dict[int, float], float],
    tmp_path: Path,
    grid: tuple[int, int, int],
) -> None:
    """Also by a run that would cut its gemms in another way: it takes over the grid for that one step."""
    expected, _ = calm
    trainer = make_trainer(client, tmp_path)
    killer = Killer(fleet.server_pid, lambda: on_disk(tmp_path, 2) > 5)
    with pytest.raises(CleaveError):
        go_on(trainer, {})
    killer.stop()
    restart_server(fleet, client)
    there = on_disk(tmp_path, 2)
    with make_trainer(client, tmp_path, grid=grid) as again:
        assert again.resume() == 2
        assert again.step(**models.points(seed=2)) == expected[2]
        record = again.records[-1]
        assert record["reused"] == there > 5
        assert record["reused"] + record["tiles"] == len(trainer.plan.tiles)
        assert record["retries"] == 0
        again.step(**models.points(seed=3))
        assert again.records[-1]["tiles"] == len(again.plan.tiles)
        assert again.records[-1]["reused"] == 0


CLIENT = """
    import sys
    from pathlib import Path
    from distributed import Client
    from tests.chaos.test_server_kill import go_on, make_trainer
    with Client(sys.argv[1]) as client:
        go_on(make_trainer(client, Path(sys.argv[2])), {}, steps=10**6)
"""


def test_a_killed_client_changes_no_bit_of_the_loss(
    fleet: LocalFleet, client: Client, calm: tuple[dict[int, float], float], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), fleet.scheduler_address, tmp_path], cwd=ROOT
    )
    try:
        until(
            lambda: process.poll() is not None or (tmp_path / "step-00000002.0002").is_dir(), "two steps", seconds=120
        )
        until(lambda: process.poll() is not None or on_disk(tmp_path, 2) > 0, "tiles of the third")
    finally:
        process.kill()
        process.wait()
    losses: dict[int, float] = {}
    with make_trainer(client, tmp_path) as trainer:
        go_on(trainer, losses)
    assert losses == {step: loss for step, loss in calm[0].items() if step in losses}
    assert losses

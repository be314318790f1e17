"""A process is killed inside single file operations of saves and tiles in flight: the run ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch

from cleave_dask.runtime.store import TileStore
from tests import models
from tests.steps import Local

STEPS = 4
ROOT = Path(__file__).parents[2]
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def run(folder: Path, losses: list[float]) -> list[int]:
    """Go on from what is on disk up to the last step, saving each; tiles that were used again in each step."""
    local = Local(models.mlp(dropout=0.2), models.points())
    done = local.restore(folder)["step"] if TileStore(folder).steps() else 0
    reused = []
    for step in range(done, STEPS):
        record = local.step(models.points(seed=step))
        losses[step] = record["loss"]
        reused.append(record["reused"])
        local.training.flight.settle()
        local.save(folder)
    local.die()
    return reused


def die_at(number: int) -> None:
    """Have this process killed at its n-th file operation, whichever thread does it."""
    count = iter(range(number))

    def watch(event: str, _: object) -> None:
        if event in EVENTS and next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(folder: Path, seed: int, kills: int) -> None:
    """Children are killed at the n-th file operation, from any thread; each goes on where the last one died."""
    torch.set_num_threads(1)  # a forked child has no threads of its parent
    expected = [0.0] * STEPS
    run(folder / "calm", expected)
    chance = random.Random(seed)
    finished = reused = 0
    place = folder / "0"
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            die_at(chance.randrange(500))
            losses = list(expected)
            used = run(place, losses)
            assert losses == expected, (seed, losses, expected)
            os.write(write, bytes([min(255, sum(used))]))
            os._exit(0)
        os.close(write)
        chance.random()  # the next child dies elsewhere
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), (seed, status)
        told = os.read(read, 1)
        os.close(read)
        store = TileStore(place)
        assert all(store.verify(step) for step in store.steps()), seed
        if status == 0:
            finished, reused = finished + 1, reused + sum(told)
            place = folder / str(finished)
    losses = list(expected)
    run(place, losses)
    assert losses == expected, (seed, losses, expected)
    print(finished, reused)


def test_a_kill_inside_any_file_operation_changes_no_bit(tmp_path: Path) -> None:
    script = f"from tests.runtime.test_tile_kills import *; main(Path({str(tmp_path)!r}), seed=0, kills=20)"
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    finished, _ = map(int, done.stdout.split())
    assert 0 < finished < 20, "some runs are killed, some come to their end"

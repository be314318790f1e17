"""Damaged files, full and read-only disks, killed writers: a store loses nothing that was whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from cleave_dask.errors import CheckpointError
from cleave_dask.runtime.store import State, StoredArray, TileStore
from tests.runtime.states import assert_same, example, run, small


def files(store: TileStore, step: int) -> list[str]:
    folder = next(store.folder.glob(f"step-{step:08d}.*"))
    return sorted(str(path.relative_to(store.folder)) for path in folder.rglob("*") if path.is_file())


def test_damage_to_any_file_is_found_and_named(saved: TileStore) -> None:
    """Each file of a step in turn: a bit flipped at its start, middle and end, cut short, made longer, removed."""
    for file in files(saved, 3):
        path = saved.folder / file
        whole = path.read_bytes()
        flips = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in (0, len(whole) // 2, len(whole) - 1)]
        for damaged in (*flips, whole[:-1], b"", whole + b"\0"):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                saved.load()
            for words in ("step 3", file, "step-00000003.0003, a resume is from step 2, which is whole"):
                assert words in str(caught.value)
        path.unlink()
        if file == "step-00000003.0003/zarr.json":
            assert saved.steps() == (1, 2)  # no longer a whole step
        else:
            with pytest.raises(CheckpointError, match="No such file"):
                saved.load()
        path.write_bytes(whole)
    assert_same(saved.load(), example(3))


def test_a_chunk_of_another_step_is_not_mistaken_for_this_one(saved: TileStore) -> None:
    """It has the right size and a right checksum of its own: only the manifest knows better."""
    file = next(file for file in files(saved, 3) if "/c." in file and "embed" in file)
    shutil.copy(saved.folder / file.replace("step-00000003.0003", "step-00000002.0002"), saved.folder / file)
    with pytest.raises(CheckpointError, match=r"c\.\d+\.\d+ fails its checksum; .* resume is from step 2"):
        saved.load()


def test_the_remedy_is_a_step_that_was_checked(saved: TileStore) -> None:
    for step in (3, 2):
        (saved.folder / next(file for file in files(saved, step) if "/c." in file)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"0 bytes instead of .* resume is from step 1, which is whole"):
        saved.load()
    (saved.folder / next(file for file in files(saved, 1) if "/c." in file)).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other step is whole: put back a copy"):
        saved.load()


def test_a_second_writer_is_refused_while_the_first_lives(saved: TileStore) -> None:
    done = run("small(Path(sys.argv[1])).save(4, example(4))", saved.folder)
    assert f"process {os.getpid()} is writing to {saved.folder}; stop that run" in done.stderr
    with pytest.raises(CheckpointError, match="is writing to"):
        small(saved.folder).save(4, example(4))
    assert_same(small(saved.folder).load(), example(3))  # readers are not held up
    saved.close()
    small(saved.folder).save(4, example(4))  # and is forgotten, which lets go of the lock too
    saved.save(5, example(5))
    assert saved.steps() == (3, 4, 5)


def test_leftovers_of_dead_writers_are_ignored_and_removed(saved: TileStore) -> None:
    shutil.copytree(saved.folder / "step-00000003.0003", saved.folder / ".writing-step-00000009.0009")
    shutil.copytree(saved.folder / "step-00000003.0003", saved.folder / ".removing-step-00000000.0001")
    assert saved.steps() == (1, 2, 3)
    saved.save(4, example(4))
    assert [path.name for path in saved.folder.iterdir() if path.name.startswith(".")] == []


FULL = """
    import resource
    store = small(Path(sys.argv[1]))
    for step in (1, 2):
        store.save(step, example(step))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    store.chunk_bytes = 4096
    some, many = (StoredArray(np.ones(size, np.float32), "float32") for size in (300, 5000))
    for arrays in ({"weights/many": many}, {f"weights/{index}": some for index in range(99)}):
        try:
            store.save(3, State(arrays, {}))
        except CheckpointError as error:
            print(error)
"""


def test_a_file_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    """The limit on a file's size stops a chunk in the middle, and then a manifest that is longer than its chunks."""
    done = run(FULL, tmp_path)
    assert done.returncode == 0, done.stderr
    for error, needed in zip(done.stdout.splitlines(), ("36.4 kB", "938 kB"), strict=True):
        assert f"saving step 3 in {tmp_path} failed" in error
        assert f"it needs {needed}, " in error
        assert "are free; free some space, keep fewer than 3 steps, or save to another disk" in error
        assert error.endswith("; steps that are whole: 1, 2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-00000001.0001", "step-00000002.0002"]
    assert_same(small(tmp_path).load(), example(2))


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    mount: list[str | Path] = ["sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0"', tmp_path]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.decode().strip()}")
    try:
        store = small(tmp_path / "run")
        store.save(1, example(1))
        with pytest.raises(CheckpointError, match=r"No space left on device; it needs 8.02 MB, .* kB are free; free"):
            store.save(2, State({"weights/x": StoredArray(np.zeros(1_000_000), "float64")}, {}))
        many = {f"weights/{index}": StoredArray(np.zeros(100), "float64") for index in range(30)}  # 4 chunks each
        (tmp_path / "other").write_bytes(bytes(shutil.disk_usage(tmp_path).free - 300_000))
        with pytest.raises(CheckpointError, match=r"No space left on device.*steps that are whole: 1$"):
            store.save(2, State(many, {}))
        assert_same(store.load(), example(1))
        assert not list((tmp_path / "run").glob(".*"))
        store.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


READ_ONLY = """
    states = {step: example(step) for step in (1, 2)}
    with tempfile.TemporaryDirectory() as other:
        small(Path(other)).save(1, states[1])
        assert_same(small(Path(other)).load(), states[1])  # everything is imported
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)  # root may write anywhere: become somebody else
    for folder in (Path(sys.argv[1]), Path(sys.argv[1]) / "new" / "run"):
        try:
            small(folder).save(2, states[2])
        except CheckpointError as error:
            print(error)
    assert_same(small(Path(sys.argv[1])).load(), states[1])
"""


def test_a_read_only_folder_is_named_and_still_readable() -> None:
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which only its owner may enter
        folder = Path(name)
        small(folder).save(1, example(1))
        folder.chmod(0o555)
        done = run(READ_ONLY, folder)
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first.startswith(f"saving step 2 in {folder} failed: [Errno 13] Permission denied")
        assert first.endswith("are free; make the folder writable, or save to another one; steps that are whole: 1")
        assert "Permission denied" in second


KILLS = """
    import random, select, signal
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(seed)
    events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}
    done = 0
    for attempt in range(int(sys.argv[3])):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            store = small(folder)
            if attempt % 2:  # die at the n-th time that a file is opened, renamed or removed, wherever that is
                count = iter(range(chance.randrange(300)))
                left = lambda event: event not in events or next(count, None) is not None
                sys.addaudithook(lambda event, _: left(event) or os.kill(os.getpid(), signal.SIGKILL))
            os.write(write, b"+")
            for step in range(done + 1, done + 100):
                store.save(step, example(step))
                os.write(write, step.to_bytes(4, "big"))
            os._exit(1)
        os.read(read, 1)
        if not attempt % 2:  # die at any instant
            select.select([], [], [], chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, (seed, attempt, "it died of something else")
        os.close(write)
        told = b"".join(iter(lambda: os.read(read, 4096), b""))
        store = small(folder)
        steps = store.steps()
        newest = int.from_bytes(told[-4:], "big") or done
        assert steps[-1:] in ((newest,), (newest + 1,)) or not (steps or newest), (seed, attempt, steps, newest)
        assert len(steps) >= min(3, newest) and len(steps) <= 4, (seed, attempt, steps)
        for step in steps:
            assert_same(store.load(step), example(step))
        done = steps[-1] if steps else 0
    print(done)
"""


def test_a_kill_at_any_instant_leaves_the_former_steps_readable(tmp_path: Path) -> None:
    """20 writers are killed, by the clock and inside single file operations; what was saved is there, and whole."""
    done = run(KILLS, tmp_path, 0, 20)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
    small(tmp_path).save(1000, example(1000))
    assert not list(tmp_path.glob(".*")), "the next writer cleans up"


def test_memory_of_a_save_and_a_load_is_a_few_chunks(tmp_path: Path) -> None:
    """128 MB are written and read back in place; the peak may grow by the chunks in flight, not by a copy."""
    script = """
        import resource
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        data = np.ones((32, 1 << 20), np.float32)
        warm = TileStore(Path(sys.argv[1]) / "warm"); warm.save(1, example(1)); warm.load()
        before = peak()
        store = TileStore(Path(sys.argv[1]) / "run", chunk_bytes=4 << 20)
        store.save(1, State({"weights/x": StoredArray(data, "float32")}, {}))
        store.load(into={"weights/x": data})
        assert store.verify(1)
        print(peak() - before)
    """
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40e6

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import cleave_dask
from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.runtime import zarr_files as module
from cleave_dask.runtime.store import Expectation, State, StoredArray, TileStore

ROOT = Path(cleave_dask.__file__).parents[1]
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn")


def example(step: int) -> State:
    """A small state that says of which step it is, with arrays of several chunks in a store of `small` chunks."""
    chance = np.random.default_rng(step)
    arrays = {
        "weights/model.embed.weight": StoredArray(chance.standard_normal((37, 11), dtype=np.float32), "float32"),
        "weights/norm": StoredArray(chance.integers(0, 2**16, 70, dtype=np.uint16), "bfloat16"),
        "optimizer/exp_avg/model.embed.weight": StoredArray(np.full((37, 11), step, np.float32), "float32"),
        "buffers/count": StoredArray(np.array(step), "int64"),
    }
    return State(arrays, {"step": step, "graph_digest": "abc", "random": "00ff", "schedule": None})


def small(folder: Path, *, keep: int = 3) -> TileStore:
    return TileStore(folder, keep=keep, chunk_bytes=256)


def assert_same(one: State, two: State) -> None:
    assert one.document == two.document
    assert one.arrays.keys() == two.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == two.arrays[name].dtype
        np.testing.assert_array_equal(array.data, two.arrays[name].data)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that sees this file's helpers."""
    head = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]; from test_store import *\n"
    command = [sys.executable, "-W", "error", "-c", head + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[TileStore]:
    """A store with steps 1, 2 and 3."""
    store = small(tmp_path / "run")
    for step in (1, 2, 3):
        store.save(step, example(step))
    yield store
    store.close()


def test_round_trip_of_the_newest_and_of_a_named_step(saved: TileStore) -> None:
    assert saved.steps() == (1, 2, 3)
    assert_same(saved.load(), example(3))
    assert_same(saved.load(1), example(1))
    assert all(saved.verify(step) for step in saved.steps())
    with pytest.raises(CheckpointError, match="has steps 1, 2, 3, not 7; name one that is there, or another folder"):
        saved.load(7)
    with pytest.raises(CheckpointError, match="has no saved step; name one that is there, or another folder"):
        TileStore(saved.folder / "elsewhere").load()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1000,), (5, 300), (2, 3, 40, 7)])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 2, shape).astype(module.holder(dtype))
    store = small(tmp_path)
    store.save(1, State({"weights/x": StoredArray(data, dtype)}, {}))
    assert_same(store.load(), State({"weights/x": StoredArray(data, dtype)}, {}))


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 200), st.sampled_from([1, 8]))
def test_chunks_partition_the_array_and_lie_side_by_side(shape: tuple[int, ...], target: int, size: int) -> None:
    chunk = module._chunk_shape(shape, size, target)
    seen = np.zeros(shape, int)
    order = np.arange(seen.size).reshape(shape)
    for _, selection in module._chunks(shape, chunk):
        seen[selection] += 1
        assert (np.diff(order[selection].reshape(-1)) == 1).all()
    assert (seen == 1).all()
    assert np.prod(chunk) * size <= max(target, size)


def test_views_that_are_not_contiguous_are_stored_as_seen(tmp_path: Path) -> None:
    data = np.arange(600, dtype=np.float32).reshape(20, 30).T[::2]
    store = small(tmp_path)
    store.save(1, State({"weights/x": StoredArray(data, "float32")}, {}))
    np.testing.assert_array_equal(store.load().arrays["weights/x"].data, data)
    target = np.zeros((20, 15), np.float32).T
    store.load(into={"weights/x": target})
    np.testing.assert_array_equal(target, data)


def test_loading_into_memory_that_is_there(saved: TileStore) -> None:
    mine = np.zeros((37, 11), np.float32)
    state = saved.load(into={"weights/model.embed.weight": mine})
    assert state.arrays["weights/model.embed.weight"].data is mine
    with pytest.raises(InputError, match=r"weights/norm is uint16 \(70,\); it cannot be read into <f4 \(70,\)"):
        saved.load(into={"weights/norm": np.zeros(70, np.float32)})
    with pytest.raises(CheckpointError, match="has no weights/other; resume with the model that wrote it"):
        saved.load(into={"weights/other": mine})


def test_any_zarr_reader_opens_a_step(saved: TileStore) -> None:
    group = zarr.open_group(saved.folder / "step-00000003.0003", mode="r")
    assert sorted(group.group_keys()) == ["buffers", "optimizer", "weights"]
    for name, array in example(3).arrays.items():
        stored = group[name]
        assert isinstance(stored, zarr.Array)
        assert stored.attrs["dtype"] == array.dtype
        np.testing.assert_array_equal(np.asarray(stored[...]), array.data)


def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir()
    store = small(tmp_path, keep=2)
    for step in range(5):
        store.save(step, example(step))
    assert store.steps() == (3, 4)
    assert sorted(path.name[-5:] for path in tmp_path.iterdir()) == [".0004", ".0005", "lock", "notes"]
    store.close()
    with pytest.raises(InputError, match="keep=0"):
        TileStore(tmp_path, keep=0)


def test_a_limit_of_bytes_removes_old_steps_but_never_the_newest(tmp_path: Path) -> None:
    with small(tmp_path / "measured") as measured:
        measured.save(1, example(1))
    size = module.size_of(tmp_path / "measured") + 200  # checksums have more or fewer digits
    needed = sum(array.data.nbytes for array in example(1).arrays.values()) + 8192 * 5  # what a save reckons with
    limit = 2 * size + needed
    store = TileStore(tmp_path / "run", keep=9, max_bytes=limit, chunk_bytes=256)
    for step in range(1, 6):
        store.save(step, example(step))
        assert module.size_of(store.folder) <= limit
    assert store.steps() == (3, 4, 5)
    store.max_bytes = needed
    with pytest.raises(
        CheckpointError, match=r"of the newest step.*max_bytes is .*; set it to at least \d+$"
    ) as caught:
        store.save(6, example(6))
    assert store.steps() == (5,)
    assert_same(store.load(), example(5))
    store.max_bytes = int(str(caught.value).split()[-1])
    store.save(6, example(6))
    assert store.steps() == (5, 6)
    store.close()


def test_a_save_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    with small(tmp_path / "a") as one, small(tmp_path / "b") as two:
        first, second = one.save(1, example(1)), two.save(1, example(2))
        assert one.load().identity == first != second == two.load().identity
        assert one.save(1, example(1)) != first


def test_a_run_that_went_back_goes_on_from_where_it_went(saved: TileStore) -> None:
    """After a resume from step 1, the new step 2 is the newest, although a step 3 of the former run is still there."""
    again = State(example(2).arrays, {"second": True})
    saved.save(2, again)
    assert saved.steps() == (1, 3, 2)
    assert_same(saved.load(), again)
    assert_same(saved.load(2), again)
    assert len(list(saved.folder.glob("step-00000002.*"))) == 1


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    one = StoredArray(np.zeros(1), "float64")
    for name in ("", "/x", "weights/../x", "weights/zarr.json", "weights//x"):
        with pytest.raises(InputError, match="cannot be the name of a stored array"):
            small(tmp_path).save(1, State({name: one}, {}))
    with pytest.raises(InputError, match="also the folder of another array"):
        small(tmp_path).save(1, State({"a": one, "a/b": one}, {}))
    with pytest.raises(InputError, match="bfloat16 are held as uint16, not as <f4"):
        StoredArray(np.zeros(1, np.float32), "bfloat16")
    with pytest.raises(InputError, match="float32 are held as float32, not as >f4"):
        StoredArray(np.zeros(1, ">f4"), "float32")
    for document in ({"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}, {"a": object()}):
        with pytest.raises(InputError, match="not plain JSON"):
            small(tmp_path).save(1, State({}, document))
    assert list(tmp_path.iterdir()) == [tmp_path / "lock"]


def test_the_state_of_another_model_is_refused(saved: TileStore) -> None:
    arrays = example(3).arrays.items()
    ours = {name: (array.dtype, array.data.shape) for name, array in arrays if name.startswith("weights/")}
    assert_same(saved.load(expect=Expectation(ours, "abc")), example(3))
    with pytest.raises(CheckpointError, match="another model: graph digest is abc there and xyz here"):
        saved.load(expect=Expectation(ours, "xyz"))
    with pytest.raises(CheckpointError, match=r"norm is \('bfloat16', \(70,\)\) there and \('bfloat16', \(71,\)"):
        saved.load(expect=Expectation(ours | {"weights/norm": ("bfloat16", (71,))}))
    with pytest.raises(CheckpointError, match=r"weights/extra is absent there and .* here \(1 differences in all\)"):
        saved.load(expect=Expectation(ours | {"weights/extra": ("float32", (2,))}))
    with pytest.raises(CheckpointError, match=r"weights/model.embed.weight is .* there and absent here"):
        saved.load(expect=Expectation({"weights/norm": ours["weights/norm"]}))


def test_a_newer_format_is_refused(saved: TileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(module, "FORMAT", 2)
        saved.save(4, example(4))
    with pytest.raises(CheckpointError, match=r"is in format 2, written by cleave-dask .*reads up to 1: upgrade it"):
        saved.load()
    assert_same(saved.load(3), example(3))


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
            for words in ("step 3", file, "resume from step 2, which is whole"):
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
    with pytest.raises(CheckpointError, match=r"c\.\d+\.\d+ fails its checksum; resume from step 2"):
        saved.load()


def test_the_remedy_is_a_step_that_was_checked(saved: TileStore) -> None:
    for step in (3, 2):
        (saved.folder / next(file for file in files(saved, step) if "/c." in file)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"0 bytes instead of .* resume from step 1, which is whole"):
        saved.load()
    (saved.folder / next(file for file in files(saved, 1) if "/c." in file)).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other step is whole"):
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
        small(Path(other)).save(1, states[1])  # everything is imported
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

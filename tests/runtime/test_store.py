from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.runtime import zarr_files as module
from cleave_dask.runtime.store import Expectation, State, StoredArray, TileStore
from tests.runtime.states import assert_same, example, small

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn")


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
    with pytest.raises(CheckpointError, match="norm is bfloat16 of 70 there and bfloat16 of 71 here"):
        saved.load(expect=Expectation(ours | {"weights/norm": ("bfloat16", (71,))}))
    with pytest.raises(CheckpointError, match=r"extra is absent there and float32 of 2 here \(1 differences in all\)"):
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

"""Text and token files, and batches drawn from them by number."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import RecipeError
from cleave_dask.graph import corpora

TOKENS = np.arange(1000, dtype=np.uint16)


def test_the_standard_library_is_bounded_text_of_its_own_source() -> None:
    tokens = corpora.stdlib_tokens()
    assert 1_000_000 < len(tokens) <= corpora.STDLIB_LIMIT
    assert tokens is corpora.stdlib_tokens()  # read once
    assert tokens.max() < corpora.BYTES
    text = corpora.decode(tokens)
    assert "import sys" in text
    first = (Path(sysconfig.get_path("stdlib")) / "__future__.py").read_text()
    assert text.startswith(first)


def test_tests_and_other_peoples_packages_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a.py", "test/t.py", "site-packages/s.py", "json/tests/t.py", "json/j.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert corpora.decode(corpora.stdlib_tokens.__wrapped__()) == "a.py\nb.py\njson/j.py\n"


def test_a_python_without_source_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(RecipeError, match=r"no standard library source in .*files = "):
        corpora.stdlib_tokens.__wrapped__()


def test_text_files_are_joined_byte_by_byte(tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("né")
    paths[1].write_text("w")
    assert corpora.text_tokens(paths).tolist() == [*"né".encode(), ord("w")]
    with pytest.raises(RecipeError, match=r"c\.txt cannot be read: No such file"):
        corpora.text_tokens([tmp_path / "c.txt"])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_token_files_are_read_in_both_formats(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(200).astype(dtype)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    np.testing.assert_array_equal(corpora.file_tokens(tmp_path / "t.npy"), tokens)
    np.testing.assert_array_equal(corpora.file_tokens(tmp_path / "t.bin", dtype), tokens)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.npy", b"", "cannot be read"),
        ("t.npy", b"\x93NUMPY garbage", "cannot be read"),
        ("t.bin", b"", "cannot be read"),
        ("t.bin", b"123", "cannot be read"),
    ],
)
def test_a_broken_token_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=words) as caught:
        corpora.file_tokens(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("wrong", [np.zeros((2, 2), np.int64), np.zeros(4), np.array([{}], dtype=object)])
def test_a_token_file_of_other_things_is_refused(tmp_path: Path, wrong: np.ndarray) -> None:
    np.save(tmp_path / "t.npy", wrong, allow_pickle=True)
    with pytest.raises(RecipeError, match=r"t\.npy"):
        corpora.file_tokens(tmp_path / "t.npy")


@given(st.integers(0, 3000))
def test_the_splits_partition_the_tokens(length: int) -> None:
    tokens = np.arange(length)
    both = np.concatenate([corpora.part(tokens, "train"), corpora.part(tokens, "validation")])
    np.testing.assert_array_equal(both, tokens)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.sampled_from(["train", "validation"]))
def test_a_batch_depends_on_its_number_only(seed: int, number: int, split: corpora.Split) -> None:
    drawn = corpora.draw(TOKENS, shape=(3, 10), seed=seed, split=split, number=number)
    again = corpora.draw(TOKENS, shape=(3, 10), seed=seed, split=split, number=number)
    np.testing.assert_array_equal(drawn, again)
    assert drawn.dtype == np.int64
    assert set(np.diff(drawn).ravel().tolist()) == {1}  # each row is one run of the text
    assert np.isin(drawn, corpora.part(TOKENS, split)).all()


def test_batches_differ_by_number_seed_and_split() -> None:
    def draw(seed: int, number: int) -> bytes:
        return corpora.draw(TOKENS, shape=(8, 10), seed=seed, split="train", number=number).tobytes()

    assert len({draw(seed, number) for seed in range(5) for number in range(20)}) == 100


def test_too_little_text_is_said_with_numbers() -> None:
    with pytest.raises(RecipeError, match="validation part of the data has 50 tokens, fewer than one sequence of 64"):
        corpora.draw(TOKENS, shape=(1, 64), seed=0, split="validation", number=0)
    whole = corpora.draw(TOKENS[:20], shape=(2, 19), seed=0, split="train", number=0)
    assert whole.tolist() == [list(range(19))] * 2


@given(st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    assert corpora.decode(text.encode("utf-8", errors="replace")) == text.encode("utf-8", errors="replace").decode()


def test_decoding_never_fails() -> None:
    assert corpora.decode([104, 105, 300, -1, 255]) == "hi\ufffd\ufffd\ufffd"
    assert corpora.decode(np.array([104, 105], dtype=np.uint8)) == "hi"

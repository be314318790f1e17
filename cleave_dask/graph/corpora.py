"""Text and token files as arrays of tokens, and batches drawn from them by number.

Byte-level text needs no tokenizer: each byte is a token below 256. A batch is a function of (seed, split, number) and
nothing else, so a resumed run sees the data that the interrupted one would have seen.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cleave_dask.errors import RecipeError

Tokens = NDArray[np.integer]
Split = Literal["train", "validation"]

BYTES = 256
"""Number of different tokens of byte-level text."""

STDLIB_LIMIT = 4_000_000
"""Bytes taken from the standard library: more than the tiny recipes ever see, and read in a moment."""

VALIDATION_PART = 20
"""One token in this many, the last of the corpus, is kept for validation."""

# Not what a person would call Python source: tests, other people's packages, tables, build leftovers.
_LEFT_OUT = {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
_LEFT_OUT_PREFIXES = ("config-", "test", "turtledemo")


@lru_cache(maxsize=1)
def stdlib_tokens() -> Tokens:
    """The first STDLIB_LIMIT bytes of the standard library's own source, file by file in the order of their paths."""
    folder = sysconfig.get_path("stdlib")
    text = bytearray()
    for path in _sources(folder):
        text += _read_bytes(path)
        if len(text) >= STDLIB_LIMIT:
            break
    if not text:
        raise RecipeError(
            f"this Python has no standard library source in {folder} (it may be zipped); "
            "give your own text instead: files = ['*.txt'] in [data]"
        )
    return np.frombuffer(bytes(text[:STDLIB_LIMIT]), dtype=np.uint8)


def text_tokens(paths: Iterable[Path]) -> Tokens:
    """The bytes of text files, one after another."""
    return np.frombuffer(b"".join(_read_bytes(path) for path in paths), dtype=np.uint8)


def file_tokens(path: Path, dtype: str = "uint16") -> Tokens:
    """The tokens of a file, read as they are needed: `.npy` says its own type, `.bin` is raw numbers of `dtype`."""
    try:
        if path.suffix == ".npy":
            tokens: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise RecipeError(
            f"token file {path} cannot be read: {error}; give a .npy file or raw {dtype} numbers"
        ) from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        found = f"{tokens.ndim}-dimensional {tokens.dtype}"
        raise RecipeError(f"token file {path} holds {found} numbers; it must hold one row of whole numbers")
    return tokens  # type: ignore[return-value]  # the line above has just checked it


def part(tokens: Tokens, split: Split) -> Tokens:
    """The tokens of one split: the last twentieth is for validation, the rest for training."""
    kept = len(tokens) // VALIDATION_PART
    return tokens[len(tokens) - kept :] if split == "validation" else tokens[: len(tokens) - kept]


def draw(tokens: Tokens, *, shape: tuple[int, int], seed: int, split: Split, number: int) -> NDArray[np.int64]:
    """Batch number `number` of a split: `shape` is (sequences, tokens of each), each from a random place."""
    batch, sequence = shape
    available = part(tokens, split)
    if len(available) < sequence:
        raise RecipeError(
            f"the {split} part of the data has {len(available)} tokens, fewer than one sequence of {sequence}; "
            "give more text or lower 'sequence' in [data]"
        )
    chance = np.random.default_rng([seed, split == "validation", number])
    starts = chance.integers(0, len(available) - sequence + 1, size=batch)
    return np.stack([available[start : start + sequence] for start in starts.tolist()]).astype(np.int64)


def decode(tokens: Iterable[int]) -> str:
    """Byte-level tokens as text, for people: what is not UTF-8, or no byte at all, shows as a replacement sign."""
    data = bytes(token if 0 <= token < BYTES else 0xFF for token in map(int, tokens))
    return data.decode("utf-8", errors="replace")


def _sources(folder: str) -> Iterator[Path]:
    """Every source file that belongs to the corpus, by relative path, whatever order the disk gives them in."""
    found: list[tuple[str, Path]] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if _wanted(name)]
        found += [
            (os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/"), Path(root, name))
            for name in files
            if name.endswith(".py")
        ]
    return (path for _, path in sorted(found))


def _wanted(folder: str) -> bool:
    """Whether the corpus includes a folder of that name."""
    return folder not in _LEFT_OUT and not folder.startswith(_LEFT_OUT_PREFIXES)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(f"text file {path} cannot be read: {error.strerror}") from None

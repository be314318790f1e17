"""A small recipe, and an empty checkpoints folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask.config
import pytest

from cleave_dask import config  # noqa: F401  # its defaults outlive what a test sets
from tests.cli.calling import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An empty checkpoints folder."""
    with dask.config.set({"cleave.checkpoint.folder": str(tmp_path / "checkpoints")}):
        yield tmp_path / "checkpoints"

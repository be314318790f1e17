"""A store with a few steps in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave_dask.runtime.store import TileStore
from tests.runtime.states import example, small


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[TileStore]:
    """A store with steps 1, 2 and 3."""
    store = small(tmp_path / "run")
    for step in (1, 2, 3):
        store.save(step, example(step))
    yield store
    store.close()

"""What every test shares: markers by folder, hypothesis profiles, the number of chaos seeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
FOLDER_MARKERS = {name: name for name in ("cluster", "chaos", "browser", "bench")} | {"security": "cluster"}
"""The marker of each folder; tests anywhere else are unit tests."""

settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("fuzz", settings.get_profile("dev"), max_examples=1000)  # at a time, by `make fuzz`
settings.load_profile("fuzz" if os.environ.get("FUZZ_SECONDS") else "ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seeds", type=int, default=2, help="seeds that each chaos test runs with (default: 2)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `chaos_seed` runs once per seed; the seed is in its name when it fails."""
    if "chaos_seed" in metafunc.fixturenames:
        metafunc.parametrize("chaos_seed", range(metafunc.config.getoption("--chaos-seeds")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        item.add_marker(FOLDER_MARKERS.get(folder, "unit"))

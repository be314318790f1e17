"""A million tiles on virtual time: python -m pytest tests/bench/test_million.py, a minute or two."""

from __future__ import annotations

from tests.simulation.test_invariants import everything_is_counted


def test_a_million_tiles_are_each_done_once_and_every_byte_is_counted() -> None:
    everything_is_counted((100, 100, 100))

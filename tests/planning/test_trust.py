"""Whom the server checks: everybody, or by the results so far; one wrong result is the last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import InputError
from cleave_dask.planning.trust import PROBATION, Trust


@given(valid=st.integers(0, 100), chance=st.floats(0, 1, exclude_max=True))
def test_always_is_always(valid: int, chance: float) -> None:
    trust = Trust()
    for _ in range(valid):
        trust.passed("a")
    assert trust.checks("a", chance)


def test_trust_is_earned_and_then_tested_once_in_n_times() -> None:
    trust = Trust("trust")
    for valid in range(PROBATION):
        assert trust.checks("a", 0.999), f"unchecked after {valid} results"
        trust.passed("a")
    for _ in range(30):
        trust.passed("a")
    chances = [number / 4000 for number in range(4000)]
    assert sum(trust.checks("a", chance) for chance in chances) == 4000 // (PROBATION + 30)
    assert trust.checks("b", 0.999), "what one has earned is not another's"


def test_one_wrong_result_is_the_last() -> None:
    trust = Trust("trust")
    for _ in range(50):
        trust.passed("a")
    assert trust.caught("a", "tile 3 is wrong")
    assert not trust.caught("a", "tile 4 is wrong too")
    assert trust.quarantined == {"a": "tile 3 is wrong"}
    assert trust.checks("a", 0.999)


def test_another_mode_is_an_error() -> None:
    with pytest.raises(InputError, match=r"'cleave\.verify' is 'never'; give one of always, trust"):
        Trust("never")  # type: ignore[arg-type]

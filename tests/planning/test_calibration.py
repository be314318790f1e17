"""Observed figures: exact on steady rates, deaf to single outliers and to nonsense."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.planning.calibration import Calibration, Rate, corrected, differ
from tests.strategies import fleets

RATES = st.floats(1e3, 1e12)
LINK = Link(1e6, 0.01)


@given(rate=RATES, seconds=st.lists(st.floats(1e-3, 10), min_size=3, max_size=20), outlier=RATES, data=st.data())
def test_a_single_outlier_changes_nothing(
    rate: float, seconds: list[float], outlier: float, data: st.DataObject
) -> None:
    seen = Rate()
    odd = data.draw(st.integers(0, len(seconds)))
    for number, time in enumerate(seconds):
        if number == odd:
            seen.observe(outlier, 1.0)
        seen.observe(rate * time, time)
    assert seen.value is not None
    if odd >= 2:
        assert seen.value == pytest.approx(rate)


def test_a_change_is_followed_within_a_few_observations() -> None:
    seen = Rate()
    for _ in range(20):
        seen.observe(1e9, 1.0)
    for _ in range(10):
        seen.observe(1e8, 1.0)
    assert seen.value is not None
    assert seen.value < 1.5e8


@pytest.mark.parametrize(
    ("amount", "seconds"), [(0, 1.0), (-1, 1.0), (1e9, 0.0), (nan, 1.0), (1e9, nan), (inf, 1.0), (1, inf)]
)
def test_what_is_no_observation_is_left_out(amount: float, seconds: float) -> None:
    seen = Rate()
    for _ in range(5):
        seen.observe(amount, seconds)
    assert seen.value is None


def test_figures_are_known_by_device_after_a_few_tiles() -> None:
    calibration = Calibration()
    for _ in range(3):
        calibration.observe("a", {"flops": (2e9, 1.0), "down": (0, 0.0), "up": (1e6, 0.5)})
    calibration.observe("b", {"flops": (1e9, 1.0)})
    assert calibration.figures() == {"a": {"flops": pytest.approx(2e9), "up": pytest.approx(2e6)}}


@given(fleets())
def test_without_observations_nothing_is_corrected(fleet: Fleet) -> None:
    assert corrected(fleet, {}) == fleet
    assert not differ(fleet, fleet, 1.5)


def test_fleets_differ_by_members_and_by_figures() -> None:
    one = Fleet(Server(), (Device("a", 1e9, 1e9, LINK, LINK), Device("b", 1e9, 1e9, LINK, LINK)))
    assert not differ(one, corrected(one, {"a": {"flops": 1.4e9}}), 1.5)
    assert differ(one, corrected(one, {"a": {"flops": 1.6e9}}), 1.5)
    assert differ(one, corrected(one, {"b": {"up": 0.5e6}}), 1.5)
    assert differ(one, Fleet(Server(), one.devices[:1]), 1.5)
    fixed = corrected(one, {"a": {"down": 5e5}, "nobody": {"down": 1.0}})
    assert fixed.device("a").down == Link(5e5, 0.01)
    assert fixed.device("b") == one.device("b")

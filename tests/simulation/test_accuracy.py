"""What is said of simulated seconds beside them."""

from __future__ import annotations

import pytest

from cleave_dask.simulation.accuracy import Accuracy, measured_accuracy


def test_ratios_are_measured_over_simulated() -> None:
    rows = [
        {"setting": "even", "seconds": 12.0, "simulated_seconds": 10.0},
        {"setting": "uneven", "seconds": 9.0, "simulated_seconds": 10.0},
    ]
    found = Accuracy.of(rows, "here")
    assert found.ratios == {"even": pytest.approx(1.2), "uneven": pytest.approx(0.9)}
    assert found.worst == pytest.approx(0.2)
    assert "took 0.90 to 1.20 times as long, in 2 settings (here)" in str(found)


def test_what_was_measured_comes_with_the_package() -> None:
    found = measured_accuracy()
    assert len(found.ratios) >= 6
    assert "kill, 2x" in found.ratios
    low, high = found.span
    assert 0 < low <= high

"""Amounts as people write them."""

from __future__ import annotations

from math import inf, isclose, isfinite, nan
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cleave_dask.errors import FleetError
from cleave_dask.fleet.units import EXAMPLES, Dimension, parse

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)


@pytest.mark.parametrize(
    ("text", "dimension", "amount"),
    [
        ("400 Mbit/s", "bytes/s", 50e6),
        ("400Mbps", "bytes/s", 50e6),
        ("50 MB/s", "bytes/s", 50e6),
        ("1 MiB/s", "bytes/s", 2**20),
        ("1.5e3 kB/s", "bytes/s", 1.5e6),
        ("512 MB", "bytes", 512e6),
        ("2 GiB", "bytes", 2 * 2**30),
        (" 1 B ", "bytes", 1),
        ("5 TFLOP/s", "flop/s", 5e12),
        ("200 GFLOPS", "flop/s", 200e9),
        ("20 ms", "seconds", 0.02),
        (".5 s", "seconds", 0.5),
        ("3 µs", "seconds", 3e-6),
        ("0 ms", "seconds", 0),
        ("7.5e6", "bytes/s", 7.5e6),
        (12_500_000, "bytes/s", 12.5e6),
        (np.float32(0.5), "seconds", 0.5),
    ],
)
def test_amounts_are_read_in_base_units(text: object, dimension: Dimension, amount: float) -> None:
    assert isclose(parse(text, dimension, field="x"), amount)


@pytest.mark.parametrize(
    ("given", "dimension"),
    [
        ("fast", "bytes/s"),
        ("", "bytes"),
        ("50 MB", "bytes/s"),  # a rate needs its time
        ("50 MB/s", "bytes"),
        ("50 mb/s", "bytes/s"),  # megabit or megabyte?
        ("1,000 MB", "bytes"),
        ("20 m", "seconds"),
        ("5 TFLOP", "flop/s"),
        ("nan", "seconds"),
        ("inf s", "seconds"),
        ("1e999 s", "seconds"),
        ("-1 ms", "seconds"),
        ("0 MB/s", "bytes/s"),
        ("1e-300 B/s", "bytes/s"),  # a plan with it would overflow
        (1e300, "flop/s"),
        ("1e30 GB", "bytes"),
        (1e200, "seconds"),
        (0, "bytes"),
        (-3.0, "flop/s"),
        (nan, "bytes"),
        (inf, "seconds"),
        (True, "bytes"),
        (None, "bytes"),
        ([1], "bytes"),
        (1j, "bytes"),
        (10**5000, "bytes"),
        ("1" * 100_000 + " x y", "bytes"),
    ],
    ids=lambda value: repr(value)[:20] if value != 10**5000 else "10**5000",
)
def test_what_cannot_be_is_refused_by_name(given: object, dimension: Dimension) -> None:
    with pytest.raises(FleetError) as caught:
        parse(given, dimension, field="device 'pi': it")
    message = str(caught.value)
    assert message.startswith("device 'pi': it is ")
    assert EXAMPLES[dimension] in message
    assert len(message) < 300


@given(
    anything=st.one_of(st.text(), st.from_regex(r"[-+]?[0-9.eE]{1,8} ?[A-Za-z/]{0,8}"), st.integers(), st.floats())
    | st.booleans()
    | st.none()
    | st.datetimes()
    | st.lists(st.integers()),
    dimension=st.sampled_from(DIMENSIONS),
)
@example(anything="1e400 TB", dimension="bytes")
@example(anything="\u0661 s", dimension="seconds")
def test_any_input_gives_an_amount_or_a_fleet_error(anything: object, dimension: Dimension) -> None:
    try:
        amount = parse(anything, dimension, field="x")
    except FleetError:
        return
    assert isfinite(amount)
    assert amount > 0 or (amount == 0 and dimension == "seconds")


@given(st.floats(min_value=1.0, max_value=1e15, allow_nan=False))
def test_a_number_and_its_text_agree(number: float) -> None:
    assert parse(f"{number!r} MB/s", "bytes/s", field="x") == pytest.approx(number * 1e6)
    assert parse(f"{number!r}", "bytes/s", field="x") == parse(number, "bytes/s", field="x") == number

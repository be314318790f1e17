"""Devices over the addresses of a server."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.runtime.spreading import Spread


@given(st.integers(1, 40), st.integers(1, 5))
def test_as_many_devices_to_each_address_as_to_any_other(devices: int, count: int) -> None:
    spread = Spread()
    spread.offer([str(number) for number in range(count)])
    told = Counter(spread.of(f"device-{number}") for number in range(devices))
    assert max(told.values()) - min(told[str(number)] for number in range(count)) <= 1


def test_a_device_keeps_its_address_until_one_of_the_two_is_gone() -> None:
    spread = Spread()
    assert spread.of("early") == ""
    spread.offer(["a", "b"])
    assert [spread.of(device) for device in ("x", "y", "x")] == ["a", "b", "a"]
    spread.left("x")
    assert spread.of("z") == "a"
    spread.offer(["b", "c"])
    assert [spread.of(device) for device in ("y", "z")] == ["b", "c"]
    spread.offer([])
    assert spread.of("y") == ""

"""Fields of messages from devices: what is acted on, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cleave_dask.runtime import checking as check
from cleave_dask.runtime.decoding import Refused
from cleave_dask.runtime.server_gathering import Attempt


@pytest.mark.parametrize("address", ["tls://127.0.0.1:1", "tcp://10.0.0.7:65535", "tls://[::1]:40000"])
def test_an_address_is_taken_as_it_is_written(address: str) -> None:
    assert check.address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        *("honest", "cleave-server", "127.0.0.1:1", "tls://localhost:1", "tls://127.1:1", "tls://127.0.0.01:1"),
        *("TLS://127.0.0.1:1", "tls://127.0.0.1:01", "tls://127.0.0.1:65536", "tls://127.0.0.1:0", "inproc://x/1/1"),
        *("tls://[::0001]:1", "tls://127.0.0.1:1\n", "tls://127.0.0.1", "", None, 5, ("127.0.0.1", 1)),
    ],
)
def test_what_dask_would_take_for_another_address_is_refused(address: Any) -> None:
    """It looks up names of workers and of hosts, and adds what is missing."""
    with pytest.raises(Refused):
        check.address(address)


def test_times_that_cannot_be_are_left_out() -> None:
    spans = [(5.0, 6.0), (-1e308, 1e308), (0.0, 1e300), (6.0, 5.0)]
    told = tuple({"action": "compute", "start": start, "stop": stop} for start, stop in spans)
    assert check.startstops(told) == [{"action": "compute", "start": 5.0, "stop": 6.0}]


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        *(("flops", 1e-300), ("down", 5e-324), ("up", 1e16), ("latency", 1e9), ("memory", 1), ("cores", 10**7)),
        *((figure, -1.0) for figure in check.REASON),
    ],
)
def test_figures_beyond_reason_are_refused(figure: str, value: float) -> None:
    with pytest.raises(Refused, match=f"{figure} of"):
        check.facts({"cleave": {"role": "device", "version": "0", "kernel": "numpy", figure: value}})


def test_what_people_read_moves_no_cursor() -> None:
    assert check.said("\x1b[2Jgone\r\n\u202eyes") == " [2Jgone   yes"


def test_what_links_cannot_carry_is_no_observation() -> None:
    told: Any = {"down": (10**6, 0.5), "up": (5e-324, 9e18), "flops": (1, 1.0)}
    assert Attempt.of("a", 0.0, 0.0, moved=told).moved == {"down": (10**6, 0.5)}
    for nonsense in ("nothing", 5, (1,), ("a", "b"), (1, 0), (10**18, 1e-3), None):
        assert Attempt.of("a", 0.0, 0.0, moved={"up": nonsense}).moved == {}  # type: ignore[dict-item]

"""Pacing is arithmetic; awaiting it is accurate; a slowed kernel takes the time that it should."""

from __future__ import annotations

import asyncio
import logging
from math import inf
from time import perf_counter, sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.graph.ir import BACKWARD_WORK
from cleave_dask.runtime.kernels import load_kernel, measure_flops
from cleave_dask.runtime.shaping import Lane, Links, Meter, SlowedKernel, operations

BYTES = st.integers(0, 10**8)
SECONDS = st.floats(0, 100, allow_nan=False)
BANDWIDTHS = st.floats(1e3, 1e9, allow_nan=False)


@given(bandwidth=BANDWIDTHS, latency=st.floats(0, 1), transfers=st.lists(st.tuples(BYTES, SECONDS), min_size=1))
def test_a_lane_is_first_come_first_served_and_never_faster_than_its_bandwidth(
    bandwidth: float, latency: float, transfers: list[tuple[int, float]]
) -> None:
    lane, now, last = Lane(bandwidth, latency), 0.0, 0.0
    for nbytes, gap in transfers:
        now += gap
        arrival = lane.book(nbytes, now)
        assert arrival >= now + nbytes / bandwidth + latency - 1e-6
        assert arrival >= last + nbytes / bandwidth - 1e-6, "two transfers share the lane"
        last = arrival
    total = sum(nbytes for nbytes, _ in transfers) / bandwidth
    waited = sum(gap for _, gap in transfers)
    assert last <= waited + total + latency + 1e-6, "the lane idles while something waits"


def test_a_lane_without_limits_takes_no_time() -> None:
    assert Lane().book(10**12, now=5.0) == 5.0
    assert Lane().bandwidth == inf


@given(st.lists(st.tuples(st.integers(10**4, 10**7), st.integers(1, 4)), min_size=1, max_size=20), BANDWIDTHS)
def test_a_meter_finds_the_bandwidth_however_many_transfers_overlap(
    stretches: list[tuple[int, int]], bandwidth: float
) -> None:
    latency, now = 0.01, 0.0
    lane, meter = Lane(bandwidth, 2 * latency), Meter(round_trip=2 * latency)
    for nbytes, count in stretches:
        arrivals = [lane.book(nbytes, now) for _ in range(count)]
        for _ in range(count):
            meter.began(now)
        for arrival in arrivals:
            meter.ended(arrival, nbytes)
        now = arrivals[-1] + 1.0
    moved, seconds = meter.take()
    if moved:
        assert moved / seconds == pytest.approx(bandwidth, rel=0.1)
    assert meter.take() == (0, 0.0)


def test_a_meter_leaves_out_what_failed_and_what_is_all_latency() -> None:
    meter = Meter(round_trip=0.1)
    meter.began(0.0)
    meter.ended(5.0, 0)
    meter.began(10.0)
    meter.ended(10.11, 1000)
    assert meter.take() == (0, 0.0)


async def answer(nbytes: int) -> int:
    return nbytes


def test_transfers_take_the_time_of_their_bytes_and_directions_do_not_wait_for_each_other() -> None:
    links = Links(Lane(1e6, 0.01), Lane(0.5e6, 0.01))

    async def both() -> tuple[float, float, float]:
        start = perf_counter()

        async def pull() -> float:
            assert await links.pull(lambda: answer(100_000), lambda nbytes: nbytes) == 100_000
            return perf_counter() - start

        async def push() -> float:
            assert await links.push(lambda: answer(7), 100_000) == 7
            return perf_counter() - start

        first, second, up = await asyncio.gather(pull(), pull(), push())
        return first, second, up

    for _ in range(20):  # a busy machine may be late; it can never be early
        first, second, up = asyncio.run(both())
        assert first >= 0.12 - 1e-3
        assert second >= 0.22 - 1e-3
        assert up >= 0.22 - 1e-3
        if first < 0.12 * 1.03 + 2e-3 and second < 0.22 * 1.03 + 2e-3 and up < 0.22 * 1.03 + 2e-3:
            return
        links = Links(Lane(1e6, 0.01), Lane(0.5e6, 0.01))
    pytest.fail(f"late twenty times: {first:.4f} {second:.4f} {up:.4f} s instead of 0.12, 0.22, 0.22")


def test_a_slowed_kernel_has_the_speed_it_is_given() -> None:
    slowed = SlowedKernel(load_kernel("numpy"), 1e8)
    speed = max(measure_flops(slowed) for _ in range(5))  # a busy machine may be slower; it can never be faster
    assert speed == pytest.approx(1e8, rel=0.1)


def test_a_machine_that_is_too_slow_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Sleepy:
        name = "sleepy"

        def run(self, *_: object, **__: object) -> tuple[()]:
            sleep(0.05)
            return ()

    slowed = SlowedKernel(Sleepy(), 1e15)
    operand = np.zeros((2, 2), np.float32)
    with caplog.at_level(logging.WARNING):
        slowed.run("gemm", (operand, operand), dtype="float32")
        slowed.run("gemm", (operand, operand), dtype="float32")
    assert [record.message for record in caplog.records if "too slow to emulate" in record.message]
    assert len(caplog.records) == 1


def test_operations_are_those_that_a_plan_counts() -> None:
    def zeros(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.zeros(shape, np.float32)

    assert operations("gemm", (zeros(2, 3), zeros(3, 5))) == 2 * 2 * 3 * 5
    assert operations("bmm", (zeros(7, 2, 3), zeros(7, 3, 5))) == 2 * 7 * 2 * 3 * 5
    query, key = zeros(2, 4, 8, 16), zeros(2, 2, 8, 16)
    forward = 4 * 2 * 4 * 8 * 16 * 8
    assert operations("attention", (query, key, key)) == forward
    assert operations("attention", (query, key, key), causal=True) == forward / 2
    backward = (query, query, key, key, query, zeros(2, 4, 8))
    assert operations("attention_backward", backward) == forward * BACKWARD_WORK

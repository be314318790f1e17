"""The simulator: every tile once, every byte counted, never below the bound, the same every time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cleave_dask as cd
from cleave_dask.errors import InputError, StepError
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.fleet.devices import Device, Fleet, Link
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.cost import result_bytes
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.trace import HERE
from cleave_dask.simulation.measured import IDEAL
from cleave_dask.simulation.simulator import simulate
from tests import models


@cache
def graph() -> StepGraph:
    return cd.capture(models.llama(), **models.tokens(batch=16, length=32))


@cache
def planned(devices: int = 6, seed: int = 0) -> Plan:
    return plan(graph(), Fleet.sample(devices, seed), min_flops=0)


def faster(fleet: Fleet, factor: float) -> Fleet:
    def link(given: Link) -> Link:
        return replace(given, bandwidth=factor * given.bandwidth)

    devices = (replace(device, down=link(device.down), up=link(device.up)) for device in fleet.devices)
    return replace(fleet, devices=tuple(devices))


def everything_once(made: Plan, trace: cd.Trace) -> None:
    """Every tile of the plan was accepted once, and as many bytes went up as the results of devices have."""
    taken = trace.where(trace.accepted)
    found = Counter(zip(taken["gemm"].tolist(), taken["tile"].tolist(), strict=True))
    assert found == Counter((name, number) for name, tiles in made.by_gemm.items() for number in range(len(tiles)))
    gemms = {gemm.name: gemm for gemm in made.graph.gemms}
    here = [made.by_gemm[row.gemm][row.tile] for row in taken if row.device == HERE]
    at_home = sum(result_bytes(gemms[tile.gemm], tile.rows, tile.cols) for tile in here)
    assert taken["up_bytes"].sum() == pytest.approx(made.up_bytes - at_home, rel=1e-3)


@pytest.mark.parametrize("devices", [1, 6, 40])
def test_a_calm_step_does_every_tile_once_and_is_not_below_the_bound(devices: int) -> None:
    made = planned(devices)
    trace = simulate(made)
    everything_once(made, trace)
    assert trace.seconds >= made.bound_seconds
    assert trace.seconds >= trace["down_bytes"].sum() / made.fleet.server.egress
    assert set(trace["device"]) <= {device.name for device in made.fleet.devices}


def test_it_is_the_same_every_time() -> None:
    churn = Churn.sample(planned().fleet, 2e4, seed=3, seconds=2 * planned().seconds, away=0.2)
    assert churn.count("leave") > 1
    one, other = simulate(planned(), churn), simulate(planned(), churn)
    assert list(one) == list(other)
    assert one.seconds == other.seconds


@pytest.mark.parametrize("seed", range(4))
def test_more_bandwidth_is_never_slower(seed: int) -> None:
    made = planned(6, seed)
    seconds = [simulate(replace(made, fleet=faster(made.fleet, factor))).seconds for factor in (1.0, 2.0, 4.0)]
    assert seconds == sorted(seconds, reverse=True)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), rate=st.sampled_from([1e3, 1e4, 1e5]))
def test_whatever_goes_wrong_every_tile_is_done(seed: int, rate: float) -> None:
    made = planned()
    churn = Churn.sample(made.fleet, rate, seed, seconds=4 * made.seconds, away=made.seconds / 2)
    trace = simulate(made, churn)
    taken = trace.where(trace.accepted)
    found = set(zip(taken["gemm"].tolist(), taken["tile"].tolist(), strict=True))
    assert found == {(name, number) for name, tiles in made.by_gemm.items() for number in range(len(tiles))}
    assert trace.seconds >= made.bound_seconds * 0.999


def test_a_device_that_leaves_costs_its_tiles_and_its_share() -> None:
    made = planned(8)
    calm = simulate(made).seconds
    busiest = max(made.busy, key=lambda name: made.busy[name])
    hurt = simulate(made, Churn((Event(0.5 * calm, busiest, "leave"),))).seconds
    assert calm < hurt < 3 * calm


def test_a_stalled_device_is_found_out() -> None:
    made = planned(8)
    calm = simulate(made).seconds
    busiest = max(made.busy, key=lambda name: made.busy[name])
    hurt = simulate(made, Churn((Event(0.5 * calm, busiest, "stall"),))).seconds
    assert hurt < 100, "the step waits for a device that never comes back"


def test_a_slow_server_link_slows_the_step() -> None:
    made = planned(6)
    server = replace(made.fleet.server, egress=made.down_bytes / (10 * made.seconds))
    slow = simulate(replace(made, fleet=replace(made.fleet, server=server)))
    assert slow.seconds >= 10 * made.seconds * 0.99


def test_what_cannot_be_simulated_is_said() -> None:
    with pytest.raises(InputError, match="device 'nobody', which is not in the fleet of this plan"):
        simulate(planned(), Churn((Event(0.0, "nobody", "leave"),)))
    everyone = tuple(Event(0.01, device.name, "leave") for device in planned().fleet.devices)
    with pytest.raises(StepError, match="no device is left, and none will join"):
        simulate(planned(), Churn(everyone))


def test_one_device_by_hand() -> None:
    """One tile on one device: each of its parts in turn, and the latency of its messages."""
    device = Device("only", 1e9, 1e9, Link(1e6, 0.1), Link(1e5, 0.2))
    whole = partial(plan, min_flops=1e5, grid=(1, 1, 1), scheduler_seconds=0.0)
    gemm = max(graph().gemms, key=lambda gemm: gemm.flops)
    alone = replace(graph(), steps=(gemm,))
    made = whole(alone, Fleet(cd.Server(), (device,)))
    trace = simulate(made, costs=IDEAL)
    down, up = float(trace["down_bytes"].sum()), float(trace["up_bytes"].sum())
    told_asked_sent, received_answered_reported = 0.1 + 0.2 + 0.1, 0.2 + 0.1 + 0.2
    expected = told_asked_sent + down / 1e6 + gemm.flops / 1e9 + up / 1e5 + received_answered_reported
    assert trace.seconds == pytest.approx(expected, rel=1e-3)


def test_a_lost_device_costs_little_more_than_that_there_is_one_less() -> None:
    """Beyond the share of seven doing the rest of the work of eight, 16%: what its gemms shared comes down for each."""
    link = Link(2e5, 1e-3)
    fleet = Fleet(cd.Server(), tuple(Device(f"device-{number}", 2e10, 1e9, link, link) for number in range(8)))
    made = plan(graph(), fleet, min_flops=0)
    calm = simulate(made).seconds
    trace = simulate(made, Churn((Event(0.1 * calm, "device-3", "leave"),)))
    everything_once(made, trace)
    assert trace.seconds < calm * (1 + 0.9 / 7 + 0.18)

"""Bandwidth traces in the simulator: links change when the script says so."""

from __future__ import annotations

from functools import cache

import pytest

import cleave_dask as cd
from cleave_dask.errors import InputError
from cleave_dask.fleet.churn import Churn, Event
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.simulation.playing import Player
from cleave_dask.simulation.simulator import simulate
from tests import models


@cache
def planned() -> Plan:
    graph = cd.capture(models.llama(), **models.tokens(batch=16, length=32))
    return plan(graph, cd.Fleet.sample(6), min_flops=0)


def links(factor: float, *, seconds: float = 0.0) -> Churn:
    """Every link of the fleet becomes so many times as fast."""
    events = []
    for device in planned().fleet.devices:
        events.append(Event(seconds, device.name, "down", bandwidth=factor * device.down.bandwidth))
        events.append(Event(seconds, device.name, "up", bandwidth=factor * device.up.bandwidth))
    return Churn(tuple(events))


def test_slower_links_make_a_step_longer_and_the_same_links_change_nothing() -> None:
    calm = simulate(planned())
    assert simulate(planned(), links(1.0)).seconds == pytest.approx(calm.seconds)
    slow = simulate(planned(), links(0.02))
    assert slow.seconds > 1.5 * calm.seconds
    taken = slow.where(slow.accepted)
    assert len(set(zip(taken["gemm"].tolist(), taken["tile"].tolist(), strict=True))) == len(planned().tiles)


def test_links_that_change_after_the_end_are_not_noticed() -> None:
    calm = simulate(planned())
    late = simulate(planned(), links(0.02, seconds=2 * calm.seconds))
    assert late.seconds == pytest.approx(calm.seconds, rel=1e-12)
    halfway = simulate(planned(), links(0.02, seconds=calm.seconds / 2))
    assert calm.seconds < halfway.seconds < simulate(planned(), links(0.02)).seconds


def test_real_processes_keep_their_links() -> None:
    with pytest.raises(InputError, match="for the simulator"):
        Player(None, links(0.5))

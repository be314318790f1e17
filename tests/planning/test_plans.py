"""Whole plans on unlike devices: exact partitions, memory, errors, values that are cheap to keep and to look at."""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import Gemm
from cleave_dask.planning.cost import AT_ONCE, IN_FLIGHT, SCHEDULER_SECONDS, extent, tile_memory
from cleave_dask.planning.planner import Tiling, plan
from cleave_dask.planning.replanning import replan
from cleave_dask.planning.values import Plan, Tile
from cleave_dask.views.partition import draw_partition
from tests.strategies import fleets, gemms, graph_of, make_attention, make_gemm

TILINGS = st.sampled_from(["3d", "2d", "even"])


def assert_partition(found: Plan, of: Gemm) -> None:
    filled = np.zeros((of.m, of.n, of.k), dtype=np.int8)
    for tile in found.by_gemm[of.name]:
        filled[slice(*tile.rows), slice(*tile.cols), slice(*tile.ks)] += 1
    assert (filled == 1).all()


@given(gemms(most=90), fleets(most=9, least_memory=1e7), TILINGS)
@settings(deadline=None, max_examples=60)
def test_every_tiling_partitions_fits_and_respects_its_bound(part: Gemm, fleet: Fleet, tiling: Tiling) -> None:
    found = plan(graph_of(part), fleet, min_flops=0, tiling=tiling)
    assert_partition(found, part)
    for tile in found.tiles:
        assert tile.device is not None
        assert AT_ONCE * tile_memory(part, tile.rows, tile.cols, tile.ks) <= fleet.device(tile.device).memory
        assert tiling == "3d" or tile.ks == (0, part.k) or tiling == "even"
    assert all(found.peak_memory[device.name] <= device.memory for device in fleet)
    assert found.bound_seconds <= found.seconds
    assert found == plan(graph_of(part), fleet, min_flops=0, tiling=tiling)
    assert set(found.reasons) == {device.name for device in fleet}


@given(st.integers(1, 20), st.integers(1, 12), fleets(most=7, least_memory=1e6))
@settings(deadline=None, max_examples=40)
def test_attention_is_dealt_out_cell_by_cell(batch: int, heads: int, fleet: Fleet) -> None:
    part = make_attention(batch, heads)
    assert_partition(plan(graph_of(part), fleet, min_flops=0), part)


@pytest.mark.parametrize("memory", [3e5, 1e6, 1e7])
def test_small_memories_are_never_exceeded(memory: float) -> None:
    part, fleet = make_gemm(700, 900, 1100), Fleet.sample(12)
    small = Fleet(fleet.server, tuple(replace(device, memory=memory) for device in fleet))
    found = plan(graph_of(part), small, min_flops=0)
    assert max(found.peak_memory.values()) <= memory
    sizes = np.diff(found.by_gemm["g"].ranges.reshape(-1, 3, 2), axis=2)
    assert sizes.prod(axis=1).sum() == 700 * 900 * 1100


def test_unlike_devices_beat_equal_shares_twofold() -> None:
    step, fleet = graph_of(make_gemm(16384, 8192, 4096)), Fleet.sample(64, seed=3)
    assert plan(step, fleet).seconds * 2 <= plan(step, fleet, tiling="even").seconds


def test_a_device_that_would_hold_up_the_others_is_left_out_with_the_reason() -> None:
    fast = tuple(Device(f"fast-{n}", 1e12, 1e9, Link(5e7, 0.01), Link(1e7, 0.01)) for n in range(4))
    slow = Device("slow", 1e12, 1e9, Link(5e7, 0.01), Link(2e2, 0.01))
    found = plan(graph_of(make_gemm(2048, 2048, 2048)), Fleet(Server(), (*fast, slow)))
    assert found.why("slow").startswith("left out: its uplink of 200 B/s would add ")
    assert "tiles" in found.why("fast-0")
    assert found.devices_used == 4


def test_parcels_grow_with_the_fleet_so_that_the_scheduler_keeps_up() -> None:
    step = graph_of(make_gemm(8192, 4096, 4096))
    small, large = (plan(step, Fleet.sample(count)) for count in (4, 256))
    for found, most in ((small, IN_FLIGHT), (large, 1)):
        tiles = found.by_gemm["g"]
        parcels = tiles.parcels()
        assert max(Counter(device for device, _ in parcels).values()) == most
        assert len(parcels) * SCHEDULER_SECONDS <= max(0.3 * found.seconds, found.devices_used * SCHEDULER_SECONDS)
        assert {device for device, _ in parcels} == {tile.device for tile in tiles}


def test_more_devices_are_never_slower_even_if_the_scheduler_is() -> None:
    step = graph_of(make_gemm(4096, 4096, 4096))
    times = [plan(step, Fleet.sample(count), scheduler_seconds=0.02).seconds for count in (32, 128, 512)]
    assert times[1] <= 1.05 * times[0]
    assert times[2] <= 1.05 * times[1]


def test_gradients_of_weights_are_filler() -> None:
    chain = [make_gemm(4096, 4096, 4096, name=f"x{n}", level=n + 1) for n in range(4)]
    weights = [make_gemm(4096, 4096, 4096, name=f"w{n}", role="dW", level=n + 2) for n in range(4)]
    fleet = Fleet.sample(32)
    alone = plan(graph_of(*chain), fleet).seconds
    both = plan(graph_of(*chain, *weights), fleet)
    assert both.seconds < 2 * alone
    assert [row.filler for row in both.levels].count(True) == 4


def test_plans_are_small_equal_and_pickled() -> None:
    step = graph_of(*(make_gemm(512, 512, 2048, name=f"g{n}", level=n + 1) for n in range(50)))
    found = plan(step, Fleet.sample(40))
    assert len(found.tiles) == sum(1 for _ in found.tiles)
    assert found.tiles[0] == next(iter(found.tiles))
    assert found.tiles[-1] == list(found.by_gemm["g49"])[-1]
    assert isinstance(found.tiles[3], Tile)
    assert found.by_gemm["g0"][:2] == tuple(found.by_gemm["g0"])[:2]
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    assert len(pickle.dumps(found)) < 200_000
    keys = [(tile.ks, tile.rows, tile.cols) for tile in found.by_gemm["g0"]]
    assert keys == sorted(keys)
    assert "binds" in str(found)
    assert "<table>" in found._repr_html_()
    assert "x its bound" in found._repr_html_()
    with pytest.raises(IndexError):
        found.tiles[len(found.tiles)]


@pytest.mark.parametrize("seed", range(5))
def test_replan_moves_only_what_must_move(seed: int) -> None:
    step = graph_of(*(make_gemm(2048, 2048, 2048, name=f"g{n}", level=n + 1) for n in range(6)))
    fleet = Fleet.sample(24, seed)
    before = plan(step, fleet)
    gone = before.tiles[seed].device
    assert gone is not None
    done = {"g0": range(len(before.by_gemm["g0"]))}
    smaller = Fleet(fleet.server, tuple(device for device in fleet if device.name != gone))
    after = replan(before, step, smaller, done=done)
    for name, tiles in after.by_gemm.items():
        for old, new in zip(before.by_gemm[name], tiles, strict=True):
            assert (old.rows, old.cols, old.ks) == (new.rows, new.cols, new.ks)
            if name == "g0" or old.device != gone:
                assert new == old
            else:
                assert new.device != gone
        assert tiles.together == before.by_gemm[name].together
    assert all(after.peak_memory[device.name] <= device.memory for device in smaller)
    assert before.seconds <= after.seconds < 1.5 * before.seconds
    back = replan(after, step, fleet, joined=[gone])
    assert gone in {tile.device for tile in back.tiles}


def test_a_device_whose_link_got_slower_keeps_what_is_done_and_little_else() -> None:
    step = graph_of(*(make_gemm(2048, 2048, 2048, name=f"g{n}", level=n + 1) for n in range(6)))
    fleet = Fleet.sample(24, 0)
    before = plan(step, fleet)
    slow = Counter(tile.device for tile in before.tiles).most_common(1)[0][0]
    assert slow is not None
    done = {"g0": range(len(before.by_gemm["g0"]))}
    now = Fleet(
        fleet.server,
        tuple(replace(d, up=replace(d.up, bandwidth=d.up.bandwidth / 20)) if d.name == slow else d for d in fleet),
    )
    after = replan(before, step, now, done=done, left=[slow], joined=[slow])
    assert after.by_gemm["g0"] == before.by_gemm["g0"]
    moved = [(old, new) for old, new in zip(before.tiles, after.tiles, strict=True) if old != new]
    assert moved
    assert all(slow in (old.device, new.device) for old, new in moved)
    sent = [
        sum(extent(tile.rows) * extent(tile.cols) for tile in made.tiles if tile.device == slow and tile.gemm != "g0")
        for made in (before, after)
    ]
    assert sent[1] < sent[0] / 4


def test_a_device_that_takes_over_twice_says_so_once() -> None:
    step = graph_of(*(make_gemm(2048, 2048, 2048, name=f"g{n}", level=n + 1) for n in range(2)))
    fleet = Fleet.sample(6, 0)
    found = plan(step, fleet)
    for left in (1, 2, 3):
        found = replan(found, step, Fleet(fleet.server, fleet.devices[left:]))
    took = [why for why in found.reasons.values() if "took tiles" in why]
    assert took
    assert all(why.count("then took tiles of others") == 1 and why.startswith("at first ") for why in took)


def test_why_of_a_device_that_is_not_there_names_those_that_are() -> None:
    fleet = Fleet.load("lab-8")
    found = plan(graph_of(make_gemm(512, 512, 512)), fleet)
    with pytest.raises(PlanError, match="called 'laptop-1'; did you mean 'laptop-0001'"):
        found.why("laptop-1")


def test_bad_input_says_what_how_much_and_what_to_do() -> None:
    part, fleet = make_gemm(64, 64, 64), Fleet.sample(3)
    tiny = Fleet(fleet.server, tuple(replace(device, memory=8.0) for device in fleet))
    with pytest.raises(PlanError, match="has 8 B; add larger devices or lower the batch"):
        plan(graph_of(part), tiny, min_flops=0)
    crumbs = Fleet(fleet.server, tuple(replace(device, memory=1000.0) for device in fleet))
    with pytest.raises(PlanError, match=r"into .* tiles, .* a device with 1 kB .*; leave such devices out"):
        plan(graph_of(make_gemm(2048, 2048, 2048)), crumbs, min_flops=0)
    with pytest.raises(PlanError, match="give every extent at least 1"):
        plan(graph_of(replace(part, m=0)), fleet, min_flops=0)
    with pytest.raises(PlanError, match="choose one of '3d', '2d', 'even'"):
        plan(graph_of(part), fleet, tiling="4d")  # type: ignore[arg-type]
    found = plan(graph_of(part), fleet, min_flops=0)
    with pytest.raises(PlanError, match="all devices of the plan have left"):
        replan(found, graph_of(part), fleet, left=[device.name for device in fleet])


def test_a_device_too_small_for_any_tile_is_left_out_where_others_are_not() -> None:
    step, fleet = graph_of(make_gemm(512, 512, 512)), Fleet.sample(3)
    mote = replace(fleet.devices[0], name="mote", memory=8.0)
    mixed = Fleet(fleet.server, (*fleet.devices, mote))
    found = plan(step, mixed)
    assert found.seconds == plan(step, fleet, tiling=found.tiling).seconds  # type: ignore[arg-type]
    assert found.why("mote") == "left out: its memory of 8 B is less than the 48 B of the smallest tiles in flight"
    with pytest.raises(PlanError, match="'mote', which has 8 B; leave that device out"):
        plan(step, mixed, tiling="even")


@pytest.mark.parametrize("memory", [48.0, 512.0, 20e3])
def test_a_device_with_a_crumb_of_memory_does_not_cut_everything_into_crumbs(memory: float) -> None:
    """As one gets who writes 512 for 512 MB: an even grid of such tiles would itself fill the server's memory."""
    fleet, step = Fleet.sample(3), graph_of(make_gemm(2048, 2048, 2048))
    crumb = Fleet(fleet.server, (*fleet.devices, replace(fleet.devices[0], name="crumb", memory=memory)))
    found = plan(step, crumb)
    assert found.peak_memory["crumb"] <= memory
    assert found.seconds < 1.05 * plan(step, fleet).seconds
    with pytest.raises(PlanError, match=r"evenly into .* tiles, more than 1,000,000; leave out the devices"):
        plan(step, crumb, tiling="even")
    with pytest.raises(PlanError, match="or ask for a coarser grid"):
        plan(step, fleet, grid=(2048, 2048, 1))


AMOUNTS = st.sampled_from([1.0, 3e2, 1e6, 1e12, 1e24])
"""From the least to the most that a fleet file may say."""

MEMORIES = st.sampled_from([1.0, 1e4, 1e6, 1e24])


@given(
    st.lists(
        st.tuples(AMOUNTS, MEMORIES, AMOUNTS, AMOUNTS, st.sampled_from([0.0, 1e-9, 1.0, 1e9])), min_size=1, max_size=3
    ),
    st.tuples(AMOUNTS, AMOUNTS, AMOUNTS, st.none() | st.just(1)),
    st.sampled_from([make_gemm(64, 48, 96), make_attention(3, 2)]),
)
@settings(deadline=None, max_examples=30)
def test_whatever_a_fleet_file_may_say_gives_a_plan_or_a_plan_error(
    rows: list[tuple[float, float, float, float, float]],
    server: tuple[float, float, float, int | None],
    part: Gemm,
) -> None:
    devices = (
        Device(f"d{number}", flops, memory, Link(down, latency), Link(up, latency))
        for number, (flops, memory, down, up, latency) in enumerate(rows)
    )
    egress, ingress, flops, processes = server
    fleet = Fleet(Server(egress, ingress, flops, processes=processes), tuple(devices))
    with suppress(PlanError):
        found = plan(graph_of(part), fleet, min_flops=0)
        assert 0 < found.bound_seconds <= found.seconds < np.inf
        assert set(found.reasons) == {device.name for device in fleet}


def test_a_device_that_is_not_there_is_named() -> None:
    found = plan(graph_of(make_gemm(512, 512, 512)), Fleet.sample(3))
    with pytest.raises(PlanError, match=r"no device of this plan is called 'phone'; .*valid: .*'server'"):
        found.why("phone")


def test_a_partition_can_be_drawn() -> None:
    found = plan(graph_of(make_gemm(512, 256, 4096)), Fleet.sample(12))
    drawn = draw_partition(found, "g")
    assert drawn.svg.startswith("<svg")
    assert drawn.svg.count("</title></rect>") >= found.devices_used
    assert drawn.png.startswith(b"\x89PNG")
    with pytest.raises(KeyError, match="is not sent out"):
        draw_partition(found, "nothing")

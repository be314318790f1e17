"""What a gemm takes in a step beyond what it takes by itself: words, confirmations, a round trip, server processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import Gemm, Operand
from cleave_dask.planning.cost import (
    BYTE_SECONDS,
    CONFIRMED,
    LEVEL_SECONDS,
    MESSAGE_BYTES,
    SHARED_BYTE_SECONDS,
    SHARED_TILE_SECONDS,
    TILE_SECONDS,
    Rates,
    Shape,
)
from cleave_dask.planning.layout import lay_out
from cleave_dask.planning.overhead import InStep
from cleave_dask.planning.planner import plan
from cleave_dask.planning.tiling import Grain, tile_gemm
from cleave_dask.simulation.measured import IDEAL, MEASURED, PLANNED
from cleave_dask.simulation.simulator import simulate
from tests.strategies import fleets, graph_of, make_gemm

MBIT = 1e6 / 8
FAST = Link(1e9, 0.0)


def edge(count: int, processes: int | None = 1) -> Fleet:
    """Devices behind links of 100/10 Mbit/s."""
    links = Link(100 * MBIT, 1e-3), Link(10 * MBIT, 1e-3)
    return Fleet(Server(processes=processes), tuple(Device(f"d{n}", 1e10, 1e9, *links) for n in range(count)))


def test_links_carry_words_and_confirmations_beside_the_numbers() -> None:
    fleet, shape = edge(1, None), Shape("gemm", 100, 200, 300, 2.0 * 100 * 200 * 300, 4, 4)
    ranges = np.array([[0, 50, 0, 200, 0, 300], [50, 100, 0, 200, 0, 300]])
    layout = lay_out(shape, ranges, np.zeros(2, dtype=np.int64), Rates.of(fleet), fleet.server)
    part = InStep.of(layout, Rates.of(fleet), fleet.server)
    down, up = (100 + 200) * 300 * 4, 100 * 200 * 4
    assert part.stages[0, 0] == pytest.approx((down + 2 * MESSAGE_BYTES + CONFIRMED * up) / (100 * MBIT))
    assert part.stages[2, 0] == pytest.approx((up + 2 * MESSAGE_BYTES + CONFIRMED * down) / (10 * MBIT))
    assert part.stages[1, 0] == layout.stages[1, 0]
    assert part.seconds > layout.seconds + 2e-3  # the third round trip
    assert "server" not in part.middle
    begun = InStep.of(layout, Rates.of(fleet), fleet.server, begun=True)
    assert part.seconds - begun.seconds == pytest.approx(4e-3), "of three round trips one is left"
    busy = InStep.of(layout, Rates.of(fleet), Server(processes=2))
    assert busy.middle["server"] == pytest.approx((2 * TILE_SECONDS + (down + up) * BYTE_SECONDS) / 2)
    slow = InStep.of(layout, Rates.of(fleet), Server(processes=2, pace=3.0, shared_cores=4))
    assert slow.middle["server"] == pytest.approx(3 * busy.middle["server"])
    together = 2 * SHARED_TILE_SECONDS + (down + up) * SHARED_BYTE_SECONDS
    assert slow.middle["shared cores"] == pytest.approx(3 * together / 4)


@given(fleets(most=5, least_memory=1e8), st.tuples(*[st.integers(1, 2000)] * 3), st.sampled_from([None, 1, 3]))
@settings(deadline=None, max_examples=30)
def test_in_a_step_nothing_takes_less_than_by_itself(
    fleet: Fleet, size: tuple[int, int, int], processes: int | None
) -> None:
    m, n, k = size
    rates, server = Rates.of(fleet), replace(fleet.server, processes=processes)
    layout = tile_gemm(Shape("gemm", m, n, k, 2.0 * m * n * k, 4, 4), rates, server)
    part = InStep.of(layout, rates, server)
    assert part.seconds >= layout.seconds
    assert (part.stages >= layout.stages).all()
    assert part.binding in ("downlink", "compute", "uplink", "latency", *part.middle)


def test_every_level_waits_for_processes_and_a_server_may_bind() -> None:
    chain = [make_gemm(512, 512, 512, name=f"x{n}", level=n + 1) for n in range(6)]
    fleet = edge(4, None)
    free = plan(graph_of(*chain), fleet, tiling="3d")
    alone = plan(graph_of(chain[0]), fleet, tiling="3d")
    saved = 5 * 2 * 2e-3  # devices have begun all levels but the first: one round trip each instead of three
    assert free.seconds == pytest.approx(6 * alone.seconds - saved)
    assert all(row.seconds > row.bound_seconds + LEVEL_SECONDS for row in free.levels)
    quick = Fleet(Server(processes=1), tuple(replace(one, flops=1e15, down=FAST, up=FAST) for one in fleet.devices))
    served = plan(graph_of(*chain), quick, tiling="even", grid=(8, 8, 1))
    assert served.binding == "server"
    assert served.seconds > len(served.tiles) * TILE_SECONDS
    unlimited = Fleet(replace(quick.server, processes=None), quick.devices)
    assert plan(graph_of(*chain), unlimited, tiling="even", grid=(8, 8, 1)).seconds < 0.8 * served.seconds


def chained(*parts: Gemm) -> list[Gemm]:
    """Gemms each of which waits for the one before it."""
    found = [parts[0]]
    for part in parts[1:]:
        waits = replace(part.inputs[0].parts[0], name=found[-1].outputs[0].name)
        found.append(replace(part, inputs=(Operand((waits,)), part.inputs[1])))
    return found


@pytest.mark.parametrize("count", [8, 16])
def test_a_step_with_filler_takes_on_the_simulator_what_is_planned(count: int) -> None:
    forward = [make_gemm(2048, 384, 1024, name=f"x{n}", level=n + 1) for n in range(6)]
    backward = [make_gemm(2048, 1024, 384, name=f"y{n}", role="dX", level=n + 7) for n in range(6)]
    chain = chained(*forward, *backward)
    weights = [
        chained(before, make_gemm(384, 1024, 2048, name=f"w{n}", role="dW", level=n + 7))[1]
        for n, before in enumerate(chain[5:11])
    ]
    made = plan(graph_of(*chain, *weights), edge(count))
    assert 0.9 <= simulate(made).seconds / made.seconds <= 1.1


@pytest.mark.parametrize("filler", [False, True])
def test_a_server_of_one_process_gets_fewer_tiles_for_each_of_many_devices(filler: bool) -> None:
    """It turns to one tile of every device in turn: what is no concern with 8 devices is one with 64."""
    shape = Shape.of(make_gemm(4096, 4096, 4096))

    def tiles(count: int, processes: int | None) -> int:
        rates = Rates.of(edge(count))
        made = tile_gemm(shape, rates, Server(processes=processes), spare=rates if filler else None)
        return len(made.owner)

    few, many = tiles(8, 1), tiles(64, 1)
    assert few <= tiles(8, None)
    assert many < tiles(64, 64) <= tiles(64, None)
    assert many / 64 < few / 8


def test_a_tile_is_worth_its_turn_of_the_server() -> None:
    turn = 128 * TILE_SECONDS
    one, two, many, unknown = (Grain.of(128, Server(processes=processes)) for processes in (1, 2, 128, None))
    assert (one.shortest, one.price) == pytest.approx((turn / 2, turn / 4))
    assert (two.shortest, two.price) == pytest.approx((turn / 4, turn / 8))
    assert many == Grain.of(8, Server(processes=1))
    assert (unknown.shortest, unknown.price) < (many.shortest, many.price) < (two.shortest, two.price)
    assert Grain.of(128, Server(processes=1), filler=True).shortest == pytest.approx(turn)


def test_a_tile_is_worth_more_where_devices_share_the_servers_cores() -> None:
    own, shared = Server(processes=1), Server(processes=1, shared_cores=2)
    assert Grain.of(32, own).price < Grain.of(32, shared).price < Grain.of(32, replace(shared, pace=2.0)).price
    assert Grain.of(32, replace(own, pace=2.0)) == Grain.of(64, own)
    assert Grain.of(32, Server(shared_cores=10_000)) == Grain.of(8, own)
    assert Grain.of(32, replace(own, shared_cores=10_000)) == Grain.of(32, own)


def test_a_step_on_shared_cores_has_fewer_tiles_and_takes_on_the_simulator_what_is_planned() -> None:
    chain = chained(*(make_gemm(2048, 384, 1024, name=f"x{n}", level=n + 1) for n in range(8)))
    own = edge(16)
    shared = Fleet(Server(processes=1, pace=1.6, shared_cores=2), own.devices)
    alone, crowded = (plan(graph_of(*chain), fleet) for fleet in (own, shared))
    assert len(crowded.tiles) < len(alone.tiles)
    assert crowded.seconds > alone.seconds
    assert 0.8 <= simulate(crowded).seconds / crowded.seconds <= 1.35  # the simulator is the more cautious of the two


def test_the_simulator_counts_work_as_the_server_does_it() -> None:
    assert MEASURED.on(Server()) == MEASURED
    assert MEASURED.on(Server(pace=2.0)) == replace(MEASURED, tile=2 * MEASURED.tile, byte=2 * MEASURED.byte)
    assert MEASURED.on(Server(shared_cores=1)).tile == SHARED_TILE_SECONDS
    assert MEASURED.on(Server(shared_cores=64)) == MEASURED  # one process of the server is what is slow
    for costs in (IDEAL, PLANNED):
        assert costs.on(Server(pace=2.0, shared_cores=1)) == costs

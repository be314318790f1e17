"""On emulated devices tiles follow links and speed, a plan beats an even split, and lies are found out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median

import pytest
import torch
from distributed import Client
from torch import nn

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.cost import tile_flops
from cleave_dask.planning.planner import plan
from cleave_dask.planning.values import Plan
from cleave_dask.runtime.trainer import Planner, Trainer
from cleave_dask.simulation.local import LocalFleet

MB, GFLOPS, LATENCY = 1e6, 1e9, 1e-3
TOKENS, WIDTH = 256, 512


class Stack(nn.Module):
    """Three square layers: nine large products a step, and next to nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


def device(name: str, speed: float, down: float, up: float) -> Device:
    """A device by GFLOP/s and MB/s."""
    return Device(name, speed * GFLOPS, 1e9, Link(down * MB, LATENCY), Link(up * MB, LATENCY))


def trainer(client: Client, planner: Planner, *, replan: bool = True) -> Trainer:
    torch.manual_seed(0)
    module = Stack()
    return Trainer(module, torch.optim.SGD(module.parameters(), lr=0.01), client, plan=planner, replan=replan)


def batch() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def shares(graph: StepGraph, plan: Plan) -> dict[str, float]:
    """Operations by device, as planned."""
    gemms = {gemm.name: gemm for gemm in graph.gemms}
    work: Counter[str] = Counter()
    for tile in plan.tiles:
        work[str(tile.device)] += round(tile_flops(gemms[tile.gemm], tile))
    return {name: amount / graph.flops for name, amount in work.items()}


UNEVEN = Fleet(
    Server(),
    (
        device("fast", 4, 40, 20),
        device("good", 4, 20, 10),
        device("slow", 1, 4, 1.5),
        device("slowest", 1, 2, 0.75),
    ),
)


def test_a_plan_is_followed_and_beats_an_even_split_on_uneven_devices() -> None:
    with LocalFleet(UNEVEN) as local, local.get_client() as client:
        planned = trainer(client, plan, replan=False)
        even = trainer(client, partial(plan, tiling="even"), replan=False)
        for _ in range(3):
            planned.step(batch())
            even.step(batch())
        done = Counter(planned.records[-1]["tiles_of"])
        wanted = Counter(str(tile.device) for tile in planned.plan.tiles)
    moved = sum(abs(done[name] - count) for name, count in wanted.items()) / 2
    assert moved <= 0.3 * wanted.total(), f"planned {wanted}, done {done}"
    seconds, even_seconds = (median(r["seconds"] for r in one.records[1:]) for one in (planned, even))
    print(f"plan {planned.plan.seconds:.2f} s, measured {seconds:.2f} s, even split {even_seconds:.2f} s")
    assert even_seconds > 1.3 * seconds


TEN_TIMES = {
    "speed": (Fleet(Server(), (device("fast", 4, 200, 200), device("slow", 0.4, 200, 200))), 7, 14),
    # Work grows with the power 1.5 of a link's bandwidth: a tile twice as wide and high has four times the result.
    "links": (Fleet(Server(), (device("fast", 8, 10, 10), device("slow", 8, 1, 1))), 10, inf),
}


@pytest.mark.parametrize("unlike", TEN_TIMES)
def test_work_follows_speed_and_links_that_are_ten_times_apart(unlike: str) -> None:
    fleet, least, most = TEN_TIMES[unlike]
    with LocalFleet(fleet) as local, local.get_client() as client, trainer(client, plan, replan=False) as run:
        run.step(batch())
        run.step(batch())
        work = shares(run.graph, run.plan)
        done = Counter(run.records[-1]["tiles_of"])
        wanted = Counter(str(tile.device) for tile in run.plan.tiles)
    assert least < work["fast"] / max(work.get("slow", 0.0), 1e-9) < most, work
    assert sum(abs(done[name] - count) for name, count in wanted.items()) / 2 <= 0.3 * wanted.total(), (wanted, done)


def test_a_device_that_is_ten_times_slower_than_it_says_is_found_out() -> None:
    honest, liar = device("honest", 2, 100, 100), device("liar", 2, 100, 100)
    truth = Fleet(Server(), (honest, replace(liar, flops=liar.flops / 10)))
    with (
        LocalFleet(truth, declared=Fleet(Server(), (honest, liar))) as local,
        local.get_client() as client,
        trainer(client, plan) as run,
    ):
        run.step(batch())
        before = shares(run.graph, run.plan)
        for _ in range(3):
            run.step(batch())
        after = shares(run.graph, run.plan)
        figures = run.records[-1]["figures"]
    assert before["liar"] > 0.4
    assert after.get("liar", 0.0) < 0.25, f"figures {figures}"
    assert figures["liar"]["flops"] == pytest.approx(liar.flops / 10, rel=0.3)

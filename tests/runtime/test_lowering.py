"""Lowering: rounds and jobs in an order that works, real dask arrays, and a submission that costs next to nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cache
from time import process_time

import pytest
from dask.order import order
from dask.typing import Key
from torch import nn

from cleave_dask.fleet.devices import Fleet
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import Gemm, StepGraph
from cleave_dask.planning.planner import Grid, plan
from cleave_dask.runtime.lowering import EARLY, Lowered, Skeleton, StepExpression, finish_key, lower
from cleave_dask.runtime.rounds import following
from cleave_dask.runtime.tasks import OrderedTask
from tests import models

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "opt": models.opt,
    "llama": models.llama,
    "gpt2": models.gpt2,
    "dropout": lambda: models.opt(dropout=0.1),
}


@cache
def graph_of(name: str) -> StepGraph:
    return capture(BUILDERS[name](), **models.tokens())


def lowered(name: str, grid: Grid | None = None) -> Lowered:
    graph = graph_of(name)
    return lower(graph, plan(graph, Fleet.sample(3), min_flops=0, grid=grid))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 2, 2)])
def test_every_value_is_there_when_it_is_read_and_freed_once(name: str, grid: Grid) -> None:
    """Plays the step in the worst order that the edges allow: whatever is ready, latest first."""
    step = lowered(name, grid)
    rounds, jobs, graph = step.schedule.rounds, step.schedule.jobs, step.graph
    inputs = {item.value.name for item in graph.inputs}
    readers = dict(step.schedule.readers)
    there: set[str] = set()
    done: set[int] = set()
    random_order: list[int] = []

    def release(names: set[str]) -> None:
        for value in names & readers.keys():
            readers[value] -= 1
            if not readers[value]:
                there.discard(value)

    while len(done) < len(rounds):
        ready = [
            number
            for number, this in enumerate(rounds)
            if number not in done
            and done.issuperset(this.after)
            and all(done.issuperset(jobs[job].after) for job in this.jobs)
        ]
        number = ready[-1]
        local: set[str] = set()
        for job in (jobs[index] for index in rounds[number].jobs):
            operands = {part.name for operand in job.gemm.inputs for part in operand.parts}
            assert operands <= there | inputs
            local |= set(job.gemm.writes)
            release(operands)
        for position in rounds[number].steps:
            item = graph.steps[position]
            assert set(item.reads) <= local | there | inputs
            local |= set(item.writes)
            if not isinstance(item, Gemm) and item.random:
                random_order.append(position)
        there |= set(rounds[number].publishes)
        release(set(rounds[number].reads))
        done.add(number)
    kept = {graph.loss, *(value for _, value in graph.grads + graph.buffers)}
    assert there == kept - inputs
    assert random_order == sorted(random_order)


def test_gradients_of_weights_never_hold_up_the_next_layer() -> None:
    step = lowered("llama")
    for this in step.schedule.rounds:
        roles = {step.schedule.jobs[job].gemm.role for job in this.jobs}
        assert roles != {"dX", "dW"}, "a round waits for a weight's gradient that it does not need"


@pytest.mark.parametrize("name", BUILDERS)
def test_what_follows_a_job_waits_for_its_round_alone(name: str) -> None:
    """The server holds back what is asked for ahead until that round is done, which must not wait for any of it."""
    schedule = lowered(name).schedule
    before: list[set[int]] = []
    for number, this in enumerate(schedule.rounds):
        waited = {*this.after, *(other for job in this.jobs for other in schedule.jobs[job].after)}
        before.append({number}.union(*(before[other] for other in waited)))
    made = {value: number for number, this in enumerate(schedule.rounds) for value in this.publishes}
    found = following(schedule)
    for number, then in found.items():
        job, other = schedule.jobs[number], schedule.jobs[then.job]
        done = set[int]().union(*(before[waited] for waited in job.after))
        assert "dW" not in (job.gemm.role, other.gemm.role)
        assert set(other.after) <= done | {schedule.round_of[number]}
        for operand, at_hand in zip(other.gemm.inputs, then.at_hand, strict=True):
            makers = {made[part.name] for part in operand.parts if part.name in made}
            assert at_hand == (makers <= done), "what the server has, it does not hold back"
    critical = sum(job.gemm.role != "dW" for job in schedule.jobs)
    assert len(found) >= 0.9 * (critical - 1), "layers follow each other"
    assert any(then.at_hand == (False, True) for then in found.values()), "weights are at hand"


def test_the_last_parcel_of_a_device_says_what_it_has_of_the_next_job() -> None:
    graph = graph_of("llama")
    step = lower(graph, plan(graph, Fleet.sample(3), min_flops=0))
    jobs = step.skeleton.jobs
    tasks = [task for task in step.tasks("run", 5).values() if task.place == "device"]
    told = [task for task in tasks if task.args[0].ahead is not None]
    assert told
    for task in told:
        parcel, ahead = task.args[0], task.args[0].ahead
        assert jobs[parcel.job].next is not None
        assert (ahead.run, ahead.step, ahead.job) == ("run", 5, jobs[parcel.job].next.job)
        own = [other.args[0] for other in tasks if other.args[0].job == ahead.job and other.device == task.device]
        first = [tile for other in sorted(own, key=lambda other: other.rank) for tile in other.tiles][:EARLY]
        assert list(ahead.tiles) == first
        assert ahead.rank == min(other.rank for other in own)
        later = [t for t in tasks if t.args[0].job == parcel.job and t.device == task.device and t.rank > task.rank]
        assert not later, "the last of its parcels says it"
        for other in (other for other in tasks if other.args[0] in own):
            begun = bool(set(other.args[0].tiles) & set(first))
            assert other.work.begun == begun, "who looks at how long it took must know that"


def test_the_dask_graph_is_whole_and_acyclic() -> None:
    tasks = lowered("llama", (2, 2, 2)).tasks("run", 5)
    assert all(task.dependencies <= tasks.keys() for task in tasks.values())
    assert len(order(tasks)) == len(tasks)
    assert sum(task.place == "device" for task in tasks.values()) == len(lowered("llama", (2, 2, 2)).plan.tiles)
    reached: set[Key] = set()
    stack: list[Key] = [finish_key("run", 5)]
    while stack:
        key = stack.pop()
        if key not in reached:
            reached.add(key)
            stack.extend(tasks[key].dependencies)
    assert reached == tasks.keys(), "a task that nobody waits for would run after the step is over"


def test_each_distributed_gemm_is_a_dask_array() -> None:
    step = lowered("llama", (3, 2, 1))
    arrays = step.arrays
    assert set(arrays) == set(step.plan.by_gemm)
    for name, array in arrays.items():
        gemm = step.graph.gemm(name)
        assert array.shape == ((gemm.m, gemm.n) if gemm.kind == "gemm" else gemm.outputs[0].shape)
        assert array.npartitions == len(step.plan.by_gemm[name])
    qkv = next(name for name in arrays if "q_proj" in name and ":" not in name)
    assert arrays[qkv].chunks == ((16, 16, 19), (32, 32))


def test_where_k_is_split_blocks_are_put_together_from_tiles() -> None:
    step = lowered("llama", (2, 1, 3))
    name = next(name for name in step.arrays if "down_proj" in name and ":" not in name)
    array = step.array(name)
    assert array.numblocks == (2, 1)
    block: OrderedTask = dict(array.dask)[(array.name, 0, 0)]
    assert len(block.dependencies) == 3


def test_arrays_can_be_drawn() -> None:
    graphviz = pytest.importorskip("graphviz")
    step = lowered("llama", (2, 1, 1))
    drawn = step.array(next(iter(step.arrays))).__dask_graph__()
    from dask.dot import to_graphviz

    assert isinstance(to_graphviz(dict(drawn)), graphviz.Digraph)


def many_tiles(count: int) -> Skeleton:
    return Skeleton(rounds=(((), (), 0), ((0,), (0,), 1 << 40)), jobs=(models.many_parcels(count, "d", after=(0,)),))


def test_submitting_fifty_thousand_tiles_costs_the_client_little() -> None:
    skeleton = many_tiles(50_000)
    start = process_time()
    shipped = pickle.dumps(StepExpression("run", 3, skeleton), protocol=5)
    assert process_time() - start < 0.5
    tasks: Mapping[Key, OrderedTask] = pickle.loads(shipped).__dask_graph__()
    assert len(tasks) == 50_003

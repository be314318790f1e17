"""What a pass keeps to itself: calls that come late, rounds that run on, and rounds that are asked for twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from cleave_dask.errors import StepError
from cleave_dask.graph.capture import flatten_batch
from cleave_dask.graph.torch_ops import resolve
from cleave_dask.runtime import interpreter, server_pass
from cleave_dask.runtime.rounds import following
from cleave_dask.runtime.server_gathering import Attempt, Gathering, TileRejected
from cleave_dask.runtime.server_mending import mend
from cleave_dask.runtime.server_pass import Pass
from cleave_dask.runtime.tiles import TileSpec, slice_names
from tests import models
from tests.steps import KERNEL, Batch, Local

BATCHES = [models.points(seed=seed) for seed in range(3)]
PATIENCE = 60.0


class Hold:
    """Stops the call of this number, counted from zero, until it is let go."""

    def __init__(self, number: int = 0) -> None:
        self.reached, self.go = Event(), Event()
        self._left = number

    def __call__(self) -> None:
        self._left -= 1
        if self._left == -1:
            self.reached.set()
            assert self.go.wait(PATIENCE)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def local(dropout: float = 0.5) -> Local:
    return Local(models.mlp(dropout), BATCHES[0])


def begin(run: Local, batch: Batch) -> TileSpec:
    """Start a step up to its first tile, which nobody has begun to gather."""
    training, step = run.training, run.passes
    run.passes += 1
    training.begin(step, flatten_batch(run.graph, (), batch))
    assert training.lowered is not None
    skeleton = training.lowered.skeleton
    first = {number for number, (jobs, after, _) in enumerate(skeleton.rounds) if not jobs and not after}
    for number in sorted(first):
        with torch.no_grad():
            training.run_round(step, number)
    job = next(number for number, job in enumerate(skeleton.jobs) if set(job.after) <= first)
    parcel, _, _ = next(skeleton.jobs[job].parcels("run", step, job))
    return next(parcel.specs())


def let_go_once_begun(run: Local, hold: Hold, late: Future[Any], patch: pytest.MonkeyPatch) -> None:
    """The next step begins while a call is held; before it goes on, that call comes to its end."""
    calm = run.training.begin

    def begin_first(step: int, batch: Batch, *, first: bool = True) -> None:
        calm(step, batch, first=first)
        hold.go.set()
        late.exception(PATIENCE)

    assert hold.reached.wait(PATIENCE)
    patch.setattr(run.training, "begin", begin_first)


def told(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("loss", "tiles", "retries", "rejected", "reused", "up_bytes", "down_bytes")}


def before(call: Callable[..., Any], hold: Hold) -> Callable[..., Any]:
    def held(*args: Any, **kwargs: Any) -> Any:
        hold()
        return call(*args, **kwargs)

    return held


def after(call: Callable[..., Any], hold: Hold) -> Callable[..., Any]:
    def held(*args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        hold()
        return answer

    return held


@pytest.mark.parametrize("check", [True, False], ids=["checked", "believed"])
@pytest.mark.parametrize(
    ("place", "hooked"), [("__init__", before), ("accept", before), ("accept", after)], ids=["new", "before", "after"]
)
def test_a_tile_that_comes_late_does_not_end_in_the_next_step(
    place: str,
    hooked: Callable[[Callable[..., Any], Hold], Callable[..., Any]],
    check: bool,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread is stopped inside `gathering`, before a tile is taken or after it; then the next step begins."""
    expected = told(local().step(BATCHES[1]))
    run, hold = local(), Hold()
    spec = begin(run, BATCHES[0])
    arrays = run.made(spec)
    monkeypatch.setattr(Gathering, place, hooked(getattr(Gathering, place), hold))
    push = (spec.step, spec.job, spec.tile, arrays, Attempt("late", 0.0, 0.0))
    late = pool.submit(run.training.accept, *push, check=check)
    let_go_once_begun(run, hold, late, monkeypatch)
    assert told(run.step(BATCHES[1])) == expected
    assert late.result(), "it was right, and the first: for a step that is over"
    run.training.distrust("late")
    run.step(BATCHES[2])


def test_a_late_tile_is_not_kept_on_disk_for_the_next_pass(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hold = local(), Hold()
    run.step(BATCHES[0])
    run.save(tmp_path)
    spec = begin(run, BATCHES[1])
    monkeypatch.setattr(Gathering, "accept", after(Gathering.accept, hold))
    late = pool.submit(run.multiply, spec)
    assert hold.reached.wait(PATIENCE)
    begin(run, BATCHES[2])
    hold.go.set()
    late.result(PATIENCE)
    run.training.flight.settle()
    assert list(tmp_path.glob("inflight-*")), "the next pass keeps its tiles"
    assert list(tmp_path.glob("inflight-*/tiles/*/0/c.*.0")) == []
    run.die()


def test_a_round_that_runs_on_leaves_the_next_step_alone(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is cut short in each of its ops in turn, random ones too; the next begins before that op runs."""
    calls = Hold(1 << 30)
    calm = local()
    monkeypatch.setattr(interpreter, "resolve", before(resolve, calls))
    expected = told(calm.step(BATCHES[1]))
    ops = (1 << 30) - calls._left
    for number in range(ops):
        run, hold = local(), Hold(number)
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "resolve", before(resolve, hold))
            cancelled = pool.submit(run.step, BATCHES[0])
            let_go_once_begun(run, hold, cancelled, patch)
            assert told(run.step(BATCHES[1])) == expected, f"cut short in op {number} of {ops}"
        assert isinstance(cancelled.exception(), StepError) or number == ops - 1
        for name, tensor in run.training.weights.items():
            assert torch.equal(tensor, calm.training.weights[name]), name


class Shared(Local):
    """A run whose server does another run's step between any two tiles of its own."""

    other: Local

    def multiply(self, spec: TileSpec) -> None:
        super().multiply(spec)
        self.other.step(BATCHES[2])


def test_two_runs_on_one_server_draw_from_streams_of_their_own() -> None:
    expected = told(local().step(BATCHES[1]))
    run = Shared(models.mlp(0.5), BATCHES[0])
    run.other = local()
    assert told(run.step(BATCHES[1])) == expected


def test_a_program_ends_the_step_in_flight() -> None:
    run = local()
    spec = begin(run, BATCHES[0])
    assert run.training.lowered is not None
    run.training.load(run.training.lowered)
    with pytest.raises(StepError, match="step 0 of 'run' is over; no step is in flight"):
        run.multiply(spec)


# Rounds


def current(run: Local) -> Pass:
    assert run.training.current is not None
    return run.training.current


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when somebody asks for what became of a round."""
    event = Event()

    class Told(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            event.set()
            return super().result(timeout)

    monkeypatch.setattr(server_pass, "Future", Told)
    return event


def test_a_round_that_two_ask_for_runs_once(
    waiting: Event, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hold = local(), Hold()
    calls: list[Any] = []

    def counted(target: Any) -> Any:
        calls.append(target)
        hold()
        return resolve(target)

    run.training.begin(0, flatten_batch(run.graph, (), BATCHES[0]))
    this = current(run)
    number = next(n for n, each in enumerate(this.lowered.schedule.rounds) if not each.jobs and not each.after)
    monkeypatch.setattr(interpreter, "resolve", counted)
    one = pool.submit(this.run_round, number)
    assert hold.reached.wait(PATIENCE)
    other = pool.submit(this.run_round, number)
    assert waiting.wait(PATIENCE)
    assert not one.done()
    assert not other.done()
    hold.go.set()
    one.result(PATIENCE)
    other.result(PATIENCE)
    this.run_round(number)
    ops = len([p for p in this.lowered.schedule.rounds[number].steps if hasattr(run.graph.steps[p], "target")])
    assert len(calls) == ops


def test_what_a_round_raises_is_raised_to_all_who_ask(
    waiting: Event, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hold = local(), Hold()

    def fails(target: Any) -> Any:
        hold()
        raise MemoryError("no room")

    run.training.begin(0, flatten_batch(run.graph, (), BATCHES[0]))
    this = current(run)
    number = next(n for n, each in enumerate(this.lowered.schedule.rounds) if not each.jobs and not each.after)
    monkeypatch.setattr(interpreter, "resolve", fails)
    one = pool.submit(this.run_round, number)
    assert hold.reached.wait(PATIENCE)
    other = pool.submit(this.run_round, number)
    assert waiting.wait(PATIENCE)
    hold.go.set()
    assert isinstance(one.exception(PATIENCE), MemoryError)
    assert one.exception() is other.exception(PATIENCE)
    with pytest.raises(MemoryError, match="no room"):
        this.run_round(number)


def test_operands_are_published_by_their_round_which_is_due_once() -> None:
    run = local(0.0)
    training = run.training
    training.begin(0, flatten_batch(run.graph, (), BATCHES[0]))
    assert training.lowered is not None
    jobs, found = training.lowered.schedule.jobs, following(training.lowered.schedule)
    number, then = next(iter(found.items()))
    for waited in jobs[number].after:
        with torch.no_grad():
            training.run_round(0, waited)
    held = then.at_hand.index(False)
    assert [training.published(0, then.job, operand) for operand in range(len(then.at_hand))] == list(then.at_hand)
    specs = [
        spec
        for parcel, _, _ in training.lowered.skeleton.jobs[number].parcels("run", 0, number)
        for spec in parcel.specs()
    ]
    for spec in specs:
        assert training.due(0, number) is None, "tiles are missing"
        run.multiply(spec)
    due = training.due(0, number)
    assert due == training.lowered.schedule.round_of[number]
    assert not training.published(0, then.job, held)
    with torch.no_grad():
        training.run_round(0, due)
    assert training.due(0, number) is None, "it has run"
    assert training.published(0, then.job, held)
    assert training.published(0, number, 0), "nobody waits for what is over"
    assert training.slice(0, number, 0, ((0, 1), (0, 1))) == ([], 0)
    with pytest.raises(StepError, match="is over"):
        training.published(1, number, 0)


def test_whoever_asks_for_a_job_that_is_over_hears_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds run as soon as their tiles are in, while a device that is late may still ask for operands, or mend."""
    run = local(0.0)
    calm = run.step(BATCHES[0])["loss"]
    training, multiply, over = run.training, run.multiply, Counter[bool]()

    def and_ask_again(spec: TileSpec) -> None:
        multiply(spec)
        due = training.due(spec.step, spec.job)
        if due is None:
            return
        with torch.no_grad():
            training.run_round(spec.step, due)
        for _, step, job, operand, first, second in slice_names(spec):
            over[not training.slice(step, job, operand, (first, second))[0]] += 1
        assert training.lowered is not None
        for parcel, _, _ in training.lowered.skeleton.jobs[spec.job].parcels("run", spec.step, spec.job):
            assert mend(training, parcel, KERNEL) == 0

    monkeypatch.setattr(run, "multiply", and_ask_again)
    assert run.step(BATCHES[0])["loss"] != calm, "another update"
    assert over[True], "operands that nobody needs any more are gone"


@pytest.mark.parametrize("check", [True, False], ids=["checked", "believed"])
def test_a_tile_cannot_come_before_its_operands(check: bool) -> None:
    """Nobody can have multiplied what is not made yet; and unchecked it would stay."""
    run = local()
    first = begin(run, BATCHES[0])
    training = run.training
    assert training.lowered is not None
    later = next(
        number
        for number, job in enumerate(training.lowered.skeleton.jobs)
        if number != first.job
        and job.after
        and not all(training.pass_of(first.step).published(number, operand) for operand in range(2))
    )
    nbytes = training.tile_nbytes(first.step, later, 0)
    assert nbytes is not None
    made = [torch.zeros(nbytes // 4).numpy()]
    attempt = Attempt("device", 0.0, 0.0)
    with pytest.raises(TileRejected, match="before its operands"):
        training.accept(first.step, later, 0, made, attempt, check=check)

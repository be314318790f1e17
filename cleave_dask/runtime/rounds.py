"""Cutting a step graph into rounds: what the server does in one go between the gemms that are sent out.

A gemm with tiles in the plan is a *job*. Everything else runs on the server. Steps that hang together without a job
between them form one *round*: it gathers the jobs it stands on, then runs its ops in program order. A round waits for
nothing but what it reads, so a gradient that only the optimizer needs never holds up the next layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from cleave_dask.graph.ir import Gemm, Op, Step, StepGraph
from cleave_dask.planning.values import Plan, Tiles

FILLER_DELAY = 8
"""Levels by which a dW job yields to the critical path: it fills links that would idle while a level drains."""


@dataclass(frozen=True, slots=True)
class Round:
    """What the server does in one go: gather jobs, run ops, publish what others need, free what nobody needs."""

    jobs: tuple[int, ...]  # numbers of the jobs whose outputs it gathers first
    steps: tuple[int, ...]  # positions in the graph's steps, in program order
    after: tuple[int, ...]  # numbers of the rounds it waits for
    reads: tuple[str, ...]  # values made by other rounds
    publishes: tuple[str, ...]  # values it makes that others, or the update, use
    level: int
    rank: int


@dataclass(frozen=True, slots=True)
class Job:
    """One distributed gemm: its tiles and the rounds that make its operands."""

    gemm: Gemm
    tiles: Tiles
    after: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Schedule:
    """All rounds and jobs of a step, and how many readers each shared value has."""

    rounds: tuple[Round, ...]
    jobs: tuple[Job, ...]
    readers: Mapping[str, int]

    @cached_property
    def round_of(self) -> dict[int, int]:
        """The round that gathers each job."""
        return {job: number for number, this in enumerate(self.rounds) for job in this.jobs}


@dataclass(frozen=True, slots=True)
class Next:
    """The job that can begin as soon as another is gathered."""

    job: int
    at_hand: tuple[bool, ...]  # its operands that are there before


def schedule(graph: StepGraph, plan: Plan) -> Schedule:
    """Rounds and jobs of `graph` when the gemms that `plan` has tiles for are sent out."""
    return _Cutter(graph, plan).schedule()


class _Cutter:
    """The work of `schedule`, step by step."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.maker: dict[str, int] = {name: p for p, step in enumerate(graph.steps) for name in step.writes}
        self.job_of: dict[int, int] = {}
        for position, step in enumerate(graph.steps):
            if self.is_job(step):
                self.job_of[position] = len(self.job_of)
        self.level = self._levels()
        self.group = self._groups()

    def is_job(self, step: Step) -> bool:
        """Whether the plan sends this step out."""
        return isinstance(step, Gemm) and step.name in self.plan.by_gemm

    def sources(self, position: int) -> list[int]:
        """Positions of the steps that this one waits for; random ops also wait for the random op before them."""
        step = self.graph.steps[position]
        found = [self.maker[name] for name in step.reads if name in self.maker]
        previous = self._previous_random.get(position)
        return found if previous is None else [*found, previous]

    def _levels(self) -> list[int]:
        self._previous_random: dict[int, int] = {}
        last: int | None = None
        for position, step in enumerate(self.graph.steps):
            if isinstance(step, Op) and step.random:
                if last is not None:
                    self._previous_random[position] = last
                last = position
        levels: list[int] = []
        for position in range(len(self.graph.steps)):
            level = max((levels[source] for source in self.sources(position)), default=0)
            levels.append(level + (position in self.job_of))
        return levels

    def _groups(self) -> list[int]:
        """For each step the first step of its round: steps of one level that are connected are one round."""
        leader = list(range(len(self.graph.steps)))

        def find(position: int) -> int:
            while leader[position] != position:
                leader[position] = leader[leader[position]]
                position = leader[position]
            return position

        def join(one: int, other: int) -> None:
            low, high = sorted((find(one), find(other)))
            leader[high] = low

        first: int | None = None
        for position, level in enumerate(self.level):
            if level == 0:
                first = position if first is None else first
                join(first, position)
            for source in self.sources(position):
                if self.level[source] == level:
                    join(source, position)
        return [find(position) for position in range(len(leader))]

    def schedule(self) -> Schedule:
        leaders = sorted(set(self.group), key=lambda leader: (self.level[leader], leader))
        number = {leader: index for index, leader in enumerate(leaders)}
        round_of = [number[leader] for leader in self.group]
        members: list[list[int]] = [[] for _ in leaders]
        for position, index in enumerate(round_of):
            members[index].append(position)
        readers = self._readers(members, round_of)
        rounds = tuple(self._round(index, positions, round_of, readers) for index, positions in enumerate(members))
        jobs = tuple(self._job(position, round_of) for position in self.job_of)
        return Schedule(rounds, jobs, readers)

    def _readers(self, members: list[list[int]], round_of: list[int]) -> Mapping[str, int]:
        """How many rounds, jobs and the update read each value that some round must publish."""
        counts: Counter[str] = Counter()
        for index, positions in enumerate(members):
            counts.update(self._external(index, positions, round_of))
        for position in self.job_of:
            counts.update(name for name in self._operands(position) if name in self.maker)
        results = [self.graph.loss, *(value for _, value in self.graph.grads + self.graph.buffers)]
        counts.update(name for name in results if name in self.maker)
        return dict(counts)

    def _operands(self, position: int) -> set[str]:
        """Values that the tiles of a job read; its biases are read by its round."""
        step = self.graph.steps[position]
        assert isinstance(step, Gemm)
        return {part.name for operand in step.inputs for part in operand.parts}

    def _external(self, index: int, positions: list[int], round_of: list[int]) -> set[str]:
        """Values that a round reads and another made."""
        names: set[str] = set()
        for position in positions:
            step = self.graph.steps[position]
            reads = set(step.reads) if position not in self.job_of else self._biases(step)
            names |= {name for name in reads if name in self.maker and round_of[self.maker[name]] != index}
        return names

    def _biases(self, step: Step) -> set[str]:
        return {bias.name for bias in step.biases if bias is not None} if isinstance(step, Gemm) else set()

    def _round(self, index: int, positions: list[int], round_of: list[int], readers: Mapping[str, int]) -> Round:
        reads = self._external(index, positions, round_of)
        order = {round_of[self.maker[name]] for name in reads}
        order |= {round_of[p] for p in map(self._previous_random.get, positions) if p is not None}
        made = [name for position in positions for name in self.graph.steps[position].writes]
        level = self.level[positions[0]]
        return Round(
            jobs=tuple(self.job_of[position] for position in positions if position in self.job_of),
            steps=tuple(position for position in positions if position not in self.job_of),
            after=tuple(sorted(order - {index})),
            reads=tuple(sorted(reads)),
            publishes=tuple(name for name in made if name in readers),
            level=level,
            rank=_rank(level, positions[0]),
        )

    def _job(self, position: int, round_of: list[int]) -> Job:
        gemm = self.graph.steps[position]
        assert isinstance(gemm, Gemm)
        makers = {round_of[self.maker[name]] for name in self._operands(position) if name in self.maker}
        delay = FILLER_DELAY if gemm.role == "dW" else 0
        return Job(
            gemm=gemm,
            tiles=self.plan.by_gemm[gemm.name],
            after=tuple(sorted(makers)),
            rank=_rank(self.level[position] + delay, position),
        )


def _rank(level: int, position: int) -> int:
    """Smaller runs first: by level, then in program order; room for the tiles of one gemm in between."""
    return (level << 40) + (position << 20)


def following(steps: Schedule) -> dict[int, Next]:
    """For jobs of the critical path the next one, if it waits for nothing more than the round of this one.

    What a device asks for ahead is then published by one round at one time, and that round waits for nothing that is
    asked for ahead of it: nobody waits in a circle.
    """
    before: list[int] = []  # rounds that are done once a round is, itself included, each a bit
    for number, this in enumerate(steps.rounds):
        before.append(
            1 << number | _together(before, (*this.after, *(r for job in this.jobs for r in steps.jobs[job].after)))
        )
    made = {name: number for number, this in enumerate(steps.rounds) for name in this.publishes}
    critical = sorted((job.rank, number) for number, job in enumerate(steps.jobs) if job.gemm.role != "dW")
    found: dict[int, Next] = {}
    for (_, number), (_, other) in pairwise(critical):
        job, then = steps.jobs[number], steps.jobs[other]
        done = _together(before, job.after)
        if all((done | 1 << steps.round_of[number]) >> waited & 1 for waited in then.after):
            makers = [[made[part.name] for part in operand.parts if part.name in made] for operand in then.gemm.inputs]
            found[number] = Next(other, tuple(all(done >> maker & 1 for maker in each) for each in makers))
    return found


def _together(sets: list[int], numbers: Iterable[int]) -> int:
    """The union of some sets of bits."""
    union = 0
    for number in numbers:
        union |= sets[number]
    return union


def deaths(graph: StepGraph, this: Round) -> list[set[str]]:
    """For each step of a round the values made in it that neither a later step of it nor anyone else reads."""
    last: dict[str, int] = {}
    for index, position in enumerate(this.steps):
        item = graph.steps[position]
        for name in (*item.reads, *item.writes):
            last[name] = index
    dead: list[set[str]] = [set() for _ in this.steps]
    for name, index in last.items():
        if name not in this.publishes:
            dead[index].add(name)
    return dead


def followers(steps: Schedule) -> dict[Any, list[tuple[str, int]]]:
    """For each round, by number, and each job, as ("job", number): who waits for it."""
    found: dict[Any, list[tuple[str, int]]] = {number: [] for number in range(len(steps.rounds))}
    found |= {("job", number): [] for number in range(len(steps.jobs))}
    for number, this in enumerate(steps.rounds):
        for other in this.after:
            found[other].append(("round", number))
        for job in this.jobs:
            found["job", job].append(("round", number))
    for number, planned in enumerate(steps.jobs):
        for other in planned.after:
            found[other].append(("job", number))
    return found

"""A step's tasks when a device that they were planned for is not there: its tiles go out as other parcels.

Before the first parcel of a job goes out, tiles of devices that are not there are dealt to others, and so are some of
theirs, so that all are through at about the same time (`planning/redealing`). A parcel that comes back, because its
device left or is late with it, goes out tile by tile. Either way tasks get other tiles than they were made with, and
where there are more parcels than before, tasks are added, which the same rounds wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from dask.typing import Key
from distributed import Scheduler
from distributed.scheduler import TaskState

from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.redealing import Dealt, Planned, redeal, scatter
from cleave_dask.runtime.tasks import OrderedTask
from cleave_dask.runtime.tiles import ParcelSpec


class Dealing:
    """Gives tasks that no device has other tiles; the tasks that it adds wait in `added` to be begun."""

    def __init__(self, scheduler: Scheduler, dispatcher: Dispatcher) -> None:
        self.added: list[Key] = []
        self._scheduler, self._dispatcher = scheduler, dispatcher
        self._step: object = None
        self._seen: set[object] = set()  # jobs of that step that have begun
        self._numbers = count()

    def dealt(self, ts: TaskState) -> OrderedTask:
        """What a task that is about to be placed is to do."""
        self._begin(ts)
        spec = _spec(ts)
        if spec.device is not None and self._dispatcher.scatters(spec.device) and len(spec.args[0].tiles) > 1:
            parcel = Planned(None, spec.work, _ranges(spec.args[0]))
            self._replace({0: ts}, scatter(spec.args[0].kind, parcel), resumed=True)
        return _spec(ts)

    def _begin(self, ts: TaskState) -> None:
        """If a parcel is the first of its job, deal what was planned for devices that are not there."""
        if not isinstance(ts.key, tuple):
            return
        step, job, *_ = ts.key
        if step != self._step:
            self._step, self._seen = step, set()
        if job in self._seen:
            return
        self._seen.add(job)
        tasks: dict[int, TaskState] = {}
        while (task := self._scheduler.tasks.get((step, job, len(tasks)))) is not None:
            tasks[len(tasks)] = task
        specs = {number: _spec(task) for number, task in tasks.items()}
        takers = self._dispatcher.takers(spec.device for spec in specs.values() if spec.device is not None)
        if all(spec.device is None or spec.device in takers for spec in specs.values()):
            return
        if any(task.state not in ("released", "waiting") for task in tasks.values()):
            return  # it began before somebody left: its parcels come back one by one
        planned = [Planned(spec.device, spec.work, _ranges(spec.args[0])) for spec in specs.values()]
        ahead = {name: self._dispatcher.ahead(name) for name in takers} if specs[0].filler else {}
        for numbers, dealt in redeal(specs[0].args[0].kind, planned, takers, ahead):
            self._replace({number: tasks[number] for number in numbers}, dealt)

    def _replace(self, tasks: Mapping[int, TaskState], dealt: Sequence[Dealt], *, resumed: bool = False) -> None:
        """Tasks get other parcels: each what is left of its own, or one of another device, or there is a new task."""
        parcels: dict[int, ParcelSpec] = {number: _spec(task).args[0] for number, task in tasks.items()}
        kept = {each.parcel for each in dealt}
        free = [task for number, task in tasks.items() if number not in kept]
        last = max(parcel.rank for parcel in parcels.values())
        model = next(iter(tasks.values()))
        for each in dealt:
            tiles = tuple(parcels[parcel].tiles[place] for parcel, place in each.tiles)
            like = parcels[each.tiles[0][0]]
            rank = like.rank if each.parcel is not None else last
            spec = replace(like, tiles=tiles, rank=rank, resumed=like.resumed or resumed, kept=(), ahead=None)
            if each.parcel is not None:
                self._fill(tasks[each.parcel], spec, each)
            else:
                self._fill(free.pop() if free else self._add(model), spec, each)

    def _fill(self, ts: TaskState, parcel: ParcelSpec, dealt: Dealt) -> None:
        old = _spec(ts)
        ts.run_spec = OrderedTask(
            ts.key,
            old.func,
            parcel,
            after=old.dependencies,
            place="device",
            rank=parcel.rank,
            device=dealt.device or None,
            work=dealt.work,
            filler=old.filler,
        )
        ts.priority = (*(ts.priority or (0, 0, 0))[:2], parcel.rank)

    def _add(self, model: TaskState) -> TaskState:
        """One more task, that waits for nothing and that those wait for who wait for another."""
        step, job, *_ = model.key if isinstance(model.key, tuple) else (model.key, 0)
        key: Key = (step, job, "more", next(self._numbers))
        ts = self._scheduler.new_task(key, _spec(model), "released")
        ts.priority = model.priority
        for waiting in model.dependents:
            waiting.add_dependency(ts)
            if waiting.state == "waiting" and waiting.waiting_on is not None:
                waiting.waiting_on.add(ts)
        self.added.append(key)
        return ts


def _spec(ts: TaskState) -> OrderedTask:
    assert isinstance(ts.run_spec, OrderedTask)
    return ts.run_spec


def _ranges(parcel: ParcelSpec) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(parcel.tiles, dtype=np.int64)[:, 1:]

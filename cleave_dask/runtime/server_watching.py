"""What the server tells a page that looks at a training: progress, records, newest tiles, sums by device, the plan.

Nothing here runs unless somebody looks. An answer has what is new since the last one; it is bounded, whatever the size
of the step: at most MOST_ROWS tiles, one row of sums per device.
"""

from __future__ import annotations

from time import thread_time
from typing import Any

from cleave_dask.runtime.server_training import Training
from cleave_dask.runtime.summaries import device_sums, plan_facts, step_summary, with_predictions
from cleave_dask.runtime.trace import Column, Trace

MOST_ROWS = 1_500
"""Tiles of one answer; of more that are new, the newest."""


class Watch:
    """One training as a page sees it."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._sums: dict[str, list[float]] = {}  # by device, as `device_sums` orders them
        self._counted = 0

    def look(self, *, rows: int, records: int, program: int) -> dict[str, Any]:
        """What is new since row `rows`, record `records` and program `program`; sums of devices that have new rows."""
        began = thread_time()
        training = self.training
        first = max(rows, training.trace.count - MOST_ROWS)
        fresh, touched, following = self._take(rows, first)
        newest, next_record = training.history.since(records)
        answer: dict[str, Any] = {
            "run": training.name,
            "progress": progress(training),
            "records": newest,
            "sums": {device: self._sums[device] for device in touched},
            "next": {"rows": following, "records": next_record, "program": training.programs},
        }
        if training.lowered is not None:
            plan = training.lowered.plan
            answer["rows"], answer["names"] = with_predictions(Trace.joined(fresh), list(training.plans), first)
            if newest:
                answer["summary"] = self._last_step()
            if program != training.programs:
                answer["plan"] = plan_facts(plan)
        answer["cpu"] = thread_time() - began
        return answer

    def standing(self) -> dict[str, Any]:
        """The plan in use and the last step, to be kept beside a checkpoint."""
        assert self.training.lowered is not None
        plan = self.training.lowered.plan
        return {"run": self.training.name, "plan": plan_facts(plan), "summary": self._last_step()}

    def latest(self) -> tuple[dict[str, Column], dict[str, tuple[str, ...]]]:
        """The newest rows with what was predicted for them."""
        first = max(0, self.training.trace.count - MOST_ROWS)
        rows, _ = self.training.trace.since(first)
        return with_predictions(rows, list(self.training.plans), first)

    def _last_step(self) -> dict[str, Any]:
        rows, first = self.training.trace.last_sealed()
        plans = list(self.training.plans)
        plan = next((plan for start, plan in reversed(plans) if start <= first), plans[0][1])
        return {**step_summary(plan, rows), "figures": self.training.calibration.figures()}

    def _take(self, known: int, first: int) -> tuple[list[Trace], set[str], int]:
        """Rows from `first` on, devices that have rows from `known` on, the next row; sums are those of all rows."""
        parts, following = self.training.trace.parts(min(known, self._counted))
        begin = following - sum(map(len, parts))
        fresh: list[Trace] = []
        touched: set[str] = set()
        for part in parts:
            for device, new in device_sums(part.where(slice(max(0, self._counted - begin), None))).items():
                before = self._sums.get(device, [0.0] * len(new))
                self._sums[device] = [one + other for one, other in zip(before, new, strict=True)]
            if begin + len(part) > known:
                touched.update(part.names["device"])
            fresh.append(part.where(slice(max(0, first - begin), None)))
            begin += len(part)
        self._counted = following
        return fresh, touched, following


def progress(training: Training) -> dict[str, Any]:
    """How far the step in flight is: tiles, gemms, and the levels of the critical path."""
    current = training.current
    facts: dict[str, Any] = {"step": training.updates + 1, "running": current is not None, "began": training.began}
    lowered = training.lowered if current is None else current.lowered
    if lowered is None:
        return facts
    jobs, gatherings = lowered.schedule.jobs, {} if current is None else current.gatherings
    levels = sorted({job.gemm.level for job in jobs if job.gemm.role != "dW"})
    done = {number: len(found.accepted) for number, found in list(gatherings.items())}
    open_levels = [
        job.gemm.level
        for number, job in enumerate(jobs)
        if job.gemm.role != "dW" and done.get(number, 0) < len(job.tiles)
    ]
    passed = levels.index(min(open_levels)) if open_levels else len(levels)
    return facts | {
        "tiles": sum(done.values()),
        "all_tiles": sum(len(job.tiles) for job in jobs),
        "gemms": sum(count == len(jobs[number].tiles) for number, count in done.items()),
        "all_gemms": len(jobs),
        "levels": passed,
        "all_levels": len(levels),
    }

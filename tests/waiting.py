"""Waiting for what becomes true soon, without sleeping for a fixed time and without waiting forever."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from distributed import Client


def until(condition: Callable[[], bool], what: str, *, seconds: float = 60) -> None:
    """Return once `condition` holds; fail with `what` if it does not in time."""
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, f"waited {seconds} s in vain: {what}"


def until_tasks(client: Client, count: int) -> None:
    """Wait until the scheduler holds exactly this many tasks; a client's release takes a moment to arrive."""

    def held() -> int:
        number: int = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        return number

    until(lambda: held() == count, f"{count} tasks on the scheduler, not {held()}", seconds=120)

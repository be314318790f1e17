"""What pricing a system yields: seconds per batch, or why it cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One system on one step graph and one fleet."""

    system: str
    seconds: float | None  # per batch; None: it cannot run
    why: str = ""  # it cannot run: what is missing, and how much
    binding: str = ""  # the resource that decides `seconds`
    devices_used: int = 0  # of the fleet, or GPUs of a cloud
    memory: float = 0.0  # bytes on the fullest of them
    configuration: str = ""  # the best one, which is the one that was priced
    moved: float = 0.0  # bytes that a device sends and gets per batch: ours on average, a pipeline's in the middle
    restart: float | None = None  # seconds that a lost device costs on average if its batch begins again
    repair: float | None = None  # seconds that it costs if others compute again what was lost
    source: str = "formula"  # where `seconds` comes from: a formula, our plan, or its simulation

    @property
    def feasible(self) -> bool:
        """Whether it can run at all."""
        return self.seconds is not None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"infeasible: {self.why}"
        return f"{self.seconds:.4g} s, {self.binding} binds, {self.devices_used} devices ({self.configuration})"


def infeasible(system: str, why: str) -> Result:
    """A system that cannot run."""
    return Result(system, None, why)


def fastest(results: Iterable[Result], otherwise: Result) -> Result:
    """The fastest of the feasible ones, the first of equals; `otherwise` if there is none."""
    best = otherwise
    for result in results:
        if result.seconds is not None and (best.seconds is None or result.seconds < best.seconds):
            best = result
    return best

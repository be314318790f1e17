"""What is measured of a system on a setting, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

FP32_TOLERANCE, BF16_TOLERANCE = 1e-3, 2e-2
"""How far the loss of a step may be from that of one process, as a share of it: rounding, some updates on."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one setting: figures, or why there are none."""

    setting: str
    system: str
    seconds: float | None = None  # per step, the median; None: it could not be measured
    steps: int = 0  # that the median is of
    warm: bool = True  # whether a step before them was left out
    losses: tuple[float, ...] = ()  # of all steps, the first included
    down: tuple[float, ...] = ()  # bytes per step, by device, headers included
    up: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()  # peak bytes beyond what the process had before it began to train, by device
    plan_seconds: float | None = None  # of ours
    bound_seconds: float | None = None
    apart_seconds: float | None = None  # its gemms one after another, each at its own bound
    spent: dict[str, float] | None = None  # of ours: seconds of a step, by what the links of a device were doing
    note: str = ""  # which variant, or why there are no figures
    commit: str = ""
    when: str = ""
    load: float = 0.0  # of the machine, when it began

    @classmethod
    def failed(cls, setting: str, system: str, why: str) -> Row:
        """A system that could not be measured."""
        return cls(setting, system, note=why)


def medians(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Seconds per step by setting and system."""
    return {(row.setting, row.system): row.seconds for row in rows if row.seconds is not None}


def best(variants: Sequence[tuple[str, Sequence[float]]]) -> int:
    """Position of the variant with the least median of its seconds."""
    return min(range(len(variants)), key=lambda place: median(variants[place][1]))


def loss_difference(row: Row, reference: Sequence[float]) -> float | None:
    """The largest difference of its losses from those of one process, as a share of them; None if there are none."""
    pairs = list(zip(row.losses, reference, strict=False))
    return max((abs(loss - true) / abs(true) for loss, true in pairs), default=None)


def same_loss(row: Row, reference: Sequence[float]) -> bool:
    """Whether its losses are those of one process, up to rounding."""
    difference = loss_difference(row, reference)
    return difference is not None and difference <= (BF16_TOLERANCE if "bf16" in row.system else FP32_TOLERANCE)


def load(path: Path) -> list[Row]:
    """The rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    tuples = ("losses", "down", "up", "memory")
    return [Row(**{**row, **{name: tuple(row[name]) for name in tuples}}) for row in json.loads(path.read_text())]


def save(path: Path, rows: Iterable[Row]) -> None:
    """Write rows so that a crash leaves the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    new.replace(path)


def replaced(rows: Iterable[Row], row: Row) -> list[Row]:
    """The rows with `row` in the place of an earlier one of its system and setting."""
    return [each for each in rows if (each.setting, each.system) != (row.setting, row.system)] + [row]

"""How true simulated steps are: the same plans played on virtual time and trained by on emulated devices.

`python benchmarks/truth.py --write` measures it and writes `accuracy.json`, which comes with the package: whoever shows
simulated seconds shows beside them how far such seconds were off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

_FILE = "accuracy.json"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Measured over simulated seconds of a step, by setting."""

    ratios: Mapping[str, float]
    source: str  # commit, machine, load

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], source: str) -> Self:
        """What rows of benchmarks/truth.py say."""
        return cls({row["setting"]: row["seconds"] / row["simulated_seconds"] for row in rows}, source)

    @property
    def span(self) -> tuple[float, float]:
        """The least and the greatest ratio."""
        return min(self.ratios.values()), max(self.ratios.values())

    @property
    def worst(self) -> float:
        """The largest share by which a measured step differed from its simulation."""
        return max(abs(ratio - 1) for ratio in self.ratios.values())

    def write(self) -> None:
        """Put it where `measured_accuracy` finds it."""
        place = Path(str(files("cleave_dask.simulation"))) / _FILE
        place.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        low, high = self.span
        return (
            f"Simulated seconds: real steps on emulated devices took {low:.2f} to {high:.2f} times as long, "
            f"in {len(self.ratios)} settings ({self.source})."
        )


@cache
def measured_accuracy() -> Accuracy:
    """What was measured last."""
    return Accuracy(**json.loads((files("cleave_dask.simulation") / _FILE).read_text()))

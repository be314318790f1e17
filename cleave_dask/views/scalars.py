"""The figures of each step as TensorBoard's scalars. Needs `pip install 'cleave-dask[tensorboard]'`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from cleave_dask.errors import InputError

FIGURES = {
    "loss": "train/loss",
    "seconds": "step/seconds",
    "tiles": "step/tiles",
    "down_bytes": "bytes/down",
    "up_bytes": "bytes/up",
    "retries": "faults/retries",
    "rejected": "faults/rejected",
}
"""What is written of a step's record, and the tag that it gets."""


class Scalars:
    """Writes records of steps to a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: str | Path) -> None:
        try:
            writing = import_module("torch.utils.tensorboard")
        except ModuleNotFoundError as error:
            remedy = "pip install 'cleave-dask[tensorboard]'"
            raise InputError(f"scalars for TensorBoard need {error.name}; install it with: {remedy}") from error
        self._writer = writing.SummaryWriter(str(folder))

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the figures of these steps."""
        for record in records:
            for figure, tag in FIGURES.items():
                self._writer.add_scalar(tag, record[figure], record["step"])

    def close(self) -> None:
        """Have everything on disk."""
        self._writer.close()

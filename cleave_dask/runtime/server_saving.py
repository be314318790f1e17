"""Saving a training to its store and bringing it back: weights, buffers, optimizer, schedule, random state."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cleave_dask._version import __version__
from cleave_dask.errors import CheckpointError
from cleave_dask.runtime.history import FOLDER, append_lines, read_records, write_story
from cleave_dask.runtime.interrupted import find_interrupted
from cleave_dask.runtime.optimizers import restore, state_arrays, to_stored, to_tensor
from cleave_dask.runtime.server_training import Training
from cleave_dask.runtime.server_watching import Watch
from cleave_dask.runtime.store import Expectation, State, TileStore
from cleave_dask.runtime.tiles_in_flight import Start, discard_tiles

logger = logging.getLogger(__name__)

_WEIGHTS = "weights/"

Event = tuple[float, dict[str, Any]]
"""When something happened to the fleet, and what."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may leave on disk."""

    keep: int = 3  # steps
    max_bytes: int | None = None  # of all steps together
    tiles: int = 0  # bytes of tiles of the step in flight; 0: none are kept


def save_training(training: Training, folder: str, limits: Limits, events: Sequence[Event] = ()) -> dict[str, Any]:
    """Write the state between two steps; visible only when it is whole. `events` are those of the fleet so far."""
    with training.updating:
        return _save(training, folder, limits, events)


def _save(training: Training, folder: str, limits: Limits, events: Sequence[Event]) -> dict[str, Any]:
    arrays, optimizer = state_arrays(training.optimizer, training.lr_schedule, _names(training))
    random_state, weights = training.settled()
    arrays = {**arrays, **{_WEIGHTS + name: to_stored(tensor) for name, tensor in weights.items()}}
    document = {
        "step": training.updates,
        "version": __version__,
        "optimizer": optimizer,
        "random_state": random_state.hex(),
    }
    store, state = _store(training, folder, limits), State(arrays, document)
    try:
        identity = store.save(training.updates, state)
    except CheckpointError as error:
        full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or not discard_tiles(Path(folder)):
            raise
        identity = store.save(training.updates, state)  # a step that is done is worth more than tiles of it
    training.flight.start_from(Start(Path(folder), identity, limits.tiles))
    _save_trace(training, Path(folder))
    _save_records(training, Path(folder), events)
    return {"step": training.updates}


def _save_trace(training: Training, folder: Path) -> None:
    """Add what happened since the last save to the trace beside the checkpoint; it is worth no failed save."""
    rows, following = training.trace.since(training.trace.saved)
    try:
        rows.append(folder / "trace")
    except CheckpointError as error:
        logger.warning("The trace up to step %s is not saved: %s", training.updates, error)
    else:
        training.trace.saved = following


def _save_records(training: Training, folder: Path, events: Sequence[Event]) -> None:
    """Add records and events since the last save to those beside the checkpoint, for `cleave report`."""
    records, following = training.history.since(training.history.saved)
    new = [(when, event) for when, event in events if when > training.told]
    try:
        append_lines(folder / FOLDER / "steps.jsonl", records)
        append_lines(folder / FOLDER / "events.jsonl", new)
        if training.lowered is not None:
            watch = Watch(training)
            write_story(folder, watch.standing(), watch.latest())
    except (OSError, CheckpointError) as error:
        logger.warning("Records up to step %s are not saved: %s", training.updates, error)
    else:
        training.history.saved = following
        training.told = max([training.told, *(when for when, _ in new)])


def restore_training(training: Training, folder: str, step: int | None, limits: Limits) -> dict[str, Any]:
    """Take over a saved state; if anything about it does not fit, the training stays as it was.

    The answer also tells of a step that was in flight after that save, if tiles of it are on disk.
    """
    own = {
        _WEIGHTS + name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in training.weights.items()
    }
    state = TileStore(folder).load(step, expect=Expectation(own))
    document = state.document
    if absent := {"step", "optimizer", "random_state"} - document.keys():
        wrote = f"cleave-dask {document.get('version', 'of an unknown version')}"
        raise CheckpointError(f"{folder} was written by {wrote}, without {min(absent)}; resume it with that version")
    others = {name: array for name, array in state.arrays.items() if not name.startswith(_WEIGHTS)}
    with training.updating, torch.no_grad():
        restore(training.optimizer, training.lr_schedule, _names(training), others, document["optimizer"])
        for name, tensor in training.weights.items():
            tensor.copy_(to_tensor(state.arrays[_WEIGHTS + name]))
        training.abandon()
        training.updates = document["step"]
        training.history.start_from(read_records(Path(folder), up_to=training.updates))
        training.random_state = bytes.fromhex(document["random_state"])
        interrupted = find_interrupted(Path(folder), state.identity)
        if _is_writer(training, folder, limits):
            training.flight.start_from(Start(Path(folder), state.identity, limits.tiles))
    return {"step": training.updates, "interrupted": interrupted}


def _is_writer(training: Training, folder: str, limits: Limits) -> bool:
    """Whether this training may write to the folder; another process may be at it, and reading harms nobody."""
    try:
        _store(training, folder, limits).lock()
    except (CheckpointError, OSError) as error:
        logger.info("Tiles of the step in flight are not kept: %s", error)
        return False
    return True


def _names(training: Training) -> dict[torch.Tensor, str]:
    return {tensor: name for name, tensor in training.weights.items()}


def _store(training: Training, folder: str, limits: Limits) -> TileStore:
    """The store that this training writes to; its lock is held until the training is closed."""
    if training.store is None or str(training.store.folder) != folder:
        if training.store is not None:
            training.store.close()
        training.store = TileStore(folder)
    training.store.keep, training.store.max_bytes = limits.keep, limits.max_bytes
    return training.store

"""The folder that a run saves to: one of its own for a new run, the latest for one that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from cleave_dask.errors import InputError


@contextmanager
def claimed(given: Path | None, name: str, *, resume: bool) -> Iterator[Path]:
    """A folder on this machine's disk for a run of that name; removed again if nothing was saved there.

    Runs never share one by accident: without `given`, a new run gets checkpoints/<name>, or <name>-2 if that exists.
    """
    if resume:
        yield _writable(_latest(given, name))
        return
    folder = _new(name) if given is None else _unused(given)
    try:
        yield folder
    finally:
        with suppress(OSError):  # there is something in it
            folder.rmdir()


def check_model(folder: Path, module: Any) -> None:
    """Refuse to resume a run of another torch module, before anything is started for it."""
    from cleave_dask.runtime.store import Expectation, TileStore

    tensors = (*module.named_parameters(), *module.named_buffers())
    kinds = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors}
    TileStore(folder).check(Expectation({f"weights/{name}": kind for name, kind in kinds.items()}))


def elsewhere(given: Path | None, name: str, *, resume: bool) -> Path:
    """A folder on the disk of a server that is another machine: nobody can look there from here."""
    if given is not None:
        return given
    if resume:
        raise InputError("the server is another machine; name the folder there to resume from with --checkpoint")
    return _root() / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _latest(given: Path | None, name: str) -> Path:
    """The folder that was given, or the one of that name which was written to last."""
    if given is not None:
        if not _steps(given):
            raise InputError(f"there is no saved step in {given}; leave --resume out to start a new run there")
        return given
    found = [folder for folder in (_root() / name, *_root().glob(f"{name}-*")) if _is_run(folder, name)]
    if not found:
        raise InputError(f"there is no saved step of {name!r} in {_root()}; leave --resume out to start a new run")
    return max(found, key=lambda folder: folder.stat().st_mtime_ns)


def _writable(folder: Path) -> Path:
    """A folder that steps can be added to: not even the first one of a run is to be computed for nothing."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder} is read-only, and what is trained could not be saved; make it writable, or copy it and give "
            "the copy with --checkpoint"
        )
    return folder


def _is_run(folder: Path, name: str) -> bool:
    """Whether a folder holds steps of a run of that name: tiny-llama-2 does, tiny-llama-large does not."""
    number = folder.name.removeprefix(name).removeprefix("-")
    return (not number or number.isdecimal()) and bool(_steps(folder))


def _new(name: str) -> Path:
    """A folder that did not exist before."""
    for number in count(1):
        folder = _root() / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            if not _root().is_dir():
                raise _unusable(folder, error) from error
        except OSError as error:
            raise _unusable(folder, error) from error
        else:
            return folder
    raise AssertionError("unreachable")


def _unused(given: Path) -> Path:
    """The folder that was given, made if it is not there; one with steps belongs to another run."""
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(given, error) from error
    steps = _steps(given)
    if steps:
        raise InputError(
            f"{given} holds a run that is at step {steps[-1]}; "
            "add --resume to go on with it, or give another --checkpoint"
        )
    return given


def _steps(folder: Path) -> tuple[int, ...]:
    from cleave_dask.runtime.store import TileStore

    return TileStore(folder).steps()


def _root() -> Path:
    from cleave_dask import config

    return Path(config.get("checkpoint.folder"))


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder} cannot be a checkpoint folder: {error.strerror}; give another one with --checkpoint")

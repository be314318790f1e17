"""The tile store: the state of finished steps on disk, as zarr, each step visible only when it is whole.

    checkpoints/run/
      lock                           held, with its process id, by the one process that may write
      step-00000120.0007/            step 120, the seventh save: a zarr group that any zarr 3 reader opens
      .writing-step-00000121.0008/   being written: readers ignore it, the next writer removes it if its writer died
      inflight-<digest>/             tiles of the step after the newest save (`tiles_in_flight`)
      trace/                         what happened, tile by tile (`trace`)
      records/                       what happened, step by step (`history`)

A step is written beside its place, synced to disk, and put in place by one atomic rename. Saving the same step again
makes a new folder with the next save number, so nothing is ever overwritten; the newest step is the one saved last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cleave_dask.errors import CheckpointError, ForeignCheckpointError, InputError
from cleave_dask.formatting import quantity
from cleave_dask.runtime.zarr_files import (
    CHUNK_BYTES,
    METADATA,
    Numbers,
    StoredArray,
    holder,
    memory,
    read_arrays,
    read_manifest,
    size_of,
    write_group,
)

__all__ = ["Expectation", "State", "StoredArray", "TileStore", "holder"]

_STEP = re.compile(r"step-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a run needs to go on: arrays by name ("weights/lm_head.weight") and a plain JSON document."""

    arrays: Mapping[str, StoredArray]
    document: dict[str, Any]
    identity: str = field(default="", compare=False)  # of the save that it was read from


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the reader's own model looks like, so that the state of another model is refused."""

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape; complete for each top folder that it names
    graph_digest: str | None = None  # compared with the document's "graph_digest"


class TileStore:
    """Steps in a folder, written by one process at a time, read by any number.

    The newest `keep` steps stay. With `max_bytes`, older ones go earlier so that all steps together stay below it; the
    newest whole step stays until a newer one is whole.
    """

    def __init__(
        self,
        folder: str | Path = "checkpoints/run",
        *,
        keep: int = 3,
        max_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if keep < 1:
            raise InputError(f"keep={keep} would keep no step at all; give 1 or more")
        self.folder, self.keep, self.max_bytes, self.chunk_bytes = Path(folder), keep, max_bytes, chunk_bytes
        self._saving = threading.Lock()
        self._unlock: weakref.finalize[Any, Any] | None = None

    def steps(self) -> tuple[int, ...]:
        """Every step that is there and whole, in the order in which they were saved."""
        return tuple(self._places())

    def save(self, step: int, state: State) -> str:
        """Write one step, then remove the oldest ones beyond `keep`; returns the identity of the save.

        The first save locks the folder until `close`.
        """
        if json.loads(json.dumps(state.document, default=repr)) != state.document:
            raise InputError("the document is not plain JSON: use lists for tuples, strings for keys, no NaN")
        needed = sum(array.data.nbytes for array in state.arrays.values()) + 8192 * (len(state.arrays) + 1)
        with self._saving:
            try:
                self.lock()
                self._retain()  # a writer that died may have left a step too many: never more than keep + 1 on disk
                if self._free() < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._make_room(step, needed)
                identity = self._write(step, state)
                self._retain()
            except OSError as error:
                raise CheckpointError(self._refusal(step, error, needed)) from error
        return identity

    def load(
        self, step: int | None = None, *, expect: Expectation | None = None, into: Mapping[str, Numbers] | None = None
    ) -> State:
        """Read a step, by default the newest, and check every byte of it.

        Arrays named in `into` are read straight into that memory, with no second copy. If a chunk turns out to be
        damaged their content is undefined: load another step before using them.
        """
        step, folder = self._find(step)
        try:
            content, checksum = read_manifest(folder)
            _check_model(content, folder, expect or Expectation({}))
            if absent := (into or {}).keys() - content["arrays"].keys():
                raise CheckpointError(f"{folder} has no {min(absent)}; resume with the model that wrote it")
            arrays = {name: memory(name, entry, into or {}) for name, entry in content["arrays"].items()}
            read_arrays(folder, content, arrays)
        except OSError as damage:
            raise CheckpointError(self._damaged(step, damage)) from damage
        return State(arrays, content["document"], _identity(folder, checksum))

    def check(self, expect: Expectation) -> None:
        """Refuse a newest step of another model or format, as `load` would, from its manifest alone."""
        step, folder = self._find(None)
        try:
            content, _ = read_manifest(folder)
        except OSError as damage:
            raise CheckpointError(self._damaged(step, damage)) from damage
        _check_model(content, folder, expect)

    def verify(self, step: int) -> bool:
        """Whether every byte of a step is as it was written."""
        try:
            folder = self._find(step)[1]
            read_arrays(folder, read_manifest(folder)[0], {})
        except (OSError, CheckpointError):
            return False
        return True

    def close(self) -> None:
        """Let another process write."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _saves(self) -> list[tuple[int, int, Path]]:
        """Save number, step and folder of every step, in the order in which they were saved."""
        matches = [match for path in self.folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
        return sorted((int(match[2]), int(match[1]), self.folder / match[0]) for match in matches)

    def _places(self) -> dict[int, Path]:
        """The folder of each whole step, in the order in which they were saved."""
        whole = [(step, path) for _, step, path in self._saves() if (path / METADATA).is_file()]
        last = dict(whole)  # a step that was saved again counts as its last save, in that save's place
        return {step: path for step, path in whole if last[step] == path}

    def _find(self, step: int | None) -> tuple[int, Path]:
        """The folder of a step, or of the newest."""
        places = self._places()
        found = next(reversed(places), None) if step is None else step
        if found is None or found not in places:
            there = f"steps {', '.join(map(str, places))}, not {step}" if places else "no saved step"
            raise CheckpointError(f"{self.folder} has {there}; name one that is there, or another folder")
        return found, places[found]

    def lock(self) -> None:
        """Become the one writer, and clear away what dead writers left behind."""
        if self._unlock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            unlock = weakref.finalize(self, os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when the process dies
            except BlockingIOError:
                owner = os.pread(handle, 16, 0).decode().strip() or "unknown"
                unlock()
                held = f"process {owner} is writing to {self.folder}"
                raise CheckpointError(f"{held}; stop that run, or give this one another folder") from None
            self._unlock = unlock
            os.pwrite(handle, f"{os.getpid():<16}".encode(), 0)
        for left in [*self.folder.glob(".writing-step-*"), *self.folder.glob(".removing-step-*")]:
            shutil.rmtree(left, ignore_errors=True)  # tried again at every save

    def _write(self, step: int, state: State) -> str:
        """Write the step beside its place, then rename it into place."""
        name = f"step-{step:08d}.{max([0, *(save for save, _, _ in self._saves())]) + 1:04d}"
        head = {"step": step, "document": state.document}
        checksum = write_group(self.folder / name, state.arrays, head, chunk_bytes=self.chunk_bytes)
        return _identity(self.folder / name, checksum)

    def _make_room(self, step: int, needed: int) -> None:
        """Remove old steps, but never the newest, until another one of `needed` bytes stays within `max_bytes`."""
        if self.max_bytes is None:
            return
        sizes = {path: size_of(path) for path in self._places().values()}
        for path in list(sizes)[:-1]:
            if sum(sizes.values()) + needed > self.max_bytes:
                self._remove(path)
                del sizes[path]
        total = sum(sizes.values()) + needed
        if total > self.max_bytes:
            beside = f" beside {quantity(sum(sizes.values()), 'B')} of the newest step, which stays until it is whole"
            raise CheckpointError(
                f"saving step {step} in {self.folder} needs {quantity(needed, 'B')}{beside if sizes else ''}, and "
                f"cleave.checkpoint.max_bytes is {quantity(self.max_bytes, 'B')}; set it to at least {total}"
            )

    def _retain(self) -> None:
        """Remove the steps that were saved before the last `keep`, and former saves of the same step."""
        kept = list(self._places().values())[-self.keep :]
        for _, _, path in self._saves():
            if path not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Make a step invisible at once, then free its space."""
        shutil.rmtree(path.rename(self.folder / f".removing-{path.name}"), ignore_errors=True)

    def _free(self) -> int:
        """Bytes free where the folder is, or would be."""
        place = self.folder.absolute()
        return shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.is_dir())).free

    def _refusal(self, step: int, error: OSError, needed: int) -> str:
        """Why a step could not be written, and what to do."""
        remedy = "make the folder writable, or save to another one"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = f"free some space, keep fewer than {self.keep} steps, or save to another disk"
        room = f"it needs {quantity(needed, 'B')}, {quantity(self._free(), 'B')} are free"
        there = ", ".join(map(str, self.steps())) or "none"
        return f"saving step {step} in {self.folder} failed: {error}; {room}; {remedy}; steps that are whole: {there}"

    def _damaged(self, step: int, damage: OSError) -> str:
        """What is wrong with a step, and which other one is whole."""
        places = self._places()
        whole = next((other for other in reversed(places) if other != step and self.verify(other)), None)
        remedy = "no other step is whole: put back a copy of that folder, or start a new run in another one"
        if whole is not None:
            remedy = f"without {places[step].name}, a resume is from step {whole}, which is whole: rename that folder"
        return f"step {step} in {self.folder} is damaged: {damage}; {remedy}"


def _check_model(content: Mapping[str, Any], folder: Path, expect: Expectation) -> None:
    """Refuse the state of another model, saying in what it differs."""
    tops = {name.split("/")[0] for name in expect.arrays}
    kinds = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in content["arrays"].items()}
    there: dict[str, Any] = {"graph digest": content["document"].get("graph_digest")}
    here: dict[str, Any] = {"graph digest": expect.graph_digest or there["graph digest"], **expect.arrays}
    there |= {name: kind for name, kind in kinds.items() if name.split("/")[0] in tops}
    differ = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if differ:
        first = f"{differ[0]} is {_kind(there.get(differ[0]))} there and {_kind(here.get(differ[0]))} here"
        found = f"{folder} is of another model: {first} ({len(differ)} differences in all)"
        raise ForeignCheckpointError(f"{found}; resume with the model that wrote it, or give this run another folder")


def _kind(kind: tuple[str, tuple[int, ...]] | str | None) -> str:
    """An array's dtype and shape, or a digest, for a person."""
    if kind is None:
        return "absent"
    return kind if isinstance(kind, str) else f"{kind[0]} of {' x '.join(map(str, kind[1])) or 'one number'}"


def _identity(folder: Path, checksum: int) -> str:
    """What tells a save from every other one: its place, and the checksum of all that is in it."""
    return f"{folder.name}-{checksum:08x}"

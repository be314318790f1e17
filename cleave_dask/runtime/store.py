"""The tile store: the state of finished steps on disk, as zarr, each step visible only when it is whole.

    checkpoints/run/
      lock                           held, with its process id, by the one process that may write
      step-00000120.0007/            step 120, the seventh save: a zarr group that any zarr 3 reader opens
        zarr.json                    written last: document, types, a checksum for itself and for every other file
        weights/<name>/zarr.json     bfloat16 is held as uint16; the attribute `dtype` has the true name
        weights/<name>/c.0.0         a chunk: raw little-endian numbers, then their crc32c
      .writing-step-00000121.0008/   being written: readers ignore it, the next writer removes it if its writer died

A step is written beside its place, synced to disk, and put in place by one atomic rename. Saving the same step again
makes a new folder with the next save number, so nothing is ever overwritten; the newest step is the one saved last.
zarr makes the metadata; chunks go straight from and into the caller's arrays, because zarr's own pipeline copies them
on the way (twice the seconds of a load) and takes 5 ms for each array of a save.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

from cleave_dask._version import __version__
from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.formatting import quantity

FORMAT = 1  # version of the layout above; a reader accepts its own and older ones
_METADATA = "zarr.json"
_STEP = re.compile(r"step-(\d+)\.(\d+)")
_THREADS = 4  # bounds the memory beyond the caller's own to this many chunks
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Numbers, and the name of their true dtype where numpy has none: bfloat16 is held as uint16."""

    data: Numbers
    dtype: str

    def __post_init__(self) -> None:
        if self.data.dtype != np.dtype(holder(self.dtype)):
            raise InputError(f"numbers of {self.dtype} are held as {holder(self.dtype)}, not as {self.data.dtype.str}")


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a run needs to go on: arrays by name ("weights/lm_head.weight") and a plain JSON document."""

    arrays: Mapping[str, StoredArray]
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the reader's own model looks like, so that the state of another model is refused."""

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape; complete for each top folder that it names
    graph_digest: str | None = None  # compared with the document's "graph_digest"


class _Damage(OSError):
    """A file of a step is not what was written."""


class TileStore:
    """Steps in a folder, written by one process at a time, read by any number."""

    def __init__(self, folder: str | Path = "checkpoints/run", *, keep: int = 3, chunk_bytes: int = 32 << 20) -> None:
        if keep < 1:
            raise InputError(f"keep={keep} would keep no step at all; give 1 or more")
        self.folder, self.keep, self.chunk_bytes = Path(folder), keep, chunk_bytes
        self._saving = threading.Lock()
        self._unlock: weakref.finalize[Any, Any] | None = None

    def steps(self) -> tuple[int, ...]:
        """Every step that is there and whole, in the order in which they were saved."""
        return tuple(self._places())

    def save(self, step: int, state: State) -> None:
        """Write one step, then remove the oldest ones beyond `keep`. The first save locks the folder until `close`."""
        if json.loads(json.dumps(state.document, default=repr)) != state.document:
            raise InputError("the document is not plain JSON: use lists for tuples, strings for keys, no NaN")
        needed = sum(array.data.nbytes for array in state.arrays.values()) + 8192 * (len(state.arrays) + 1)
        with self._saving:
            try:
                self._lock()
                self._retain()  # a writer that died may have left a step too many: never more than keep + 1 on disk
                if self._free() < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._write(step, state)
                self._retain()
            except OSError as error:
                raise CheckpointError(self._refusal(step, error, needed)) from error

    def load(
        self, step: int | None = None, *, expect: Expectation | None = None, into: Mapping[str, Numbers] | None = None
    ) -> State:
        """Read a step, by default the newest, and check every byte of it.

        Arrays named in `into` are read straight into that memory, with no second copy. If a chunk turns out to be
        damaged their content is undefined: load another step before using them.
        """
        step, folder = self._find(step)
        try:
            content = _read_manifest(folder)
            _check_model(content, folder, expect or Expectation({}))
            if absent := (into or {}).keys() - content["arrays"].keys():
                raise CheckpointError(f"{folder} has no {min(absent)}; resume with the model that wrote it")
            arrays = {name: _memory(name, entry, into or {}) for name, entry in content["arrays"].items()}
            _read_arrays(folder, content, arrays)
        except OSError as damage:
            raise CheckpointError(self._damaged(step, damage)) from damage
        return State(arrays, content["document"])

    def verify(self, step: int) -> bool:
        """Whether every byte of a step is as it was written."""
        try:
            folder = self._find(step)[1]
            _read_arrays(folder, _read_manifest(folder), {})
        except (OSError, CheckpointError):
            return False
        return True

    def close(self) -> None:
        """Let another process write."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def _saves(self) -> list[tuple[int, int, Path]]:
        """Save number, step and folder of every step, in the order in which they were saved."""
        matches = [match for path in self.folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
        return sorted((int(match[2]), int(match[1]), self.folder / match[0]) for match in matches)

    def _places(self) -> dict[int, Path]:
        """The folder of each whole step, in the order in which they were saved."""
        whole = [(step, path) for _, step, path in self._saves() if (path / _METADATA).is_file()]
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

    def _lock(self) -> None:
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

    def _write(self, step: int, state: State) -> None:
        """Write the step beside its place, then rename it into place."""
        name = f"step-{step:08d}.{max([0, *(save for save, _, _ in self._saves())]) + 1:04d}"
        hidden = self.folder / f".writing-{name}"
        try:
            content = {"format": FORMAT, "package": __version__, "step": step, "document": state.document}
            content |= _write_arrays(hidden, state.arrays, self.chunk_bytes)
            manifest = {"crc32c": google_crc32c.value(json.dumps(content).encode()), "content": content}
            text = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": manifest})
            _put(hidden / _METADATA, text.encode())
            _sync(hidden / _METADATA)
            _sync(hidden)
            hidden.rename(self.folder / name)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        _sync(self.folder)

    def _retain(self) -> None:
        """Remove the steps that were saved before the last `keep`, and former saves of the same step."""
        kept = list(self._places().values())[-self.keep :]
        for _, _, path in self._saves():
            if path not in kept:
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
        whole = next((other for other in reversed(self.steps()) if other != step and self.verify(other)), None)
        remedy = "no other step is whole" if whole is None else f"resume from step {whole}, which is whole"
        return f"step {step} in {self.folder} is damaged: {damage}; {remedy}"


def holder(dtype: str) -> str:
    """The numpy type that holds numbers of this dtype: another of the same size where numpy has no such numbers."""
    return "uint8" if dtype.startswith("float8") else {"bfloat16": "uint16"}.get(dtype, dtype)


def _write_arrays(root: Path, arrays: Mapping[str, StoredArray], chunk_bytes: int) -> dict[str, Any]:
    """Write every array under `root`; what the manifest says of them: their types, and the checksum of each file."""
    places = {name: _place(root, name) for name in arrays}
    groups = {parent for place in places.values() for parent in place.parents if root in parent.parents}
    metadata = {group: _zarr_metadata() for group in sorted(groups)}
    entries: dict[str, Any] = {}
    jobs: list[tuple[Path, Numbers, int]] = []
    for name, place in places.items():
        if place in metadata:
            raise InputError(f"{name!r} is an array and also the folder of another array; rename one")
        data, dtype = arrays[name].data, arrays[name].dtype
        chunk = _chunk_shape(data.shape, data.itemsize, chunk_bytes)
        entries[name] = {"dtype": dtype, "shape": list(data.shape), "chunk": list(chunk)}
        metadata[place] = _zarr_metadata(data.shape, chunk, dtype)
        size = math.prod(chunk) * data.itemsize
        jobs += [(place / key, data[selection], size) for key, selection in _chunks(data.shape, chunk)]
    for folder in (root, *metadata):
        folder.mkdir()
    sums = {folder / _METADATA: google_crc32c.value(text) for folder, text in metadata.items()}
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda folder: _put(folder / _METADATA, metadata[folder]), metadata))
        sums |= threads.map(_write_chunk, jobs)
        list(threads.map(_sync, [*sums, *metadata]))  # together: one commit of the disk's journal serves many files
    return {"arrays": entries, "files": {str(path.relative_to(root)): checksum for path, checksum in sums.items()}}


def _write_chunk(job: tuple[Path, Numbers, int]) -> tuple[Path, int]:
    """Write one chunk and its checksum, filled up with zeros to the size that all chunks of its array have."""
    path, piece, size = job
    raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    padding = bytes(size - raw.nbytes)
    checksum: int = google_crc32c.extend(google_crc32c.value(raw), padding)
    _put(path, raw, padding, checksum.to_bytes(4, "little"))
    return path, checksum


def _read_arrays(root: Path, content: Mapping[str, Any], targets: Mapping[str, StoredArray]) -> None:
    """Check all files of a step's arrays, reading the arrays that have a target into it."""
    files = content["files"]
    for file in files:
        if file.endswith(_METADATA) and google_crc32c.value((root / file).read_bytes()) != files[file]:
            raise _Damage(f"{root / file} fails its checksum")
    jobs: list[tuple[Path, Numbers | None, int, int]] = []
    for name, entry in content["arrays"].items():
        place, shape, chunk = _place(root, name), tuple(entry["shape"]), tuple(entry["chunk"])
        size = math.prod(chunk) * np.dtype(holder(entry["dtype"])).itemsize
        for key, selection in _chunks(shape, chunk):
            piece = targets[name].data[selection] if name in targets else None
            jobs.append((place / key, piece, size, files[str((place / key).relative_to(root))]))
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(_read_chunk, jobs))


def _read_chunk(job: tuple[Path, Numbers | None, int, int]) -> None:
    """Read one chunk into its piece of an array, or nowhere; check it against its own checksum and the manifest's."""
    path, piece, size, checksum = job
    if piece is None:
        piece = np.empty(size, np.uint8)
    target = piece if piece.flags.c_contiguous else np.empty(piece.shape, piece.dtype)
    raw = target.reshape(-1).view(np.uint8)
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length != size + 4:
            raise _Damage(f"{path} has {length} bytes instead of {size + 4}")
        file.readinto(raw.data)
        padding, stored = file.read(size - raw.nbytes), int.from_bytes(file.read(4), "little")
    if not google_crc32c.extend(google_crc32c.value(raw), padding) == stored == checksum:
        raise _Damage(f"{path} fails its checksum")
    if target is not piece:
        piece[...] = target


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's content, if it is whole and in a format that can be read."""
    try:
        group = json.loads((folder / _METADATA).read_bytes())
        content: dict[str, Any] = group["attributes"]["content"]
        checksum = google_crc32c.value(json.dumps(content).encode())
        if (group["zarr_format"], group["node_type"], group["attributes"]["crc32c"]) != (3, "group", checksum):
            raise ValueError(checksum)
    except (ValueError, KeyError, TypeError):
        raise _Damage(f"{folder / _METADATA} fails its checksum") from None
    if content["format"] > FORMAT:
        newer = f"format {content['format']}, written by cleave-dask {content['package']}"
        raise CheckpointError(f"{folder} is in {newer}; version {__version__} reads up to {FORMAT}: upgrade it")
    return content


def _check_model(content: Mapping[str, Any], folder: Path, expect: Expectation) -> None:
    """Refuse the state of another model, saying in what it differs."""
    tops = {name.split("/")[0] for name in expect.arrays}
    kinds = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in content["arrays"].items()}
    there: dict[str, Any] = {"graph digest": content["document"].get("graph_digest")}
    here: dict[str, Any] = {"graph digest": expect.graph_digest or there["graph digest"], **expect.arrays}
    there |= {name: kind for name, kind in kinds.items() if name.split("/")[0] in tops}
    differ = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if differ:
        first = f"{differ[0]} is {there.get(differ[0], 'absent')} there and {here.get(differ[0], 'absent')} here"
        found = f"{folder} is of another model: {first} ({len(differ)} differences in all)"
        raise CheckpointError(f"{found}; resume with the model that wrote it, or give this run another folder")


def _memory(name: str, entry: Mapping[str, Any], into: Mapping[str, Numbers]) -> StoredArray:
    """Memory for an array that is about to be read: the caller's, or new."""
    shape, dtype = tuple(entry["shape"]), holder(entry["dtype"])
    target = into[name] if name in into else np.empty(shape, dtype)
    if target.shape != shape or target.dtype != np.dtype(dtype):
        raise InputError(f"{name} is {dtype} {shape}; it cannot be read into {target.dtype.str} {target.shape}")
    return StoredArray(target, entry["dtype"])


def _chunk_shape(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """A chunk of about `chunk_bytes` whose numbers lie side by side in a C-ordered array: (1, .., 1, some, all, ..)."""
    chunk = [max(1, extent) for extent in shape]
    for axis, extent in enumerate(chunk):
        rest = itemsize * math.prod(chunk[axis + 1 :])
        chunk[axis] = math.ceil(extent / math.ceil(extent / max(1, chunk_bytes // rest)))  # of equal size, or nearly
        if rest <= chunk_bytes:
            break
    return tuple(chunk)


def _chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The key and the selection of each chunk of an array."""
    for index in product(*(range(math.ceil(extent / size)) for extent, size in zip(shape, chunk, strict=True))):
        selection = [slice(place * size, (place + 1) * size) for place, size in zip(index, chunk, strict=True)]
        yield ".".join(["c", *map(str, index)]), (*selection, ...)  # the ellipsis keeps a scalar an array


def _place(root: Path, name: str) -> Path:
    """The folder of an array."""
    parts = name.split("/")
    if any(part in {"", ".", "..", _METADATA} for part in parts):
        raise InputError(f"{name!r} cannot be the name of a stored array; use a path such as 'weights/lm_head.weight'")
    return root.joinpath(*parts)


@lru_cache  # layers repeat their shapes
def _zarr_metadata(shape: tuple[int, ...] = (), chunk: tuple[int, ...] = (), dtype: str | None = None) -> bytes:
    """The metadata file of an array, or without a dtype of a group, as zarr itself writes it."""
    store: dict[str, Any] = {}
    if dtype is None:
        zarr.create_group(store)
    else:
        form: dict[str, Any] = {"fill_value": 0, "filters": None, "compressors": [{"name": "crc32c"}]}
        form |= {"chunk_key_encoding": {"name": "default", "separator": "."}, "attributes": {"dtype": dtype}}
        zarr.create_array(store, shape=shape, chunks=chunk, dtype=holder(dtype), **form)
    return bytes(store[_METADATA].to_bytes())


def _put(path: Path, *parts: Any) -> None:
    """Write a file that was not there."""
    with path.open("xb") as file:
        file.writelines(parts)


def _sync(path: Path) -> None:
    """Put a file, or a folder's list of files, down to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

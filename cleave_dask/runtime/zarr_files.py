"""Arrays in a folder, as zarr: the files of a saved step, of the tiles in flight, of a trace.

    folder/
      zarr.json                    written last: document, types, a checksum for itself and for every other file
      weights/<name>/zarr.json     bfloat16 is held as uint16; the attribute `dtype` has the true name
      weights/<name>/c.0.0         a chunk: raw little-endian numbers, then their crc32c

zarr makes the metadata; chunks go straight from and into the caller's arrays, because zarr's own pipeline copies them
on the way (twice the seconds of a load) and takes 5 ms for each array of a save.
"""

from __future__ import annotations

import json
import math
import os
import shutil
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
from cleave_dask.errors import ForeignCheckpointError, InputError

FORMAT = 1  # version of the layout above; a reader accepts its own and older ones
METADATA = "zarr.json"
CHUNK_BYTES = 32 << 20
_THREADS = 4  # bounds the memory beyond the caller's own to this many chunks
Numbers = np.ndarray[Any, Any]
Form = tuple[tuple[int, ...], tuple[int, ...], str]
"""Shape, chunk and dtype of an array."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Numbers, and the name of their true dtype where numpy has none: bfloat16 is held as uint16."""

    data: Numbers
    dtype: str

    def __post_init__(self) -> None:
        if self.data.dtype != np.dtype(holder(self.dtype)):
            raise InputError(f"numbers of {self.dtype} are held as {holder(self.dtype)}, not as {self.data.dtype.str}")


class Damage(OSError):
    """A file of a step is not what was written."""


def holder(dtype: str) -> str:
    """The numpy type that holds numbers of this dtype: another of the same size where numpy has no such numbers."""
    return "uint8" if dtype.startswith("float8") else {"bfloat16": "uint16"}.get(dtype, dtype)


def write_group(
    folder: Path,
    arrays: Mapping[str, StoredArray],
    head: Mapping[str, Any],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    empty: Mapping[str, Form] | None = None,
    durable: bool = True,
) -> int:
    """Write arrays and what `head` says of them into a new folder that appears in one go; returns its checksum.

    Arrays in `empty` get their metadata only, for chunks that come later. What is `durable` also survives a machine
    that loses its power, not only a process that is killed.
    """
    hidden = folder.parent / f".writing-{folder.name}"
    try:
        content = {"format": FORMAT, "package": __version__, **head}
        content |= write_arrays(hidden, arrays, chunk_bytes, empty=empty or {}, durable=durable)
        checksum: int = google_crc32c.value(json.dumps(content).encode())
        manifest = {"crc32c": checksum, "content": content}
        text = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": manifest})
        put(hidden / METADATA, text.encode())
        if durable:
            sync(hidden / METADATA)
            sync(hidden)
        hidden.rename(folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    if durable:
        sync(folder.parent)
    return checksum


def write_arrays(
    root: Path, arrays: Mapping[str, StoredArray], chunk_bytes: int, *, empty: Mapping[str, Form], durable: bool
) -> dict[str, Any]:
    """Write every array under `root`; what the manifest says of them: their types, and the checksum of each file."""
    places = {name: _place(root, name) for name in (*arrays, *empty)}
    groups = {parent for place in places.values() for parent in place.parents if root in parent.parents}
    metadata = {group: zarr_metadata() for group in sorted(groups)}
    entries: dict[str, Any] = {}
    jobs: list[tuple[Path, Numbers, int]] = []
    for name, place in places.items():
        if place in metadata:
            raise InputError(f"{name!r} is an array and also the folder of another array; rename one")
        if name in empty:
            metadata[place] = zarr_metadata(*empty[name])
            continue
        data, dtype = arrays[name].data, arrays[name].dtype
        chunk = _chunk_shape(data.shape, data.itemsize, chunk_bytes)
        entries[name] = {"dtype": dtype, "shape": list(data.shape), "chunk": list(chunk)}
        metadata[place] = zarr_metadata(data.shape, chunk, dtype)
        size = math.prod(chunk) * data.itemsize
        jobs += [(place / key, data[selection], size) for key, selection in _chunks(data.shape, chunk)]
    for folder in (root, *metadata):
        folder.mkdir()
    sums = {folder / METADATA: google_crc32c.value(text) for folder, text in metadata.items()}
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda folder: put(folder / METADATA, metadata[folder]), metadata))
        sums |= threads.map(write_chunk, jobs)
        list(
            threads.map(sync, [*sums, *metadata] if durable else [])
        )  # together: one commit of the disk's journal serves many files
    return {"arrays": entries, "files": {str(path.relative_to(root)): checksum for path, checksum in sums.items()}}


def write_chunk(job: tuple[Path, Numbers, int]) -> tuple[Path, int]:
    """Write one chunk and its checksum, filled up with zeros to the size that all chunks of its array have."""
    path, piece, size = job
    raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    padding = bytes(size - raw.nbytes)
    checksum: int = google_crc32c.extend(google_crc32c.value(raw), padding)
    put(path, raw, padding, checksum.to_bytes(4, "little"))
    return path, checksum


def read_arrays(root: Path, content: Mapping[str, Any], targets: Mapping[str, StoredArray]) -> None:
    """Check all files of a step's arrays, reading the arrays that have a target into it."""
    files = content["files"]
    for file in files:
        if file.endswith(METADATA) and google_crc32c.value((root / file).read_bytes()) != files[file]:
            raise Damage(f"{root / file} fails its checksum")
    jobs: list[tuple[Path, Numbers | None, int, int]] = []
    for name, entry in content["arrays"].items():
        place, shape, chunk = _place(root, name), tuple(entry["shape"]), tuple(entry["chunk"])
        size = math.prod(chunk) * np.dtype(holder(entry["dtype"])).itemsize
        for key, selection in _chunks(shape, chunk):
            piece = targets[name].data[selection] if name in targets else None
            jobs.append((place / key, piece, size, files[str((place / key).relative_to(root))]))
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(read_chunk, jobs))


def read_chunk(job: tuple[Path, Numbers | None, int, int | None]) -> None:
    """Read one chunk into its piece of an array, or nowhere; check it against its own checksum and the manifest's."""
    path, piece, size, checksum = job
    if piece is None:
        piece = np.empty(size, np.uint8)
    target = piece if piece.flags.c_contiguous else np.empty(piece.shape, piece.dtype)
    raw = target.reshape(-1).view(np.uint8)
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length != size + 4:
            raise Damage(f"{path} has {length} bytes instead of {size + 4}")
        file.readinto(raw.data)
        padding, stored = file.read(size - raw.nbytes), int.from_bytes(file.read(4), "little")
    if (
        not google_crc32c.extend(google_crc32c.value(raw), padding)
        == stored
        == (stored if checksum is None else checksum)
    ):
        raise Damage(f"{path} fails its checksum")
    if target is not piece:
        piece[...] = target


def read_manifest(folder: Path) -> tuple[dict[str, Any], int]:
    """The manifest's content and its checksum, if it is whole and in a format that can be read."""
    try:
        group = json.loads((folder / METADATA).read_bytes())
        content: dict[str, Any] = group["attributes"]["content"]
        checksum: int = google_crc32c.value(json.dumps(content).encode())
        if (group["zarr_format"], group["node_type"], group["attributes"]["crc32c"]) != (3, "group", checksum):
            raise ValueError(checksum)
    except (ValueError, KeyError, TypeError):
        raise Damage(f"{folder / METADATA} fails its checksum") from None
    if content["format"] > FORMAT:
        newer = f"format {content['format']}, written by cleave-dask {content['package']}"
        raise ForeignCheckpointError(f"{folder} is in {newer}; version {__version__} reads up to {FORMAT}: upgrade it")
    return content, checksum


def memory(name: str, entry: Mapping[str, Any], into: Mapping[str, Numbers]) -> StoredArray:
    """Memory for an array that is about to be read: the caller's, or new."""
    shape, dtype = tuple(entry["shape"]), holder(entry["dtype"])
    target = into[name] if name in into else np.empty(shape, dtype)
    if target.shape != shape or target.dtype != np.dtype(dtype):
        raise InputError(f"{name} is {dtype} {shape}; it cannot be read into {target.dtype.str} {target.shape}")
    return StoredArray(target, entry["dtype"])


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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
    if any(part in {"", ".", "..", METADATA} for part in parts):
        raise InputError(f"{name!r} cannot be the name of a stored array; use a path such as 'weights/lm_head.weight'")
    return root.joinpath(*parts)


@lru_cache  # layers repeat their shapes
def zarr_metadata(shape: tuple[int, ...] = (), chunk: tuple[int, ...] = (), dtype: str | None = None) -> bytes:
    """The metadata file of an array, or without a dtype of a group, as zarr itself writes it."""
    store: dict[str, Any] = {}
    if dtype is None:
        zarr.create_group(store)
    else:
        form: dict[str, Any] = {"fill_value": 0, "filters": None, "compressors": [{"name": "crc32c"}]}
        form |= {"chunk_key_encoding": {"name": "default", "separator": "."}, "attributes": {"dtype": dtype}}
        zarr.create_array(store, shape=shape, chunks=chunk, dtype=holder(dtype), **form)
    return bytes(store[METADATA].to_bytes())


def put(path: Path, *parts: Any) -> None:
    """Write a file that was not there."""
    with path.open("xb") as file:
        file.writelines(parts)


def sync(path: Path) -> None:
    """Put a file, or a folder's list of files, down to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

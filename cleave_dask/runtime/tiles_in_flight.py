"""Accepted tiles of the step in flight, on disk, so that a server that is killed need not ask for them again.

    checkpoints/run/
      inflight-<digest>/        one pass over one micro-batch; the digest is of everything that its tiles depend on
        zarr.json               the save that the step started from, the program, the gemms; written before any tile
        ranges, owner           the grid and who was to multiply what, so that a resumed run can plan its step alike
        tiles/<job>/<output>/   an array with one row, and one chunk, per tile: c.<tile>.0

A tile can be used again only if the state is the one that it was computed from, bit for bit. That is so for a step that
starts from a save, and for no other: tiles are written for the first step after each save or resume. The digest chains
the save's identity, the program, the grid, the batch and the random state; where one of them differs it is another
digest, and nothing is reused. With accumulation each micro-batch is a link of the chain.

A thread of its own writes. If the disk is slower than tiles come in, or their space is used up, tiles are left out; a
step never waits. Every chunk carries its checksum and appears by a rename, so that a kill at any instant leaves whole
tiles only. They are not synced: what a process wrote survives its death, and after a power cut the checksums tell which
tiles survived. The folder goes when a newer step has been saved.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import numpy as np

from cleave_dask._version import __version__
from cleave_dask.graph.ir import LOGITS
from cleave_dask.runtime.background import Background
from cleave_dask.runtime.interrupted import PREFIX, folders, grid_arrays, grid_head
from cleave_dask.runtime.lowering import Lowered
from cleave_dask.runtime.rounds import Job
from cleave_dask.runtime.server_gathering import tile_forms
from cleave_dask.runtime.zarr_files import Form, Numbers, holder, read_chunk, size_of, write_chunk, write_group

logger = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20
"""Tiles that wait to be written; more are left out."""


@dataclass(frozen=True, slots=True)
class Start:
    """The save that a step starts from."""

    folder: Path  # of the checkpoint
    identity: str
    limit: int  # bytes of tiles that may be on disk


@dataclass
class PassOnDisk:
    """What is on disk of one pass over one micro-batch."""

    start: Start
    digest: str
    number: int  # among the passes since the start
    lowered: Lowered
    found: bool = False  # whether an earlier process left tiles
    skipped: int = 0  # tiles that were left out
    used: int = 0  # bytes of tiles on disk, those of other passes included
    broken: bool = False  # something could not be written; nothing more is tried
    _sizes: dict[int, list[int]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its tiles are."""
        return self.start.folder / f"{PREFIX}{self.digest}"

    def open(self) -> None:
        """Make the folder unless it is there; former attempts at the same pass on another batch or grid go."""
        try:
            for other, content in folders(self.start.folder):
                if content["pass"] == self.number and other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)
                else:
                    self.used += size_of(other)
            if not (self.folder / "zarr.json").is_file():
                shutil.rmtree(self.folder, ignore_errors=True)
                plan, graph = self.lowered.plan, self.lowered.graph
                head = {"save": self.start.identity, "pass": self.number, "graph": graph.digest, **grid_head(plan)}
                write_group(self.folder, grid_arrays(plan), head, empty=self._forms(), durable=False)
                self.used += size_of(self.folder)
        except OSError as error:
            self._break(error)

    def write(self, job: int, tile: int, arrays: Sequence[Numbers]) -> None:
        """Write a tile, its first output last: where that is, the others are."""
        sizes = self._chunk_sizes(job)
        if self.broken or self.used + sum(sizes) > self.start.limit:
            self.skipped += 1
            return
        try:
            for output in reversed(range(len(arrays))):
                place = self._place(job, output)
                hidden = place / f".{tile}"
                hidden.unlink(missing_ok=True)
                write_chunk((hidden, arrays[output], sizes[output]))
                hidden.rename(place / f"c.{tile}.0")
                self.used += sizes[output]
        except OSError as error:
            self._break(error)

    def stored(self, number: int) -> Iterator[tuple[int, list[Numbers]]]:
        """The tiles of a job that an earlier attempt at this very pass left; damaged ones are left out."""
        if not self.found:
            return
        job, sizes = self.lowered.schedule.jobs[number], self._chunk_sizes(number)
        for path in sorted(self._place(number, 0).glob("c.*.0")):
            tile = int(path.name.split(".")[1])
            arrays: list[Numbers] = []
            try:
                for output, (shape, dtype) in enumerate(tile_forms(job.gemm, job.tiles[tile])):
                    arrays.append(np.empty(shape, holder(dtype)))
                    read_chunk((self._place(number, output) / path.name, arrays[output], sizes[output], None))
            except (OSError, IndexError) as error:
                logger.warning("Tile %s of job %s is computed again: %s", tile, number, error)
            else:
                yield tile, arrays

    def _place(self, job: int, output: int) -> Path:
        return self.folder / "tiles" / str(job) / str(output)

    def _chunk_sizes(self, job: int) -> list[int]:
        """Bytes of a chunk of each output of a job, without the checksum."""
        if job not in self._sizes:
            forms = _row_forms(self.lowered.schedule.jobs[job])
            self._sizes[job] = [size * np.dtype(holder(dtype)).itemsize for size, dtype in forms]
        return self._sizes[job]

    def _forms(self) -> dict[str, Form]:
        """The arrays of all jobs."""
        return {
            f"tiles/{number}/{output}": ((len(job.tiles), size), (1, size), dtype)
            for number, job in enumerate(self.lowered.schedule.jobs)
            for output, (size, dtype) in enumerate(_row_forms(job))
        }

    def _break(self, error: OSError) -> None:
        self.broken = True
        logger.warning("Tiles of the step in flight are no longer written to %s: %s", self.folder, error)


class TilesInFlight:
    """Decides which tiles go to disk. A pass gets what is on disk of it, and shows it with each tile that it offers."""

    def __init__(self) -> None:
        self.current: PassOnDisk | None = None
        self._start: Start | None = None
        self._chain = ""  # digest of the state: the save that it started from, and all that happened since
        self._passes = 0  # since the start
        self._background = Background("cleave-tiles", QUEUE_BYTES)
        self._lock = Lock()  # a tile that comes late is queued before the next pass opens its folder, or not at all

    def start_from(self, start: Start) -> None:
        """The state is that of this save, neither more nor less; tiles of steps before it are of no more use."""
        with self._lock:
            self.current, self._start, self._chain, self._passes = None, start, start.identity, 0
            self._background.clear()
            self._background.submit(_remove_others, start)

    def leave(self) -> None:
        """The state can be had from no save any more; what is on disk stays until a newer one is saved."""
        with self._lock:
            self.current, self._start = None, None

    def begin(self, lowered: Lowered, batch: Mapping[str, Numbers], random_state: bytes) -> PassOnDisk | None:
        """A pass over a micro-batch begins; None if its tiles are not kept."""
        with self._lock:
            self.current = None
            if self._start is not None and self._start.limit > 0:
                digest = _digest(self._chain, lowered, batch, random_state)
                self.current = PassOnDisk(self._start, digest, self._passes, lowered)
                self.current.found = self.current.folder.is_dir()
                self._background.submit(self.current.open)
            return self.current

    def end(self) -> None:
        """The pass is over; the next one starts from where it led to."""
        with self._lock:
            if self.current is not None:
                self._chain, self._passes, self.current = self.current.digest, self._passes + 1, None
            else:
                self._start = None  # a pass that left no digest

    def offer(self, kept: PassOnDisk | None, job: int, tile: int, arrays: Sequence[Numbers]) -> None:
        """Write a tile that a pass accepted, if there is time and room, and if the pass is not over."""
        with self._lock:
            if kept is not None and kept is self.current and not kept.broken:
                size = sum(array.nbytes for array in arrays)
                if not self._background.submit(kept.write, job, tile, tuple(arrays), size=size):
                    kept.skipped += 1

    def settle(self) -> None:
        """Wait until everything that was offered is on disk; for those who then look there."""
        self._background.join()

    def close(self) -> None:
        """Write nothing more."""
        self.leave()
        self._background.close()


def _row_forms(job: Job) -> list[tuple[int, str]]:
    """For each output of a job's tiles the numbers in its largest tile, and their dtype."""
    gemm = job.gemm
    if gemm.kind in LOGITS:
        rows = max(stop - start for start, stop in (tile.rows for tile in job.tiles))
        return [(rows * math.prod(value.shape[1:]), gemm.sent_dtype(value)) for value in gemm.outputs]
    ranges = np.array([(*tile.rows, *tile.cols) for tile in job.tiles], dtype=np.int64)
    cells = int(((ranges[:, 1] - ranges[:, 0]) * (ranges[:, 3] - ranges[:, 2])).max())
    if gemm.kind == "gemm":
        return [(cells, gemm.tile_dtype)]
    per_cell = [(math.prod(value.shape) // (gemm.m * gemm.n), gemm.sent_dtype(value)) for value in gemm.outputs]
    return [(cells * numbers, dtype) for numbers, dtype in per_cell]


def _digest(chain: str, lowered: Lowered, batch: Mapping[str, Numbers], random_state: bytes) -> str:
    """What tells this pass from any whose tiles might differ in a bit."""
    hashed = blake2b(digest_size=16)
    for text in (__version__, chain, lowered.graph.digest):
        hashed.update(f"{text};".encode())
    for job in lowered.schedule.jobs:
        ranges = np.array([(*tile.rows, *tile.cols, *tile.ks) for tile in job.tiles], dtype=np.int64)
        hashed.update(f"{job.gemm.name};{len(ranges)};".encode())
        hashed.update(ranges.tobytes())
    for source in sorted(batch):
        array = np.ascontiguousarray(batch[source])
        hashed.update(f"{source};{array.dtype.str};{array.shape};".encode())
        hashed.update(array.tobytes())
    hashed.update(random_state)
    return hashed.hexdigest()


def discard_tiles(folder: Path) -> bool:
    """Free the space of all tiles on disk; whether there were any."""
    found = [*folder.glob(f"{PREFIX}*"), *folder.glob(f".writing-{PREFIX}*")]
    for place in found:
        shutil.rmtree(place, ignore_errors=True)
    return bool(found)


def _remove_others(start: Start) -> None:
    """Remove tiles of steps that started from another save."""
    mine = {folder for folder, content in folders(start.folder) if content["save"] == start.identity}
    for folder in (*start.folder.glob(f"{PREFIX}*"), *start.folder.glob(f".writing-{PREFIX}*")):
        if folder not in mine:
            shutil.rmtree(folder, ignore_errors=True)

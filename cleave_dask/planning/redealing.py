"""Redealing: a gemm is about to go out, and some device that it was planned for is not there.

The grid of tiles is fixed within a step, so that the loss stays the same bit for bit, and its tiles are unequal: the
largest keeps a device busy for a third of the gemm. If the tiles of a lost device went to whoever is free first,
everybody would wait for whoever got that one, and for slices that others have. So they are dealt as if planned: the
largest first, each to the device that would then be through first; and whoever would be last passes tiles on, its own
too, while somebody else would be through with them sooner. Filler, which nobody waits for, is dealt by parcels, so that
fewer slices come down twice, to whoever has the least ahead. Nobody gets a tile that is too large for its memory,
unless it is for everybody's.

A device's time for its tiles is the longest of its downlink, its multiplier and its uplink, which work side by side.
Of a tile's operands only those pieces come down that no other tile of the device needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cleave_dask.planning.cost import AT_ONCE, CONFIRMED, Floats, Ints
from cleave_dask.planning.parcels import Figures, Ranges, Work
from cleave_dask.planning.slices import SIDED, results, segments, turned

TOGETHER = 32
"""Devices among which the tiles of those that are lost are dealt."""

PASSES = 4
"""Tiles that are passed on, at most, for each that is dealt."""

WORTHWHILE = 0.005
"""Part of the gemm's time that passing on a tile must save."""

EARLY = 0.5
"""Part of its results that a device is to send of its own: its first tiles make it begin early, and none may lack."""

NOBODY = -1

Bools = np.ndarray[Any, np.dtype[np.bool_]]

Place = tuple[int, int]
"""A tile, as the number of its parcel and its place among the tiles of that."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A parcel of a gemm: whose it is, what it costs, and the ranges of its tiles (rows, cols, ks: start and stop)."""

    device: str | None
    work: Work
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Dealt:
    """A parcel as it goes out."""

    device: str  # or "": whoever is free first
    work: Work
    tiles: tuple[Place, ...]
    parcel: int | None  # the planned one that it is, or is left of; None: its tiles were others'


def redeal(
    kind: str, parcels: Sequence[Planned], takers: Mapping[str, Figures], ahead: Mapping[str, Work]
) -> Iterator[tuple[list[int], list[Dealt]]]:
    """Groups of a gemm's parcels that go out otherwise than planned, by their numbers, and those that go out instead.

    No tile is left with a device that is no taker, unless there are no takers at all. A parcel of a taker keeps a tile
    at least, and a group has no fewer parcels than before.
    """
    for numbers in _groups(parcels, takers):
        yield numbers, _Deal(kind, {number: parcels[number] for number in numbers}, takers, ahead).dealt()


def scatter(kind: str, parcel: Planned) -> list[Dealt]:
    """The tiles of a parcel as parcels of their own, for whoever is free first; the largest first."""
    costs = TileCosts.of(kind, [parcel])
    down = costs.needs.sum(axis=1)
    order = np.argsort(-costs.up, kind="stable").tolist()
    works = [Work(float(costs.flops[n]), float(down[n]), float(costs.up[n]), float(down[n])) for n in order]
    return [Dealt("", work, ((0, place),), None) for place, work in zip(order, works, strict=True)]


def _groups(parcels: Sequence[Planned], takers: Mapping[str, Figures]) -> Iterator[list[int]]:
    """Parcels of devices that are neighbours in the order of the parcels, where one is lost and one is a taker."""
    of: dict[str, list[int]] = {}
    for number, parcel in enumerate(parcels):
        if parcel.device is not None:
            of.setdefault(parcel.device, []).append(number)
    names = list(of)
    count = max(1, round(len(names) / TOGETHER))
    for group in range(count):
        some = names[group * len(names) // count : (group + 1) * len(names) // count]
        if 0 < sum(name in takers for name in some) < len(some):
            yield [number for name in some for number in of[name]]


@dataclass(frozen=True, eq=False)
class TileCosts:
    """What each of some tiles of a gemm needs."""

    flops: Floats
    up: Floats  # bytes
    needs: Floats  # (tiles, pieces): bytes of each piece of an operand that a tile needs

    @classmethod
    def of(cls, kind: str, parcels: Sequence[Planned]) -> TileCosts:
        """Those of all tiles of these parcels, one after another."""
        ranges = np.concatenate([parcel.ranges for parcel in parcels]).astype(np.int64)
        size = (ranges[:, 1::2] - ranges[:, 0::2]).astype(np.float64)
        cells, volume = results(kind, size), size.prod(axis=1)
        work = [sum(column) for column in zip(*((p.work.flops, p.work.up_bytes) for p in parcels), strict=True)]
        flops, up = volume * (work[0] / volume.sum()), cells * (work[1] / cells.sum())
        if kind not in SIDED:
            down = sum(parcel.work.alone_bytes for parcel in parcels)
            return cls(flops, up, np.diag(cells * (down / cells.sum())))
        ranges, size = turned(kind, ranges), turned(kind, size)
        layer = np.unique(ranges[:, 4:], axis=0, return_inverse=True)[1].reshape(-1)
        rows, columns = (segments(layer, ranges[:, 2 * axis], ranges[:, 2 * axis + 1]) for axis in (0, 1))
        width = work[1] / cells.sum()  # bytes of a number, of operands as of results
        if kind == "logit_sums":  # whose results are none of their numbers
            numbers = _table(size, rows, columns, 1.0)
            parts = np.split(numbers, np.cumsum([len(parcel.ranges) for parcel in parcels])[:-1])
            alone = sum(float(part.max(axis=0).sum()) for part in parts)
            width = sum(parcel.work.alone_bytes for parcel in parcels) / alone
        return cls(flops, up, _table(size, rows, columns, width))


_Segments = tuple[Ints, Ints, Ints]
"""Tile, piece and length of each part of a tile along an axis."""


def _table(size: Floats, rows: _Segments, columns: _Segments, width: float) -> Floats:
    """(tiles, pieces): bytes. For large gemms a gigabyte of zeros: written only where there are others, not copied."""
    split = int(rows[1].max()) + 1
    found = np.zeros((len(size), split + int(columns[1].max()) + 1))
    for first, (tile, piece, length) in ((0, rows), (split, columns)):
        found[tile, first + piece] = length * size[tile, 2] * width
    return found


@dataclass(eq=False)
class _Deal:
    """Whose each tile is, and what each device has to do."""

    kind: str
    parcels: Mapping[int, Planned]
    takers: Mapping[str, Figures]
    ahead: Mapping[str, Work]
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        whose = [parcel.device for parcel in self.parcels.values()]
        self.names = [name for name in dict.fromkeys(whose) if name is not None and name in self.takers]
        place = {name: number for number, name in enumerate(self.names)}
        figures = [self.takers[name] for name in self.names]
        self.rates = np.array([(one.down, one.flops, one.up) for one in figures])
        counts = [len(parcel.ranges) for parcel in self.parcels.values()]
        self.parcel = np.repeat(np.arange(len(counts)), counts)  # of each tile
        self.place = np.concatenate([np.arange(count) for count in counts])  # of each tile in its parcel
        self.owner = np.array([place.get(name or "", NOBODY) for name in whose])[self.parcel]  # planned, of each tile
        self.kept = np.array(counts)  # tiles of each parcel that were not passed on
        self.costs = TileCosts.of(self.kind, list(self.parcels.values()))
        held = AT_ONCE * (self.costs.needs.sum(axis=1) + self.costs.up)
        memory = np.array([one.memory for one in figures])
        self.fits = (held[:, None] <= memory) | (memory == memory.max())  # whom each tile may go to; somebody must
        self.holder = np.full(len(self.parcel), NOBODY)
        self.movable = np.zeros(len(self.parcel), dtype=bool)
        for device in range(len(self.names)):
            mine = np.flatnonzero(self.owner == device)
            sent = np.cumsum(self.costs.up[mine])
            self.movable[mine] = sent - self.costs.up[mine] >= (0.0 if self.ahead else EARLY * sent[-1])
        ahead = [self.ahead.get(name, Work()) for name in self.names]
        self.load = np.array([_load(work.down_bytes, work.flops, work.up_bytes) for work in ahead])
        self.uses = np.zeros((len(self.names), self.costs.needs.shape[1]), dtype=np.int64)  # tiles that need a piece
        for tile in np.flatnonzero(self.owner >= 0).tolist():
            self._take(tile, int(self.owner[tile]))

    def dealt(self) -> list[Dealt]:
        """Deal what nobody holds, then even it out."""
        lost = np.flatnonzero(self.owner == NOBODY)
        lost = lost[np.argsort(-self.costs.up[lost], kind="stable")]
        for unit in self._units(lost):
            more = np.array([self._together(unit, device) for device in range(len(self.names))])
            device = int(np.where(self.fits[unit].all(axis=0), self._seconds(self.load + more), np.inf).argmin())
            for tile in unit.tolist():
                self.kept[self.parcel[tile]] -= 1
                self._take(tile, device)
        for _ in range(PASSES * len(lost)):
            if not self._improve():
                break
        return self._result()

    def _units(self, lost: Ints) -> Iterator[Ints]:
        """What is dealt at once: a tile; of filler, which nobody waits for, a parcel, whose tiles share slices."""
        if not self.ahead:
            yield from np.split(lost, np.arange(1, len(lost)))
            return
        for parcel in dict.fromkeys(self.parcel[lost].tolist()):
            unit = lost[self.parcel[lost] == parcel]
            yield from [unit] if self.fits[unit].all(axis=0).any() else np.split(unit, np.arange(1, len(unit)))

    def _seconds(self, load: Floats, device: int | slice = slice(None)) -> Floats:
        return np.asarray((load / self.rates[device]).max(axis=-1))

    def _more(self, tiles: Ints, devices: Ints) -> Floats:
        """What some tiles would add to a device, or a tile to some devices."""
        down = (self.costs.needs[tiles] * (self.uses[devices] == 0)).sum(axis=1)
        flops, up = (np.broadcast_to(column[tiles], down.shape) for column in (self.costs.flops, self.costs.up))
        return _load(down, flops, up)

    def _together(self, tiles: Ints, device: int) -> Floats:
        """What some tiles together would add to a device."""
        down = (self.costs.needs[tiles].max(axis=0) * (self.uses[device] == 0)).sum()
        return _load(down, self.costs.flops[tiles].sum(), self.costs.up[tiles].sum())

    def _less(self, tiles: Ints, device: int) -> Floats:
        """What a device would have less to do without each of some tiles of its own."""
        down = (self.costs.needs[tiles] * (self.uses[device] == 1)).sum(axis=1)
        return _load(down, self.costs.flops[tiles], self.costs.up[tiles])

    def _take(self, tile: int, device: int) -> None:
        self.load[device] += self._more(np.array([tile]), np.array([device]))[0]
        self.uses[device] += self.costs.needs[tile] > 0
        self.holder[tile] = device

    def _improve(self) -> bool:
        """Whoever would be last passes a tile on, if that helps."""
        seconds = self._seconds(self.load)
        last, first = int(seconds.argmax()), int(seconds.argmin())
        tiles = np.flatnonzero((self.holder == last) & self.fits[:, first])
        tiles = tiles[(self.owner[tiles] != last) | self.movable[tiles] & (self.kept[self.parcel[tiles]] > 1)]
        if not len(tiles) or last == first:
            return False
        less, more = self._less(tiles, last), self._more(tiles, np.array([first]))
        after = np.maximum(self._seconds(self.load[last] - less, last), self._seconds(self.load[first] + more, first))
        best = int(after.argmin())
        if after[best] > (1.0 - WORTHWHILE) * seconds[last]:
            return False
        tile = int(tiles[best])
        self.load[last] -= less[best]
        self.uses[last] -= self.costs.needs[tile] > 0
        self.kept[self.parcel[tile]] -= self.owner[tile] == last
        self._take(tile, first)
        return True

    def _result(self) -> list[Dealt]:
        """What is left of parcels, then a parcel for each device that has others' tiles."""
        found: list[Dealt] = []
        own = self.holder == self.owner
        has = np.zeros((len(self.names), self.costs.needs.shape[1]), dtype=bool)  # pieces that came with parcels before
        for number, (given, parcel) in enumerate(self.parcels.items()):
            tiles = np.flatnonzero((self.parcel == number) & own)
            if len(tiles) == len(parcel.ranges):
                places = tuple((given, place) for place in range(len(tiles)))
                found.append(Dealt(parcel.device or "", parcel.work, places, given))
                has[self.holder[tiles[0]]] |= (self.costs.needs[tiles] > 0).any(axis=0)
            elif len(tiles):
                found.append(self._parcel(tiles, has, given))
        foreign = [np.flatnonzero((self.holder == device) & ~own) for device in range(len(self.names))]
        foreign = [tiles[np.argsort(-self.costs.up[tiles], kind="stable")] for tiles in foreign if len(tiles)]
        while len(foreign) < np.count_nonzero(self.kept == 0):
            tiles = foreign.pop(max(range(len(foreign)), key=lambda number: len(foreign[number])))
            foreign += [tiles[::2], tiles[1::2]]
        return found + [self._parcel(tiles, has, None) for tiles in foreign]

    def _parcel(self, tiles: Ints, has: Bools, parcel: int | None) -> Dealt:
        """Tiles of one device as one parcel; some of their slices it has from others."""
        device, needs, numbers = int(self.holder[tiles[0]]), self.costs.needs[tiles].max(axis=0), list(self.parcels)
        pairs = zip(self.parcel[tiles].tolist(), self.place[tiles].tolist(), strict=True)
        work = Work(
            flops=float(self.costs.flops[tiles].sum()),
            down_bytes=float(needs[~has[device]].sum()),
            up_bytes=float(self.costs.up[tiles].sum()),
            alone_bytes=float(needs.sum()),
        )
        has[device] |= needs > 0
        return Dealt(self.names[device], work, tuple((numbers[p], place) for p, place in pairs), parcel)


def _load(down: Any, flops: Any, up: Any) -> Floats:
    """What keeps a device's downlink, multiplier and uplink busy."""
    return np.stack([down, flops, up + CONFIRMED * down], axis=-1)

"""What planning yields: tiles placed on devices, and the plan they make together.

A plan of a large model on a thousand devices has some hundred thousand tiles. They are kept as columns of numbers,
shared by all gemms that are cut alike, and become `Tile` objects only where somebody looks at them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import duration, html_bar, html_table, quantity
from cleave_dask.graph.ir import Range, StepGraph
from cleave_dask.planning.growing import growing_order
from cleave_dask.resources import expect, nearest, shown

Column = np.ndarray[Any, np.dtype[np.int32]]

_SHOWN = 8  # devices that a notebook shows of a plan
_NAMED = 20  # devices that an error names


@dataclass(frozen=True, slots=True)
class Tile:
    """A cuboid of one gemm: the unit of work, transfer, check, checkpoint and retry."""

    gemm: str
    rows: Range
    cols: Range
    ks: Range
    device: str | None = None  # None: whichever device is free first


class Tiles(Sequence[Tile]):
    """The tiles of one gemm in canonical order (by k, rows, columns): like a tuple, at a fraction of its size.

    A device gets its tiles in parcels: `together` tiles of its own, in growing order, that are sent as one task.
    """

    __slots__ = ("gemm", "kept", "names", "owner", "place", "ranges", "together", "values")

    def __init__(
        self,
        gemm: str,
        ranges: Column,
        owner: Column,
        names: tuple[str, ...],
        together: int = 1,
        place: Column | None = None,
        values: tuple[tuple[int, bool], ...] = (),
        kept: tuple[bool, ...] = (),
    ) -> None:
        self.gemm = gemm
        self.ranges = ranges  # (tiles, 6): rows, cols, ks, each start and stop
        self.owner = owner  # of each tile, as a position in `names`
        self.names = names  # of all devices
        self.together = together  # tiles of a parcel; a device's last parcel may have fewer
        self.place = place  # of each device in the scheduler's queue; None: those with the most to do come first
        self.values = values  # operands by number, and whether transposed, if gemms share them; empty: they do not
        self.kept = kept  # operands of which each device has its part from gemms before; empty: of none

    def parcels(self) -> list[tuple[str, tuple[int, ...]]]:
        """Device and tile numbers of each parcel, in the order in which they go out; they have every tile once.

        A device gets its tiles in growing order. First everybody's first parcel goes out, then everybody's second;
        devices come in the order of their `place`.
        """
        order, turn = growing_order(self.ranges, self.owner, self.place)
        first = np.flatnonzero(np.concatenate([[True], turn[1:] != turn[:-1]])) if len(turn) else turn
        number = np.arange(len(turn)) - np.repeat(first, np.diff(np.append(first, len(turn))))
        starts = np.flatnonzero(number % self.together == 0)
        stops = np.append(starts[1:], len(turn))
        sending = np.lexsort((turn[starts], number[starts]))
        tiles, owner = order.tolist(), self.owner[order[starts]].tolist()
        spans = zip(starts[sending].tolist(), stops[sending].tolist(), sending.tolist(), strict=True)
        return [(self.names[owner[parcel]], tuple(tiles[start:stop])) for start, stop, parcel in spans]

    def __len__(self) -> int:
        return len(self.owner)

    @overload
    def __getitem__(self, index: int) -> Tile: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tile, ...]: ...
    def __getitem__(self, index: int | slice) -> Tile | tuple[Tile, ...]:
        if isinstance(index, slice):
            return tuple(Tiles(self.gemm, self.ranges[index], self.owner[index], self.names))
        r0, r1, c0, c1, k0, k1 = self.ranges[index].tolist()
        return Tile(self.gemm, (r0, r1), (c0, c1), (k0, k1), self.names[self.owner[index]])

    def __iter__(self) -> Iterator[Tile]:
        for (r0, r1, c0, c1, k0, k1), device in zip(self.ranges.tolist(), self.owner.tolist(), strict=True):
            yield Tile(self.gemm, (r0, r1), (c0, c1), (k0, k1), self.names[device])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tiles):
            mine, theirs = (
                (tiles.gemm, tiles.names, tiles.together, tiles.values, tiles.kept) for tiles in (self, other)
            )
            columns = ((self.ranges, other.ranges), (self.owner, other.owner), (self.place, other.place))
            return mine == theirs and all(_equal(one, two) for one, two in columns)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash((self.gemm, len(self)))

    def __repr__(self) -> str:
        return f"<{len(self):,} tiles of {self.gemm}>"

    def __dask_tokenize__(self) -> object:
        place = None if self.place is None else self.place.tobytes()
        shared = self.values, self.kept
        return self.gemm, self.ranges.tobytes(), self.owner.tobytes(), self.names, self.together, place, shared


class AllTiles(Sequence[Tile]):
    """All tiles of a plan, gemm after gemm."""

    def __init__(self, by_gemm: Mapping[str, Tiles]) -> None:
        self._parts = tuple(by_gemm.values())
        self._ends = tuple(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Tile: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tile, ...]: ...
    def __getitem__(self, index: int | slice) -> Tile | tuple[Tile, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"tile {index} of {len(self)}")
        part = bisect_right(self._ends, place)
        return self._parts[part][place - self._ends[part] + len(self._parts[part])]

    def __iter__(self) -> Iterator[Tile]:
        for part in self._parts:
            yield from part


@dataclass(frozen=True, slots=True)
class LevelCost:
    """What one level of the step is predicted to cost."""

    level: int
    gemms: tuple[str, ...]
    seconds: float
    bound_seconds: float
    binding: str
    devices: int
    tiles: int
    down_bytes: int
    up_bytes: int
    filler: bool  # gradients of weights: they run beside later levels and hold up none


@dataclass(frozen=True, repr=False)
class Plan:
    """Tiles placed on devices, with what that is predicted to cost. A gemm without tiles runs on the server."""

    graph: StepGraph = field(repr=False, compare=False)  # what is planned
    fleet: Fleet = field(repr=False, compare=False)  # on what
    by_gemm: Mapping[str, Tiles]  # the tiles of each distributed gemm
    seconds: float  # predicted time of the step
    bound_seconds: (
        float  # no plan can be faster of those with one box of a gemm a device, or of all; sharing as it does
    )
    binding: str  # the resource that decides `seconds`
    down_bytes: int
    up_bytes: int
    peak_memory: Mapping[str, int]  # bytes, by device
    reasons: Mapping[str, str]  # by device: why it has the work it has
    levels: tuple[LevelCost, ...] = ()
    tiling: str = "3d"
    server_memory: int = 0  # bytes that the server holds at most, beside the optimizer's state
    busy: Mapping[str, float] = field(default_factory=dict, compare=False)  # seconds, by device, of its busiest part

    @cached_property
    def tiles(self) -> AllTiles:
        """All tiles, gemm after gemm."""
        return AllTiles(self.by_gemm)

    @cached_property
    def devices_used(self) -> int:
        """Number of devices that have at least one tile."""
        used: set[int] = set()
        for owner in {id(tiles.owner): tiles.owner for tiles in self.by_gemm.values()}.values():
            used.update(np.unique(owner).tolist())
        return len(used)

    def why(self, device: str) -> str:
        """Why this device has the share of work that it has; of "server": what it must hold."""
        if device == "server" and device not in self.reasons:
            return self._holding
        if not isinstance(device, str) or device not in self.reasons:
            known = [*list(self.reasons)[:_NAMED], "server"]
            raise PlanError(f"no device of this plan is called {shown(device)}; {nearest(str(device), known)}")
        return self.reasons[device]

    def __str__(self) -> str:
        return "\n".join([self._headline, *(f"  {name}: {value}" for name, value in self._facts)])

    def __repr__(self) -> str:
        return f"<{self._headline}>"

    def _repr_html_(self) -> str:
        """The facts, and the devices with the most to do."""
        busiest = sorted(self.busy, key=lambda name: -self.busy[name])
        rows = [
            (
                device,
                html_bar([("#2b6cb0", self.busy[device] / self.seconds, duration(self.busy[device]))]),
                duration(self.busy[device]),
                self.why(device),
            )
            for device in busiest[:_SHOWN]
        ]
        more = f" ({len(busiest) - _SHOWN:,} more devices)" if len(busiest) > _SHOWN else ""
        facts = html_table(("", ""), self._facts, caption=self._headline)
        return facts + html_table(("device", "busy", "", "why"), rows, caption=f"The busiest{more}") if rows else facts

    @property
    def _headline(self) -> str:
        ratio = f", {self.seconds / self.bound_seconds:.3g} x its bound" if self.bound_seconds else ""
        return f"Plan: {duration(self.seconds)} a step{ratio}; {self.binding} binds"

    @property
    def _facts(self) -> list[tuple[str, str]]:
        fullest = max(self.peak_memory, key=lambda name: self.peak_memory[name], default="")
        return [
            ("tiles", f"{len(self.tiles):,} of {len(self.by_gemm):,} gemms"),
            ("devices", f"{self.devices_used:,} of {len(self.reasons):,}"),
            ("down", quantity(self.down_bytes, "B") + self._sharing),
            ("up", quantity(self.up_bytes, "B")),
            ("memory", f"{quantity(self.peak_memory.get(fullest, 0), 'B')} at most, on {fullest}"),
            ("server memory", self._holding),
        ]

    @property
    def _sharing(self) -> str:
        """Of how many gemms an operand is on the devices already."""
        count = sum(any(tiles.kept) for tiles in self.by_gemm.values())
        return f"; {count:,} gemms find operands of others where they are" if count else ""

    @property
    def _holding(self) -> str:
        """What the server holds of what it has, and the remedy if that is too much."""
        held, has = self.server_memory, self.fleet.server.memory
        text = f"{quantity(held, 'B')} of {quantity(has, 'B')}, beside the optimizer's state"
        if held <= has:
            return text
        return f"{text}: {quantity(held - has, 'B')} too much; lower the batch, and accumulate gradients of several"


def _equal(one: Column | None, other: Column | None) -> bool:
    return one is other or (one is not None and other is not None and bool(np.array_equal(one, other)))


def check_plan(plan: object) -> None:
    """Refuse what is no plan, such as the graph of a step."""
    expect(plan, Plan, what="the plan", remedy="give a Plan: cd.plan(graph, fleet)", error=PlanError)

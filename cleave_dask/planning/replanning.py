"""Replanning: a device left, joined or changed, and the step goes on with as few tiles moved as can be.

Within a step the grid is fixed and only placement moves, so the loss stays the same bit for bit. Tiles that are done
stay done. The open tiles of a device that left go to those that have the least to do beside what they have, in turn;
one that joined, or became faster, takes tiles from those with the most to do; one that became slower gives some away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cleave_dask.errors import PlanError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import quantity
from cleave_dask.graph.ir import StepGraph
from cleave_dask.planning.cost import AT_ONCE, Floats, Ints, Rates, Shape
from cleave_dask.planning.layout import footprint
from cleave_dask.planning.values import Column, Plan, Tiles

_SPREAD = 64  # devices among which the tiles of one that left are spread, at least


def replan(
    plan: Plan,
    graph: StepGraph,
    fleet: Fleet,
    *,
    done: Mapping[str, Collection[int]] | None = None,
    left: Collection[str] = (),
    joined: Collection[str] = (),
) -> Plan:
    """The plan on `fleet`, the fleet as it is now: what is `done` is kept, what need not move stays where it is.

    `done` has the numbers of the accepted tiles of each gemm, as positions in `plan.by_gemm[gemm]`. Devices of the
    plan that the fleet no longer has have left, those that only the fleet has have joined; naming them is not needed.
    A device in both `left` and `joined` has a new link: it gives its open tiles away and takes a fair share. The step
    is predicted to take longer by what the busiest device has more to do than the busiest one had.
    """
    mover = _Mover(plan, graph, fleet, done or {})
    gone = {name for name in mover.names if name not in mover.present} | set(left)
    new = {device.name for device in fleet.devices if device.name not in plan.reasons} | set(joined)
    owners, before = mover.owners(), float(mover.busy.max(initial=0.0))
    mover.evacuate(owners, gone)
    mover.attract(owners, new)
    seconds = plan.seconds + max(0.0, float(mover.busy.max(initial=0.0)) - before)
    return replace(
        plan,
        fleet=fleet,
        by_gemm={
            name: Tiles(
                name,
                tiles.ranges,
                owners[name],
                mover.names,
                tiles.together,
                mover.places(tiles),
                tiles.values,
                tiles.kept if owners[name] is tiles.owner else (),  # whoever gets a tile now lacks its operands
            )
            for name, tiles in plan.by_gemm.items()
        },
        seconds=max(seconds, plan.bound_seconds),
        peak_memory=mover.peaks(),
        reasons=mover.reasons(gone, new),
        busy=dict(zip(mover.names, mover.busy.tolist(), strict=True)),
    )


class _Mover:
    """Where tiles are, who has room and time for more, and what has been moved."""

    def __init__(
        self,
        plan: Plan,
        graph: StepGraph,
        fleet: Fleet,
        done: Mapping[str, Collection[int]],
    ) -> None:
        self.plan, self.done = plan, done
        self._places: dict[int, Column] = {}
        known = next((tiles.names for tiles in plan.by_gemm.values()), tuple(plan.reasons))
        fresh = tuple(device.name for device in fleet.devices if device.name not in plan.reasons)
        self.names: tuple[str, ...] = known + fresh
        self.place = {name: place for place, name in enumerate(self.names)}
        self.present = {device.name: device for device in fleet.devices}
        self.gemms = {gemm.name: gemm for gemm in graph.gemms}
        self.busy = np.array([plan.busy.get(name, 0.0) for name in self.names])
        self.peak = np.array([plan.peak_memory.get(name, 0) for name in self.names], dtype=np.float64)
        self.mean = float(self.busy.sum()) / max(1, len(plan.tiles))  # seconds of a tile
        rates, here = Rates.of(fleet), [self.place[device.name] for device in fleet.devices]
        self.memory, self.pace = np.zeros(len(self.names)), np.full(len(self.names), np.inf)
        self.memory[here] = rates.memory
        self.pace[here] = 1.0 / np.sqrt(rates.down * rates.up)  # how long a byte takes, in and out alike

    def owners(self) -> dict[str, Column]:
        """The owner of each tile, as columns that are replaced when something in them moves."""
        return {name: tiles.owner for name, tiles in self.plan.by_gemm.items()}

    def places(self, tiles: Tiles) -> Column | None:
        """The places of devices in the scheduler's queue: those that had none come last."""
        if tiles.place is None or len(tiles.place) == len(self.names):
            return tiles.place
        key = id(tiles.place)
        if key not in self._places:
            late = np.full(len(self.names) - len(tiles.place), len(self.names), dtype=np.int32)
            self._places[key] = np.concatenate([tiles.place, late])
        return self._places[key]

    def evacuate(self, owners: dict[str, Column], gone: Collection[str]) -> None:
        """Give the open tiles of devices that left to others."""
        places = np.array(sorted(self.place[name] for name in gone if name in self.place), dtype=np.int64)
        if not len(places):
            return
        staying = np.array([place for name, place in self.place.items() if name in self.present and name not in gone])
        if not len(staying):
            raise PlanError("all devices of the plan have left; wait until one returns, or plan anew")
        spread = max(_SPREAD, 8 * len(places))
        takers = staying[np.argsort((self.busy + self.pace * 1e6)[staying], kind="stable")][:spread]
        leaving = np.zeros(len(self.names), dtype=bool)
        leaving[places] = True
        found: dict[tuple[int, int], tuple[Ints, Floats]] = {}
        moved = 0
        for name, owner in owners.items():
            key = id(owner), id(self.plan.by_gemm[name].ranges)
            if key not in found:
                theirs = np.flatnonzero(leaving[owner])
                found[key] = theirs, self._bytes(name, theirs)
            tiles, sizes = self._open(name, *found[key])
            if len(tiles):
                owners[name] = self._handed(
                    name, owner, tiles, sizes, takers[(moved + np.arange(len(tiles))) % len(takers)]
                )
                moved += len(tiles)
        self.busy[places], self.peak[places] = 0.0, 0.0

    def attract(self, owners: dict[str, Column], new: Collection[str]) -> None:
        """Let devices that joined take a fair share of each gemm's open tiles from those with the most to do."""
        places = [self.place[name] for name in new if name in self.present]
        each = len(self.plan.tiles) // max(1, len(self.plan.by_gemm) * self.plan.devices_used)
        for turn, (name, owner) in enumerate(owners.items() if places else ()):
            for place in places:
                heavy, sizes = self._open(name, np.arange(len(owner)), self._bytes(name, np.arange(len(owner))))
                fits = np.flatnonzero(sizes * AT_ONCE <= self.memory[place])
                if len(fits):
                    order = fits[np.argsort(-self.busy[owners[name][heavy[fits]]], kind="stable")]
                    chosen = order[turn % min(len(order), _SPREAD) :][: max(1, each)]
                    owners[name] = self._handed(name, owners[name], heavy[chosen], sizes[chosen], np.array([place]))

    def _handed(self, name: str, owner: Column, tiles: Ints, sizes: Floats, takers: Ints) -> Column:
        """The owners of a gemm's tiles after `tiles` went to `takers` in turn, each to one that can hold it."""
        size = sizes * AT_ONCE
        taker = np.resize(takers, len(tiles)) if len(takers) != len(tiles) else takers
        large = np.flatnonzero(size > self.memory[taker])
        if len(large):
            if (need := float(size[large].max())) > self.memory.max():
                raise PlanError(
                    f"a tile of '{name}' needs {quantity(need, 'B')} in flight and no device that is "
                    f"left has that much memory; plan anew"
                )
            roomiest, idlest = np.argsort(-self.memory, kind="stable"), np.argsort(self.busy, kind="stable")
            rank = np.argsort(idlest)  # of each device, the one with the least to do first
            roomy = np.searchsorted(-self.memory[roomiest], -size[large], side="right")  # how many can hold each tile
            taker[large] = idlest[np.minimum.accumulate(rank[roomiest])[roomy - 1]]
        np.add.at(self.busy, taker, self.mean)
        np.maximum.at(self.peak, taker, size)
        changed = owner.copy()
        changed[tiles] = taker
        return changed

    def _open(self, name: str, tiles: Ints, sizes: Floats) -> tuple[Ints, Floats]:
        """Those of these tiles that are not done, with their sizes."""
        finished = self.done.get(name)
        if not finished:
            return tiles, sizes
        still = ~np.isin(tiles, np.fromiter(finished, dtype=np.int64))
        return tiles[still], sizes[still]

    def _bytes(self, name: str, tiles: Ints) -> Floats:
        """Bytes of operands and result of some tiles of a gemm."""
        shape, ranges = Shape.of(self.gemms[name]), self.plan.by_gemm[name].ranges[tiles].astype(np.float64)
        return footprint(shape, ranges[:, 1::2] - ranges[:, 0::2])

    def peaks(self) -> dict[str, int]:
        """Bytes that each device needs at most."""
        peaks: Sequence[int] = np.ceil(self.peak).astype(np.int64).tolist()
        return dict(zip(self.names, peaks, strict=True))

    def reasons(self, gone: Collection[str], new: Collection[str]) -> dict[str, str]:
        """What each device had, and what has become of it."""
        changed = {name: "has left: its open tiles went to others" for name in gone if name not in new}
        changed |= dict.fromkeys(new, "joined: took open tiles from the busiest devices")
        more = {name for name, place in self.place.items() if self.busy[place] > self.plan.busy.get(name, 0.0)}
        reasons = {name: self.plan.reasons.get(name, "") for name in self.names}
        return {name: _took_more(why) if name in more else why for name, why in reasons.items()} | changed


_MORE = "; then took tiles of others"


def _took_more(why: str) -> str:
    """A reason whose share was another one before; said once, however often it happens."""
    first = "at first " if why[:1].isdigit() else ""
    return why if why.endswith(_MORE) else f"{first}{why}{_MORE}"

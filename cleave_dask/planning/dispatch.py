"""Which device gets which tile, one event at a time. No clock, no I/O: the scheduler plugin only asks and tells.

A tile waits in the queue of the device it was planned for. A device has a small window of tiles in flight; when it has
room it takes the next tile of its own, then one that is planned for nobody, then one from the longest queue. So a
plan is followed while it holds, and a device that joins late, or is faster than planned, still finds work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

TileId = Any
"""Whatever the caller knows a tile by; it is only hashed and compared."""

_ANYONE = ""


@dataclass
class _Queue:
    """Tiles that wait, smallest rank first; tiles that left are skipped when they come up."""

    heap: list[tuple[int, int, TileId]] = field(default_factory=list)
    members: set[TileId] = field(default_factory=set)

    def push(self, rank: int, number: int, tile: TileId) -> None:
        heappush(self.heap, (rank, number, tile))
        self.members.add(tile)

    def pop(self) -> TileId | None:
        while self.heap:
            tile = heappop(self.heap)[2]
            if tile in self.members:
                self.members.discard(tile)
                return tile
        return None


class Dispatcher:
    """The state of placement: devices with their tiles in flight, tiles that wait."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.flying: dict[str, set[TileId]] = {}  # by device
        self.holder: dict[TileId, str] = {}  # the device of each tile in flight
        self._queues: dict[str, _Queue] = {_ANYONE: _Queue()}
        self._queue_of: dict[TileId, str] = {}
        self._pushed = 0

    def device_joined(self, device: str) -> None:
        """A device can take tiles from now on."""
        self.flying.setdefault(device, set())
        self._queues.setdefault(device, _Queue())

    def device_left(self, device: str) -> None:
        """A device is gone: what waited for it waits for anyone. Its tiles in flight come back as ready again."""
        for tile in self.flying.pop(device, set()):
            self.holder.pop(tile, None)
        queue = self._queues.pop(device, _Queue())
        for rank, number, tile in queue.heap:
            if tile in queue.members:
                self._queues[_ANYONE].push(rank, number, tile)
                self._queue_of[tile] = _ANYONE

    def tile_ready(self, tile: TileId, rank: int, planned: str | None) -> str | None:
        """A tile's operands are there; returns the device that it is sent to at once, if any.

        That is its planned device when it has room and nothing else waits for it. Otherwise the tile waits, for that
        device or for anyone.
        """
        if tile in self._queue_of or tile in self.holder:
            return self.holder.get(tile)
        queue = planned if planned is not None and planned in self.flying else _ANYONE
        if queue != _ANYONE and len(self.flying[queue]) < self.window and not self._queues[queue].members:
            self._send(tile, queue)
            return queue
        self._pushed += 1
        self._queues[queue].push(rank, self._pushed, tile)
        self._queue_of[tile] = queue
        return None

    def tile_ended(self, tile: TileId) -> None:
        """A tile in flight was accepted, failed, or was taken back."""
        device = self.holder.pop(tile, None)
        if device is not None:
            self.flying[device].discard(tile)

    def tile_forgotten(self, tile: TileId) -> None:
        """A tile is no longer wanted."""
        self.tile_ended(tile)
        queue = self._queue_of.pop(tile, None)
        if queue is not None:
            self._queues[queue].members.discard(tile)

    def take(self, device: str) -> TileId | None:
        """The next tile for a device, which is then in flight; None if its window is full or nothing waits."""
        if len(self.flying[device]) >= self.window:
            return None
        for queue in (device, _ANYONE, self._longest()):
            tile = self._queues[queue].pop()
            if tile is not None:
                del self._queue_of[tile]
                self._send(tile, device)
                return tile
        return None

    def _send(self, tile: TileId, device: str) -> None:
        self.flying[device].add(tile)
        self.holder[tile] = device

    def placements(self) -> list[tuple[TileId, str]]:
        """Everything that can be sent out now, one tile for each device in turn, least busy devices first."""
        placed: list[tuple[TileId, str]] = []
        open_devices = sorted(self.flying, key=lambda device: len(self.flying[device]))
        while open_devices and self._queue_of:
            still_open = []
            for device in open_devices:
                tile = self.take(device)
                if tile is not None:
                    placed.append((tile, device))
                    still_open.append(device)
            open_devices = still_open
        return placed

    def _longest(self) -> str:
        return max(self._queues, key=lambda device: len(self._queues[device].members))

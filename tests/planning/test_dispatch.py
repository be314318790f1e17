"""The dispatcher as a state machine: any order of events, no tile lost, none on an absent or full device."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cleave_dask.planning.dispatch import Dispatcher

WINDOW = 2
NAMES = ("a", "b", "c", "d")


class Dispatching(RuleBasedStateMachine):
    tiles = Bundle("tiles")

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(WINDOW)
        self.present: set[str] = set()
        self.waiting: set[int] = set()
        self.flying: dict[int, str] = {}
        self.count = 0

    @rule(device=st.sampled_from(NAMES))
    def join(self, device: str) -> None:
        self.present.add(device)
        self.dispatcher.device_joined(device)

    @rule(device=st.sampled_from(NAMES))
    def leave(self, device: str) -> None:
        self.present.discard(device)
        self.dispatcher.device_left(device)
        for tile in [tile for tile, holder in self.flying.items() if holder == device]:
            del self.flying[tile]
            self.waiting.add(tile)
            assert self.dispatcher.tile_ready(tile, tile, device) is None, "sent to a device that has left"

    @rule(target=tiles, planned=st.sampled_from([*NAMES, "nobody", None]), rank=st.integers(0, 5))
    def ready(self, planned: str | None, rank: int) -> int:
        self.count += 1
        device = self.dispatcher.tile_ready(self.count, rank, planned)
        if device is None:
            self.waiting.add(self.count)
        else:
            assert device == planned
            assert device in self.present
            self.flying[self.count] = device
        return self.count

    @rule(tile=tiles)
    def ready_again(self, tile: int) -> None:
        if tile in self.waiting or tile in self.flying:
            found = self.dispatcher.tile_ready(tile, 0, None)  # Dask may ask twice; it must not count twice
            assert found == self.flying.get(tile)

    @rule(tile=consumes(tiles))
    def end(self, tile: int) -> None:
        if tile in self.flying:
            del self.flying[tile]
            self.dispatcher.tile_ended(tile)

    @rule(tile=consumes(tiles))
    def forget(self, tile: int) -> None:
        self.waiting.discard(tile)
        self.flying.pop(tile, None)
        self.dispatcher.tile_forgotten(tile)

    @rule()
    def place(self) -> None:
        for tile, device in self.dispatcher.placements():
            assert tile in self.waiting
            assert device in self.present
            self.waiting.discard(tile)
            self.flying[tile] = device
        full = all(list(self.flying.values()).count(device) >= WINDOW for device in self.present)
        assert full or not self.waiting, "a device has room and a tile waits"

    @invariant()
    def agrees(self) -> None:
        assert self.dispatcher.holder == self.flying
        for device in self.present:
            assert len(self.dispatcher.flying[device]) <= WINDOW


TestDispatching = Dispatching.TestCase


def test_own_tiles_come_first_in_order_of_rank() -> None:
    dispatcher = Dispatcher(window=2)
    dispatcher.device_joined("a")
    for tile in ("first", "second"):
        assert dispatcher.tile_ready(tile, 5, "a") == "a"
    for tile, rank, planned in (("late", 9, "a"), ("early", 1, "a"), ("loose", 0, None)):
        assert dispatcher.tile_ready(tile, rank, planned) is None
    order = []
    for ended in ("first", "second", "early", "late"):
        dispatcher.tile_ended(ended)
        order.append(dispatcher.take("a"))
    assert order == ["early", "late", "loose", None]


def test_an_idle_device_helps_the_longest_queue() -> None:
    dispatcher = Dispatcher(window=1)
    for device in ("slow", "idle"):
        dispatcher.device_joined(device)
    assert [dispatcher.tile_ready(tile, tile, "slow") for tile in range(3)] == ["slow", None, None]
    assert dispatcher.placements() == [(1, "idle")]

"""The dispatcher as a state machine: any order of events, no parcel lost, none on an absent, paused or full device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from benchmarks.dispatching import run
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.dispatch_state import FACTOR, GRACE
from cleave_dask.planning.parcels import Figures, Work

WINDOW = 2
NAMES = ("a", "b", "c", "d")
FIGURES = Figures(flops=1e9, down=1e6, up=1e6, latency=0.01)
SECOND = Work(flops=0.96e9)  # with its latency, a second on FIGURES


class Dispatching(RuleBasedStateMachine):
    parcels = Bundle("parcels")

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(WINDOW)
        self.now = 0.0
        self.present: set[str] = set()
        self.paused: set[str] = set()
        self.works: dict[int, Work] = {}
        self.planned: dict[int, str | None] = {}
        self.filler: dict[int, bool] = {}
        self.waiting: set[int] = set()
        self.flying: dict[int, str] = {}
        self.done: set[int] = set()

    def ready(self, parcel: int) -> None:
        """What the scheduler does with a parcel that is ready, for the first time or again."""
        planned, work, filler = self.planned[parcel], self.works[parcel], self.filler[parcel]
        device = self.dispatcher.parcel_ready(parcel, parcel % 5, planned, work, self.now, filler=filler)
        if device is None:
            self.waiting.add(parcel)
            return
        assert device == planned
        self.sent(parcel, device)

    def sent(self, parcel: int, device: str) -> None:
        assert device in self.present - self.paused
        assert not self.dispatcher.silent(device)
        assert parcel not in self.done
        self.waiting.discard(parcel)
        self.flying[parcel] = device
        there = [other for other, holder in self.flying.items() if holder == device]
        counted = there if self.filler[parcel] else [other for other in there if not self.filler[other]]
        assert len(counted) <= WINDOW, "filler finds room beside everything, the rest beside what is no filler"

    @rule(device=st.sampled_from(NAMES), speed=st.sampled_from([1e8, 1e9, 1e10]))
    def join(self, device: str, speed: float) -> None:
        self.present.add(device)
        self.dispatcher.device_joined(device, Figures(speed, 1e6, 1e6, 0.01), self.now)

    @rule(device=st.sampled_from(NAMES))
    def leave(self, device: str) -> None:
        self.present.discard(device)
        self.paused.discard(device)
        self.dispatcher.device_left(device)
        for parcel in [parcel for parcel, holder in self.flying.items() if holder == device]:
            del self.flying[parcel]
            self.ready(parcel)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: st.DataObject, paused: bool) -> None:
        device = data.draw(st.sampled_from(sorted(self.present)))
        (self.paused.add if paused else self.paused.discard)(device)
        self.dispatcher.device_paused(device, paused)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        self.dispatcher.device_heard(data.draw(st.sampled_from(sorted(self.present))), self.now)

    @rule(
        target=parcels,
        planned=st.sampled_from([*NAMES, "nobody", None]),
        seconds=st.sampled_from([0.0, 1.0, 9.0]),
        filler=st.booleans(),
    )
    def arrive(self, planned: str | None, seconds: float, filler: bool) -> int:
        parcel = len(self.works)
        self.works[parcel], self.planned[parcel], self.filler[parcel] = Work(flops=1e9 * seconds), planned, filler
        self.ready(parcel)
        return parcel

    @rule(parcel=parcels)
    def ready_again(self, parcel: int) -> None:
        if parcel in self.waiting or parcel in self.flying:
            found = self.dispatcher.parcel_ready(parcel, 0, None, self.works[parcel], self.now)
            assert found == self.flying.get(parcel), "Dask may ask twice; it must not count twice"

    @rule(parcel=parcels, seconds=st.floats(0, 5), done=st.booleans())
    def end(self, parcel: int, seconds: float, done: bool) -> None:
        self.now += seconds
        if parcel in self.flying:
            del self.flying[parcel]
            self.dispatcher.parcel_ended(parcel, self.now, done=done)
            if done:
                self.done.add(parcel)
            else:
                self.ready(parcel)

    @rule(parcel=consumes(parcels))
    def forget(self, parcel: int) -> None:
        self.waiting.discard(parcel)
        self.flying.pop(parcel, None)
        self.done.add(parcel)
        self.dispatcher.parcel_forgotten(parcel)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = self.dispatcher.tick(self.now)
        for handover in late:
            assert self.flying.pop(handover.parcel) == handover.device
        for handover in late:
            self.ready(handover.parcel)

    @rule()
    def place(self) -> None:
        for parcel, device in self.dispatcher.settle(self.now):
            assert parcel in self.waiting
            self.sent(parcel, device)

    @invariant()
    def agrees(self) -> None:
        assert self.dispatcher.waiting == len(self.waiting)
        for device in self.present:
            assert set(self.dispatcher.flying(device)) == {p for p, holder in self.flying.items() if holder == device}

    def teardown(self) -> None:
        """Whatever has happened: if one device stays and works, or all do, everything gets done."""
        self.join("a", 1e9)
        for device in self.present - {"a"} if len(self.works) % 2 else ():
            self.leave(device)
        self.paused.clear()
        for device in self.present:
            self.dispatcher.device_paused(device, False)
        for _ in range(4 * len(self.works) + 4):
            self.now += 1.0
            for device in self.present:
                self.dispatcher.device_heard(device, self.now)
            self.place()
            for parcel in list(self.flying):
                self.end(parcel, 0.1, done=True)
        assert not self.waiting
        assert not self.flying
        super().teardown()


TestDispatching = Dispatching.TestCase
TestDispatching.settings = settings(stateful_step_count=40)


def joined(*names: str, window: int = 1) -> Dispatcher:
    dispatcher = Dispatcher(window)
    for name in names:
        dispatcher.device_joined(name, FIGURES, 0.0)
    return dispatcher


def test_own_parcels_come_first_in_order_of_rank() -> None:
    dispatcher = joined("a", window=2)
    for parcel in ("first", "second"):
        assert dispatcher.parcel_ready(parcel, 5, "a", SECOND, 0.0) == "a"
    for parcel, rank, planned in (("late", 9, "a"), ("early", 1, "a"), ("loose", 0, None)):
        assert dispatcher.parcel_ready(parcel, rank, planned, SECOND, 0.0) is None
    order = []
    for now, ended in enumerate(("first", "second", "early", "late"), start=1):
        dispatcher.parcel_ended(ended, float(now))
        order += [parcel for parcel, _ in dispatcher.settle(float(now))]
    assert order == ["early", "late", "loose"]


def test_an_idle_device_helps_whoever_is_most_behind() -> None:
    dispatcher = joined("busy", "busier", "idle")
    for name, count in (("busy", 2), ("busier", 4)):
        for number in range(count):
            dispatcher.parcel_ready((name, number), number, name, SECOND, 0.0)
    assert dispatcher.settle(0.0) == [(("busier", 3), "idle")]


def test_a_device_does_not_take_what_the_other_would_finish_sooner() -> None:
    dispatcher = joined("quick")
    dispatcher.device_joined("slow", Figures(1e7, 1e6, 1e6), 0.0)
    for number in range(3):
        dispatcher.parcel_ready(number, number, "quick", SECOND, 0.0)
    assert dispatcher.settle(0.0) == []


def test_silence_is_noticed_in_time_and_others_take_over() -> None:
    dispatcher = joined("stopped", "alive")
    assert dispatcher.parcel_ready("p", 0, "stopped", SECOND, 0.0) == "stopped"
    limit = FACTOR * 1.0 + GRACE
    assert limit <= 2 * 1.0 + 1.0 - 0.4
    assert not dispatcher.tick(limit - 0.1)
    assert [handover.device for handover in dispatcher.tick(limit + 0.1)] == ["stopped"]
    assert dispatcher.parcel_ready("p", 0, "stopped", SECOND, limit + 0.1) is None
    assert dispatcher.settle(limit + 0.1) == [("p", "alive")]
    assert dispatcher.silent("stopped")
    assert dispatcher.parcel_ready("q", 0, "stopped", SECOND, limit + 0.2) is None
    dispatcher.device_heard("stopped", limit + 1.0)
    assert dispatcher.settle(limit + 1.0) == [("q", "stopped")]


def test_a_parcel_that_everybody_was_late_with_is_not_left_lying() -> None:
    dispatcher = joined("one", "other")
    assert dispatcher.parcel_ready("p", 0, "one", SECOND, 0.0) == "one"
    now, had = 0.0, []
    for _ in range(3):
        now += 100.0
        (handover,) = dispatcher.tick(now)
        had.append(handover.device)
        dispatcher.parcel_ready("p", 0, "one", SECOND, now)
        for device in ("one", "other"):
            dispatcher.device_heard(device, now + 1.0)
        assert [parcel for parcel, _ in dispatcher.settle(now + 1.0)] == ["p"]
    assert had[:2] == ["one", "other"]


def test_of_idle_devices_the_one_that_would_finish_first_gets_a_late_parcel() -> None:
    dispatcher = joined("stopped", "slow", "quick", "slower")
    for device, flops in (("slow", 0.5e9), ("quick", 2e9), ("slower", 0.2e9)):
        dispatcher.device_joined(device, replace(FIGURES, flops=flops), 0.0)
    assert dispatcher.parcel_ready("p", 0, "stopped", SECOND, 0.0) == "stopped"
    assert [handover.parcel for handover in dispatcher.tick(100.0)] == ["p"]
    assert dispatcher.parcel_ready("p", 0, "stopped", SECOND, 100.0) is None
    assert dispatcher.settle(100.0) == [("p", "quick")]


def test_the_last_device_is_waited_for() -> None:
    dispatcher = joined("only")
    assert dispatcher.parcel_ready("p", 0, "only", SECOND, 0.0) == "only"
    assert not dispatcher.tick(1e6)


def test_the_deadline_learns_from_what_a_device_has_shown() -> None:
    dispatcher = joined("steady", "other")
    for number in range(6):
        dispatcher.parcel_ready(number, 0, "steady", SECOND, 5.0 * number)
        dispatcher.parcel_ended(number, 5.0 * number + 5.0)
    dispatcher.parcel_ready("p", 0, "steady", SECOND, 30.0)
    assert dispatcher.expected("p", "steady") == pytest.approx(5.0, rel=0.1)
    assert not dispatcher.tick(30.0 + 1.5 * 5.0)


def in_flight_everywhere(count: int) -> tuple[Dispatcher, list[str]]:
    """Everybody has a parcel of a second, since 0."""
    names = [f"device-{number}" for number in range(count)]
    dispatcher = joined(*names)
    for number, name in enumerate(names):
        assert dispatcher.parcel_ready(number, number, name, SECOND, 0.0) == name
    return dispatcher, names


def test_nobody_is_late_where_everybody_waits_for_the_server() -> None:
    """One result in a second, of 40 devices whose parcels should take one: the server is slow, not they."""
    dispatcher, names = in_flight_everywhere(40)
    for tick in range(1, 40 * 5):
        now = tick / 5
        for name in names:
            dispatcher.device_heard(name, now)
        assert not dispatcher.tick(now), now
        if tick % 5 == 0:
            dispatcher.parcel_ended(tick // 5 - 1, now)


def test_whoever_has_gone_is_late_even_if_the_rest_wait_for_the_server() -> None:
    dispatcher, names = in_flight_everywhere(10)
    late = set()
    for tick in range(1, 200):
        for name in names[2:]:
            dispatcher.device_heard(name, tick / 5)
        late |= {handover.device for handover in dispatcher.tick(tick / 5)}
    assert late == set(names[:2])


def test_a_straggler_is_late_where_the_others_are_through() -> None:
    dispatcher, names = in_flight_everywhere(10)
    for number, name in enumerate(names[1:], start=1):
        dispatcher.parcel_ended(number, 1.0)
        dispatcher.device_heard(name, 1.0)
    dispatcher.device_heard(names[0], 2.0)
    assert [handover.device for handover in dispatcher.tick(FACTOR * 1.0 + GRACE + 0.1)] == names[:1]


def test_a_device_twenty_times_slower_than_it_claims_soon_has_little() -> None:
    """Two devices of equal figures; one takes 20 s for what the other does in one. A run of 60 parcels."""
    dispatcher, now = joined("honest", "boaster", window=2), 0.0
    finish: dict[int, float] = {}
    count = {"honest": 0, "boaster": 0}
    open_parcels = set(range(60))
    for parcel in range(60):
        device = dispatcher.parcel_ready(parcel, parcel, ("honest", "boaster")[parcel % 2], SECOND, 0.0)
        if device:
            finish[parcel] = (1.0 if device == "honest" else 20.0) * (1 + len(dispatcher.flying(device)) - 1)
    while open_parcels:
        for parcel, device in dispatcher.settle(now):
            seconds = 1.0 if device == "honest" else 20.0
            finish[parcel] = now + seconds * len(dispatcher.flying(device))
        now = round(now + 0.2, 6)
        for device in ("honest", "boaster"):
            dispatcher.device_heard(device, now)
        for parcel in [parcel for parcel, at in finish.items() if at <= now]:
            del finish[parcel]
            holder = dispatcher.holder(parcel)
            assert holder is not None
            count[holder] += 1
            open_parcels.discard(parcel)
            dispatcher.parcel_ended(parcel, now)
        for handover in dispatcher.tick(now):
            finish.pop(handover.parcel)
            dispatcher.parcel_ready(handover.parcel, 0, handover.device, SECOND, now)
    assert count["boaster"] <= 4
    assert now < 80, "about the honest device's own 60 s"


def test_a_placement_costs_about_the_same_on_a_large_fleet() -> None:
    """CPU per parcel, ready to done, with idle, slow and stopped devices: a look at all of them would cost 40 times."""
    small = min(run(50, 4_000)["us_per_parcel"] for _ in range(2))
    large = min(run(2_000, 8_000)["us_per_parcel"] for _ in range(2))
    assert large < 6 * small, f"{small:.0f} us per parcel on 50 devices, {large:.0f} on 2,000"


def test_filler_of_a_lost_device_does_not_hold_up_what_others_wait_for() -> None:
    """Windows are full of filler: an older one that waits for anyone must not keep a parcel of the critical path."""
    dispatcher = Dispatcher(2)
    for name in ("stays", "leaves"):
        dispatcher.device_joined(name, FIGURES, 0.0)
    for number in range(4):
        for name in ("stays", "leaves"):
            dispatcher.parcel_ready((name, number), number, name, Work(1e9), 0.0, filler=True)
    for number in range(4):
        dispatcher.parcel_ready(("urgent", number), 10 + number, "leaves", Work(1e9), 0.0)
    assert dispatcher.urgent("leaves")
    flying = dispatcher.flying("leaves")
    dispatcher.device_left("leaves")
    for parcel in flying:
        dispatcher.parcel_ready(parcel, 0, "leaves", Work(1e9), 1.0, filler=parcel[0] != "urgent")
    sent = dispatcher.settle(1.0)
    assert [parcel for parcel, _ in sent] == [("urgent", 0), ("urgent", 1)]


def test_all_that_a_device_has_ahead_counts_in_flight_or_not() -> None:
    dispatcher = Dispatcher(1)
    dispatcher.device_joined("device", FIGURES, 0.0)
    for number in range(3):
        dispatcher.parcel_ready(number, number, "device", Work(1.0, 2.0, 3.0, 4.0), 0.0, filler=True)
    assert dispatcher.ahead("device") == Work(3.0, 6.0, 9.0, 12.0)
    dispatcher.parcel_forgotten(2)
    assert dispatcher.ahead("device") == Work(2.0, 4.0, 6.0, 8.0)


def test_a_parcel_that_was_begun_before_it_was_sent_says_only_that_a_device_is_slow() -> None:
    """Whoever made it ahead is through at once: measured by that, everybody else would be sluggish."""
    dispatcher, begun = Dispatcher(WINDOW), replace(SECOND, begun=True)
    for device in ("quick", "fresh"):
        dispatcher.device_joined(device, FIGURES, 0.0)
    for number in range(50):
        assert dispatcher.parcel_ready(number, number, "quick", begun, float(number)) == "quick"
        dispatcher.parcel_ended(number, number + 1e-3)
    assert dispatcher.pace == 1.0
    assert dispatcher.parcel_ready("slow", 100, "fresh", begun, 60.0) == "fresh"
    dispatcher.parcel_ended("slow", 69.0)
    assert dispatcher.pace > 2.0
    for number in range(101, 121):
        dispatcher.parcel_ready(number, number, "fresh", begun, float(number))
        dispatcher.parcel_ended(number, number + 1e-3)
    assert 1.0 <= dispatcher.pace < 1.5, "one that was slow once is not slow for ever"

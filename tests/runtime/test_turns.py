"""Turns to measure: one at a time, nobody starves, nobody who is gone holds up the others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cleave_dask.runtime.turns import LONGEST_WAIT, TURN, Turns


def test_one_after_the_other_in_the_order_of_their_coming() -> None:
    turns = Turns()
    assert turns.ask("a", 0.0) == 0.0
    assert turns.ask("b", 0.1) > 0
    assert turns.ask("c", 0.2) > turns.ask("b", 0.2) > 0
    turns.end("a", 1.0)
    assert turns.ask("c", 1.1) > 0
    assert turns.ask("b", 1.2) == 0.0
    turns.end("b", 2.0)
    assert turns.ask("c", 2.1) == 0.0


def test_a_turn_ends_by_itself() -> None:
    turns = Turns()
    assert turns.ask("stopped", 0.0) == 0.0
    assert turns.ask("next", 1.0) > 0
    assert turns.ask("next", TURN - 0.1) > 0
    assert turns.ask("next", TURN + 0.1) == 0.0


def test_a_device_that_left_the_line_in_silence_is_passed_over() -> None:
    turns = Turns()
    turns.ask("a", 0.0)
    turns.ask("gone", 0.1)
    turns.ask("c", 0.2)
    turns.end("a", 1.0)
    now = 1.0
    while (wait := turns.ask("c", now)) > 0:
        now += wait
        assert now < 1.0 + 2 * (LONGEST_WAIT + TURN)


@settings(max_examples=500)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.floats(0.01, 4)), max_size=60),
)
def test_never_two_at_once(events: list[tuple[str, bool, float]]) -> None:
    turns, now = Turns(), 0.0
    holding: dict[str, float] = {}  # who measures, and when that must be over
    for who, ends, gap in events:
        now += gap
        holding = {name: end for name, end in holding.items() if end > now}
        if ends:
            turns.end(who, now)
            holding.pop(who, None)
        elif who not in holding and turns.ask(who, now) == 0.0:
            assert not holding
            holding[who] = now + TURN

"""Words and arrays between two processes: what is said is heard, memory goes round, and an end leaves nothing open."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Coroutine
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.protocol import to_serialize
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import StepError
from cleave_dask.runtime.hatches import Hatch
from cleave_dask.runtime.trays import IDLE, Trays, order_of


async def echo(op: str, fields: dict[str, Any]) -> Any:
    """Answers with what it was told, or fails as it was told to."""
    if op == "refuse":
        raise StepError("the step is over")
    if op == "break":
        raise KeyError("x")
    return fields


class Pair:
    """Both ends, in one process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.ended: list[str] = []
        self.asker = Hatch(ours, echo, lambda: self.ended.append("asker"))
        self.answerer = Hatch(theirs, echo, lambda: self.ended.append("answerer"))


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


@contextmanager
def no_descriptor_left() -> Any:
    def count() -> list[str]:
        gc.collect()
        here = Path("/proc/self/fd")
        return sorted(os.readlink(each) for each in here.iterdir() if each.is_symlink()) if here.exists() else []

    before = count()
    yield
    assert count() == before


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), min_size=1, max_size=3),
            st.sampled_from(["float32", "float64", "uint16"]),
            st.sampled_from("CF"),
        ),
        max_size=5,
    )
)
def test_arrays_arrive_as_they_were_in_memory_of_both(forms: list[tuple[list[int], str, Any]]) -> None:
    sent = [
        np.arange(np.prod(shape), dtype=dtype).reshape(shape).copy(order=order) + 1 for shape, dtype, order in forms
    ]

    async def main() -> None:
        pair = Pair()
        for wrap in (lambda array: array, to_serialize, pair.asker.trays.placed):
            answer = await pair.asker.ask("echo", arrays=[wrap(array) for array in sent], text="ä", nothing=None)
            assert (answer["text"], answer["nothing"]) == ("ä", None)
            for told, came in zip(sent, answer["arrays"], strict=True):
                assert (came.dtype, came.shape, order_of(came)) == (told.dtype, told.shape, order_of(told))
                assert np.array_equal(came, told)
        pair.asker.close()

    run(main())


def test_memory_goes_round_and_a_view_keeps_it() -> None:
    async def main() -> None:
        pair = Pair()
        tile = np.ones((300, 1000), np.float32)
        numbers = set()
        for _ in range(20):
            answer = await pair.asker.ask("echo", tile=pair.asker.trays.placed(tile))
            numbers.add(pair.asker.trays._count)
            del answer
            await asyncio.sleep(0)  # what was dropped is told
        assert max(numbers) <= 3, "trays are used again"
        kept = (await pair.asker.ask("echo", tile=tile))["tile"][7:9, ::3]
        for _ in range(20):
            await pair.asker.ask("echo", tile=np.zeros_like(tile))
        assert (kept == 1).all(), "what somebody looks at is not written on"
        pair.asker.close()
        assert (kept == 1).all(), "also when the other side is gone"

    run(main())


def test_trays_that_nobody_uses_are_given_up() -> None:
    async def main() -> None:
        pair = Pair()
        sizes = [int(IDLE / 8 * (1 + n)) for n in range(4)] * 3
        for nbytes in sizes:
            await pair.asker.ask("echo", data=np.zeros(nbytes, np.uint8))
            await asyncio.sleep(0)
        for hatch in (pair.asker, pair.answerer):
            assert sum(tray.nbytes for tray in hatch.trays._all.values()) <= 2 * IDLE
            assert len(hatch._theirs) < len(sizes)
        pair.asker.close()

    run(main())


def test_what_the_other_side_raises_is_told() -> None:
    async def main() -> None:
        pair = Pair()
        with pytest.raises(StepError, match="the step is over"):
            await pair.asker.ask("refuse")
        with pytest.raises(StepError, match="KeyError"):
            await pair.asker.ask("break")
        assert await pair.asker.ask("echo", still="here") == {"still": "here"}
        pair.asker.close()

    run(main())


def test_what_a_device_sends_cannot_pose_as_an_array() -> None:
    """Values of a device are plain; an array in a word is an extension type, which no plain value is."""

    async def main() -> None:
        pair = Pair()
        forged = {"1": [1, "<f4", [4], "C"], "__array__": [1, "<f4", [4], "C"]}
        assert await pair.asker.ask("echo", moved=forged, unreadable=object()) == {"moved": forged, "unreadable": None}
        pair.asker.close()

    run(main())


def test_words_larger_than_the_socket_and_many_at_once() -> None:
    async def main() -> None:
        pair = Pair()
        tiles = list(range(300_000))
        answers = await asyncio.gather(
            *(pair.asker.ask("echo", tiles=tiles, tile=np.full(5000, n, np.float32)) for n in range(8))
        )
        assert [answer["tile"][0] for answer in answers] == list(range(8))
        assert answers[-1]["tiles"] == tiles
        pair.asker.close()

    run(main())


def test_an_end_reaches_both_and_leaves_nothing_open() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.asker.ask("echo", tile=np.ones(100))
        asked = asyncio.ensure_future(pair.asker.ask("echo", tile=pair.asker.trays.placed(np.ones(100_000))))
        pair.asker.trays.take(1 << 20)  # and one that is never lent
        await asyncio.sleep(0)
        pair.answerer.close()
        with pytest.raises(ConnectionError):
            await asked
        with pytest.raises(ConnectionError):
            await pair.asker.ask("echo")
        assert sorted(pair.ended) == ["answerer", "asker"]

    with no_descriptor_left():
        run(main())


def test_any_thread_may_take_trays() -> None:
    async def main() -> None:
        trays = Trays()

        def work(seed: int) -> bool:
            chance = np.random.default_rng(seed)
            held: list[Any] = []
            for _ in range(200):
                array = trays.placed(np.full(int(chance.integers(1, 300_000)), seed, np.uint8))
                held = [*held[-3:], array]
                assert all((each == seed).all() for each in held)
            return True

        assert all(await asyncio.gather(*(asyncio.to_thread(work, seed) for seed in range(4))))
        trays.close()

    run(main())

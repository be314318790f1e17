"""Porters with a server that keeps nothing: tiles and slices go through, a killed one is replaced at its address."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import dask
import numpy as np
import pytest
from distributed.comm import Comm, CommClosedError, connect
from distributed.core import Server
from distributed.protocol import to_serialize
from distributed.security import Security

from cleave_dask.errors import StepError
from cleave_dask.runtime.hatches import Hatch
from cleave_dask.runtime.porter import BLOCK, Sizes
from cleave_dask.runtime.porters import ATTEMPTS, Desk, Porters
from cleave_dask.runtime.tiles import COMING

TILE = np.arange(300 * 200, dtype=np.float32).reshape(300, 200)
PUSH = {"op": "cleave_push", "run": "x", "step": 0, "job": 0, "tile": 0, "device": "one", "timing": {}, "moved": {}}
PUSH |= {"pull_seconds": 0.0, "compute_seconds": 0.0}
PULL = {"op": "cleave_pull", "run": "x", "step": 0, "job": 0, "operand": 1, "first": (0, 9), "second": (3, 5)}


class Keeper:
    """A server that gives everyone the same slice and remembers what it was told."""

    def __init__(self) -> None:
        self.pushed: list[dict[str, Any]] = []
        self.asked = 0
        self.awaited: list[tuple[str, int]] = []
        self.made = asyncio.Event()

    async def push(self, hatch: Hatch, arrays: list[Any], **told: Any) -> dict[str, Any]:
        self.pushed.append({**told, "arrays": [None if array is None else array.copy() for array in arrays]})
        return {"accepted": True}

    async def pull(self, hatch: Hatch, operand: int, **told: Any) -> dict[str, Any]:
        if operand > 1:
            raise StepError("the step is over")
        return {"parts": [hatch.trays.placed(np.asfortranarray(TILE)), hatch.trays.placed(TILE[:0])], "axis": 1}

    async def published(self, hatch: Hatch, device: str, operand: int, **told: Any) -> None:
        self.awaited.append((device, operand))
        await self.made.wait()

    async def sizes(self, hatch: Hatch, run: str, first: int, count: int, **told: Any) -> list[int | None]:
        self.asked += 1
        return [TILE.nbytes, *[None] * (count - 1)] if run == "x" and first == 0 else []


class Served:
    """A server with porters, for the length of a block."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.keeper = Keeper()
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Served:
        self.server = Server({})
        await self.server.listen("tcp://127.0.0.1:0")
        await self.server
        desk: Desk = {
            "cleave_push": self.keeper.push,
            "cleave_pull": self.keeper.pull,
            "published": self.keeper.published,
            "sizes": self.keeper.sizes,
        }

        async def changed() -> None:
            self.changed.set()

        self.porters = Porters(self.count, self.server, Security(), desk, changed)
        self.porters.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        pids = self.porters.pids
        await self.porters.close()
        await self.server.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def said(comm: Comm, message: dict[str, Any]) -> Any:
    await comm.write(message)
    return await comm.read()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 240))


def test_tiles_and_slices_go_through() -> None:
    async def main() -> None:
        async with Served() as served:
            comm = await connect(served.porters.addresses[0], timeout=120)
            for name in ("one", "two"):
                told = {**PUSH, "device": name, "arrays": [to_serialize(TILE)]}
                assert await said(comm, told) == {"accepted": True}
            first, second = served.keeper.pushed
            assert np.array_equal(first["arrays"][0], TILE)
            assert (first["device"], second["device"]) == ("one", "one"), "who it is, it says once"
            assert served.keeper.asked == 1, "sizes are asked for once"
            assert first["arrived"] <= second["arrived"]
            answer = await said(comm, PULL)
            assert np.array_equal(answer["parts"][0], TILE)
            assert answer["parts"][0].flags.f_contiguous
            assert answer["parts"][1].shape == (0, 200)
            assert isinstance(await said(comm, {"op": "cleave_clock"}), float)
            assert (await said(comm, {**PULL, "operand": 7}))["status"] == "uncaught-error"
            comm.abort()

    run(main())


def test_a_slice_that_is_still_to_be_made_is_announced_when_it_is() -> None:
    async def main() -> None:
        async with Served() as served:
            comm = await connect(served.porters.addresses[0], timeout=120)
            await comm.write({**PULL, "op": "cleave_await", "device": "one"})
            while not served.keeper.awaited:
                await asyncio.sleep(0.01)
            assert served.keeper.awaited == [("one", 1)]
            served.keeper.made.set()
            assert await comm.read() == COMING
            answer = await comm.read()
            assert np.array_equal(answer["parts"][0], TILE)
            comm.abort()

    run(main())


@pytest.mark.parametrize(
    "message",
    [
        {"op": "sizes"},
        {"op": "run", "function": b"x"},
        {**PUSH, "arrays": [to_serialize(np.zeros(TILE.size + 2000, np.float32))]},
        {**PUSH, "arrays": [], "arrived": 0.0},
    ],
    ids=["what porters ask", "code", "a tile that is too large", "one field more"],
)
def test_a_device_may_say_no_more_than_to_the_server(message: dict[str, Any]) -> None:
    async def main() -> None:
        async with Served() as served:
            comm = await connect(served.porters.addresses[0], timeout=120)
            with pytest.raises(CommClosedError):
                await said(comm, message)
            stray = {**PUSH, "run": "y", "arrays": [to_serialize(TILE)]}
            other = await connect(served.porters.addresses[0], timeout=120)
            assert await said(other, stray) == {"accepted": True}
            assert served.keeper.pushed[-1]["arrays"] == [None], "what nobody waits for is not kept"
            other.abort()

    run(main())


def test_a_killed_porter_is_replaced_where_it_was() -> None:
    async def main() -> None:
        async with Served(2) as served:
            address, other = served.porters.addresses
            comm = await connect(address, timeout=120)
            assert await said(comm, {**PUSH, "arrays": [to_serialize(TILE)]})
            killed, stays = served.porters.pids
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(CommClosedError):
                await comm.read()
            again = await connect(address, timeout=120)  # waits in the server's socket
            assert await said(again, {**PUSH, "arrays": [to_serialize(TILE)]})
            assert killed not in served.porters.pids
            assert stays in served.porters.pids
            assert served.porters.addresses == [address, other]
            again.abort()

    run(main())


def test_a_porter_that_never_gets_ready_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Served() as served:
            await served.changed.wait()
            assert served.porters.addresses == []

    with dask.config.set({"distributed.comm.tcp.backend": "asyncio"}):  # its connections would not be guarded
        run(main())
    assert f"has ended {ATTEMPTS} times before it was ready" in caplog.text


def test_sizes_are_of_the_step_in_flight() -> None:
    questions = []

    async def ask(op: str, *, step: int, first: int, count: int, **_: Any) -> list[int | None]:
        questions.append((step, first))
        return [100 + step] * count if step < 2 else []

    async def main() -> None:
        sizes = Sizes(ask)
        for step, tile in ((0, 0), (0, BLOCK - 1), (0, BLOCK), (1, 5), (0, 0), (2, 0), (2, 0)):
            await sizes.learn("x", step, 0, tile)
        assert questions == [(0, 0), (0, BLOCK), (1, 0), (0, 0), (2, 0), (2, 0)]
        assert sizes.expected("x", 0, 0, 3) == 100
        assert sizes.expected("x", 2, 0, 0) is None, "nobody waits for it"
        sizes.forget()
        assert sizes.expected("x", 0, 0, 3) is None

    run(main())

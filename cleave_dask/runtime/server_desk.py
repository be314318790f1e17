"""What the server does for its porters: the operations of devices, with arrays on trays instead of in messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from cleave_dask.graph.ir import Range
from cleave_dask.runtime.hatches import Hatch
from cleave_dask.runtime.porters import Desk
from cleave_dask.runtime.server_gathering import Array


class Keeper(Protocol):
    """The part of the server that devices reach."""

    async def cleave_wanted(self, run: str, step: int, job: int, tiles: list[int]) -> list[int]:
        """Which of these tiles nobody has delivered yet."""
        ...

    async def push(
        self, place: tuple[str, int, int, int], arrays: list[Array], identity: str, **told: Any
    ) -> dict[str, Any]:
        """Take in a tile."""
        ...

    async def published(
        self, run: str, step: int, job: int, operand: int, identity: str, listens: Callable[[], bool]
    ) -> None:
        """Have a device wait until an operand is there, or it does not listen any more."""
        ...

    def sliced(
        self, run: str, step: int, job: int, operand: int, first: Range, second: Range
    ) -> tuple[list[Array], int]:
        """An operand slice in parts, and the axis along which they are joined."""
        ...

    def expected(self, run: str, step: int, job: int, tile: int) -> int | None:
        """Bytes of a tile that somebody waits for."""
        ...

    async def off_loop(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run something in a thread."""
        ...


def make_desk(keeper: Keeper) -> Desk:
    """All that porters ask, by operation."""

    async def pull(hatch: Hatch, arrived: float, **told: Any) -> dict[str, Any]:
        parts, axis = await keeper.off_loop(_placed, keeper, hatch, told)
        return {"parts": parts, "axis": axis}

    async def published(hatch: Hatch, run: str, step: int, job: int, operand: int, device: str) -> None:
        await keeper.published(run, step, job, operand, str(device), lambda: not hatch.closed)

    async def push(
        hatch: Hatch, arrived: float, run: str, step: int, job: int, tile: int, device: str, **told: Any
    ) -> dict[str, Any]:
        """A porter says who a device is, by its certificate; nobody else is believed that."""
        return await keeper.push((run, step, job, tile), told.pop("arrays"), str(device), arrived=arrived, **told)

    async def wanted(hatch: Hatch, arrived: float, **told: Any) -> list[int]:
        return await keeper.cleave_wanted(**told)

    async def sizes(hatch: Hatch, **told: Any) -> list[int | None]:
        found: list[int | None] = await keeper.off_loop(partial(_sizes, keeper, **told))
        return found

    return {"cleave_pull": pull, "published": published, "cleave_push": push, "cleave_wanted": wanted, "sizes": sizes}


def _placed(keeper: Keeper, hatch: Hatch, told: dict[str, Any]) -> tuple[list[Array], int]:
    """A slice, copied once: from its operand to memory that the porter sends it from."""
    parts, axis = keeper.sliced(**told)
    return [hatch.trays.placed(part) for part in parts], axis


def _sizes(keeper: Keeper, run: str, step: int, job: int, first: int, count: int) -> list[int | None]:
    """Bytes of the tiles from the first on; none if nobody waits for any of them."""
    sizes = [keeper.expected(run, step, job, tile) for tile in range(first, first + count)]
    return sizes if any(size is not None for size in sizes) else []

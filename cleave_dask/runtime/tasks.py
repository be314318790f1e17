"""The Dask task of a step: its edges order it, and no data travels along them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from dask._task_spec import Task
from dask.typing import Key
from distributed import get_worker

from cleave_dask.errors import ClusterError
from cleave_dask.graph.ir import Gemm, Range
from cleave_dask.planning.parcels import Work
from cleave_dask.planning.values import Tile
from cleave_dask.runtime.tiles import ParcelSpec

NO_WORK = Work()


class OrderedTask(Task):
    """A task that waits for others and takes nothing from them.

    Operands and results go over connections of the device's own making, so Dask would only waste round trips on
    carrying receipts about. The scheduler plugin ships `shipped()`, which has no dependencies left; any other
    scheduler runs the task as it stands.
    """

    place: Literal["server", "device"]
    rank: int
    device: str | None
    work: Work
    filler: bool

    __slots__ = ("device", "filler", "place", "rank", "work")

    def __init__(
        self,
        key: Key,
        func: Callable[..., Any],
        /,
        *args: Any,
        after: Iterable[Key] = (),
        place: Literal["server", "device"] = "server",
        rank: int = 0,
        device: str | None = None,
        work: Work = NO_WORK,
        filler: bool = False,
    ) -> None:
        super().__init__(key, func, *args)
        self._dependencies = frozenset(after)
        self.place = place
        self.rank = rank
        self.device = device
        self.work = work
        self.filler = filler

    def __call__(self, values: Any = ()) -> Any:
        """Run it; what it waited for is not looked at."""
        return self.func(*self.args)

    def __dask_tokenize__(self) -> object:
        """Its key says what it is: run, step and number. Hashing the rest would cost the scheduler a third more."""
        return type(self).__name__, self.key

    @property
    def block_fusion(self) -> bool:
        """Never fused with a neighbour: where it runs is part of what it means."""
        return True

    def shipped(self) -> Task:
        """The same work without dependencies."""
        return Task(self.key, self.func, *self.args)

    def copy(self) -> OrderedTask:
        """An equal task."""
        return self.substitute({})

    def substitute(self, subs: dict[Any, Any], key: Key | None = None) -> OrderedTask:
        """The same task with keys renamed."""
        return OrderedTask(
            self.key if key is None else key,
            self.func,
            *self.args,
            after=[getattr(subs.get(k, k), "key", subs.get(k, k)) for k in self._dependencies],
            place=self.place,
            rank=self.rank,
            device=self.device,
            work=self.work,
            filler=self.filler,
        )

    def also_after(self, key: Key) -> OrderedTask:
        """The same task, waiting for one more."""
        task = self.copy()
        task._dependencies = self._dependencies | {key}
        return task


def run_round(run: str, step: int, number: int) -> None:
    """Server task: one round of a step."""
    _server().run_round(run, step, number)


def finish_step(run: str, step: int) -> dict[str, Any]:
    """Server task: the end of a step; its record is what the client waits for."""
    record: dict[str, Any] = _server().finish_step(run, step)
    return record


def mend_parcel(parcel: ParcelSpec, kernel: str, cores: int) -> int:
    """Server task: what a lost device had not delivered of a parcel, by the kernel that it had; how many tiles."""
    made: int = _server().mend(parcel, kernel, cores)
    return made


def read_block(run: str, step: int, job: int, rows: Range, cols: Range) -> Any:
    """Server task: one block of a gathered gemm, as an array."""
    return _server().read_block(run, step, job, rows, cols)


def stage_product(run: str, gemm: Gemm, tiles: Sequence[Tile], a: Sequence[Any], b: Sequence[Any]) -> Any:
    """Server task: both operands of a product of dask arrays, ready to be sliced."""
    return _server().stage_product(run, gemm, tiles, a, b)


def _server() -> Any:
    """The server's own state, in the process that runs this task."""
    server = get_worker().extensions.get("cleave")
    if server is None:
        raise ClusterError(
            "this task belongs on the cleave server, and this worker is none; "
            "start the scheduler with --preload cleave_dask.runtime.scheduler so that tasks find it"
        )
    return server

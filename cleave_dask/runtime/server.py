"""The server's side: a Dask worker that keeps models, hands out operand slices and takes in tiles. Preload.

    dask worker ADDRESS --host 127.0.0.1 --preload cleave_dask.runtime.server --nthreads 1 --memory-limit 0

Weights, optimizer state and activations live in this process. Devices reach it with `cleave_pull`, `cleave_await` and
`cleave_push`; the client with the other `cleave_*` calls. A round of a step runs as soon as its tiles are in, at the
latest when its Dask task asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from secrets import randbits
from time import time
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from dask.system import CPU_COUNT
from distributed import Worker
from distributed.comm import Comm
from distributed.protocol import to_serialize

from cleave_dask import config
from cleave_dask._version import __version__
from cleave_dask.errors import CleaveError, InputError, StepError
from cleave_dask.fleet.devices import LEAST_PACE
from cleave_dask.graph.ir import Gemm, Range
from cleave_dask.planning.trust import Trust
from cleave_dask.planning.values import Plan, Tile
from cleave_dask.runtime.admission import ServerAdmission
from cleave_dask.runtime.bells import Bell
from cleave_dask.runtime.kernels import Kernel, calm_products, load_kernel, measure_flops, threads
from cleave_dask.runtime.lowering import lower
from cleave_dask.runtime.optimizers import unpack
from cleave_dask.runtime.porters import Porters
from cleave_dask.runtime.probes import cleave_probe_down, cleave_probe_up
from cleave_dask.runtime.roles import Peer
from cleave_dask.runtime.server_desk import make_desk
from cleave_dask.runtime.server_gathering import Array, Attempt, TileRejected
from cleave_dask.runtime.server_mending import mend
from cleave_dask.runtime.server_products import Blocks, Product, joined
from cleave_dask.runtime.server_saving import Limits, restore_training, save_training
from cleave_dask.runtime.server_training import Settings, Training
from cleave_dask.runtime.server_watching import Watch
from cleave_dask.runtime.tiles import COMING, ParcelSpec
from cleave_dask.runtime.wire import is_hollow, to_wire
from cleave_dask.runtime.wire_torch import from_wire

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ServerRuntime:
    """Everything the server keeps, by the name of the run it belongs to."""

    training_type = Training

    def __init__(self, worker: Worker, trust: Trust) -> None:
        self.worker = worker
        self.trainings: dict[str, Training] = {}
        self.products: WeakValueDictionary[str, Product] = WeakValueDictionary()  # Dask owns them, as task results
        self.watches: WeakKeyDictionary[Training, Watch] = WeakKeyDictionary()  # what pages look at
        self.trust = trust
        self._kernels: dict[str, Kernel] = {}  # of lost devices
        self._names: WeakKeyDictionary[Comm, str] = WeakKeyDictionary()
        self.porters: Porters | None = None  # who talks with devices, if there are several processes
        self.copies = ThreadPoolExecutor(2, thread_name_prefix="cleave-copy")  # slicing and gathering, off the loop
        self.rounds = ThreadPoolExecutor(1, thread_name_prefix="cleave-round")  # run before they are asked for
        self.rounds.submit(torch.ones(1).sum)  # a thread keeps the number of threads that torch has when it begins
        self.bell = Bell()  # rung when there are new values, or a step is over
        calls: tuple[Callable[..., Any], ...] = (
            self.cleave_pull,
            self.cleave_await,
            self.cleave_push,
            self.cleave_wanted,
            self.cleave_clock,
            cleave_probe_down,
            cleave_probe_up,
            self.cleave_open,
            self.cleave_put,
            self.cleave_optimizer,
            self.cleave_program,
            self.cleave_begin,
            self.cleave_get,
            self.cleave_trace,
            self.cleave_watch,
            self.cleave_save,
            self.cleave_restore,
            self.cleave_close,
        )
        worker.handlers.update({call.__name__: call for call in calls})

    # What devices call

    async def cleave_pull(
        self, run: str, step: int, job: int, operand: int, first: Range, second: Range
    ) -> dict[str, Any]:
        """An operand slice; no parts of it if nobody needs it any more."""
        parts, axis = await self.off_loop(self.sliced, run, step, job, operand, first, second)
        return {"parts": [to_serialize(part) for part in parts], "axis": axis}

    async def cleave_await(
        self, comm: Comm, run: str, step: int, job: int, operand: int, device: str, **ranges: Range
    ) -> dict[str, Any]:
        """An operand slice that is asked for ahead, once its numbers are there; first a word that it is coming."""
        await self.published(run, step, job, operand, self._identity(comm, device), lambda: not comm.closed())
        await comm.write(COMING)
        return await self.cleave_pull(run, step, job, operand, **ranges)

    async def cleave_push(
        self,
        comm: Comm,
        run: str,
        step: int,
        job: int,
        tile: int,
        device: str,
        arrays: list[Array],
        pull_seconds: float,
        compute_seconds: float,
        timing: dict[str, Any] | None = None,
        moved: dict[str, tuple[int, float]] | None = None,
    ) -> dict[str, Any]:
        """A tile from a device, with how long it waited for operands and multiplied, and what its links carried."""
        place = run, step, job, tile
        told = {"pull_seconds": pull_seconds, "compute_seconds": compute_seconds, "timing": timing, "moved": moved}
        return await self.push(place, arrays, self._identity(comm, device), arrived=self.cleave_clock(), **told)

    async def cleave_wanted(self, run: str, step: int, job: int, tiles: list[int]) -> list[int]:
        """Which of these tiles nobody has delivered yet: asked by a device that takes over a parcel."""
        try:
            return await self.off_loop(self._run(run).wanted, step, job, tiles)
        except StepError:
            return []  # it is over

    def cleave_clock(self) -> float:
        """Seconds on this server's clock, by which devices time what they send."""
        return time()

    # What the client calls

    async def cleave_open(self, run: str, client: str, settings: dict[str, Any], random_state: bytes) -> None:
        """A new training, still without weights; those of clients that are gone make room for it."""
        present = set(await self.worker.scheduler.cleave_clients())
        for name, training in list(self.trainings.items()):
            if training.client not in present:
                logger.info("Run %s is dropped: its client %s has left", name, training.client)
                self.cleave_close(name)
        self.trainings[run] = self.training_type(run, client, Settings(**settings), random_state)

    def cleave_put(self, run: str, name: str, array: Array, dtype: str, role: str) -> None:
        """One weight or buffer; `role` is "param", "frozen" or "buffer"."""
        if is_hollow(array):
            raise InputError(
                f"{name!r} has no numbers: the module is on the meta device, which trains on hollow devices"
            )
        tensor = from_wire(array, dtype).clone()  # the frames of a message are read-only
        weight = torch.nn.Parameter(tensor, requires_grad=role == "param") if role != "buffer" else tensor
        self._training(run).weights[name] = weight

    def cleave_optimizer(self, run: str, packed: bytes) -> None:
        """The optimizer and learning rate schedule over the weights that are here."""
        training = self._training(run)
        training.optimizer, training.lr_schedule = unpack(packed, training.weights)

    def cleave_program(self, run: str, plan: Plan) -> None:
        """The program of a step and where its tiles go."""
        self._training(run).load(lower(plan.graph, plan))
        if self.porters is not None:
            self.porters.forget_sizes()

    def cleave_begin(self, run: str, step: int, batch: dict[str, tuple[Array, str]], first: bool) -> None:
        """Start a step on a batch, an array and its dtype for each source; `first` of an update, or a further one."""
        tensors = {source: from_wire(array, dtype) for source, (array, dtype) in batch.items()}
        self._training(run).begin(step, tensors, first=first)
        self.bell.ring()

    def cleave_get(self, run: str, name: str) -> dict[str, Any]:
        """One weight or buffer as it is now."""
        tensor = self._training(run).weights[name].detach()
        return {"array": to_serialize(to_wire(tensor)), "dtype": str(tensor.dtype).removeprefix("torch.")}

    def cleave_trace(self, run: str, since: int) -> dict[str, Any]:
        """The rows of the trace from number `since` on, and the number to ask for next."""
        trace, following = self._training(run).trace.since(since)
        columns = {name: to_serialize(column) for name, column in trace.columns.items()}
        return {"columns": columns, "names": dict(trace.names), "next": following}

    async def cleave_watch(self, run: str | None, since: dict[str, int]) -> dict[str, Any]:
        """What a page shows of the newest run, as far as it is new; `since` says what the page has of run `run`."""
        newest = max(self.trainings.values(), key=lambda training: training.began, default=None)
        if newest is None:
            return {"run": None}
        watch = self.watches.get(newest)
        if watch is None:
            watch = self.watches[newest] = Watch(newest)
        known = since if newest.name == run else dict.fromkeys(since, 0)
        answer = await self.off_loop(partial(watch.look, **known))
        if "rows" in answer:
            answer["rows"] = {name: (str(column.dtype), column.tobytes()) for name, column in answer["rows"].items()}
        return answer

    async def cleave_save(self, run: str, folder: str, limits: dict[str, Any]) -> dict[str, Any]:
        """Write weights and optimizer state to a checkpoint."""
        events = await self.worker.scheduler.events(topic="cleave")
        return await self.off_loop(save_training, self._training(run), folder, Limits(**limits), events)

    async def cleave_restore(self, run: str, folder: str, step: int | None, limits: dict[str, Any]) -> dict[str, Any]:
        """Read weights and optimizer state from a checkpoint."""
        answer = await self.off_loop(restore_training, self._training(run), folder, step, Limits(**limits))
        found = answer["interrupted"]
        if found is not None:
            found.update({name: to_serialize(found[name]) for name in ("ranges", "owner")})
        return answer

    def cleave_close(self, run: str) -> None:
        """Forget a run."""
        training = self.trainings.pop(run, None)
        if training is not None:
            training.close()
            self.bell.ring()

    # What its own Dask tasks call

    def run_round(self, run: str, step: int, number: int) -> None:
        """One round of a step."""
        try:
            with torch.no_grad():
                self._training(run).run_round(step, number)
        finally:
            self.bell.ring()

    def finish_step(self, run: str, step: int) -> dict[str, Any]:
        """The end of a step."""
        try:
            return self._training(run).finish(step)
        finally:
            self.bell.ring()

    def mend(self, parcel: ParcelSpec, kernel: str, cores: int) -> int:
        """What a lost device had not delivered of a parcel, made here as by so many cores; how many tiles."""
        with threads(cores):
            return mend(self._run(parcel.run), parcel, self._kernel(kernel))

    def read_block(self, run: str, step: int, job: int, rows: Range, cols: Range) -> Array:
        """One block of a gathered gemm."""
        return self._run(run).gathering(step, job).block(rows, cols)

    def stage_product(self, run: str, gemm: Gemm, tiles: Sequence[Tile], a: Blocks, b: Blocks) -> Product:
        """Offer a product's operands to devices for as long as Dask keeps it."""
        product = Product(run, gemm, tiles, {"a": joined(a, gemm.dtype), "b": joined(b, gemm.dtype)})
        self.products[run] = product
        return product

    # What porters ask (server_desk), and what is told of them

    async def published(
        self, run: str, step: int, job: int, operand: int, identity: str, listens: Callable[[], bool]
    ) -> None:
        """Have a device wait until an operand is there, or it does not listen any more."""
        await self.bell.until(lambda: not listens() or self._run(run).published(step, job, operand), identity)
        if not listens():
            raise StepError(f"{identity} has left")

    def sliced(
        self, run: str, step: int, job: int, operand: int, first: Range, second: Range
    ) -> tuple[list[Array], int]:
        """An operand slice in parts, and the axis along which they are joined."""
        return self._run(run).slice(step, job, operand, ((first[0], first[1]), (second[0], second[1])))

    async def push(
        self, place: tuple[str, int, int, int], arrays: list[Array], identity: str, **told: Any
    ) -> dict[str, Any]:
        """Take in a tile of this run, step, job and number from whoever has been identified."""
        run, step, job, tile = place
        attempt = Attempt.of(identity, **told)
        check = self.trust.checks(identity, chance=randbits(53) / 2**53)
        try:
            if identity in self.trust.quarantined:
                raise StepError(f"{identity} is in quarantine: {self.trust.quarantined[identity]}")
            await self.off_loop(partial(self._run(run).accept, step, job, tile, arrays, attempt, check=check))
            self._advance(run, step, job)
        except TileRejected as error:
            await self._quarantine(identity, f"step {step}: {error}")
            return {"accepted": False, "why": str(error)}
        except StepError as error:
            return {"accepted": False, "why": str(error)}
        if check:
            self.trust.passed(identity)
        return {"accepted": True}

    def expected(self, run: str, step: int, job: int, tile: int) -> int | None:
        """Bytes of a tile that somebody waits for."""
        try:
            return self._run(run).tile_nbytes(step, job, tile)
        except StepError:
            return None  # it is over

    async def off_loop(self, work: Callable[..., Result], *args: Any) -> Result:
        """Numpy and torch work in a thread, so that the event loop stays free for transfers."""
        return await asyncio.get_running_loop().run_in_executor(self.copies, work, *args)

    async def porters_changed(self) -> None:
        """Tell the scheduler where devices are to go."""
        if self.porters is not None:
            await self.worker.scheduler.cleave_porters(server=self.worker.address, addresses=self.porters.addresses)

    # Inside

    def _run(self, run: str) -> Training | Product:
        found = self.trainings.get(run) or self.products.get(run)
        if found is None:
            raise StepError(f"the server knows no run '{run}'; it was closed, or the server has restarted")
        return found

    def _advance(self, run: str, step: int, job: int) -> None:
        """Run the round of a job that has all of its tiles, before Dask has heard of the last one and asks for it."""
        number = self._run(run).due(step, job)
        if number is not None:
            self.rounds.submit(self.run_round, run, step, number)  # what it raises, it raises again for its task

    def _kernel(self, name: str) -> Kernel:
        """A kernel, as devices have them."""
        if name not in self._kernels:
            self._kernels[name] = load_kernel(name)
        return self._kernels[name]

    def _training(self, run: str) -> Training:
        training = self._run(run)
        assert isinstance(training, Training)
        return training

    def _identity(self, comm: Comm, device: str) -> str:
        """Who is at the other end of a connection: by its certificate, else the name that it gave there first."""
        peer: Peer | None = getattr(comm, "peer", None)
        return peer.name if peer is not None and peer.role == "device" else self._names.setdefault(comm, str(device))

    async def _quarantine(self, identity: str, why: str) -> None:
        """A device has sent a wrong tile: it gets no more, and what it was believed is done again."""
        if self.trust.caught(identity, why):
            logger.error("%s is in quarantine: %s", identity, why)
            for training in self.trainings.values():
                training.distrust(identity)
            await self.worker.scheduler.cleave_quarantine(device=identity, why=why)


_ADMISSION = ServerAdmission()

_SECONDS = 0.05  # that the server measures its speed for, with one thread as it makes tiles of lost devices


async def dask_setup(worker: Worker) -> None:
    """Make a stock worker the server."""
    try:
        trust, porters = Trust(config.get("verify")), config.whole("server.processes") - 1
        pace, shared_cores = config.number("server.pace", least=LEAST_PACE), config.whole_or_none("server.shared_cores")
        trust.quarantined.update(_ADMISSION.guard.quarantined())
    except CleaveError as error:  # Dask would only log it, and go on as a worker that is no server
        raise SystemExit(f"the server cannot start: {error}") from error
    calm_products()
    runtime = ServerRuntime(worker, trust)
    worker.extensions["cleave"] = runtime
    _ADMISSION.attach(worker, runtime.expected)
    if porters:
        runtime.porters = Porters(porters, worker, worker.security, make_desk(runtime), runtime.porters_changed)
        runtime.porters.start()
    flops = measure_flops(load_kernel("numpy"), seconds=_SECONDS)
    worker.startup_information["cleave"] = lambda _: {
        "role": "server",
        "version": __version__,
        "flops": flops,
        "cores": CPU_COUNT,
        "pace": pace,
        "shared_cores": shared_cores,
        "porters": [] if runtime.porters is None else runtime.porters.addresses,
    }


async def dask_teardown(worker: Worker) -> None:
    """Stop the copying threads, and the porters."""
    runtime: ServerRuntime = worker.extensions["cleave"]
    runtime.copies.shutdown(wait=False, cancel_futures=True)
    runtime.rounds.shutdown(wait=False, cancel_futures=True)
    if runtime.porters is not None:
        await runtime.porters.close()

"""The scheduler's side: tiles go to devices, everything else to the server. Preload of a stock scheduler.

    dask scheduler --host 127.0.0.1 --preload cleave_dask.runtime.scheduler

The plugin turns Dask's events into events of the dispatcher and its placements into Dask's. It takes over the one
method through which every task finds its worker, and ships a step's tasks without their dependencies: devices fetch
operands from the server only, and nobody ever fetches anything from a device.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from time import monotonic
from typing import Any, TypeVar, cast

import distributed
from dask._task_spec import Task
from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time as wall_clock
from distributed.protocol.serialize import ToPickle
from distributed.scheduler import TaskState, WorkerState
from tornado.ioloop import PeriodicCallback

from cleave_dask import config
from cleave_dask._version import __version__
from cleave_dask.errors import CleaveError
from cleave_dask.fleet.devices import Fleet
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.mending import mends
from cleave_dask.planning.parcels import Figures
from cleave_dask.runtime.admission import SchedulerAdmission
from cleave_dask.runtime.dealing import Dealing
from cleave_dask.runtime.guarding import Guard
from cleave_dask.runtime.orders import write_order
from cleave_dask.runtime.spreading import Spread
from cleave_dask.runtime.tasks import OrderedTask, mend_parcel
from cleave_dask.runtime.turns import Measurements

logger = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two looks for late parcels."""

MENDED = ("numpy", "torch")
"""Kernels that the server has too: what it makes with them is what a device would have made."""

_TAKEN_OVER = ("is_rootish", "decide_worker_non_rootish", "_task_to_msg")
"""Methods of Dask's scheduler that the plugin replaces."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _fatal(hook: Hook) -> Hook:
    """An exception in a hook ends all steps with an error; Dask would log it and place tasks by its own rules."""

    @wraps(hook)
    def guarded(self: SteeringPlugin, *args: Any, **kwargs: Any) -> Any:
        if self.broken is None:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self.broken = f"{hook.__name__} failed with {type(error).__name__}: {error}"
                logger.exception("Steering is broken, nothing is placed any more: %s", self.broken)
        return None

    return cast(Hook, guarded)


class SteeringPlugin(SchedulerPlugin):
    """Places every task of the cluster."""

    name = "cleave-steering"

    def __init__(self, scheduler: Scheduler, guard: Guard) -> None:
        self.scheduler = scheduler
        self.guard = guard
        self.dispatcher = Dispatcher(config.whole("device.window"))
        self.dealing = Dealing(scheduler, self.dispatcher)
        self.broken: str | None = None  # why nothing is placed any more
        self.late: Counter[str] = Counter()  # parcels taken from late devices, by device
        self.quarantined = guard.quarantined()  # devices that sent a wrong tile, and what was wrong
        self._devices: dict[str, WorkerState] = {}  # by name
        self._server: WorkerState | None = None
        self.spread = Spread()  # of devices over the server's addresses
        self._granted: dict[Key, WorkerState] = {}
        self._sent: set[Key] = set()  # parcels that some device has had
        self._mending: dict[Key, tuple[str, int]] = {}  # what the server makes; kernel and cores of who was lost
        self._pumping = False
        self._stock_message = scheduler._task_to_msg
        for method, ours in zip(_TAKEN_OVER, (lambda ts: False, self.decide, self.message), strict=True):
            setattr(scheduler, method, ours)
        for answer in (self.info, self.clients, self.quarantine, self.porters):
            scheduler.handlers[f"cleave_{answer.__name__}"] = answer
        self._stock_status = scheduler.stream_handlers["worker-status-change"]
        scheduler.stream_handlers["worker-status-change"] = self.status_changed
        ticking = PeriodicCallback(self.tick, TICK * 1000)
        scheduler.periodic_callbacks["cleave-tick"] = ticking
        ticking.start()

    # What clients and the server ask

    def info(self) -> dict[str, Any]:
        """What a client must know of the cluster before it trains on it, and while it waits."""
        roles: dict[str, dict[str, Any]] = {"server": {}, "device": {}, "stranger": {}}
        for worker in self.scheduler.workers.values():
            facts = worker.extra.get("cleave") or {"role": "stranger"}
            running = worker in self.scheduler.running
            if facts["role"] == "device" and str(worker.name) in self.quarantined:
                continue
            roles[facts["role"]][str(worker.name)] = {**facts, "address": worker.address, "running": running}
        silent = [name for name in self.dispatcher.devices if self.dispatcher.silent(name)]
        state = {"broken": self.broken, "waiting": self.dispatcher.waiting, "silent": silent}
        more = {"handovers": self.late.total(), "late": dict(self.late), "quarantined": self.quarantined}
        return {"version": __version__, **roles, **state, **more}

    def clients(self) -> list[str]:
        """Who is connected: a run whose client is not among them is nobody's."""
        return list(self.scheduler.clients)

    def quarantine(self, device: str, why: str) -> None:
        """A device gets nothing any more, and others do what it has; also if it, or the scheduler, comes back."""
        self.quarantined.setdefault(device, why)
        logger.error("%s is in quarantine and gets no more tiles: %s", device, why)
        if device in self._devices:
            parcels = self.dispatcher.flying(device)
            self._gone(device)
            self._take_back(parcels, "cleave-quarantine")
        self.guard.quarantine(device, why)
        self._tell("quarantined", device, why=why)

    def porters(self, server: str, addresses: list[str]) -> None:
        """The server has other porters than when it joined."""
        if self._server is not None and self._server.address == server:
            self._server.extra["cleave"] = {**self._server.extra["cleave"], "porters": addresses}
            self._serve(self._server)

    # What Dask calls

    @_fatal
    def decide(self, ts: TaskState) -> WorkerState | None:
        """The worker for a task; None parks it until one has room."""
        spec = ts.run_spec
        if not isinstance(spec, OrderedTask) or spec.place == "server":
            return self._server
        if ts.key in self._mending and self._server is not None:
            return self._server
        granted = self._granted.pop(ts.key, None)
        if granted is not None and self._present(granted):
            return granted
        for _ in range(2):  # a device whose worker is gone is forgotten, and the parcel is somebody else's
            device = self._offer(ts)
            if device is None:
                break
            if self._present(self._devices[device]):
                return self._devices[device]
            self._gone(device)
        self._pump_soon()
        return None

    def message(self, ts: TaskState) -> dict[str, Any]:
        """What a worker is sent: a step's task without the dependencies that only ordered it."""
        message = self._message(ts)
        if message is None:
            raise RuntimeError(self.broken)
        return message

    @_fatal
    def _message(self, ts: TaskState) -> dict[str, Any] | None:
        message: dict[str, Any] = self._stock_message(ts)
        spec = ts.run_spec
        if isinstance(spec, OrderedTask):
            message.update(who_has={}, nbytes={}, run_spec=ToPickle(spec.shipped()))
            if ts.key in self._mending and ts.processing_on is self._server:
                message["run_spec"] = ToPickle(Task(ts.key, mend_parcel, spec.args[0], *self._mending[ts.key]))
            elif spec.place == "device":
                assert ts.processing_on is not None
                name = str(ts.processing_on.name)
                planned, address = name == spec.device, self.spread.of(name)
                message["run_spec"] = write_order(spec.args[0], address, ts.key in self._sent, planned=planned)
                self._sent.add(ts.key)
        return message

    @_fatal
    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A device joins the dispatcher; the server and strangers do not."""
        ws = scheduler.workers[worker]
        facts = ws.extra.get("cleave")
        if facts is None:
            logger.warning(
                "Worker %s joined without --preload cleave_dask.runtime.device and gets no tiles; "
                "install cleave-dask there and start it with that option",
                ws.name,
            )
        elif facts["role"] == "server":
            self._serve(self._server or ws)
        elif facts["role"] == "device":
            self._join(str(ws.name), ws, facts)
        self._pump_soon()

    @_fatal
    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """A worker is gone; its parcels have come back through `decide` already."""
        if self._server is not None and self._server.address == worker:
            others = (ws for ws in scheduler.workers.values() if (ws.extra.get("cleave") or {}).get("role") == "server")
            self._serve(next(others, None))
        for name in [name for name, ws in self._devices.items() if ws.address == worker and not self._present(ws)]:
            self._gone(name)
        self._pump_soon()

    @_fatal
    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **_: Any) -> None:
        """Rank the tasks of a step: critical path first, gradients of weights as filler."""
        generation = scheduler.generation
        for key in tasks:
            ts = scheduler.tasks[key]
            if isinstance(ts.run_spec, OrderedTask):
                ts.priority = (0, generation, ts.run_spec.rank)

    @_fatal
    def transition(self, key: Key, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Keep the dispatcher's view of parcels in flight true, and accepted tiles safe."""
        holder = self.dispatcher.holder(key) if start == "processing" else None
        if holder is not None:
            seconds = self.dispatcher.expected(key, holder)
            self.dispatcher.parcel_ended(key, monotonic(), done=finish == "memory")
            if finish == "released" and not self._present(self._devices[holder]):
                self._lost(key, holder, seconds)
            self._pump_soon()
        if start == "processing" and finish == "memory" and key in self._sent:
            self._secure(key)
        if finish == "forgotten":
            self.dispatcher.parcel_forgotten(key)
            self._granted.pop(key, None)
            self._mending.pop(key, None)
            self._sent.discard(key)

    @_fatal
    def status_changed(self, status: str, worker: str | WorkerState, stimulus_id: str) -> None:
        """A device was paused or resumed: whoever is told so next finds that it gets tiles no more, or again."""
        self._stock_status(status, worker, stimulus_id)
        ws = self.scheduler.workers.get(worker) if isinstance(worker, str) else worker
        if ws is not None and self._devices.get(str(ws.name)) is ws:
            self._hear_pause(str(ws.name), ws)
            self._pump_soon()

    @_fatal
    def tick(self) -> None:
        """Hear who is alive; take parcels back from devices that are late."""
        now, clock = monotonic(), wall_clock()
        for name, ws in self._devices.items():
            self.dispatcher.device_heard(name, now - (clock - ws.last_seen))
        late = self.dispatcher.tick(now)
        for handover in late:
            logger.warning("%s is late with %s: it goes to another device too", handover.device, handover.parcel)
        for name, parcels in Counter(handover.device for handover in late).items():
            self.late[name] += parcels
            self._tell("late", name, parcels=parcels)
        self._take_back([handover.parcel for handover in late], "cleave-late")

    @_fatal
    def device_measured(self, ws: WorkerState) -> None:
        """A device knows more of itself than when it joined."""
        if self._devices.get(str(ws.name)) is ws:
            self._join(str(ws.name), ws, ws.extra["cleave"])

    # Inside

    def _serve(self, ws: WorkerState | None) -> None:
        """Take a worker for the server from now on, with its porters, or by itself if it has none."""
        self._server = ws
        self.spread.offer([] if ws is None else ws.extra["cleave"].get("porters") or [ws.address])

    def _take_back(self, parcels: Sequence[Key], stimulus: str) -> None:
        """Have parcels in flight placed anew."""
        recommendations: dict[Key, Any] = {key: "released" for key in parcels if key in self.scheduler.tasks}
        if recommendations:
            self.scheduler.transitions(recommendations, stimulus)
        self._pump_soon()

    def _offer(self, ts: TaskState) -> str | None:
        """A parcel, perhaps dealt anew, is ready; the device that it is sent to at once, if any."""
        spec = self.dealing.dealt(ts)
        place = spec.rank, spec.device, spec.work
        return self.dispatcher.parcel_ready(ts.key, *place, monotonic(), filler=spec.filler)

    def _join(self, name: str, ws: WorkerState, facts: dict[str, Any]) -> None:
        if name in self.quarantined:
            logger.warning("Device %s gets no tiles, it is in quarantine: %s", name, self.quarantined[name])
            return
        try:
            (device,) = Fleet.from_workers({name: facts}).devices
        except CleaveError as error:
            logger.warning("Device %s gets no tiles: %s", name, error)
            return
        if self._devices.get(name) is not ws:
            self._tell("joined", name)
        self._devices[name] = ws
        self.dispatcher.device_joined(name, Figures.of(device), monotonic())
        self._hear_pause(name, ws)

    def _hear_pause(self, name: str, ws: WorkerState) -> None:
        self.dispatcher.device_paused(name, ws not in self.scheduler.running)

    def _lost(self, key: Key, device: str, seconds: float) -> None:
        """A device is gone that was to take `seconds` for a parcel: the server makes it, if it soon has it done."""
        spec, facts = self.scheduler.tasks[key].run_spec, self._devices[device].extra["cleave"]
        if self._server is None or facts.get("kernel") not in MENDED or not isinstance(spec, OrderedTask):
            return
        here, cores = self._server.extra["cleave"], int(facts.get("cores", 1))
        if cores <= here["cores"] and mends(spec.work, seconds, here["flops"]):
            self.dispatcher.parcel_forgotten(key)
            self._mending[key] = facts["kernel"], cores

    def _secure(self, key: Key) -> None:
        """A tile that the server has accepted is the server's: its device may leave, and nothing is computed again.

        Only the receipt was ever on the device, and nobody fetches that, so the replica need not be real.
        """
        if self._server is not None:
            self.scheduler.add_replica(self.scheduler.tasks[key], self._server)

    def _present(self, ws: WorkerState) -> bool:
        return self.scheduler.workers.get(ws.address) is ws

    def _tell(self, what: str, device: str, **more: Any) -> None:
        """An event for whoever looks: Dask keeps it under the topic "cleave"."""
        self.scheduler.log_event("cleave", {"action": what, "device": device, **more})

    def _gone(self, name: str) -> None:
        self._tell("left", name)
        del self._devices[name]
        self.spread.left(name)
        waited = self.dispatcher.urgent(name)
        self.dispatcher.device_left(name)
        for key in waited:
            self.dispatcher.parcel_forgotten(key)
            self._offer(self.scheduler.tasks[key])

    def _pump_soon(self) -> None:
        """Place parcels as soon as Dask is through with the transitions under way."""
        if not self._pumping:
            self._pumping = True
            self.scheduler.loop.add_callback(self._pump)

    @_fatal
    def _pump(self) -> None:
        self._pumping = False
        recommendations: dict[Key, Any] = dict.fromkeys(self.dealing.added, "waiting")
        self.dealing.added.clear()
        if recommendations:
            self.scheduler.transitions(recommendations, "cleave-deal")
        recommendations = {}
        for key, device in reversed(self.dispatcher.settle(monotonic())):  # Dask takes the last one first
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                self.dispatcher.parcel_forgotten(key)
                continue
            self._granted[key] = self._devices[device]
            recommendations[key] = "processing"
        if recommendations:
            self.scheduler.transitions(recommendations, "cleave-pump")


_ADMISSION = SchedulerAdmission()


def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin and the settings that it relies on; a scheduler that it does not fit is stopped.

    Dask only logs what a preload raises, and would then place tiles by its own rules.
    """
    missing = [method for method in _TAKEN_OVER if not callable(getattr(scheduler, method, None))]
    if missing:
        raise SystemExit(
            f"cleave-dask {__version__} steers through Scheduler.{missing[0]}, which distributed "
            f"{distributed.__version__} does not have; install the distributed that cleave-dask asks for"
        )
    stealing = scheduler.extensions.pop("stealing", None)
    for name, plugin in list(scheduler.plugins.items()):
        if plugin is stealing:
            scheduler.remove_plugin(name)  # it would move tiles to the server
    memory_manager = scheduler.extensions.get("amm")
    if memory_manager is not None:
        memory_manager.stop()  # it would drop the server's own results
    scheduler.allowed_failures = 2**31  # a flaky link is never a bad tile
    scheduler.no_workers_timeout = None  # a step waits for devices to come back
    try:
        steering = SteeringPlugin(scheduler, _ADMISSION.guard)
    except (CleaveError, ValueError) as error:
        raise SystemExit(f"the scheduler cannot steer: {error}") from error
    Measurements(scheduler, steering.spread.of, measured=steering.device_measured)
    _ADMISSION.attach(scheduler)
    scheduler.add_plugin(steering)
    for worker in scheduler.workers:  # who joined while the preload was being imported
        steering.add_worker(scheduler, worker)

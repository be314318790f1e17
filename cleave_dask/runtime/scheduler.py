"""The scheduler's side: tiles go to devices, everything else to the server. Preload of a stock scheduler.

    dask scheduler --preload cleave_dask.runtime.scheduler

The plugin turns Dask's events into events of the dispatcher and its placements into Dask's. It takes over the one
method through which every task finds its worker, and ships a step's tasks without their dependencies: devices fetch
operands from the server only, and nobody ever fetches anything from a device.
"""

from __future__ import annotations

import logging
from typing import Any

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import ToPickle
from distributed.scheduler import TaskState, WorkerState

from cleave_dask import config
from cleave_dask._version import __version__
from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.runtime.tasks import OrderedTask

logger = logging.getLogger(__name__)


class SteeringPlugin(SchedulerPlugin):
    """Places every task of the cluster."""

    name = "cleave-steering"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.dispatcher = Dispatcher(int(config.get("device.window")))
        self.devices: dict[str, WorkerState] = {}  # by name
        self._granted: dict[Key, WorkerState] = {}
        self._pumping = False
        self._stock_message = scheduler._task_to_msg
        taken_over = {"is_rootish": lambda ts: False, "decide_worker_non_rootish": self.decide}
        for method, ours in {**taken_over, "_task_to_msg": self.message}.items():
            setattr(scheduler, method, ours)
        scheduler.handlers.update(cleave_info=self.info, cleave_clients=self.clients)

    def info(self) -> dict[str, Any]:
        """What a client must know of the cluster before it trains on it."""
        roles: dict[str, dict[str, Any]] = {"server": {}, "device": {}, "stranger": {}}
        for worker in self.scheduler.workers.values():
            facts = worker.extra.get("cleave") or {"role": "stranger"}
            roles[facts["role"]][str(worker.name)] = {**facts, "address": worker.address}
        return {"version": __version__, **roles}

    def clients(self) -> list[str]:
        """Who is connected: a run whose client is not among them is nobody's."""
        return list(self.scheduler.clients)

    def server(self) -> WorkerState | None:
        """The worker that is the server, if it is there."""
        servers = (ws for ws in self.scheduler.running if (ws.extra.get("cleave") or {}).get("role") == "server")
        return min(servers, key=lambda ws: ws.address, default=None)

    def decide(self, ts: TaskState) -> WorkerState | None:
        """The worker for a task; None parks it until one has room."""
        spec = ts.run_spec
        if not isinstance(spec, OrderedTask) or spec.place == "server":
            return self.server()
        granted = self._granted.pop(ts.key, None)
        if granted is not None and self.scheduler.workers.get(granted.address) is granted:
            return granted
        device = self.dispatcher.tile_ready(ts.key, spec.rank, spec.device)
        if device is not None:
            ws = self.devices[device]
            if self.scheduler.workers.get(ws.address) is ws:
                return ws
            self._drop_absent()
            self.dispatcher.tile_ready(ts.key, spec.rank, planned=None)
        self._pump_soon()
        return None

    def message(self, ts: TaskState) -> dict[str, Any]:
        """What a worker is sent: a step's task without the dependencies that only ordered it."""
        message: dict[str, Any] = self._stock_message(ts)
        spec = ts.run_spec
        if isinstance(spec, OrderedTask):
            server = self.server()
            more = (server.address,) if spec.place == "device" and server is not None else ()
            message.update(who_has={}, nbytes={}, run_spec=ToPickle(spec.shipped(*more)))
        return message

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
        elif facts["role"] == "device":
            self.devices[str(ws.name)] = ws
            self.dispatcher.device_joined(str(ws.name))
        self._pump_soon()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """A worker is gone; its tiles have come back through `decide` already."""
        self._drop_absent()
        self._pump_soon()

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **_: Any) -> None:
        """Rank the tasks of a step: critical path first, gradients of weights as filler."""
        generation = scheduler.generation
        for key in tasks:
            ts = scheduler.tasks[key]
            if isinstance(ts.run_spec, OrderedTask):
                ts.priority = (0, generation, ts.run_spec.rank)

    def transition(self, key: Key, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Keep the dispatcher's view of tiles in flight true, and accepted tiles safe."""
        if start == "processing" and key in self.dispatcher.holder:
            self.dispatcher.tile_ended(key)
            self._pump_soon()
            if finish == "memory":
                self._secure(key)
        if finish in ("forgotten", "released"):
            self.dispatcher.tile_forgotten(key)
            self._granted.pop(key, None)

    def _secure(self, key: Key) -> None:
        """A tile that the server has accepted is the server's: its device may leave, and nothing is computed again.

        Only the receipt was ever on the device, and nobody fetches that, so the replica need not be real.
        """
        server = self.server()
        if server is not None:
            self.scheduler.add_replica(self.scheduler.tasks[key], server)

    def _drop_absent(self) -> None:
        for name, ws in list(self.devices.items()):
            if self.scheduler.workers.get(ws.address) is not ws:
                del self.devices[name]
                self.dispatcher.device_left(name)

    def _pump_soon(self) -> None:
        """Place tiles as soon as Dask is through with the transitions under way."""
        if not self._pumping:
            self._pumping = True
            self.scheduler.loop.add_callback(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        self._drop_absent()
        recommendations: dict[Key, Any] = {}
        for key, device in self.dispatcher.placements():
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                self.dispatcher.tile_forgotten(key)
                continue
            self._granted[key] = self.devices[device]
            recommendations[key] = "processing"
        if recommendations:
            self.scheduler.transitions(recommendations, "cleave-pump")


def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin and the settings that it relies on."""
    stealing = scheduler.extensions.pop("stealing", None)
    for name, plugin in list(scheduler.plugins.items()):
        if plugin is stealing:
            scheduler.remove_plugin(name)  # it would move tiles to the server
    memory_manager = scheduler.extensions.get("amm")
    if memory_manager is not None:
        memory_manager.stop()  # it would drop the server's own results
    scheduler.allowed_failures = 2**31  # a flaky link is never a bad tile
    scheduler.no_workers_timeout = None  # a step waits for devices to come back
    steering = SteeringPlugin(scheduler)
    scheduler.add_plugin(steering)
    for worker in scheduler.workers:  # who joined while the preload was being imported
        steering.add_worker(scheduler, worker)

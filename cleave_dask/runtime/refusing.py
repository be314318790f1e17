"""What a device does not do, whoever asks: run functions, take plugins, files or data, unpickle anything.

A machine is lent for tiles, not for the code of a stranger. It multiplies with the kernels of its installed package and
answers everything else with a refusal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from dask._task_spec import Task
from distributed import Worker

from cleave_dask.errors import ClusterError
from cleave_dask.runtime.conversations import WithCluster
from cleave_dask.runtime.decoding import Refused
from cleave_dask.runtime.guarding import CONNECTIONS, install
from cleave_dask.runtime.orders import read_order

logger = logging.getLogger(__name__)

ANSWERED = ("identity", "ping", "versions")
"""Calls that a device answers."""

HEARD = (
    *("cancel-compute", "close", "compute-task", "free-keys", "refresh-who-has", "remove-replicas", "remove-worker"),
    *("steal-request", "worker-status-change"),
)
"""Orders of the scheduler that a device follows."""

POOL = 3 * CONNECTIONS // 4
"""Connections that a device opens at most, so that a cluster never takes it for a flood."""

_WHY = "this device runs nothing but tiles of its installed cleave-dask"


def refuse_all_but_tiles(worker: Worker, run: Callable[..., Any], limit: int) -> None:
    """Make a worker that runs parcels with `run` and nothing else; `limit` is the bytes that one message may have."""
    install()
    converse = partial(WithCluster, limit)
    arguments: dict[str, Any] = worker.connection_args
    arguments["cleave_converse"] = converse
    worker.rpc.limit = POOL
    worker.rpc.semaphore = asyncio.Semaphore(POOL - worker.rpc.open)
    listeners: list[Any] = worker.listeners
    called = partial(WithCluster, 0)  # who calls brings no arrays
    for listener in listeners:
        listener.comm_class = partial(_guarded, listener.comm_class, called)
        listener.abort_handshaking_comms()  # who came before this knows no better, and has no business here
    for call in set(worker.handlers) - set(ANSWERED):
        worker.handlers[call] = _refusal(call)
    for order in set(worker.stream_handlers) - set(HEARD):
        worker.stream_handlers[order] = partial(_ignore, order)
    take_orders(worker, run)
    if worker.nanny:
        logger.warning("A nanny runs what its scheduler sends; start this device with --no-nanny to be safe from that")


def take_orders(worker: Worker, run: Callable[..., Any]) -> None:
    """Have a worker compute parcels with `run`, and nothing else."""
    compute = worker.stream_handlers["compute-task"]
    worker.stream_handlers["compute-task"] = lambda **message: compute(**_only_tiles(message, run))


def _only_tiles(message: dict[str, Any], run: Callable[..., Any]) -> dict[str, Any]:
    """An order to compute, with nothing in it but a parcel; any other becomes a task that says why it is refused."""
    key = message["key"]
    try:
        task = Task(key, run, *read_order(message.get("run_spec")))
    except Refused as why:
        logger.warning("Refused task %s: %s", key, why)
        task = Task(key, refuse_task, str(why))
    return {**message, "run_spec": task, "who_has": {}, "nbytes": {}, "actor": False, "annotations": {}}


def refuse_task(why: str) -> None:
    """What a device runs in place of a task that it does not run."""
    raise ClusterError(f"{_WHY}, and was sent {why}")


def _refusal(call: str) -> Callable[..., None]:
    """What answers a call that a device does not answer; a function, because Dask asks for its name."""

    def refuse(**_: Any) -> None:
        logger.warning("Refused to answer %s", call)
        raise ClusterError(f"{_WHY}; it does not answer {call!r}")

    return refuse


def _ignore(order: str, **_: Any) -> None:
    logger.warning("Ignored the order %s", order)


def _guarded(comm_class: Any, converse: Callable[[], WithCluster], *arguments: Any) -> Any:
    comm = comm_class(*arguments)
    comm.conversation = converse()
    return comm

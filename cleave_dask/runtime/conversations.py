"""What a device may say to the scheduler and to the server, and what a device listens to. No I/O: messages in and out.

Each side knows a short list of operations and, for each, all of its fields. What a device may not decide is put in its
place: its name, its address, the type of its results, its exceptions. A message that is not on the list is `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from distributed.protocol import serialize
from distributed.protocol.serialize import Serialized
from distributed.protocol.utils import host_array

from cleave_dask.errors import ClusterError
from cleave_dask.runtime import checking as check
from cleave_dask.runtime.checking import Check, Message, chosen
from cleave_dask.runtime.decoding import NO_ARRAYS, SKIPPED, Allowance, Refused
from cleave_dask.runtime.probes import LARGEST

PLAIN_PROTOCOL = 4
"""Of pickle, as devices tell in their greeting; they are sent no pickles."""


class Ledger(Protocol):
    """What the scheduler knows of its workers."""

    def address_of(self, name: str) -> str | None:
        """Where the worker of this name is, unless it is the server."""
        ...

    def is_taken(self, address: str) -> bool:
        """Whether a worker is at this address."""
        ...

    def has(self, name: str, key: Any) -> bool:
        """Whether the worker of this name was given this task and has not answered."""
        ...


class Conversation:
    """One connection with a device: a greeting, then calls."""

    calls: Mapping[str, Mapping[str, Check]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.greeted = False

    async def prepare(self, message: Any) -> None:
        """Learn what must be known before a message with arrays can be allowed them."""

    def allow(self, message: Any) -> Allowance:
        """How many bytes of arrays this message may bring."""
        return NO_ARRAYS

    def room(self, nbytes: int) -> memoryview:
        """Where the numbers of an array are read to."""
        room: memoryview = host_array(nbytes)
        return room

    def admit(self, message: Any) -> Any:
        """The message as it is acted on."""
        if not isinstance(message, dict):
            raise Refused(f"a {type(message).__name__} where a message was expected")
        if not self.greeted:
            self.greeted = True
            return greeting(message)
        return self.call(message)

    def call(self, message: Message) -> Message:
        """One call of an operation."""
        told = dict(message)
        op = check.text(told.pop("op", None))
        manner: Message = {name: check.flag(told.pop(name)) for name in ("reply", "close") if name in told}
        told.pop("serializers", None)
        if op == "close":
            return {"op": op, **manner}
        if op not in self.calls:
            raise Refused(f"the operation {op[:40]!r}, which devices have no use for")
        return {"op": op, **manner, **self.settle(op, chosen(told, self.calls[op]))}

    def settle(self, op: str, fields: Message) -> Message:
        """Put what the device may not decide in its place."""
        return fields


def greeting(message: Message) -> Message:
    """The first message of a connection; nothing is ever compressed."""
    told = chosen(message, {"compression": check.plain, "python": check.plain, "pickle-protocol": check.whole})
    return {**told, "compression": None, "pickle-protocol": min(told["pickle-protocol"], PLAIN_PROTOCOL)}


class WithScheduler(Conversation):
    """What a device may say to the scheduler."""

    calls: Mapping[str, Mapping[str, Check]] = {
        "register-worker": {
            "address": check.address,
            "status": check.status,
            "nthreads": check.whole,
            "name": check.plain,
            "now": check.number,
            "resources": check.replaced_by({}),
            "memory_limit": check.optional(check.whole),
            "local_directory": check.replaced_by(""),
            "services": check.replaced_by({}),
            "nanny": check.optional(check.text),
            "pid": check.whole,
            "versions": check.replaced_by({}),  # Dask compares them for every client that connects
            "metrics": check.metrics,
            "extra": check.facts,
            "stimulus_id": check.text,
            "server_id": check.text,
        },
        "heartbeat_worker": {
            "address": check.address,
            "now": check.number,
            "metrics": check.metrics,
            "executing": check.replaced_by({}),
            "extensions": check.replaced_by({}),
        },
        "unregister": {"address": check.address, "stimulus_id": check.text},
        "register_nanny": {"address": check.text},
        "cleave_turn": {"worker": check.text},
        "cleave_measured": {"worker": check.text, "figures": check.group},
    }
    stream: Mapping[str, Mapping[str, Check]] = {
        "task-finished": {
            "key": check.key,
            "run_id": check.whole,
            "nbytes": check.replaced_by(28),  # of a receipt
            "type": check.replaced_by(None),  # a pickle, which clients would load
            "typename": check.replaced_by("int"),
            "metadata": check.replaced_by({}),
            "thread": check.replaced_by(None),
            "startstops": check.startstops,
            "stimulus_id": check.text,
            "status": check.replaced_by("OK"),
        },
        "task-erred": {
            "key": check.key,
            "run_id": check.whole,
            "exception": check.replaced_by(None),
            "traceback": check.replaced_by(None),
            "exception_text": check.plain,
            "traceback_text": check.replaced_by(""),
            "thread": check.replaced_by(None),
            "startstops": check.startstops,
            "stimulus_id": check.text,
            "status": check.replaced_by("error"),
        },
        "reschedule": {"key": check.key, "stimulus_id": check.text},
        "release-worker-data": {"key": check.key, "stimulus_id": check.text},
        "worker-status-change": {"status": check.status, "stimulus_id": check.text},
        "keep-alive": {},
        "close-stream": {},
    }
    ignored = ("log-event", "add-keys", "long-running", "request-refresh-who-has")
    """What a stock worker may say, and nobody needs to hear from a device."""

    def __init__(self, name: str, ledger: Ledger, *, streaming: bool = False) -> None:
        super().__init__(name)
        self.ledger = ledger
        self.streaming = streaming

    def admit(self, message: Any) -> Any:
        """A call, or after registration a list of messages of the stream."""
        if not self.streaming:
            return super().admit(message)
        messages = message if isinstance(message, tuple | list) else (message,)
        return [told for one in messages if (told := self._streamed(one)) is not None]

    def settle(self, op: str, fields: Message) -> Message:
        """A device speaks for itself only."""
        for field in ("address", "worker"):
            if op != "register_nanny" and field in fields:
                self._check_own(op, fields[field])
        if op == "register-worker":
            fields["name"] = self.name
            self.streaming = True
        return fields

    def _check_own(self, op: str, address: str) -> None:
        own = self.ledger.address_of(self.name)
        if self.ledger.is_taken(address) and (address != own or op == "register-worker"):
            raise Refused(f"{op} in the name of {address}")

    def _streamed(self, message: Any) -> Message | None:
        if not isinstance(message, dict):
            raise Refused(f"a {type(message).__name__} where a message was expected")
        told = dict(message)
        op = check.text(told.pop("op", None))
        if op in self.ignored:
            return None
        if op not in self.stream:
            raise Refused(f"the stream operation {op[:40]!r}, which devices have no use for")
        told.pop("worker", None)  # it would take the place of the true one
        fields = chosen(told, self.stream[op])
        if op in ("task-finished", "task-erred") and not self.ledger.has(self.name, fields["key"]):
            fields["run_id"] = -1  # not its task, or no longer: Dask takes it for a run that is over
        if op == "task-erred":
            fields["exception_text"] = why = check.said(fields["exception_text"])
            fields["exception"] = Serialized(*serialize(ClusterError(f"a tile failed on {self.name}: {why}")))
        return {"op": op, **fields}


Expected = Callable[[str, int, int, int], int | None]
"""Bytes of the tile of this run, step, job and number; None if nobody waits for it."""


class WithServer(Conversation):
    """What a device may say to the server."""

    calls: Mapping[str, Mapping[str, Check]] = {
        "cleave_pull": {
            "run": check.text,
            "step": check.whole,
            "job": check.whole,
            "operand": check.whole,
            "first": check.span,
            "second": check.span,
        },
        "cleave_await": {
            "run": check.text,
            "step": check.whole,
            "job": check.whole,
            "operand": check.whole,
            "first": check.span,
            "second": check.span,
            "device": check.plain,
        },
        "cleave_push": {
            "run": check.text,
            "step": check.whole,
            "job": check.whole,
            "tile": check.whole,
            "device": check.plain,
            "arrays": check.listed,
            "pull_seconds": check.plain,
            "compute_seconds": check.plain,
            "timing": check.group,
            "moved": check.group,
        },
        "cleave_wanted": {"run": check.text, "step": check.whole, "job": check.whole, "tiles": check.wholes},
        "cleave_clock": {},
        "cleave_probe_down": {"nbytes": check.whole},
        "cleave_probe_up": {"data": check.listed},
    }

    def __init__(self, name: str, expected: Expected) -> None:
        super().__init__(name)
        self.expected = expected

    def allow(self, message: Any) -> Allowance:
        """A tile has the bytes that it was asked for; one that nobody waits for is not kept."""
        if not self.greeted or not isinstance(message, dict):
            return NO_ARRAYS
        told = self.call(message)
        if told["op"] == "cleave_probe_up":
            return Allowance(LARGEST)
        if told["op"] != "cleave_push":
            return NO_ARRAYS
        size = self.expected(told["run"], told["step"], told["job"], told["tile"])
        return Allowance(SKIPPED, keep=False) if size is None else Allowance(size)

    def settle(self, op: str, fields: Message) -> Message:
        """Who made a tile is whoever the connection belongs to."""
        return {**fields, "device": self.name} if "device" in fields else fields


class WithCluster(Conversation):
    """What a device listens to: answers, and orders of its scheduler; nothing that it would have to unpickle."""

    def __init__(self, limit: int) -> None:
        super().__init__("the cluster")
        self.limit = limit  # bytes

    def allow(self, message: Any) -> Allowance:
        """Slices, within what the owner lends."""
        return Allowance(self.limit)

    def admit(self, message: Any) -> Any:
        """Plain values and arrays; an error is told by its text."""
        if not self.greeted:
            return super().admit(message)
        if isinstance(message, dict) and message.get("status") == "uncaught-error":
            raise ClusterError(str(message.get("exception_text"))[: check.LONGEST])
        if isinstance(message, dict) and "worker-plugins" in message:
            message["worker-plugins"] = {}  # a device takes no plugins
        return message

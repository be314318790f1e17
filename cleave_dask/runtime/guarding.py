"""Connections that know who is at the other end, and read from devices only what devices may say.

`install` puts guarded classes in the place of Dask's connections. They behave like Dask's own unless there is a
conversation: with peers whose certificate says that they are devices, with workers that have registered as devices,
and, on a device, with everybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from ssl import SSLError
from typing import Any
from weakref import WeakSet

import dask.config
from distributed.comm import tcp
from distributed.comm.core import CommClosedError
from distributed.protocol.utils import host_array
from tornado.iostream import IOStream, StreamClosedError

from cleave_dask.errors import AccessError
from cleave_dask.runtime.conversations import Conversation
from cleave_dask.runtime.credentials import ServerFolder
from cleave_dask.runtime.decoding import Refused, Wanted, receive
from cleave_dask.runtime.gates import Gate
from cleave_dask.runtime.roles import Peer, peer_of
from cleave_dask.runtime.streams import fill, read_bytes
from cleave_dask.runtime.tokens import Register

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds for a TLS handshake, and for the greeting after it."""

SLOWEST = 1000.0
"""Bytes per second, beside a minute, with which a message must come once it has begun."""

CONNECTIONS = 64
"""Connections of one device at most."""

INCOMING = 256e6
"""Bytes that one device may be sending at once; more waits unread. A single message may be larger."""

_SCRATCH = 1 << 16


class Guard:
    """What a process of the cluster knows of devices that connect to it."""

    def __init__(
        self,
        converse: Callable[[Peer], Conversation],
        folder: ServerFolder | None,
        strangers: Callable[[], Conversation] | None = None,
    ) -> None:
        self.converse = converse
        self.strangers = strangers  # how one talks with whoever comes without TLS; None: as Dask does
        self.folder = folder  # None: whoever has a certificate may connect
        self.refused = 0  # connections and messages
        self._register, self._stamp = Register(), 0
        self._connections: dict[str, WeakSet[Any]] = {}
        self._incoming: dict[str, Gate] = {}

    def admits(self, peer: Peer) -> bool:
        """Whether a device may connect: it has joined, was not revoked, and has not too many connections."""
        if not self._is_member(peer):
            return False
        return sum(not comm.closed() for comm in self._connections.get(peer.name, ())) < CONNECTIONS

    def _is_member(self, peer: Peer) -> bool:
        self._look()
        return self.folder is None or self._register.allows(peer.serial)

    def add(self, comm: Any, peer: Peer) -> Gate:
        """Remember a connection; gives the gate that all messages of this device come through."""
        self._connections.setdefault(peer.name, WeakSet()).add(comm)
        return self._incoming.setdefault(peer.name, Gate(1, INCOMING))

    def expel(self) -> list[str]:
        """Close all connections of devices that are no longer members; gives their names."""
        if not self._look():
            return []
        gone = []
        for name, comms in self._connections.items():
            leaving = [comm for comm in comms if not comm.closed() and not self._is_member(comm.peer)]
            for comm in leaving:
                comm.abort()
            gone += [name] * bool(leaving)
        return gone

    def quarantined(self) -> dict[str, str]:
        """Members that sent a wrong tile, now or before a restart, and what was wrong."""
        self._look()
        return self._register.quarantined

    def quarantine(self, name: str, why: str) -> None:
        """Write down that a member sent a wrong tile; it is in quarantine even if that cannot be written."""
        if self.folder is None:
            return
        try:
            self.folder.change(lambda register: register.quarantine(name, why))
        except (OSError, AccessError) as error:
            logger.error("The quarantine of %s ends with this process, it cannot be written down: %s", name, error)

    def _look(self) -> bool:
        """Read the register if it has changed; whether it has."""
        stamp = self.folder.stamp() if self.folder is not None else 0
        if self.folder is None or stamp == self._stamp:
            return False
        self._register, self._stamp = self.folder.register(), stamp
        return True


_guard: Guard | None = None


def install(guard: Guard | None = None) -> None:
    """Guard the connections of this process; `guard` is for scheduler and server.

    Dask imports a preload before it listens, and runs it afterwards: whoever guards does so on import.
    """
    global _guard
    _guard = guard or _guard
    backend = dask.config.get("distributed.comm.tcp.backend", "tornado")
    if backend != "tornado":
        raise SystemExit(f"distributed.comm.tcp.backend is {backend!r}, whose connections are not guarded; set tornado")
    for kind, comm in ((("TCPListener", "TCPConnector"), GuardedTCP), (("TLSListener", "TLSConnector"), GuardedTLS)):
        for name in kind:
            getattr(tcp, name).comm_class = comm
    listener, connector = tcp.TLSListener, tcp.BaseTCPConnector
    setattr(tcp, _stock_read.__name__, read_bytes)
    setattr(listener, _stock_prepare.__name__, _prepare_stream)
    setattr(connector, _stock_connect.__name__, _connect)


class _Guarded:
    """A connection of Dask that may hold a conversation."""

    conversation: Conversation | None = None
    peer: Peer | None = None
    gate: Gate | None = None
    stream: IOStream | None
    _closed: bool
    abort: Callable[[], None]

    @property
    def allow_offload(self) -> bool:
        """Never: what is large are arrays, which are sent and read as they lie, so a thread would have nothing to do.

        Dask would measure every message, which takes as long as packing it.
        """
        return False

    @allow_offload.setter
    def allow_offload(self, _: bool) -> None:
        """Dask's own default."""

    async def read(self, deserializers: Any = None) -> Any:
        """The next message."""
        if self.conversation is None:
            stock: Any = super()
            return await stock.read(deserializers)
        if self.stream is None:
            raise CommClosedError
        try:
            return self.conversation.admit(await self._receive(self.stream, self.conversation))
        except (StreamClosedError, SSLError) as error:
            self.stream, self._closed = None, True
            raise CommClosedError(f"in {self}: {error}") from error
        except (Refused, TimeoutError) as error:
            why = str(error) if isinstance(error, Refused) else "it came too slowly"
            logger.warning("Closed a connection of %s, which sent %s", self.conversation.name, why or "nothing")
            if _guard is not None:
                _guard.refused += 1
            self.abort()
            raise CommClosedError(f"in {self}: refused {why}") from error
        except asyncio.CancelledError:
            self.abort()  # nobody knows how much of a message was read
            raise

    async def write(self, message: Any, serializers: Any = None, on_error: str = "message") -> Any:
        """Send a message; a device that does not read it is answered nothing else, and in the end sent away.

        Dask would go on, and keep all that it has to send.
        """
        stock: Any = super()
        nbytes = await stock.write(message, serializers, on_error)
        if self.conversation is None or _guard is None or self.stream is None or not self.stream.writing():
            return nbytes
        try:
            async with asyncio.timeout(60 + nbytes / SLOWEST):
                await self.stream.write(b"")
        except StreamClosedError as error:
            self.stream, self._closed = None, True
            raise CommClosedError(f"in {self}: {error}") from error
        except TimeoutError as error:
            logger.warning("Closed a connection of %s, which does not read what it is sent", self.conversation.name)
            _guard.refused += 1
            self.abort()
            raise CommClosedError(f"in {self}: it does not read") from error
        return nbytes

    async def _receive(self, stream: IOStream, conversation: Conversation) -> Any:
        """A message; it may be long in coming, but once it has begun it must go on."""
        now = asyncio.get_running_loop().time
        reader = receive(conversation.allow)
        entered = 0
        async with asyncio.timeout(None if conversation.greeted else PATIENCE) as deadline:
            try:
                wanted = reader.send(await _read(stream, next(reader), conversation))
                if conversation.greeted:
                    deadline.reschedule(now() + 60)
                while True:
                    if wanted.about is not None:
                        await conversation.prepare(wanted.about)
                    if wanted.ahead:
                        if self.gate is not None and wanted.keep:
                            deadline.reschedule(None)
                            await self.gate.enter(0, wanted.ahead)
                            entered = wanted.ahead
                        deadline.reschedule(now() + 60 + wanted.ahead / SLOWEST)
                    wanted = reader.send(await _read(stream, wanted, conversation))
            except StopIteration as done:
                return done.value
            finally:
                if entered and self.gate is not None:
                    self.gate.leave(entered)


class GuardedTCP(_Guarded, tcp.TCP):
    """A connection without encryption; nobody knows who is there until it says so."""

    def _read_extra(self) -> None:
        stock: Any = super()
        stock._read_extra()
        if _guard is not None and _guard.strangers is not None:
            self.conversation = _guard.strangers()


class GuardedTLS(_Guarded, tcp.TLS):
    """An encrypted connection: the certificate says who is there."""

    def _read_extra(self) -> None:
        stock: Any = super()
        stock._read_extra()
        self.peer = peer = peer_of(self._extra.get("peercert"))
        if _guard is None:
            return
        if peer is None or (peer.role == "device" and not _guard.admits(peer)):
            logger.warning("Refused a connection from %s: %s", self._peer_addr, peer or "a certificate without a role")
            _guard.refused += 1
            self.abort()
        elif peer.role == "device":
            self.conversation = _guard.converse(peer)
            self.gate = _guard.add(self, peer)


async def _read(stream: IOStream, wanted: Wanted, conversation: Conversation) -> memoryview:
    """So many bytes of a stream, into memory that is taken only now."""
    if wanted.keep:
        buffer = conversation.room(wanted.nbytes) if wanted.array else host_array(wanted.nbytes)
        await fill(stream, buffer)
        return buffer
    scratch = host_array(_SCRATCH)
    for start in range(0, wanted.nbytes, _SCRATCH):
        await fill(stream, scratch[: wanted.nbytes - start])
    return scratch[:0]


_stock_read: Any = tcp.read_bytes_rw
_stock_prepare: Any = tcp.TLSListener._prepare_stream
_stock_connect: Any = tcp.BaseTCPConnector.connect


async def _prepare_stream(self: Any, stream: Any, address: str) -> Any:
    """Dask's, which would wait for a handshake without end."""
    try:
        return await asyncio.wait_for(_stock_prepare(self, stream, address), PATIENCE)
    except TimeoutError:
        logger.warning("Refused a connection from %s: no handshake within %s s", address, PATIENCE)
        stream.close()
        return None


async def _connect(self: Any, address: str, deserialize: bool = True, **arguments: Any) -> Any:
    """Dask's, with a conversation if the arguments of the connection ask for one."""
    converse = arguments.pop("cleave_converse", None)
    comm = await _stock_connect(self, address, deserialize, **arguments)
    if converse is not None:
        comm.conversation = converse()
    return comm

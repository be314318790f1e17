"""A device's links and kernel, held to figures: emulated devices, and what an owner lends of real ones.

Pacing is arithmetic on times (`Lane`, `Meter`); `Links` awaits what it says. Bytes of one direction follow each other,
the two directions do not wait for each other, and a transfer is over when its last byte would have come:

    arrival = max(asked, end of the transfer before) + bytes / bandwidth + latency

What the real transfer takes is part of that time. A device that cannot be as fast as it should is just slower.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from time import perf_counter, sleep
from typing import TypeVar

from cleave_dask.formatting import quantity
from cleave_dask.graph.ir import BACKWARD_WORK, LOGITS
from cleave_dask.planning.cost import UNDER_WAY
from cleave_dask.runtime.kernels import Kernel
from cleave_dask.runtime.wire import Array

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LONG_ENOUGH = 0.25
"""Seconds of unbroken traffic that are an observation of a link's bandwidth, whether or not it pauses after them."""

UNKNOWN = 2e6
"""Bytes that are under way at once over a link of unknown bandwidth."""

LEAST_SECONDS = 0.002
"""Traffic shorter than this, without its latency, says nothing of a bandwidth."""

_TOO_SLOW = 1.2  # times the seconds that a tile should take, from where a device is said to be too slow
_NOTICED = 0.02  # seconds; shorter tiles are not looked at


@dataclass
class Lane:
    """One direction of a link, first come, first served."""

    bandwidth: float = inf  # bytes per second
    latency: float = 0.0  # seconds
    free: float = 0.0  # when the last transfer has left it

    def book(self, nbytes: float, now: float) -> float:
        """Put a transfer that is ready `now` behind those before it; when its last byte arrives."""
        self.free = max(now, self.free) + nbytes / self.bandwidth
        return self.free + self.latency


@dataclass
class Meter:
    """What a link really carries: bytes over the seconds in which something was on its way.

    Transfers that overlap share the link, so only the time in which there is at least one of them counts. The first
    byte of a busy stretch waits for a round trip, which is no part of the bandwidth.
    """

    round_trip: float = 0.0  # seconds
    bytes: int = 0  # observed and not yet taken
    seconds: float = 0.0
    _flying: int = 0
    _since: float = 0.0
    _arrived: int = 0
    _spoiled: bool = False

    def began(self, now: float) -> None:
        """A transfer was asked for."""
        if self._flying == 0:
            self._since, self._arrived, self._spoiled = now + self.round_trip, 0, False
        self._flying += 1

    def ended(self, now: float, nbytes: int) -> None:
        """A transfer is over; zero bytes if it failed."""
        self._flying -= 1
        self._arrived += nbytes
        if self._flying and now - self._since < LONG_ENOUGH:
            return
        if self._arrived and not self._spoiled and now - self._since >= max(LEAST_SECONDS, self.round_trip / 2):
            self.bytes += self._arrived
            self.seconds += now - self._since
        self._since, self._arrived, self._spoiled = now, 0, False

    def spoil(self) -> None:
        """Something came whose beginning nobody saw: what else came meanwhile says nothing of the link."""
        self._spoiled = True

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since this was last asked."""
        taken = self.bytes, self.seconds
        self.bytes, self.seconds = 0, 0.0
        return taken


@dataclass
class Links:
    """Both links of a device, as its transfers see them."""

    down: Lane = field(default_factory=Lane)
    up: Lane = field(default_factory=Lane)
    down_meter: Meter = field(default_factory=Meter)
    up_meter: Meter = field(default_factory=Meter)

    windows: tuple[float, float] = (UNKNOWN, UNKNOWN)  # bytes that should be under way at once, down and up

    def expect(self, latency: float, down: float = inf, up: float = inf) -> None:
        """Tell how long a byte takes one way, and how many come through a second."""
        self.down_meter.round_trip = self.up_meter.round_trip = 2 * latency
        window = 2 * latency + UNDER_WAY
        self.windows = down * window if down < inf else UNKNOWN, up * window if up < inf else UNKNOWN

    async def assigned(self) -> None:
        """Wait as long as the message that brought a task was on its way."""
        await _pause(self.down.latency)

    async def pull(self, call: Callable[[], Awaitable[Answer]], size: Callable[[Answer], int]) -> Answer:
        """Ask, and have the answer once its last byte has come down."""
        self.down_meter.began(perf_counter())
        nbytes = 0
        try:
            await _pause(self.up.latency)
            asked = perf_counter()
            answer = await call()
            arrival = self.down.book(size(answer), asked)
            await _pause(arrival - perf_counter())
            nbytes = size(answer)
            return answer
        finally:
            self.down_meter.ended(perf_counter(), nbytes)

    async def await_pull(self, call: Callable[[], Awaitable[Answer]], size: Callable[[Answer], int]) -> Answer:
        """Ask for what the other side sends when it has it: when that begins to come is not known here."""
        await _pause(self.up.latency)
        answer = await call()
        self.down_meter.spoil()
        now = perf_counter()
        await _pause(self.down.book(size(answer), now) - now)
        return answer

    async def push(self, call: Callable[[], Awaitable[Answer]], nbytes: int) -> Answer:
        """Send so that the other side has everything when its last byte has gone up; then hear what it says."""
        self.up_meter.began(perf_counter())
        sent = 0
        try:
            await _pause(self.up.book(nbytes, perf_counter()) - perf_counter())
            answer = await call()
            await _pause(self.down.latency)
            sent = nbytes
            return answer
        finally:
            self.up_meter.ended(perf_counter(), sent)

    async def reported(self) -> None:
        """Wait as long as a finished task's own message takes to the scheduler."""
        await _pause(self.up.latency)

    def observed(self) -> dict[str, tuple[int, float]]:
        """Bytes and seconds of each direction since this was last asked."""
        return {"down": self.down_meter.take(), "up": self.up_meter.take()}


async def _pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


@dataclass
class SlowedKernel:
    """A kernel that takes as long as one of `flops` per second would; it sleeps the difference."""

    kernel: Kernel
    flops: float
    warned: bool = False

    @property
    def name(self) -> str:
        """What computes."""
        return self.kernel.name

    def run(
        self, kind: str, arrays: Sequence[Array], *, dtype: str, causal: bool = False, scale: float | None = None
    ) -> tuple[Array, ...]:
        """The result of a tile, no sooner than it should be; see `kernels.Kernel`."""
        start = perf_counter()
        results = self.kernel.run(kind, arrays, dtype=dtype, causal=causal, scale=scale)
        wanted = operations(kind, arrays, causal=causal) / self.flops
        spent = perf_counter() - start
        if wanted > spent:
            sleep(wanted - spent)
        elif spent > max(_NOTICED, _TOO_SLOW * wanted) and not self.warned:
            self.warned = True
            logger.warning(
                "This machine is too slow to emulate a device of %s: a tile took %.3f s instead of %.3f s",
                quantity(self.flops, "FLOP/s"),
                spent,
                wanted,
            )
        return results


def operations(kind: str, arrays: Sequence[Array], *, causal: bool = False) -> float:
    """Floating point operations of a tile with these operands, as a plan counts them."""
    if kind in ("gemm", "bmm"):
        a, b = arrays
        return 2.0 * float(prod(a.shape)) * float(b.shape[-1])
    if kind in LOGITS:
        products = 1 if kind == "logit_sums" else 2
        return 2.0 * products * float(prod(arrays[0].shape)) * float(arrays[1].shape[0])
    query, key = arrays[-5:-3] if kind == "attention_backward" else arrays[:2]
    forward = 4.0 * float(prod(query.shape)) * float(key.shape[2]) * (0.5 if causal else 1.0)
    return forward * BACKWARD_WORK if kind == "attention_backward" else forward

"""Memory that two processes of this machine both see: one fills a tray, the other reads it, and no byte moves between.

A tray is memory without a name (a memfd, or elsewhere than on Linux a file that is deleted before it is used), handed
over as a descriptor: nobody else can open it, and it is gone when the last process that has it is, however that ended.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from mmap import mmap
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

IDLE = 64 << 20
"""Bytes of empty trays that are kept for the next arrays: what is mapped already costs no page faults."""

MANY = 64
"""Empty trays that are kept at most: each costs a descriptor on both sides."""

_SMALLEST = 1 << 16


class Tray:
    """One stretch of memory."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor: int | None = _allocate(nbytes)  # until the other side has it
        self.memory = mmap(self.descriptor, nbytes)
        self.holders = 0  # arrays on it here, and what of it is lent to the other side

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return address_of(np.frombuffer(self.memory, np.uint8))

    def hand_over(self) -> int | None:
        """Its descriptor, for the other side to map; None if it has been handed over."""
        descriptor, self.descriptor = self.descriptor, None
        return descriptor

    def close(self) -> None:
        """Give up a descriptor that nobody has asked for; the memory goes with the last array on it."""
        if (descriptor := self.hand_over()) is not None:
            os.close(descriptor)


class Trays:
    """The trays that this process fills. They come back when neither side has an array on them; any thread may take."""

    def __init__(self, idle: int = IDLE) -> None:
        self.idle = idle
        self.gone: list[int] = []  # numbers that the other side need not remember
        self._all: dict[int, Tray] = {}  # by number
        self._starts: dict[int, Tray] = {}  # by where they begin
        self._empty: deque[Tray] = deque()  # the longest unused first
        self._empty_bytes = 0
        self._dropped: deque[Tray] = deque()  # one entry for each holder less; filled wherever an array happens to die
        self._count = 0
        self._lock = Lock()

    def take(self, nbytes: int) -> Array:
        """So many bytes of a tray, from its start; it is in use as long as there is an array on it."""
        size = _rounded(nbytes)
        with self._lock:
            self._settle()
            tray = next((tray for tray in reversed(self._empty) if tray.nbytes == size), None)
            if tray is not None:
                self._empty.remove(tray)
                self._empty_bytes -= size
            else:
                tray = self._made(size)
            tray.holders = 1
        return on_tray(tray.memory, nbytes, self._dropped.append, tray)

    def placed(self, array: Array) -> Array:
        """A copy of an array on a tray, in the same order."""
        if array.nbytes == 0:
            return array
        copy: Array = np.ndarray(array.shape, array.dtype, self.take(array.nbytes), order=order_of(array))
        np.copyto(copy, array)
        return copy

    def lend(self, array: Array) -> Tray | None:
        """The tray that an array begins, which the other side holds from now on; None if it is on none."""
        with self._lock:
            tray = self._starts.get(address_of(array))
            if tray is not None:
                tray.holders += 1
            return tray

    def give_back(self, numbers: list[int]) -> None:
        """The other side has no array any more on these."""
        with self._lock:
            self._dropped.extend(self._all[number] for number in numbers)
            self._settle()

    def close(self) -> None:
        """The other side is gone."""
        with self._lock:
            for tray in self._all.values():
                tray.close()

    def _made(self, size: int) -> Tray:
        self._count += 1
        tray = Tray(self._count, size)
        self._all[tray.number] = self._starts[tray.address] = tray
        return tray

    def _settle(self) -> None:
        while self._dropped:
            tray = self._dropped.popleft()
            tray.holders -= 1
            if tray.holders == 0:
                self._empty.append(tray)
                self._empty_bytes += tray.nbytes
        while self._empty_bytes > self.idle or len(self._empty) > MANY:
            tray = self._empty.popleft()
            self._empty_bytes -= tray.nbytes
            del self._all[tray.number], self._starts[tray.address]
            if tray.descriptor is None:
                self.gone.append(tray.number)
            tray.close()


def on_tray(memory: mmap, nbytes: int, dropped: Any, *told: Any) -> Array:
    """The first bytes of a tray; `dropped` is called, in any thread, when no array on them is left.

    Arrays made of this one keep it alive, as numpy and torch keep whatever they stand on.
    """
    root = np.frombuffer(memory, np.uint8, nbytes)
    weakref.finalize(root, dropped, *told).atexit = False
    return root


def order_of(array: Array) -> Literal["C", "F"]:
    """How an array lies in memory: "C", or "F" for those that are contiguous that way only."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def address_of(array: Array) -> int:
    """Where an array begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def _rounded(nbytes: int) -> int:
    """A size of trays that holds so many bytes, with a quarter to spare at most, so that there are few sizes."""
    unit = max(_SMALLEST, 1 << max(nbytes.bit_length() - 3, 0))
    return -(-nbytes // unit) * unit


def _allocate(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("cleave-tray")
    else:  # macOS
        with TemporaryFile(prefix="cleave-tray-") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor

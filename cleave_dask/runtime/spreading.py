"""Which of the server's addresses each device is told, if it has several: as many devices to each as to any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Spread:
    """Devices over addresses; a device keeps its own for as long as both are there. No I/O."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._told: dict[str, str] = {}

    def offer(self, addresses: Sequence[str]) -> None:
        """These are all addresses from now on; devices at others get a new one."""
        self._addresses = tuple(addresses)
        self._told = {device: address for device, address in self._told.items() if address in self._addresses}

    def of(self, device: str) -> str:
        """The address of a device; nothing if there is none."""
        found = self._told.get(device)
        if found is None and self._addresses:
            busy = Counter(self._told.values())
            found = self._told[device] = min(self._addresses, key=lambda address: busy[address])
        return found or ""

    def left(self, device: str) -> None:
        """A device is gone; its place is free."""
        self._told.pop(device, None)

"""The least of many values that change: a heap that forgives entries which are no longer true."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Lowest:
    """A value for each of many names; setting one and finding the least cost O(log names), averaged over calls."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> float | None:
        """The value of a name."""
        return self._values.get(name)

    def set(self, name: str, value: float) -> None:
        """The value of a name from now on."""
        if self._values.get(name) != value:
            self._values[name] = value
            heappush(self._heap, (value, name))
            if len(self._heap) > 4 * len(self._values) + 64:
                self._heap = [(value, name) for name, value in self._values.items()]
                heapify(self._heap)

    def drop(self, name: str) -> None:
        """A name has no value any more."""
        self._values.pop(name, None)

    def least(self) -> tuple[float, str] | None:
        """The least value and whose it is."""
        while self._heap:
            value, name = self._heap[0]
            if self._values.get(name) == value:
                return value, name
            heappop(self._heap)
        return None

"""What devices turn out to be: figures corrected by what their tiles really took.

Every accepted tile is an observation of its device: operations over seconds in the kernel, bytes over busy seconds of
each link. A figure is the geometric moving average of the observed rates; each rate is first replaced by the median
of itself and the two before it, so that a single outlier changes nothing. Tiles whose operands were on the device
already say nothing of its downlink.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, inf, log
from statistics import median

from cleave_dask.fleet.devices import Device, Fleet, Link

FIGURES = ("flops", "down", "up")
"""What is corrected: operations per second, bytes per second of each link."""

WEIGHT = 0.3
"""Of the newest rate in the moving average."""

ENOUGH = 3
"""Observations before a figure is believed."""

SHORTEST = 1e-3
"""Seconds; what is shorter measures the clock, not the device."""


@dataclass
class Rate:
    """One figure of one device, from amounts and the seconds that they took."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=3))  # logarithms of the last rates
    average: float = 0.0  # of the logarithms
    count: int = 0

    def observe(self, amount: float, seconds: float) -> None:
        """Take an observation; nothing moved, or too short a time, is none."""
        if not (0 < amount < inf and SHORTEST <= seconds < inf):
            return
        self.recent.append(log(amount / seconds))
        self.count += 1
        if self.count <= ENOUGH:
            self.average = median(self.recent)
        else:
            self.average += WEIGHT * (median(self.recent) - self.average)

    @property
    def value(self) -> float | None:
        """Amount per second, or None as long as there are too few observations."""
        return exp(self.average) if self.count >= ENOUGH else None


class Calibration:
    """The observed figures of all devices of a training."""

    def __init__(self) -> None:
        self._rates: dict[str, dict[str, Rate]] = {}

    def observe(self, device: str, moved: Mapping[str, tuple[float, float]]) -> None:
        """Take what a device did for one tile: amount and seconds, by figure."""
        rates = self._rates.setdefault(device, {name: Rate() for name in FIGURES})
        for name in FIGURES:
            if name in moved:
                rates[name].observe(*moved[name])

    def figures(self) -> dict[str, dict[str, float]]:
        """What is known by now: by device, the figures that were observed often enough."""
        known = {
            device: {name: rate.value for name, rate in rates.items() if rate.value is not None}
            for device, rates in self._rates.items()
        }
        return {device: figures for device, figures in known.items() if figures}


def corrected(fleet: Fleet, figures: Mapping[str, Mapping[str, float]]) -> Fleet:
    """The fleet with observed figures in place of what its devices said."""
    return replace(fleet, devices=tuple(_corrected(device, figures.get(device.name, {})) for device in fleet.devices))


def _corrected(device: Device, seen: Mapping[str, float]) -> Device:
    return replace(
        device,
        flops=seen.get("flops", device.flops),
        down=Link(seen.get("down", device.down.bandwidth), device.down.latency),
        up=Link(seen.get("up", device.up.bandwidth), device.up.latency),
    )


def differ(one: Fleet, other: Fleet, factor: float) -> bool:
    """Whether some device is in one fleet only, or has a figure that differs by more than a factor."""
    if {device.name for device in one.devices} != {device.name for device in other.devices}:
        return True
    pairs = [(device, other.device(device.name)) for device in one.devices]
    return any(
        not 1 / factor <= now / then <= factor
        for a, b in pairs
        for then, now in ((a.flops, b.flops), (a.down.bandwidth, b.down.bandwidth), (a.up.bandwidth, b.up.bandwidth))
    )

"""What an owner lends of a device, as its settings say: cores, memory, links, when, and figures to plan with."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from cleave_dask import config
from cleave_dask.errors import InputError
from cleave_dask.fleet.units import Dimension, parse
from cleave_dask.runtime.kernels import Kernel, load_kernel
from cleave_dask.runtime.pausing import Reason, reasons
from cleave_dask.runtime.shaping import Lane, Links, SlowedKernel

FIGURES: dict[str, Dimension] = {"flops": "flop/s", "down": "bytes/s", "up": "bytes/s", "latency": "seconds"}
"""What a plan knows a device by, beside its memory."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A device as its owner lends it."""

    kernel: Kernel
    links: Links
    cores: int
    memory: int  # bytes
    figures: dict[str, float]  # what the owner says of it, in base units; the rest is measured

    @property
    def missing(self) -> tuple[str, ...]:
        """Figures that have to be measured."""
        return tuple(name for name in FIGURES if name not in self.figures)


def read_settings(*, cores: int, memory: int) -> Lent:
    """What the settings lend of a worker that has so many cores and so much memory."""
    emulated = {name: amount(f"emulate.{name}", dimension) for name, dimension in FIGURES.items()}
    caps = {side: amount(f"max_{side}", "bytes/s") or inf for side in ("down", "up")}
    kernel = load_kernel(config.get("device.kernel"))
    if emulated["flops"] is not None:
        kernel = SlowedKernel(kernel, emulated["flops"])
    figures = {name: given for name, dimension in FIGURES.items() if (given := amount(name, dimension)) is not None}
    for side, cap in caps.items():
        if side in figures:
            figures[side] = min(figures[side], cap)
    down, up = (Lane(min(emulated[side] or inf, caps[side]), emulated["latency"] or 0.0) for side in ("down", "up"))
    links = Links(down, up)
    links.expect(figures.get("latency", 0.0), figures.get("down", inf), figures.get("up", inf))
    if memory <= 0:
        raise InputError("its memory limit leaves nothing for tiles; give a higher --memory-limit, 512 MB or more")
    lent = amount("memory", "bytes")
    return Lent(kernel, links, _cores(cores), memory if lent is None else min(memory, int(lent)), figures)


def read_reasons() -> Reason | None:
    """The owner's reasons to pause, as the settings say; None if there is none."""
    wishes = {name: config.get(f"device.{name}") for name in ("only_on_mains", "only_when_idle")}
    for name, wish in wishes.items():
        if not isinstance(wish, bool):
            raise InputError(f"setting 'cleave.device.{name}' is {wish!r}; give true or false")
    file = config.get("device.pause_file")
    return reasons(file=None if file is None else Path(file).expanduser(), **wishes)


def amount(key: str, dimension: Dimension) -> float | None:
    """A setting of the device in base units; None if it is not given."""
    given = config.get(f"device.{key}")
    return None if given is None else parse(given, dimension, field=f"setting 'cleave.device.{key}'")


def _cores(available: int) -> int:
    given = config.get("device.cores")
    if given is None:
        return available
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InputError(f"setting 'cleave.device.cores' is {given!r}; give a whole number of cores, 1 or more")
    return given

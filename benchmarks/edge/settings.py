"""The settings: which devices behind which links train which model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.models import Llama
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.formatting import quantity

MBIT = 1e6 / 8
"""Bytes per second."""

FLOPS = 10e9
"""Of a device; eight of them are about what two cores of a laptop can do. On these links it hardly matters."""

LATENCY = 1e-3
"""Seconds, of ours alone: the kernel delays nothing here, so that peers have none."""

SMALL = Llama(hidden=384, intermediate=1024, layers=4, heads=8, vocabulary=4096, batch=16, length=128)
WIDE = Llama(hidden=1024, intermediate=2816, layers=2, heads=8, vocabulary=4096, batch=8, length=64)
TINY = Llama(hidden=64, intermediate=128, layers=4, heads=8, vocabulary=256, batch=16, length=16)
"""SMALL is what systems are compared with; a layer of WIDE is too much for some; TINY is for a quick look."""

OURS = ("cleave", "cleave-bf16")
VARIANTS = ("cleave-head", "cleave-even", "cleave-trust")
PIPELINES = ("gpipe", "1f1b", "data-pipeline")
SHARDED = ("ddp", "ddp-bf16", "fsdp", "tensor")
OTHERS = ("dask-blocks", "dask-grid", "dask-rows", "hivemind")
ALONE = ("alone",)


@dataclass(frozen=True, slots=True)
class Setting:
    """Devices, their links, the model, and which systems are measured there unless others are asked for."""

    name: str
    what: str
    fleet: Fleet
    llama: Llama
    systems: tuple[str, ...]
    cap: int | None = None  # bytes that a device can hold; who needs more has failed

    def quick(self) -> Setting:
        """The same fleet with a model that takes seconds."""
        return replace(self, llama=TINY)


def require_memory(needed: int, cap: int | None) -> None:
    """Raise if a device's peak is more than it has."""
    if cap is not None and needed > cap + PROCESS:
        raise MemoryError(f"needs {quantity(needed, 'B')} on a device, which has {quantity(cap, 'B')}")


def fleet(links: Iterable[tuple[float, float]], memory: float = 1e9) -> Fleet:
    """Devices by downlink and uplink in Mbit/s."""
    return Fleet(
        Server(),
        tuple(
            Device(f"device-{n}", FLOPS, memory, Link(down * MBIT, LATENCY), Link(up * MBIT, LATENCY))
            for n, (down, up) in enumerate(links)
        ),
    )


CAP = 48_000_000
"""Bytes, of the devices of `capped`: the weights of one layer of its model are 51 MB, with their gradients and the
optimizer's state 205 MB."""

PROCESS = 16_000_000
"""Bytes that a process may grow by beside what it trains with where memory is capped: buffers, threads."""

UNEVEN = [(200.0, 20.0), (100.0, 10.0), (50.0, 5.0), (20.0, 4.0)] * 2

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "edge-8",
            "8 devices, 100/10 Mbit/s",
            fleet([(100, 10)] * 8),
            SMALL,
            (*ALONE, *OURS, *VARIANTS, *PIPELINES, *SHARDED, *OTHERS),
        ),
        Setting(
            "even-8",
            "8 devices, 100/100 Mbit/s",
            fleet([(100, 100)] * 8),
            SMALL,
            (*ALONE, *OURS, *VARIANTS, *PIPELINES, *SHARDED, *OTHERS),
        ),
        Setting(
            "mixed-8",
            "8 devices, two each of 200/20, 100/10, 50/5 and 20/4 Mbit/s",
            fleet(UNEVEN),
            SMALL,
            (*OURS, *VARIANTS, *PIPELINES, *SHARDED, *OTHERS),
        ),
        Setting("edge-16", "16 devices, 100/10 Mbit/s", fleet([(100, 10)] * 16), SMALL, (*OURS, *PIPELINES, *SHARDED)),
        Setting("edge-32", "32 devices, 100/10 Mbit/s", fleet([(100, 10)] * 32), SMALL, (*OURS, *PIPELINES, *SHARDED)),
        Setting(
            "capped-8",
            "8 devices, 100/10 Mbit/s, of 48 MB: less than one layer",
            fleet([(100, 10)] * 8, memory=CAP),
            WIDE,
            (*ALONE, *OURS, *PIPELINES, *SHARDED),
            cap=CAP,
        ),
    )
}

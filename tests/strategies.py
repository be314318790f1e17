"""hypothesis strategies for the values of this package: links, devices, servers, fleets."""

from __future__ import annotations

from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server

NAMES = st.text(st.characters(categories=("L", "N"), include_characters="-_."), min_size=1, max_size=12)


def amounts(least: float, most: float) -> st.SearchStrategy[float]:
    """Finite amounts within what a machine can have."""
    return st.floats(least, most, allow_nan=False, allow_infinity=False)


def links(*, least: float = 1e5, most: float = 1e9) -> st.SearchStrategy[Link]:
    """Links of 100 kB/s to 1 GB/s with up to half a second of latency."""
    return st.builds(Link, bandwidth=amounts(least, most), latency=amounts(0.0, 0.5))


def devices(*, names: st.SearchStrategy[str] = NAMES, least_memory: float = 1e6) -> st.SearchStrategy[Device]:
    """Devices from an old phone to a large workstation."""
    return st.builds(
        Device,
        name=names,
        flops=amounts(1e9, 1e14),
        memory=amounts(least_memory, 64e9),
        down=links(),
        up=links(),
    )


def servers() -> st.SearchStrategy[Server]:
    """Servers from a desktop to a rack."""
    return st.builds(
        Server,
        egress=amounts(1e8, 1e12),
        ingress=amounts(1e8, 1e12),
        flops=amounts(1e10, 1e15),
        memory=amounts(1e9, 1e14),
    )


def fleets(*, least: int = 1, most: int = 8, least_memory: float = 1e6) -> st.SearchStrategy[Fleet]:
    """Small fleets of unlike devices, each under a name of its own."""
    members = st.lists(
        devices(least_memory=least_memory), min_size=least, max_size=most, unique_by=lambda device: device.name
    )
    return st.builds(Fleet, server=servers(), devices=members.map(tuple))

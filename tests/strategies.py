"""hypothesis strategies for the values of this package: links, devices, servers, fleets, gemms."""

from __future__ import annotations

from hypothesis import strategies as st

from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.graph.ir import Gemm, Operand, Role, StepGraph, Value

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
        processes=st.none() | st.integers(1, 8),
    )


def fleets(*, least: int = 1, most: int = 8, least_memory: float = 1e6) -> st.SearchStrategy[Fleet]:
    """Small fleets of unlike devices, each under a name of its own."""
    members = st.lists(
        devices(least_memory=least_memory), min_size=least, max_size=most, unique_by=lambda device: device.name
    )
    return st.builds(Fleet, server=servers(), devices=members.map(tuple))


def gemms(*, most: int = 400, name: str = "g") -> st.SearchStrategy[Gemm]:
    """Single products of any proportions."""
    extents = st.integers(1, most)
    return st.builds(lambda m, n, k: make_gemm(m, n, k, name=name), extents, extents, extents)


def make_gemm(m: int, n: int, k: int, *, name: str = "g", role: Role = "forward", level: int = 1) -> Gemm:
    """The product of an m x k and a k x n matrix."""
    a, b = Value(f"{name}.a", (m, k), (k, 1), "float32"), Value(f"{name}.b", (k, n), (n, 1), "float32")
    return Gemm(
        *(name, "gemm", role, level, m, n, k, 2.0 * m * n * k, "float32"),
        inputs=(Operand((a,)), Operand((b,))),
        outputs=(Value(f"{name}.c", (m, n), (n, 1), "float32"),),
    )


def make_attention(batch: int, heads: int, *, length: int = 64, width: int = 16, name: str = "att") -> Gemm:
    """An attention of `batch` sequences and `heads` heads."""
    size = (batch, heads, length, width)
    q, k, v, out = (Value(f"{name}.{part}", size, (1, 1, 1, 1), "float32") for part in "qkvo")
    flops = 4.0 * batch * heads * length * length * width
    return Gemm(
        *(name, "attention", "forward", 1, batch, heads, 1, flops, "float32"),
        inputs=(Operand((q,)), Operand((k,)), Operand((v,))),
        outputs=(out, Value(f"{name}.lse", (batch, heads, length), (1, 1, 1), "float32")),
    )


def graph_of(*parts: Gemm) -> StepGraph:
    """A step of nothing but these gemms."""
    return StepGraph("test", (), parts, loss="", grads=(), buffers=(), batch="")

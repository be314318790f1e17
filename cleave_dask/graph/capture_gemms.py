"""Which nodes of a traced step are gemms: products, batched products, and attention in one piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from cleave_dask.graph.ir import BACKWARD_WORK, Gemm, Kind, Operand, Value
from cleave_dask.graph.torch_ops import dtype_name

aten = torch.ops.aten

Names = dict[fx.Node, str]
FLOATS = ("float64", "float32", "bfloat16", "float16")


def gemm_of(node: fx.Node, names: Names) -> Gemm | None:
    """The gemm that a node is, if it is one that can be cut into tiles; its role and level are still to be found."""
    build = _BUILDERS.get(node.target)
    gemm = build(node, names) if build else None
    return gemm if gemm is not None and gemm.dtype in FLOATS and gemm.flops > 0 else None


def value_of(name: str, tensor: torch.Tensor) -> Value:
    """What a step graph says of a tensor."""
    return Value(name, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))


def _values(nodes: Any, names: Names) -> list[Value]:
    return [value_of(names[node], node.meta["val"]) for node in nodes]


def _mm(node: fx.Node, names: Names) -> Gemm:
    """C = A B."""
    [out, a, b] = _values([node, *node.args], names)
    (m, k), n = a.shape, b.shape[1]
    return _bare("gemm", [out], [a, b], (m, n, k), 2.0 * m * n * k)


def _addmm(node: fx.Node, names: Names) -> Gemm | None:
    """C = A B with one bias for each column."""
    [out, bias, a, b] = _values([node, *node.args], names)
    (m, k), n = a.shape, b.shape[1]
    if bias.shape != (n,) or any(factor != 1 for factor in node.kwargs.values()):
        return None
    return _bare("gemm", [out], [a, b], (m, n, k), 2.0 * m * n * k, biases=(bias,))


def _bmm(node: fx.Node, names: Names) -> Gemm:
    """C[i] = A[i] B[i]."""
    [out, a, b] = _values([node, *node.args], names)
    return _bare("bmm", [out], [a, b], (out.shape[0], 1, 1), 2.0 * prod(out.shape) * a.shape[2])


def _baddbmm(node: fx.Node, names: Names) -> Gemm | None:
    """C[i] = A[i] B[i], if nothing is added."""
    if node.kwargs.get("beta") != 0 or node.kwargs.get("alpha", 1) != 1:
        return None
    [out, a, b] = _values([node, *node.args[1:]], names)
    return _bare("bmm", [out], [a, b], (out.shape[0], 1, 1), 2.0 * prod(out.shape) * a.shape[2])


def _attention(node: fx.Node, names: Names, *, kind: Kind, tensors: int) -> Gemm | None:
    """Attention without mask and dropout. Its results are the values that the picks from it are called."""
    inputs = _values(node.args[:tensors], names)
    settings = dict(zip(("dropout_p", "is_causal"), node.args[tensors:], strict=False)) | node.kwargs
    if settings.get("dropout_p", 0.0) != 0.0 or settings.get("attn_mask") is not None:
        return None
    picks = {user.args[1]: names[user] for user in node.users}
    outputs = [value_of(picks.get(i, f"{node.name}.{i}"), out) for i, out in enumerate(node.meta["val"])]
    query, key = inputs[-5:-3] if kind == "attention_backward" else inputs[:2]
    causal = bool(settings.get("is_causal", False))
    flops = 4.0 * prod(query.shape) * key.shape[2] * (0.5 if causal else 1.0)
    if kind == "attention_backward":
        flops *= BACKWARD_WORK
    cuboid = (query.shape[0], key.shape[1], 1)
    return _bare(kind, outputs, inputs, cuboid, flops, causal=causal, scale=settings.get("scale"))


def _bare(
    kind: Kind,
    outputs: list[Value],
    inputs: list[Value],
    cuboid: tuple[int, int, int],
    flops: float,
    **rest: Any,
) -> Gemm:
    """A gemm that does not know yet what it is for."""
    m, n, k = cuboid
    return Gemm(
        name=outputs[0].name,
        kind=kind,
        role="forward",
        level=0,
        m=m,
        n=n,
        k=k,
        flops=flops,
        dtype=outputs[0].dtype,
        inputs=tuple(Operand((value,)) for value in inputs),
        outputs=tuple(outputs),
        **rest,
    )


_BUILDERS: dict[Any, Callable[[fx.Node, Names], Gemm | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: partial(_attention, kind="attention", tensors=3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: partial(
        _attention, kind="attention_backward", tensors=6
    ),
}

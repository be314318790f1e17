"""The kernel on torch's CPU products and flash attention; imported only where it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cleave_dask.graph.steps import LOGITS
from cleave_dask.runtime.logits_torch import run_logits
from cleave_dask.runtime.wire import Array, check_operands, operand_dtypes, to_wire
from cleave_dask.runtime.wire_torch import from_wire

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchKernel:
    """The kernel of devices that have torch anyway; see `kernels.Kernel`."""

    name = "torch"

    def run(
        self, kind: str, arrays: Sequence[Array], *, dtype: str, causal: bool = False, scale: float | None = None
    ) -> tuple[Array, ...]:
        """The result of a tile; see `kernels.Kernel`."""
        check_operands(kind, arrays, dtype)
        names = operand_dtypes(kind, dtype)
        operands = [_aligned(from_wire(array, name)) for array, name in zip(arrays, names, strict=True)]
        with torch.inference_mode():
            results = _run(kind, operands, causal, scale)
            return tuple(to_wire(result.contiguous()) for result in results)


def _aligned(operand: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory of torch's own: products of some shapes depend on where an operand begins."""
    return torch.empty(operand.shape, dtype=operand.dtype).copy_(operand)


def _run(kind: str, operands: Sequence[torch.Tensor], causal: bool, scale: float | None) -> tuple[torch.Tensor, ...]:
    if kind == "gemm":
        return (torch.mm(*operands),)
    if kind == "bmm":
        return (torch.bmm(*operands),)
    if kind in LOGITS:
        return run_logits(kind, operands)
    if kind == "attention":
        results: tuple[torch.Tensor, ...] = _ATTENTION(*operands, 0.0, causal, scale=scale)
    else:
        results = _ATTENTION_BACKWARD(*operands, 0.0, causal, scale=scale)
    return results

"""Torch's ops, dtypes and devices by name, and the one op that is ours.

A step graph speaks of torch in words ("aten.mm.default", dtype "float32"). Here words become torch's objects and back.
Importing this module registers `cleave::dropout_mask`, which the machine that runs a step graph needs as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cleave_dask.errors import InputError
from cleave_dask.graph.ir import TorchConstant

NEVER_DRAW = (  # torch tags it as random for its dropout, which it does not have on a CPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


@torch.library.custom_op("cleave::dropout_mask", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def dropout_mask(like: torch.Tensor, keep: float, scale: float | None) -> torch.Tensor:
    """The mask of torch's dropout: 1 / scale with probability `keep`, else 0, laid out like the tensor it will meet.

    Torch draws it in memory order with three ops, two of them in place. One pure op draws the same numbers.
    """
    mask = torch.empty_like(like).bernoulli_(keep)
    return mask if scale is None else mask.div_(scale)


@dropout_mask.register_fake
def _fake_dropout_mask(like: torch.Tensor, keep: float, scale: float | None) -> torch.Tensor:
    return torch.empty_like(like)


def constant_of(thing: object) -> TorchConstant | None:
    """The name of a torch dtype, device, layout or memory format; None for anything else."""
    match thing:
        case torch.dtype():
            return TorchConstant("dtype", str(thing).removeprefix("torch."))
        case torch.device():
            return TorchConstant("device", str(thing))
        case torch.layout():
            return TorchConstant("layout", str(thing).removeprefix("torch."))
        case torch.memory_format():
            return TorchConstant("memory_format", str(thing).removeprefix("torch."))
    return None


@cache
def from_constant(constant: TorchConstant) -> Any:
    """The torch object that a constant names."""
    if constant.kind == "device":
        return torch.device(constant.name)
    return getattr(torch, constant.name)


def dtype_of(name: str) -> torch.dtype:
    """`dtype_of("float32")` is torch.float32."""
    dtype: torch.dtype = from_constant(TorchConstant("dtype", name))
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`dtype_name(torch.float32)` is "float32"."""
    return str(dtype).removeprefix("torch.")


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The function behind an op's target: "aten.add.Tensor", "cleave.dropout_mask.default", "getitem"."""
    if target == "getitem":
        return operator.getitem
    try:
        found: Callable[..., Any] = operator.attrgetter(target)(torch.ops)
    except AttributeError as error:
        raise InputError(f"torch {torch.__version__} has no op '{target}': capture the step with this torch") from error
    return found


def is_random(function: object) -> bool:
    """Whether an op draws from torch's random stream."""
    if not isinstance(function, torch._ops.OpOverload) or function in NEVER_DRAW:
        return False
    return torch.Tag.nondeterministic_seeded in function.tags

"""What a step graph is made of: values, ops that only the server can run, and gemms that may be sent out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Range = tuple[int, int]
"""A half-open range (start, stop)."""

Kind = Literal["gemm", "bmm", "attention", "attention_backward", "logit_sums", "logit_dx", "logit_dw"]
Role = Literal["forward", "dX", "dW"]

LOGITS = ("logit_sums", "logit_dx", "logit_dw")
"""Kinds that make logits and keep them to themselves."""

BACKWARD_WORK = 2.5
"""Products in the backward of an attention, for each in its forward."""

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex128": 16,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program: its name and what torch would say of it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when it is stored densely."""
        size = ITEMSIZE[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value as an argument of an op."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """An argument that only torch has a type for, by the name torch gives it: dtype "float32", device "cpu"."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


@dataclass(frozen=True, slots=True)
class Input:
    """What the program starts from: a parameter, a buffer, a leaf of the batch, or a constant of the module."""

    kind: Literal["param", "buffer", "batch", "constant"]
    source: str  # the parameter's or buffer's full name, the leaf's path in the batch, or the constant's name
    value: Value


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen op that the server runs as it stands.

    Arguments are frozen: tuples, `Ref`s, `TorchConstant`s, strings, numbers and None. Lists become tuples, and every
    nan becomes the one `math.nan`, so that equal ops compare equal.
    """

    name: str
    target: str  # as torch prints it: "aten.add.Tensor"; "getitem" picks from a tuple
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    value: Value | None  # None: the op yields a tuple, which "getitem" ops pick apart
    random: bool = False  # draws from the random stream: such ops keep their program order

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", _frozen(self.args))
        object.__setattr__(self, "kwargs", _frozen(self.kwargs))

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that it uses."""
        return tuple(dict.fromkeys(ref.name for ref in _refs((self.args, self.kwargs))))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the values that it makes."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a gemm: a value, or several joined along an axis (QKV, gate and up)."""

    parts: tuple[Value, ...]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined operand."""
        joined = list(self.parts[0].shape)
        joined[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(joined)


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product that may be sent out: C[m, n] = A[m, k] B[k, n], a batched product, or one attention.

    The cuboid m x n x k is what tiles partition. For `bmm` it is (batch, 1, 1); for `attention` and its backward it
    is (batch, groups of heads that share keys and values, 1): such ops are cut along batch and head groups only.

    Inputs, outputs: gemm (A, B) -> C; bmm (A, B) -> C; attention (q, k, v) -> (out, logsumexp);
    attention_backward (grad_out, q, k, v, out, logsumexp) -> (dq, dk, dv).
    Kinds of a head by vocabulary, which see logits X[m, k] W[n, k]^T, have the cuboids of the products that they stand
    for; k of `logit_sums` and columns of the others are never cut: logit_sums (X, W, targets) -> (logsumexp, target's
    logit), results over columns combined; logit_dx (X, W, targets, logsumexp, slope) -> dX; logit_dw (W, X, targets,
    logsumexp, slope) -> dW, both added up along k, which is the other side of the logits.
    Merged gemms have several outputs, C's rows (out_axis 0) or columns (out_axis 1) in order: output i belongs to
    part i of A (out_axis 0) or of B (out_axis 1). A gemm whose A and B both have parts is a sum of products.
    """

    name: str
    kind: Kind
    role: Role
    level: int
    m: int
    n: int
    k: int
    flops: float
    dtype: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    out_axis: int = 1
    biases: tuple[Value | None, ...] = ()  # added to each output's rows (addmm); empty: none
    causal: bool = False
    scale: float | None = None
    wire: str | None = None  # dtype that numbers are rounded to for their way between server and devices; None: as is

    @property
    def tile_dtype(self) -> str:
        """The dtype in which devices get, multiply and send numbers."""
        return self.wire or self.dtype

    def sent_dtype(self, value: Value) -> str:
        """The dtype in which an input or output travels; logsumexps, which have one axis less, are never rounded."""
        kept = {"attention": 3, "attention_backward": 3, **dict.fromkeys(LOGITS, 1)}.get(self.kind)
        rounded = value.dtype == self.dtype and len(value.shape) != kept
        return self.tile_dtype if rounded else value.dtype

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that it uses."""
        parts = [part.name for operand in self.inputs for part in operand.parts]
        return tuple(dict.fromkeys(parts + [bias.name for bias in self.biases if bias is not None]))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the values that it makes."""
        return tuple(value.name for value in self.outputs)


Step = Op | Gemm


def _refs(argument: Any) -> Iterator[Ref]:
    """Every Ref inside a nested argument."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _refs(item)


def _frozen(argument: Any) -> Any:
    """The argument with tuples for lists and one nan for all."""
    if isinstance(argument, (tuple, list)):
        return tuple(_frozen(item) for item in argument)
    return math.nan if isinstance(argument, float) and math.isnan(argument) else argument

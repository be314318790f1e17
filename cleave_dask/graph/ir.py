"""The step graph: one training step (forward, loss, backward) as plain, frozen data.

A `StepGraph` is a program: a list of steps in program order, each either an `Op` that only the server can run or a
`Gemm` that may be cut into tiles and sent out. Values are tensors, known by name. Nothing here imports torch: a step
graph can be planned, simulated, printed and stored on a machine without it.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

from cleave_dask.errors import InputError
from cleave_dask.formatting import html_table, quantity

Range = tuple[int, int]
"""A half-open range (start, stop)."""

Kind = Literal["gemm", "bmm", "attention", "attention_backward"]
Role = Literal["forward", "dX", "dW"]

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

FORMAT = 1
"""Version of the JSON that `StepGraph.to_json` writes."""


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


@dataclass(frozen=True)
class StepGraph:
    """The whole training step of one module on one batch shape."""

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]  # in program order
    loss: str  # name of the value that is the loss
    grads: tuple[tuple[str, str], ...]  # (parameter, value) for each parameter that has a gradient
    buffers: tuple[tuple[str, str], ...]  # (buffer, value) for each buffer that the step changes
    batch: str  # structure of the batch, with every argument that is not a tensor spelled out
    constants: Mapping[str, bytes] = field(default_factory=dict)  # raw bytes of each constant input

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """Everything that may be sent out, in program order."""
        return tuple(step for step in self.steps if isinstance(step, Gemm))

    @cached_property
    def flops(self) -> float:
        """Floating point operations of all gemms of the step."""
        return sum(gemm.flops for gemm in self.gemms)

    @cached_property
    def levels(self) -> int:
        """Length of the longest chain of gemms that wait for each other."""
        return max((gemm.level for gemm in self.gemms), default=0)

    @cached_property
    def frees(self) -> tuple[tuple[str, ...], ...]:
        """For each step, the values that nothing needs after it: neither a later step nor the result."""
        results = {self.loss, *(value for _, value in self.grads), *(value for _, value in self.buffers)}
        seen, frees = set(results), []
        for step in reversed(self.steps):
            last = tuple(name for name in dict.fromkeys(step.reads + step.writes) if name not in seen)
            seen.update(last)
            frees.append(last)
        return tuple(reversed(frees))

    @cached_property
    def digest(self) -> str:
        """A hash of the content: equal graphs have equal digests, on any machine."""
        return blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def gemm(self, name: str) -> Gemm:
        """The gemm of that name."""
        for gemm in self.gemms:
            if gemm.name == name:
                return gemm
        raise KeyError(name)

    def to_json(self) -> str:
        """The graph as one JSON object, from which `from_json` makes an equal graph."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "inputs": [[entry.kind, entry.source, _from_value(entry.value)] for entry in self.inputs],
            "steps": [_from_op(step) if isinstance(step, Op) else _from_gemm(step) for step in self.steps],
            "loss": self.loss,
            "grads": self.grads,
            "buffers": self.buffers,
            "batch": self.batch,
            "constants": {name: b64encode(self.constants[name]).decode() for name in sorted(self.constants)},
        }
        return json.dumps(content, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> StepGraph:
        """The graph that `to_json` wrote."""
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise InputError(f"step graph has format {content['format']}, not {FORMAT}: capture it again")
            return cls(
                name=content["name"],
                inputs=tuple(Input(kind, source, _to_value(value)) for kind, source, value in content["inputs"]),
                steps=tuple(_to_op(step) if "target" in step else _to_gemm(step) for step in content["steps"]),
                loss=content["loss"],
                grads=tuple((name, value) for name, value in content["grads"]),
                buffers=tuple((name, value) for name, value in content["buffers"]),
                batch=content["batch"],
                constants={name: b64decode(data) for name, data in content["constants"].items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is not the JSON of a step graph ({error!r}): write it with to_json()") from error

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __repr__(self) -> str:
        return f"<StepGraph {self._headline}>"

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._shapes]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self._headline, *lines])

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._shapes, caption=self._headline)

    @property
    def _headline(self) -> str:
        """The graph in one line."""
        ops = len(self.steps) - len(self.gemms)
        work = quantity(self.flops, "FLOP")
        return f"{self.name}: {work} in {len(self.gemms)} gemms on {self.levels} levels, {ops} other ops"

    @property
    def _shapes(self) -> list[tuple[str, ...]]:
        """One row for each distinct shape of gemm: by role, then by work, the most first."""
        counts = Counter((gemm.role, gemm.kind, gemm.m, gemm.n, gemm.k, gemm.dtype, gemm.flops) for gemm in self.gemms)
        order = sorted(counts.items(), key=lambda item: (_ROLES.index(item[0][0]), -item[1] * item[0][-1]))
        return [
            (role, kind, str(m), str(n), str(k), dtype, str(count), quantity(count * flops, "FLOP"))
            for (role, kind, m, n, k, dtype, flops), count in order
        ]


_ROLES = ("forward", "dX", "dW")
_COLUMNS = ("role", "kind", "m", "n", "k", "dtype", "count", "work")


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


def _from_argument(argument: Any) -> Any:
    """An argument of an op as JSON; what JSON has no word for becomes an object with one key."""
    match argument:
        case tuple():
            return [_from_argument(item) for item in argument]
        case Ref(name):
            return {"ref": name}
        case TorchConstant(kind, name):
            return {kind: name}
        case float() if not math.isfinite(argument):
            return {"float": str(argument)}
        case complex():
            return {"complex": [_from_argument(argument.real), _from_argument(argument.imag)]}
    return argument


def _to_argument(data: Any) -> Any:
    """The argument that `_from_argument` wrote."""
    match data:
        case list():
            return tuple(_to_argument(item) for item in data)
        case {"ref": name}:
            return Ref(name)
        case {"float": number}:
            return float(number)
        case {"complex": [real, imaginary]}:
            return complex(_to_argument(real), _to_argument(imaginary))
        case {"dtype": _} | {"device": _} | {"layout": _} | {"memory_format": _}:
            [(kind, name)] = data.items()
            return TorchConstant(kind, name)
    return data


def _from_value(value: Value | None) -> Any:
    return value and [value.name, value.shape, value.strides, value.dtype]


def _to_value(data: Any) -> Value:
    name, shape, strides, dtype = data
    return Value(name, tuple(shape), tuple(strides), dtype)


def _from_op(op: Op) -> dict[str, Any]:
    data = {entry.name: getattr(op, entry.name) for entry in fields(op)}
    return data | {
        "args": _from_argument(op.args),
        "kwargs": _from_argument(op.kwargs),
        "value": _from_value(op.value),
    }


def _to_op(data: dict[str, Any]) -> Op:
    value = _to_value(data["value"]) if data["value"] else None
    return Op(**data | {"args": _to_argument(data["args"]), "kwargs": _to_argument(data["kwargs"]), "value": value})


def _from_gemm(gemm: Gemm) -> dict[str, Any]:
    data = {entry.name: getattr(gemm, entry.name) for entry in fields(gemm)}
    return data | {
        "inputs": [[[_from_value(part) for part in operand.parts], operand.axis] for operand in gemm.inputs],
        "outputs": [_from_value(value) for value in gemm.outputs],
        "biases": [_from_value(bias) for bias in gemm.biases],
    }


def _to_gemm(data: dict[str, Any]) -> Gemm:
    operands = (Operand(tuple(_to_value(part) for part in parts), axis) for parts, axis in data["inputs"])
    return Gemm(
        **data
        | {
            "inputs": tuple(operands),
            "outputs": tuple(_to_value(value) for value in data["outputs"]),
            "biases": tuple(_to_value(bias) if bias else None for bias in data["biases"]),
        }
    )

"""Ops and gemms as JSON, and back."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from cleave_dask.graph.steps import Gemm, Op, Operand, Ref, TorchConstant, Value


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


def from_value(value: Value | None) -> Any:
    """A value as JSON."""
    return value and [value.name, value.shape, value.strides, value.dtype]


def to_value(data: Any) -> Value:
    """The value that `from_value` wrote."""
    name, shape, strides, dtype = data
    return Value(name, tuple(shape), tuple(strides), dtype)


def from_op(op: Op) -> dict[str, Any]:
    """An op as JSON."""
    data = {entry.name: getattr(op, entry.name) for entry in fields(op)}
    return data | {
        "args": _from_argument(op.args),
        "kwargs": _from_argument(op.kwargs),
        "value": from_value(op.value),
    }


def to_op(data: dict[str, Any]) -> Op:
    """The op that `from_op` wrote."""
    value = to_value(data["value"]) if data["value"] else None
    return Op(**data | {"args": _to_argument(data["args"]), "kwargs": _to_argument(data["kwargs"]), "value": value})


def from_gemm(gemm: Gemm) -> dict[str, Any]:
    """A gemm as JSON."""
    data = {entry.name: getattr(gemm, entry.name) for entry in fields(gemm)}
    return data | {
        "inputs": [[[from_value(part) for part in operand.parts], operand.axis] for operand in gemm.inputs],
        "outputs": [from_value(value) for value in gemm.outputs],
        "biases": [from_value(bias) for bias in gemm.biases],
    }


def to_gemm(data: dict[str, Any]) -> Gemm:
    """The gemm that `from_gemm` wrote."""
    operands = (Operand(tuple(to_value(part) for part in parts), axis) for parts, axis in data["inputs"])
    return Gemm(
        **data
        | {
            "inputs": tuple(operands),
            "outputs": tuple(to_value(value) for value in data["outputs"]),
            "biases": tuple(to_value(bias) if bias else None for bias in data["biases"]),
        }
    )

"""How tensors travel: as contiguous numpy arrays that Dask sends without a copy.

numpy has no bfloat16, so such numbers travel as the uint16 that holds their bits, with the dtype's name beside them.
Nothing here imports torch: a device reads and writes the same bits without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cleave_dask.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]

_QUIET_NAN = 0x7FC0  # of bfloat16


def to_wire(array: Any) -> Array:
    """A numpy array or torch tensor as the array to send: the same memory where that is contiguous, else a copy.

    Contiguous means in C or in Fortran order, for kernels take both. A matrix that is neither is copied along its
    memory, anything else into C order. A tensor on the meta device has no numbers: it travels as a `hollow` array.
    """
    if getattr(array, "is_meta", False):
        return hollow(tuple(array.shape), dtype_name(array))
    sent = as_array(array)
    if sent.flags.c_contiguous or sent.flags.f_contiguous:
        return sent
    return sent.copy(order="K" if sent.ndim == 2 and 0 not in sent.strides else "C")


def as_array(array: Any) -> Array:
    """The same memory as numpy sees it, in whatever order it is."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint16) if dtype_name(array) == "bfloat16" else array
    return _from_torch(array)


def hollow(shape: tuple[int, ...], dtype: str) -> Array:
    """An array that has a shape and no numbers: it takes, and Dask sends, one number whatever its size."""
    return np.broadcast_to(np.zeros((), wire_dtype(dtype)), shape)


def is_hollow(array: Array) -> bool:
    """Whether an array has no numbers of its own: no tensor that has some travels with a stride of zero."""
    return array.size > 1 and 0 in array.strides


def _from_torch(tensor: Any) -> Array:
    """The memory of a torch tensor as numpy sees it."""
    if not hasattr(tensor, "detach"):
        raise InputError(f"cannot send a {type(tensor).__name__}; give a numpy array or a torch tensor")
    tensor = tensor.detach().cpu()
    if dtype_name(tensor) == "bfloat16":
        tensor = tensor.view(sys.modules["torch"].uint16)  # whoever made the tensor has imported torch
    sent: Array = tensor.numpy()
    return sent


def dtype_name(array: Any) -> str:
    """The dtype's name, the same for numpy and torch: "float32", "bfloat16"."""
    if isinstance(array, np.ndarray):
        return str(array.dtype.name)
    return str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")


def wire_dtype(dtype: str) -> str:
    """Name of the numpy dtype in which numbers of this dtype travel."""
    return "uint16" if dtype == "bfloat16" else dtype


def widen(array: Any, dtype: str) -> Any:
    """Numbers of a dtype in the precision to compute in: float32 for halves, else the array itself.

    Works on numpy and cupy arrays, and keeps the memory order.
    """
    if dtype == "bfloat16":
        bits = array.astype("uint32")
        bits <<= 16
        return bits.view("float32")
    return array.astype("float32") if dtype == "float16" else array


def narrow(array: Any, dtype: str) -> Any:
    """The way back from `widen`: rounded to the nearest number of the dtype, ties to even; NaN stays NaN."""
    if dtype == "float16":
        return array.astype("float16")
    if dtype != "bfloat16":
        return array
    bits = array.view("uint32")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    halves = rounded.astype("uint16")
    nan = array != array
    if nan.any():  # the addition may have carried a NaN into infinity, or past the sign
        halves[nan] = _QUIET_NAN
    return halves


def check_operands(kind: str, arrays: Sequence[Array], dtype: str) -> None:
    """Raise InputError unless the arrays are operands of a tile of this kind, as they travel."""
    if kind not in _RANKS:
        raise InputError(f"unknown kind of tile {kind!r}; known are {', '.join(_RANKS)}")
    seen = [str(array.dtype) for array in arrays]
    shapes = [array.shape for array in arrays]
    if tuple(array.ndim for array in arrays) != _RANKS[kind] or not _fit(kind, shapes):
        raise InputError(f"operands of shapes {shapes} do not make a tile of kind {kind!r}")
    floats = ("float64", "float32", "float16", "bfloat16")
    if dtype not in floats or seen != [wire_dtype(name) for name in operand_dtypes(kind, dtype)]:
        raise InputError(f"operands of dtypes {seen} do not make a tile of kind {kind!r} in {dtype}")


def logsumexp_dtype(dtype: str) -> str:
    """Name of the dtype in which attention keeps its logsumexp."""
    return "float64" if dtype == "float64" else "float32"


def operand_dtypes(kind: str, dtype: str) -> list[str]:
    """Names of the dtypes of a tile's operands."""
    wide = logsumexp_dtype(dtype)
    if kind == "attention_backward":
        return [dtype] * 5 + [wide]
    if kind.startswith("logit"):
        return [dtype, dtype, "float64", wide, wide][: len(_RANKS[kind])]
    return [dtype] * len(_RANKS[kind])


_RANKS = {
    "gemm": (2, 2),
    "bmm": (3, 3),
    "attention": (4, 4, 4),
    "attention_backward": (4, 4, 4, 4, 4, 3),
    "logit_sums": (2, 2, 1),
    "logit_dx": (2, 2, 1, 1, 1),
    "logit_dw": (2, 2, 1, 1, 1),
}


def _fit(kind: str, shapes: list[tuple[int, ...]]) -> bool:
    """Whether shapes of the right ranks agree with each other."""
    if kind in ("gemm", "bmm"):
        a, b = shapes
        return a[-1] == b[-2] and a[:-2] == b[:-2]
    if kind.startswith("logit"):
        kept, other, *rows = shapes
        x = other if kind == "logit_dw" else kept
        return kept[1] == other[1] and all(vector == x[:1] for vector in rows) and min(kept[0], other[0]) > 0
    q, k, v = shapes[-5:-2] if kind == "attention_backward" else shapes
    heads_fit = k[1] > 0 and q[1] % k[1] == 0
    fit = heads_fit and (q[0], q[3]) == (k[0], k[3]) and k[:3] == v[:3] and k[2] > 0
    if kind == "attention":
        return fit
    made = (*q[:3], v[3])
    return fit and shapes[0] == made == shapes[4] and shapes[5] == q[:3]

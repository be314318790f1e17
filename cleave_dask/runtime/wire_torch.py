"""Arrays from the network as torch tensors: the server's side of `wire`."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from cleave_dask.errors import InputError
from cleave_dask.runtime.wire import Array, dtype_name, wire_dtype


def from_wire(array: Array, dtype: str) -> torch.Tensor:
    """The tensor over the array's own memory.

    Where the array is read-only, so is that memory, although torch cannot say so: clone before writing in place.
    """
    if dtype_name(array) != wire_dtype(dtype):
        raise InputError(f"an array of dtype {array.dtype} does not hold numbers of {dtype}")
    tensor = from_dlpack(array)  # unlike from_numpy, silent about read-only memory
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor

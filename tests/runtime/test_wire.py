"""Tensors travel without copies, and arrive as what they were."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from distributed.protocol import deserialize, serialize

from cleave_dask.errors import InputError
from cleave_dask.runtime.wire import dtype_name, narrow, to_wire, widen
from cleave_dask.runtime.wire_torch import from_wire

Array = np.ndarray[Any, np.dtype[Any]]

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "rows": torch.arange(12.0).reshape(4, 3)[1:3],
    "float64": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "float16": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    "bfloat16": torch.arange(6).reshape(2, 3).bfloat16(),
    "bfloat16 transposed": torch.arange(6).reshape(2, 3).bfloat16().T,
    "tokens": torch.arange(6).reshape(2, 3),
    "mask": torch.tensor([[True, False], [False, True]]),
    "scalar": torch.tensor(3.5),
    "bfloat16 scalar": torch.tensor(3.5).bfloat16(),
    "empty": torch.zeros(0, 4),
    "parameter": torch.nn.Parameter(torch.ones(2, 3)),
    "stack": torch.arange(24.0).reshape(2, 3, 4),
}
COPIED = {
    "columns": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "columns of columns": torch.arange(12.0).reshape(3, 4).T[1:3],
    "bfloat16 columns": torch.arange(12).reshape(3, 4).bfloat16()[:, 1:3],
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "heads": torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2),
    "every other": torch.arange(12.0)[::2],
}


def memory(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("name", TENSORS)
def test_a_contiguous_tensor_is_sent_from_its_own_memory(name: str) -> None:
    tensor = TENSORS[name]
    sent = to_wire(tensor)
    assert memory(sent) == tensor.data_ptr() or not sent.size
    assert sent.shape == tensor.shape


@pytest.mark.parametrize("name", COPIED)
def test_any_other_tensor_is_copied_into_a_contiguous_array(name: str) -> None:
    tensor = COPIED[name]
    sent = to_wire(tensor)
    assert sent.flags.c_contiguous or sent.flags.f_contiguous
    assert memory(sent) != tensor.data_ptr()
    assert torch.equal(from_wire(sent, dtype_name(tensor)), tensor)


def test_numpy_arrays_too() -> None:
    array = np.arange(12.0).reshape(3, 4)
    for contiguous in (array, array.T, array[1:]):
        assert to_wire(contiguous) is contiguous
    np.testing.assert_array_equal(to_wire(array[:, 1:]), array[:, 1:])
    np.testing.assert_array_equal(to_wire(array[::-1]), array[::-1])
    assert to_wire(np.broadcast_to(array[0], (3, 4))).flags.c_contiguous


def test_what_cannot_be_sent() -> None:
    with pytest.raises(InputError, match="list"):
        to_wire([1, 2])


@pytest.mark.parametrize("name", [*TENSORS, *COPIED])
@pytest.mark.parametrize("writeable", [True, False])
def test_there_and_back(name: str, writeable: bool) -> None:
    tensor = (TENSORS | COPIED)[name].detach()
    sent = to_wire(tensor).copy(order="K")
    sent.flags.writeable = writeable
    received = from_wire(sent, dtype_name(tensor))
    assert received.dtype == tensor.dtype
    assert torch.equal(received, tensor)
    assert received.data_ptr() == memory(sent) or not sent.size


def test_an_array_of_another_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="float32 does not hold numbers of bfloat16"):
        from_wire(np.ones((2, 2), "float32"), "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_dask_sends_and_receives_without_copies(dtype: str, order: str) -> None:
    tensor = torch.arange(20_000.0).reshape(100, 200).to(getattr(torch, dtype))
    sent = to_wire(tensor if order == "C" else tensor.T)
    header, frames = serialize(sent)
    assert header["serializer"] == "dask"
    (frame,) = frames
    assert np.shares_memory(np.frombuffer(frame, sent.dtype), sent)

    arrived = bytearray(frame)  # what a connection reads into
    received = deserialize(header, [memoryview(arrived)])
    assert np.shares_memory(received, np.frombuffer(arrived, sent.dtype))
    assert received.strides == sent.strides
    assert torch.equal(from_wire(received, dtype), tensor if order == "C" else tensor.T)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_widening_is_exact_and_keeps_the_order(dtype: str) -> None:
    tensor = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    for array in (to_wire(tensor), to_wire(tensor.T)):
        wide = widen(array, dtype)
        assert wide.flags.c_contiguous == array.flags.c_contiguous
        assert wide.flags.f_contiguous == array.flags.f_contiguous
        assert wide.dtype == ("float64" if dtype == "float64" else "float32")
        np.testing.assert_array_equal(narrow(wide, dtype), array)


def test_every_bfloat16_survives_widening() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    wide = widen(every, "bfloat16")
    nan = np.isnan(wide)
    np.testing.assert_array_equal(narrow(wide, "bfloat16")[~nan], every[~nan])
    assert np.isnan(widen(narrow(wide, "bfloat16"), "bfloat16")[nan]).all()


def test_needs_no_torch() -> None:
    code = "import sys, cleave_dask.runtime.wire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

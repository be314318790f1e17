"""What can be known of tensors while a module is traced, although none of them has data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from cleave_dask.errors import CaptureError
from cleave_dask.graph.torch_ops import is_random

aten = torch.ops.aten

LARGEST = 1 << 22  # elements: a larger tensor is not worth knowing
UNDEFINED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
COMPARISONS = {aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar}
JUST_BELOW_ONE = 1.0 - 2.0**-53


class Knowledge(TorchDispatchMode):
    """Watches the ops of a trace, and answers questions that do not depend on any batch.

    A tensor computed from constants alone (positions, causal masks) has the same value in every step: it is computed on
    the side, and control flow may ask for it. A uniform draw lies in [0, 1), whatever the seed: `torch.rand([]) < 0`
    is known to be false. A tensor that is written in place is no longer known.

    Each random op gets a ticket, the state of the random stream when it was drawn. Two draws with one ticket are one
    draw: activation checkpointing turns the stream back to repeat its forward pass.
    """

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        self.tickets: list[str] = []
        self._values = WeakIdKeyDictionary()
        self._uniform = WeakIdKeyDictionary()
        self._written: dict[int, torch.UntypedStorage] = {}

    def declare(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Say what a tensor's value is in every batch."""
        self._values[tensor] = value

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's value if no batch can change it."""
        value = self._values.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        return None if value is None or _storage_key(value) in self._written else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op of the trace, and the same op on the side if all that it reads is known."""
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked more often than all else together
        if is_random(func):
            self._draw()
        knows_all = all(self.value(tensor) is not None for tensor in _tensors((args, kwargs.values())))
        if knows_all and not _returns_tensors(func):
            return self._evaluate(func, args, kwargs)
        if func._schema.is_mutable:
            _refuse_to_write(func, args)
            self._forget(args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is aten.rand.default:
            self._uniform[result] = True
        elif func in COMPARISONS and args[0] in self._uniform:
            self._compare(func, args, result)
        elif knows_all and self._can_know(func, result):
            self._learn(result, self._evaluate(func, args, kwargs))
        return result

    def _draw(self) -> None:
        """Note the state of the random stream, and move it on, as the op itself will when it runs."""
        with _disable_current_modes():
            state = torch.get_rng_state().numpy().tobytes()
            self.tickets.append(blake2b(state, digest_size=16).hexdigest())
            torch.rand(1)

    def _compare(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """A comparison with a uniform draw is known if both ends of [0, 1) agree on it."""
        with _disable_current_modes():
            low, high = (
                func(torch.full(result.shape, end, dtype=torch.float64), *args[1:]) for end in (0.0, JUST_BELOW_ONE)
            )
            if torch.equal(low, high):
                self._values[result] = low

    def _can_know(self, func: Any, result: Any) -> bool:
        outputs = list(_tensors(result))
        if is_random(func) or func in UNDEFINED or not outputs:
            return False
        return all(isinstance(output, FakeTensor) and output.numel() <= LARGEST for output in outputs)

    def _evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op on the values that are known."""
        args, kwargs = tree_map_only(torch.Tensor, self.value, (args, kwargs))
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _learn(self, result: Any, value: Any) -> None:
        for tensor, known in zip(_tensors(result), _tensors(value), strict=True):
            self._values[tensor] = known

    def _forget(self, args: Any, kwargs: Any) -> None:
        """Nothing that shares memory with what was written is known any more; of draws, none, to be safe."""
        self._uniform.clear()
        for tensor in _tensors((args, kwargs.values())):
            value = self.value(tensor)
            if value is not None:
                self._written[_storage_key(value)] = value.untyped_storage()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an op."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Iterable) and not isinstance(tree, str):
        for item in tree:
            yield from _tensors(item)


def _refuse_to_write(func: Any, args: tuple[Any, ...]) -> None:
    """Raise if an op is about to change a tensor of the module's own: what the step changes has to be a buffer."""
    for argument, tensor in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"{func} writes to a tensor of shape {tuple(tensor.shape)} that the module has as a plain attribute: "
                "make it a buffer with register_buffer"
            )


def _storage_key(tensor: torch.Tensor) -> int:
    """One number for all tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


@cache
def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(result.type) for result in func._schema.returns)

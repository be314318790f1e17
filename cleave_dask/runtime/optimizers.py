"""Any torch.optim optimizer and its schedule: moved to the process that keeps the weights, and in and out of a store.

Two ways, for two needs. `pack` and `unpack` carry the objects themselves, with whatever functions and classes the user
wrote, from the client to the server: a pickle, in which each parameter is only a name. Unpickling runs code, so such
bytes may only come from the client, who is trusted; nothing that a device sends, and nothing that lies on a disk, is
ever unpickled. `state_arrays` and `restore` carry the numbers only, as arrays and plain JSON, for the tile store.
"""

from __future__ import annotations

import inspect
import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from weakref import ref

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.resources import expect
from cleave_dask.runtime.store import StoredArray, holder

Names = Mapping[Tensor, str]
Arrays = dict[str, StoredArray]


def check_kind(optimizer: object) -> None:
    """Refuse what is no optimizer, such as the class of one."""
    remedy = "give one of torch.optim over module.parameters()"
    expect(optimizer, Optimizer, what="the optimizer", remedy=remedy)


def check(optimizer: Optimizer, names: Names) -> None:
    """Refuse an optimizer that cannot run on the server."""
    check_kind(optimizer)
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        remedy = "use one whose step() needs none, such as AdamW"
        raise InputError(f"{kind} evaluates the loss several times per step, through a closure; {remedy}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError("SparseAdam needs sparse gradients, and those of a step graph are dense; use Adam")
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in names:
                which = f"parameter {place} of group {index}, of shape {tuple(parameter.shape)}"
                raise InputError(f"{which}, is not of this module; build {kind} over module.parameters()")


def pack(optimizer: Optimizer, schedule: LRScheduler | None, names: Names) -> bytes:
    """The optimizer and its schedule with all their state, as bytes in which each parameter is only a name."""
    check(optimizer, names)
    if schedule is not None and schedule.optimizer is not optimizer:
        raise InputError("the schedule belongs to another optimizer; build it over the one that you pass")
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, names).dump((optimizer, schedule))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        remedy = "keep open files, locks, clients and the like out of it"
        raise InputError(f"{type(optimizer).__name__} or its schedule cannot be sent: {error}; {remedy}") from error
    return buffer.getvalue()


def unpack(data: bytes, params: Mapping[str, Tensor]) -> tuple[Optimizer, LRScheduler | None]:
    """What was packed, over other tensors of the same names. For bytes from the client only: this runs their code."""
    optimizer, schedule = _Unpickler(io.BytesIO(data), params).load()
    if schedule is not None:
        _count_steps(optimizer)
    return optimizer, schedule


def state_arrays(optimizer: Optimizer, schedule: LRScheduler | None, names: Names) -> tuple[Arrays, dict[str, Any]]:
    """The state of both: large tensors as arrays that share their memory, everything else as plain JSON.

    What has no place in JSON raises InputError: call this once before training, to hear of it in time.
    """
    check(optimizer, names)
    arrays: Arrays = {}
    document: dict[str, Any] = {
        "type": type(optimizer).__qualname__,
        "groups": None,
        "parameters": {},
        "schedule": None,
    }
    state = dict(optimizer.state_dict())
    if "param_groups" in state:  # a class with a format of its own may have none: then all of it is "rest"
        order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        groups = [group | {"params": [order[key] for key in group["params"]]} for group in state.pop("param_groups")]
        document["groups"] = _encode(groups, "optimizer/groups", arrays)
        mine = {order[key]: value for key, value in state["state"].items() if type(key) is int}
        state["state"] = {key: value for key, value in state["state"].items() if type(key) is not int}
        document["parameters"] = {name: _encode_state(value, name, arrays) for name, value in mine.items()}
    document["rest"] = _encode(state, "optimizer/rest", arrays)
    if schedule is not None:
        kept = {key: item for key, item in schedule.state_dict().items() if not _is_code(item)}
        document["schedule"] = {"type": type(schedule).__qualname__, "state": _encode(kept, "schedule/state", arrays)}
    return arrays, document


def restore(
    optimizer: Optimizer,
    schedule: LRScheduler | None,
    names: Names,
    arrays: Mapping[str, StoredArray],
    document: Mapping[str, Any],
) -> None:
    """Put the state of `state_arrays` into an optimizer and a schedule of the same kind, which take over the arrays."""
    saved = document["schedule"]
    for there, here in ((document["type"], optimizer), (saved and saved["type"], schedule)):
        ours = None if here is None else type(here).__qualname__
        if there != ours:
            raise CheckpointError(f"the state is of {there}, and this run uses {ours}; use {there} to resume")
    parameters = _decode(document["parameters"], arrays)
    state = _decode(document["rest"], arrays)
    if document["groups"] is not None:
        state["param_groups"] = _regroup(optimizer, names, _decode(document["groups"], arrays))
        state["state"] |= parameters
    if schedule is not None:
        schedule.load_state_dict(_decode(saved["state"], arrays))  # first: the optimizer's learning rates are to stay
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        for parameter, name in names.items():
            if name in parameters:
                optimizer.state[parameter] = _exact(optimizer.state[parameter], parameters[name])


def to_stored(tensor: Tensor) -> StoredArray:
    """A tensor as the store holds it; it shares the tensor's memory where that is possible."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        raise InputError(f"a tensor of layout {tensor.layout} cannot be stored; make it dense")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if holder(dtype) != dtype:
        plain = plain.view(getattr(torch, holder(dtype)))
    return StoredArray(plain.numpy(), dtype)


def to_tensor(stored: StoredArray) -> Tensor:
    """A stored array as a tensor that shares its memory."""
    return torch.from_numpy(stored.data).view(getattr(torch, stored.dtype))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Writes parameters as their names, and optimizers with everything that their class or their user added."""

    def __init__(self, file: io.BytesIO, names: Names) -> None:
        super().__init__(file)
        self._names = {id(parameter): name for parameter, name in names.items()}

    def persistent_id(self, item: Any) -> str | None:
        return self._names.get(id(item)) if isinstance(item, Tensor) else None

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Optimizer) and type(item).__getstate__ is Optimizer.__getstate__:
            # torch's own state leaves out hooks and what subclasses add; a schedule's wrapper of step() is made again.
            state = {key: value for key, value in vars(item).items() if not hasattr(value, "_wrapped_by_lr_sched")}
            return _blank, (type(item),), state
        return super().reducer_override(item)


class _Unpickler(pickle.Unpickler):
    """Reads names as the parameters of this process."""

    def __init__(self, file: io.BytesIO, params: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._params = params

    def persistent_load(self, name: str) -> Tensor:
        if name not in self._params:
            raise InputError(f"the optimizer updates {name!r}, which this model does not have; send the module first")
        return self._params[name]


def _blank(kind: type[Optimizer]) -> Optimizer:
    """An optimizer before it has any state."""
    return kind.__new__(kind)


def _count_steps(optimizer: Optimizer) -> None:
    """Note that step() was called, as torch makes an optimizer do for its schedule, which would warn otherwise."""
    step: Callable[..., Any] = type(optimizer).step
    target = ref(optimizer)

    @wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        alive: Any = target()
        alive._opt_called = True
        return step(alive, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]


def _is_code(item: Any) -> bool:
    """A function, which is not state: the object that it is restored into has its own."""
    return callable(item) and not isinstance(item, Tensor)


def _regroup(optimizer: Optimizer, names: Names, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups with their parameters in this optimizer's order, if they are the same ones."""
    ours = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in groups]
    if list(map(sorted, ours)) != list(map(sorted, theirs)):
        odd = sorted({name for group in ours for name in group} ^ {name for group in theirs for name in group})
        what = f"{odd[0]} is only in one of them" if odd else f"{len(theirs)} there, {len(ours)} here"
        raise CheckpointError(
            f"the state has other parameter groups ({what}); build the optimizer as in the former run"
        )
    return [group | {"params": params} for group, params in zip(groups, ours, strict=True)]


def _exact(loaded: Any, saved: Any) -> Any:
    """The saved value where the loaded one is: torch casts floating state to its parameter's dtype, and loses bits."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return loaded | {key: _exact(loaded.get(key), value) for key, value in saved.items()}
    return saved


def _encode(value: Any, path: str, arrays: Arrays) -> Any:
    """A value as JSON. What JSON has no word for becomes an object with one key that starts with a dollar."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": value.hex()}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case Tensor():
            return _encode_tensor(value, path, arrays)
        case tuple() | list():
            items = [_encode(item, f"{path}.{index}", arrays) for index, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value) and type(value) is dict:
            return {key: _encode(item, f"{path}.{key}", arrays) for key, item in value.items()}
        case dict():
            pairs = [
                [_encode(key, path, arrays), _encode(item, f"{path}.{key}", arrays)] for key, item in value.items()
            ]
            return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    remedy = "leave it out in state_dict(), or make it numbers, strings, lists, dicts or tensors"
    raise InputError(f"{path} is a {type(value).__name__}, which a store without pickles cannot hold; {remedy}")


def _encode_state(state: Mapping[Any, Any], name: str, arrays: Arrays) -> Any:
    """The state of one parameter, its arrays named by what they are: "optimizer/exp_avg/lm_head.weight"."""
    if not all(isinstance(key, str) for key in state):
        return _encode(dict(state), f"optimizer/state/{name}", arrays)
    return {key: _encode(value, f"optimizer/{key}/{name}", arrays) for key, value in state.items()}


def _encode_tensor(value: Tensor, path: str, arrays: Arrays) -> Any:
    """A tensor as the name of its array, or as the number that it is: a file for each step count would be a waste."""
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() == 1 and not value.is_complex():
        return {"$number": [_encode(value.item(), path, arrays), dtype, list(value.shape)]}
    name = path
    while name in arrays:
        name += "+"
    arrays[name] = to_stored(value)
    return {"$array": name, "strides": list(value.stride())}


def _decode(value: Any, arrays: Mapping[str, StoredArray]) -> Any:
    """The value that was encoded."""
    match value:
        case list():
            return [_decode(item, arrays) for item in value]
        case {"$float": text}:
            return float(text)
        case {"$bytes": text}:
            return bytes.fromhex(text)
        case {"$dtype": name}:
            return getattr(torch, name)
        case {"$number": [number, dtype, shape]}:
            return torch.tensor(_decode(number, arrays), dtype=getattr(torch, dtype)).reshape(shape)
        case {"$array": name, "strides": strides}:
            return _decode_array(name, strides, arrays)
        case {"$tuple": items}:
            return tuple(_decode(item, arrays) for item in items)
        case {"$dict": pairs} | {"$counter": pairs}:
            items = {_decode(key, arrays): _decode(item, arrays) for key, item in pairs}
            return Counter(items) if "$counter" in value else items
        case dict():
            return {key: _decode(item, arrays) for key, item in value.items()}
    return value


def _decode_array(name: str, strides: list[int], arrays: Mapping[str, StoredArray]) -> Tensor:
    """A stored tensor, laid out in memory as it was: sums over it then add up in the same order."""
    if name not in arrays:
        raise CheckpointError(f"the state has no array {name!r}; it was not saved together with its document")
    tensor = to_tensor(arrays[name])
    if list(tensor.stride()) == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)

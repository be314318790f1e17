from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import cleave_dask
from cleave_dask.errors import CheckpointError, InputError
from cleave_dask.runtime.optimizers import check, pack, restore, state_arrays, to_stored, to_tensor, unpack
from cleave_dask.runtime.store import State, StoredArray, TileStore

Params = dict[str, Tensor]
Factory = Callable[[list[Tensor]], Optimizer]
Schedule = Callable[[Any], LRScheduler]

MATRICES = ("matrix", "wide", "transposed")


def parameters(only: tuple[str, ...] | None = None) -> Params:
    """Parameters of several kinds: bfloat16, and laid out in memory in other orders than C's."""
    chance = torch.Generator().manual_seed(0)
    shapes = {"matrix": (6, 5), "wide": (3, 9), "transposed": (4, 7), "vector": (8,), "scalar": ()}
    shapes["conv"] = (3, 4, 2, 2)
    made: Params = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=chance)
        if name == "transposed":
            tensor = tensor.t().contiguous().t()
        if name == "conv":
            tensor = tensor.to(memory_format=torch.channels_last)
        made[name] = nn.Parameter(tensor.bfloat16() if name == "wide" else tensor)
    return {name: made[name] for name in only or made}


def kinds(state: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(item, "dtype", type(item)) for key, item in state.items()}


def names_of(params: Params) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in params.items()}


def copies(params: Params) -> Params:
    return {name: nn.Parameter(parameter.detach().clone()) for name, parameter in params.items()}


def train(params: Params, optimizer: Optimizer, schedule: LRScheduler | None, steps: range) -> list[tuple[float, ...]]:
    """Steps with gradients that depend on nothing but the step; the learning rates after each."""
    rates = []
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for parameter in params.values():
            gradient = torch.randn(parameter.shape, generator=chance).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
        match schedule:
            case lr.ReduceLROnPlateau():
                schedule.step(float(step // 2))
            case LRScheduler():
                schedule.step()
        rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
    return rates


def assert_same(one: Params, two: Params) -> None:
    for name in one:
        assert torch.equal(one[name], two[name]), name


def through_json(arrays: dict[str, StoredArray], document: dict[str, Any]) -> tuple[dict[str, StoredArray], Any]:
    """As a store would give them back: copies in C order, and parsed text."""
    copied = {name: StoredArray(item.data.copy("C"), item.dtype) for name, item in arrays.items()}
    return copied, json.loads(json.dumps(document, allow_nan=False))


class Counting(torch.optim.SGD):
    """What a user might write: attributes of its own, state of every kind, state that is not of a parameter."""

    def __init__(self, params: list[Tensor], scale: float) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.scale = scale

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.scale)
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().double())
                state.setdefault("history", []).append(torch.full((2,), float(len(state))))
                state |= {"label": "text", "range": (1, math.inf), "kind": torch.float16, "raw": b"\x00\xff"}
                parameter.data.add_(state["master"].sum().to(parameter.dtype) * 1e-3)
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[call-overload, index]
        return super().step(closure)


class OwnFormat(torch.optim.SGD):
    """An optimizer whose state dict has a format of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inner"])


OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, maximize=True),
    "AdamW-each": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, lr_decay=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=1),
    "NAdam": lambda params: torch.optim.NAdam(params, decoupled_weight_decay=True),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "Muon": lambda params: torch.optim.Muon(params),
    "Counting": lambda params: Counting(params, 0.5),
    "OwnFormat": lambda params: OwnFormat(params, lr=0.1, momentum=0.9),
    "groups": lambda params: torch.optim.AdamW(
        [{"params": params[:2], "lr": 0.5, "tag": ("a", 1)}, {"params": params[2:], "weight_decay": 0.0}], lr=0.01
    ),
}

SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda it: lr.LambdaLR(it, lambda step: 0.9**step),
    "LambdaLR-partial": lambda it: lr.LambdaLR(it, partial(pow, 0.8)),
    "MultiplicativeLR": lambda it: lr.MultiplicativeLR(it, lambda step: 1 / (1 + step)),
    "StepLR": lambda it: lr.StepLR(it, 2),
    "MultiStepLR": lambda it: lr.MultiStepLR(it, [1, 4, 4]),
    "ConstantLR": lambda it: lr.ConstantLR(it, total_iters=4),
    "LinearLR": lambda it: lr.LinearLR(it, total_iters=7),
    "ExponentialLR": lambda it: lr.ExponentialLR(it, 0.9),
    "PolynomialLR": lambda it: lr.PolynomialLR(it, 9, 2.0),
    "CosineAnnealingLR": lambda it: lr.CosineAnnealingLR(it, 7),
    "CosineAnnealingWarmRestarts": lambda it: lr.CosineAnnealingWarmRestarts(it, 2),
    "CyclicLR": lambda it: lr.CyclicLR(it, 0.01, 0.1, 2, cycle_momentum=False),
    "CyclicLR-range": lambda it: lr.CyclicLR(it, 0.01, 0.1, 2, mode="exp_range", gamma=0.9, cycle_momentum=False),
    "CyclicLR-own": lambda it: lr.CyclicLR(it, 0.01, 0.1, 2, scale_fn=lambda cycle: 1 / cycle, cycle_momentum=False),
    "OneCycleLR": lambda it: lr.OneCycleLR(it, 0.5, total_steps=20),
    "ReduceLROnPlateau": lambda it: lr.ReduceLROnPlateau(it, patience=1),
    "SWALR": lambda it: SWALR(it, 0.05, anneal_epochs=4),
    "SequentialLR": lambda it: lr.SequentialLR(
        it, [lr.LinearLR(it, total_iters=3), lr.CosineAnnealingLR(it, 9)], milestones=[3]
    ),
    "ChainedScheduler": lambda it: lr.ChainedScheduler([lr.ConstantLR(it, total_iters=2), lr.ExponentialLR(it, 0.9)]),
}

CASES = [pytest.param(factory, None, id=name) for name, factory in OPTIMIZERS.items()]
CASES += [pytest.param(OPTIMIZERS["AdamW"], schedule, id=name) for name, schedule in SCHEDULES.items()]
CASES += [pytest.param(OPTIMIZERS["Adam"], SCHEDULES["CosineAnnealingLR"], id="tensor-lr")]
CASES += [pytest.param(OPTIMIZERS["groups"], SCHEDULES["SequentialLR"], id="groups-SequentialLR")]


def test_every_optimizer_of_torch_is_among_the_cases() -> None:
    kinds = {getattr(torch.optim, name) for name in torch.optim.__all__}
    kinds = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Optimizer)}
    tried = {type(factory(list(parameters(MATRICES).values()))) for factory in OPTIMIZERS.values()}
    assert kinds - tried == {Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    schedules = {getattr(lr, name) for name in lr.__all__}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    assert schedules - {type(schedule(optimizer)) for schedule in SCHEDULES.values()} == {LRScheduler}


def built(factory: Factory, schedule: Schedule | None) -> tuple[Params, Optimizer, LRScheduler | None]:
    params = parameters(MATRICES if factory is OPTIMIZERS["Muon"] else None)
    optimizer = factory(list(params.values()))
    return params, optimizer, None if schedule is None else schedule(optimizer)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("factory", "schedule"), CASES)
def test_a_packed_run_goes_on_bit_for_bit(factory: Factory, schedule: Schedule | None, before: int) -> None:
    params, optimizer, plan = built(factory, schedule)
    train(params, optimizer, plan, range(before))
    others = copies(params)
    moved, moved_plan = unpack(pack(optimizer, plan, names_of(params)), others)
    assert (type(moved), type(moved_plan)) == (type(optimizer), type(plan))
    steps = range(before, before + 5)
    assert train(params, optimizer, plan, steps) == train(others, moved, moved_plan, steps)
    assert_same(params, others)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("factory", "schedule"), CASES)
def test_a_restored_run_goes_on_bit_for_bit(factory: Factory, schedule: Schedule | None, before: int) -> None:
    params, optimizer, plan = built(factory, schedule)
    train(params, optimizer, plan, range(before))
    arrays, document = through_json(*state_arrays(optimizer, plan, names_of(params)))
    fresh, again, again_plan = built(factory, schedule)
    train(fresh, again, again_plan, range(7, 7 + before // 2))  # what it has learnt so far is to be forgotten
    for name, parameter in fresh.items():
        parameter.data.copy_(params[name])
    restore(again, again_plan, names_of(fresh), arrays, document)
    for name, parameter in fresh.items():
        assert kinds(optimizer.state.get(params[name], {})) == kinds(again.state.get(parameter, {}))
    steps = range(before, before + 5)
    assert train(params, optimizer, plan, steps) == train(fresh, again, again_plan, steps)
    assert_same(params, fresh)


def test_state_goes_through_a_store(tmp_path: Path) -> None:
    params, optimizer, plan = built(OPTIMIZERS["AdamW"], SCHEDULES["OneCycleLR"])
    train(params, optimizer, plan, range(3))
    arrays, document = state_arrays(optimizer, plan, names_of(params))
    assert {"optimizer/exp_avg/matrix", "optimizer/exp_avg_sq/conv", "optimizer/max_exp_avg_sq/wide"} <= arrays.keys()
    assert all(item.data.size > 1 for item in arrays.values()), "single numbers are no files"
    assert arrays["optimizer/exp_avg/wide"].dtype == "bfloat16"
    matrix = optimizer.state[params["matrix"]]["exp_avg"]
    assert arrays["optimizer/exp_avg/matrix"].data.ctypes.data == matrix.data_ptr(), "not a copy"
    weights = {f"weights/{name}": to_stored(parameter) for name, parameter in params.items()}
    store = TileStore(tmp_path)
    store.save(3, State(arrays | weights, {"optimizer": document}))
    store.close()
    fresh, again, again_plan = built(OPTIMIZERS["AdamW"], SCHEDULES["OneCycleLR"])
    into = {f"weights/{name}": to_stored(parameter).data for name, parameter in fresh.items()}
    state = store.load(into=into)
    assert_same(params, fresh)
    restore(again, again_plan, names_of(fresh), state.arrays, state.document["optimizer"])
    assert train(params, optimizer, plan, range(3, 6)) == train(fresh, again, again_plan, range(3, 6))
    assert_same(params, fresh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool, torch.complex64])
def test_tensors_and_stored_arrays_share_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2).to(dtype)
    back = to_tensor(to_stored(tensor))
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert to_tensor(to_stored(torch.zeros((), dtype=dtype))).shape == ()
    with pytest.raises(InputError, match=r"layout torch.sparse_coo cannot be stored; make it dense"):
        to_stored(torch.zeros(2, 2).to_sparse())


@pytest.fixture
def tiny() -> tuple[Params, dict[Tensor, str]]:
    params = parameters(("matrix", "vector"))
    return params, names_of(params)


def test_optimizers_that_cannot_run_on_the_server(tiny: tuple[Params, dict[Tensor, str]]) -> None:
    params, names = tiny
    kinds = {"through a closure; use one": torch.optim.LBFGS, "SparseAdam needs sparse": torch.optim.SparseAdam}
    for words, kind in kinds.items():
        for attempt in (check, partial(pack, schedule=None), partial(state_arrays, schedule=None)):
            with pytest.raises(InputError, match=words):
                attempt(kind(list(params.values())), names=names)


def test_parameters_of_another_module(tiny: tuple[Params, dict[Tensor, str]]) -> None:
    params, names = tiny
    optimizer = torch.optim.SGD([params["matrix"]], lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 4))]})
    words = r"parameter 0 of group 1, of shape \(3, 4\), is not of this module; build SGD over module.parameters\(\)"
    with pytest.raises(InputError, match=words):
        pack(optimizer, None, names)
    data = pack(torch.optim.SGD(params.values(), lr=0.1), None, names)
    with pytest.raises(InputError, match="updates 'vector', which this model does not have"):
        unpack(data, {"matrix": params["matrix"]})


def test_what_cannot_be_sent_or_stored(tiny: tuple[Params, dict[Tensor, str]], tmp_path: Path) -> None:
    params, names = tiny
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    other = torch.optim.SGD(params.values(), lr=0.1)
    with pytest.raises(InputError, match="the schedule belongs to another optimizer"):
        pack(optimizer, lr.ExponentialLR(other, 0.9), names)
    with (tmp_path / "log").open("w") as file:
        optimizer.log = file  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=r"SGD or its schedule cannot be sent: .*; keep open files"):
            pack(optimizer, None, names)
    optimizer.param_groups[0]["odd"] = [1, object()]
    with pytest.raises(InputError, match=r"optimizer/groups.0.odd.1 is a object, which a store without pickles cannot"):
        state_arrays(optimizer, None, names)


def test_state_of_another_optimizer(tiny: tuple[Params, dict[Tensor, str]]) -> None:
    params, names = tiny
    optimizer = torch.optim.AdamW(params.values(), lr=0.1)
    plan = lr.StepLR(optimizer, 3)
    arrays, document = state_arrays(optimizer, plan, names)
    with pytest.raises(CheckpointError, match="the state is of AdamW, and this run uses SGD; use AdamW to resume"):
        restore(torch.optim.SGD(params.values(), lr=0.1), None, names, arrays, document)
    with pytest.raises(CheckpointError, match="the state is of StepLR, and this run uses None"):
        restore(optimizer, None, names, arrays, document)
    fewer = torch.optim.AdamW([params["matrix"]], lr=0.1)
    with pytest.raises(CheckpointError, match=r"other parameter groups \(vector is only in one of them\); build the"):
        restore(fewer, lr.StepLR(fewer, 3), names, arrays, document)
    split = torch.optim.AdamW([{"params": [params["matrix"]]}, {"params": [params["vector"]]}], lr=0.1)
    with pytest.raises(CheckpointError, match=r"other parameter groups \(1 there, 2 here\)"):
        restore(split, lr.StepLR(split, 3), names, arrays, document)
    train(params, optimizer, plan, range(1))
    _, document = state_arrays(optimizer, plan, names)
    with pytest.raises(CheckpointError, match=r"no array 'optimizer/exp_avg/matrix'; it was not saved together"):
        restore(optimizer, plan, names, {}, document)


def test_parameters_may_come_in_another_order(tiny: tuple[Params, dict[Tensor, str]]) -> None:
    params, names = tiny
    optimizer = torch.optim.AdamW(params.values(), lr=0.1)
    train(params, optimizer, None, range(2))
    arrays, document = through_json(*state_arrays(optimizer, None, names))
    others = dict(reversed(copies(params).items()))
    again = torch.optim.AdamW(others.values(), lr=0.5)
    restore(again, None, names_of(others), arrays, document)
    for name in params:
        assert torch.equal(optimizer.state[params[name]]["exp_avg"], again.state[others[name]]["exp_avg"])


def test_a_schedules_functions_are_its_own(tiny: tuple[Params, dict[Tensor, str]]) -> None:
    class Halving(LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.rule: Callable[[float], float] = lambda rate: rate / 2
            super().__init__(optimizer)

        def get_lr(self) -> list[float | Tensor]:
            return [self.rule(group["lr"]) for group in self.optimizer.param_groups]

    params, names = tiny
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    plan = Halving(optimizer)
    train(params, optimizer, plan, range(2))
    arrays, document = through_json(*state_arrays(optimizer, plan, names))
    again = torch.optim.SGD(params.values(), lr=0.1)
    again_plan = Halving(again)
    restore(again, again_plan, names, arrays, document)
    assert train(params, again, again_plan, range(2)) == train(params, optimizer, plan, range(2))


def test_a_pack_has_no_weights_in_it() -> None:
    """Weights are on the server already: a pack of a fresh optimizer is small, whatever the size of the model."""
    params: Params = {"weight": nn.Parameter(torch.zeros(1000, 1000))}
    optimizer = torch.optim.AdamW(params.values())
    schedule = lr.CosineAnnealingLR(optimizer, 10)
    before = copy.copy(vars(optimizer))
    data = pack(optimizer, schedule, names_of(params))
    assert len(data) < 10_000
    assert vars(optimizer) == before
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)


RECEIVER = """
import sys, torch
from cleave_dask.runtime.optimizers import unpack

weight = torch.nn.Parameter(torch.zeros(2))
optimizer, schedule = unpack(sys.stdin.buffer.read(), {"w": weight})
for _ in range(2):
    weight.grad = torch.ones(2)
    optimizer.step()
    schedule.step()
print(weight.tolist(), schedule.get_last_lr())
"""


def test_classes_of_the_users_own_script_reach_another_process() -> None:
    class Mine(Optimizer):
        """Stands for a class of the user's script, which no other process can import."""

        def __init__(self, params: list[Tensor], factor: float) -> None:
            super().__init__(params, {"lr": 1.0})
            self.factor = factor

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor)

    weight = nn.Parameter(torch.zeros(2))
    optimizer = Mine([weight], 0.5)
    optimizer.register_step_post_hook(lambda *_: print("stepped"))
    data = pack(optimizer, lr.LambdaLR(optimizer, lambda step: 1.0 + step), {weight: "w"})
    command, home = [sys.executable, "-W", "error", "-c", RECEIVER], Path(cleave_dask.__file__).parents[1]
    done = subprocess.run(command, input=data, capture_output=True, timeout=120, check=False, cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == ["stepped", "stepped", "[-1.5, -1.5] [3.0]"]

"""Arguments of the wrong kind, in every public call: an error of ours that names the remedy, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cleave_dask as cd

FLEET = cd.Fleet.sample(2)
MODULE = cd.with_loss(nn.Linear(8, 4), nn.CrossEntropyLoss())
BATCH = (torch.ones(2, 8), torch.zeros(2, dtype=torch.long))
STEP = cd.capture(MODULE, *BATCH)
PLAN = cd.plan(STEP, FLEET, min_flops=0)
ONES = np.ones((4, 4), np.float32)
SGD = torch.optim.SGD(MODULE.parameters(), lr=0.1)
api: Any = cd  # what follows would not pass a type checker

WRONG: dict[str, tuple[Callable[[], Any], type[cd.CleaveError], str]] = {
    "capture nothing": (lambda: api.capture(None, *BATCH), cd.CaptureError, "give an instance of torch.nn.Module"),
    "capture a class": (lambda: api.capture(nn.Linear, *BATCH), cd.CaptureError, "give an instance"),
    "plan on a list": (lambda: api.plan(STEP, []), cd.PlanError, r"the fleet is \[\]; give a Fleet"),
    "plan on a number": (lambda: api.plan(STEP, 4), cd.PlanError, "give a Fleet"),
    "plan nothing": (lambda: api.plan(None, FLEET), cd.PlanError, "give a StepGraph: cd.capture"),
    "plan from words": (lambda: api.plan(STEP, FLEET, min_flops="x"), cd.PlanError, "give a number of operations"),
    "plan from no number": (lambda: api.plan(STEP, FLEET, min_flops=nan), cd.PlanError, "give a number of operations"),
    "plan on no grid": (lambda: api.plan(STEP, FLEET, grid=(0, 1, 1)), cd.PlanError, "each 1 or more"),
    "plan on half a grid": (lambda: api.plan(STEP, FLEET, grid=2), cd.PlanError, "each 1 or more"),
    "why of a list": (lambda: api.Plan.why(PLAN, []), cd.PlanError, "no device of this plan"),
    "compare on a list": (lambda: api.compare(STEP, []), cd.PlanError, "give a Fleet"),
    "compare forever": (lambda: api.compare(STEP, FLEET, churn=inf), cd.InputError, "mishaps per device and hour"),
    "simulate a graph": (lambda: api.simulate(STEP), cd.PlanError, "give a Plan"),
    "simulate a rate": (lambda: api.simulate(PLAN, churn=3), cd.InputError, "give a Churn"),
    "local fleet of a word": (lambda: api.LocalFleet("x"), cd.FleetError, "give a number of devices, or a Fleet"),
    "local fleet of nothing": (lambda: api.LocalFleet(None), cd.FleetError, "give a number of devices, or a Fleet"),
    "no cores": (lambda: api.LocalFleet(1, cores=0), cd.FleetError, "cores of a device is 0"),
    "no shaping": (lambda: api.LocalFleet(FLEET, shaping="bucket"), cd.InputError, "did you mean 'buckets'"),
    "hollow fleet of a number": (lambda: api.HollowFleet(3), cd.FleetError, "give a Fleet"),
    "train nothing": (lambda: api.Trainer(None, SGD, None), cd.InputError, "the module is None; give"),
    "train without": (lambda: api.Trainer(MODULE, None, None), cd.InputError, "the optimizer is None; give"),
    "train with a class": (lambda: api.Trainer(MODULE, type(SGD), None), cd.InputError, "give one of torch.optim"),
    "train on nothing": (lambda: api.Trainer(MODULE, SGD, None), cd.InputError, "give a Dask client"),
    "train in words": (lambda: api.Trainer(MODULE, SGD, None, accumulate="2"), cd.InputError, "1 or more"),
    "train apart on nothing": (lambda: api.AsyncTrainer(MODULE, SGD, None), cd.InputError, "give a Dask client"),
    "seed below zero": (lambda: api.verify_tile(ONES, ONES, ONES, seed=-1), cd.InputError, "seed is -1; give a whole"),
    "seed of a word": (lambda: api.verify_tile(ONES, ONES, ONES, seed="x"), cd.InputError, "give a whole number"),
    "dtype of a list": (lambda: api.verify_tile(ONES, ONES, ONES, seed=0, dtype=[]), cd.InputError, "only of float64"),
    "load nothing": (lambda: api.Fleet.load(None), cd.FleetError, "None is not the name of a file; give a path"),
    "load a number": (lambda: api.Fleet.load(3), cd.FleetError, "give a path"),
    "recipe of nothing": (lambda: api.Recipe.load(None), cd.RecipeError, "give a path"),
    "fleet of nothing": (lambda: api.Fleet(cd.Server(), None), cd.FleetError, "give a list of Device"),
    "fleet of numbers": (lambda: api.Fleet(cd.Server(), [1]), cd.FleetError, "a device of a fleet is 1; give a Device"),
    "fleet of no client": (lambda: api.Fleet.from_cluster(None), cd.FleetError, "None is no Dask client; give one"),
    "device of a list": (lambda: api.Fleet.device(FLEET, []), cd.FleetError, "no device is called"),
    "churn of nothing": (lambda: api.Churn.sample(None, 1, 0), cd.InputError, "give a Fleet"),
    "churn at once": (lambda: api.Churn.sample(FLEET, inf, 0), cd.InputError, "0 or more and finite"),
    "churn in words": (lambda: api.Churn.sample(FLEET, "x", 0), cd.InputError, "0 or more and finite"),
    "churn forever": (lambda: api.Churn.sample(FLEET, 1, 0, seconds=inf), cd.InputError, "a finite number of seconds"),
    "churn never": (lambda: api.Churn.sample(FLEET, 1, 0, seconds=nan), cd.InputError, "a finite number of seconds"),
    "away for nothing": (lambda: api.Churn.sample(FLEET, 1, 0, away=0), cd.InputError, "above zero"),
    "churn by a list": (lambda: api.Churn.sample(FLEET, 1, []), cd.InputError, r"the seed is \[\]; give"),
    "churn of a number": (lambda: api.Churn(3), cd.InputError, "give a list of Event"),
    "churn of numbers": (lambda: api.Churn((3,)), cd.InputError, "give Event"),
    "churn from nothing": (lambda: api.Churn.load(None), cd.InputError, "give the path of a CSV file"),
    "multiply nothing": (lambda: api.matmul(None, None), cd.InputError, "give two arrays"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_remedy(case: str) -> None:
    call, error, remedy = WRONG[case]
    with pytest.raises(error, match=remedy):
        call()


def test_whole_numbers_of_numpy_will_do() -> None:
    assert api.verify_tile(ONES, ONES, ONES @ ONES, seed=np.int64(3))
    grid = tuple(np.ones(3, int))
    assert api.plan(STEP, FLEET, min_flops=np.float64(0), grid=grid).tiles

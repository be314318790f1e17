"""Families: which gemms of a step have their operands in common, and how each of them reads them."""

from __future__ import annotations

import torch
from torch import nn

from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import StepGraph
from cleave_dask.graph.sharing import families, numbered


class Block(nn.Module):
    """Three projections of one input, as in attention, then a layer of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out = nn.Linear(16, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seen = inputs.tanh()
        loss: torch.Tensor = self.out((self.q(seen) * self.k(seen)).relu() + self.v(seen)).square().mean()
        return loss


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(self.layer(inputs).relu()).square().mean()
        return loss


def step(module: nn.Module) -> StepGraph:
    first = nn.Linear(16, 16)  # so that the gradient of its result is asked for
    return capture(nn.Sequential(first, module), torch.randn(32, 16))


def test_forward_and_both_gradients_of_a_layer_are_a_family() -> None:
    found = {family[0].gemm.name.split(".")[-1]: family for family in families(step(Block()))}
    assert [member.gemm.role for member in found["out"]] == ["forward", "dX", "dW"]
    [joined] = [family for name, family in found.items() if "+" in name]  # q, k and v are one gemm
    assert [member.gemm.role for member in joined] == ["forward", "dX", "dW"]
    assert [member.kept for member in joined] == [(False, False), (False, True), (True, True)]
    parts = [sum(len(operand.parts) for operand in member.gemm.inputs) for member in joined]
    assert parts == [4, 6, 4]


def test_operands_with_one_number_are_the_same_numbers() -> None:
    """Evaluated by torch: every operand of a number is the same matrix, transposed where it says so."""
    graph = step(Block())
    names = [member.gemm.name for family in families(graph) for member in family]
    values = numbered(graph, names)
    assert set(values) == set(names)
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for name, sides in values.items():
        for operand, (number, turned) in zip(graph.gemm(name).inputs, sides, strict=True):
            shapes.setdefault(number, set()).add(operand.shape[::-1] if turned else operand.shape)
    assert all(len(found) == 1 for found in shapes.values())
    assert numbered(graph, []) == {}


def test_axes_lead_from_the_forward_cuboid_to_the_own() -> None:
    for family in families(step(Block())):
        forward = family[0].gemm
        extents = (forward.m, forward.n, forward.k)
        for member in family:
            assert (member.gemm.m, member.gemm.n, member.gemm.k) == tuple(extents[axis] for axis in member.axes)


def test_a_weight_of_two_layers_makes_no_family() -> None:
    graph = step(Tied())
    assert not [family for family in families(graph) if "layer" in family[0].gemm.name]

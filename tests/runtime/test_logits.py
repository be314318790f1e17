"""Tiles of a head by vocabulary: every kernel against torch's cross-entropy, and what the server's check lets pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.runtime.kernels import load_kernel
from cleave_dask.runtime.verification_logits import verify_logits
from cleave_dask.runtime.wire import to_wire
from cleave_dask.runtime.wire_torch import from_wire

IGNORED = -100
DTYPES = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 1e-2, "float16": 2e-3}


class Head:
    """Operands of a head, what torch makes of them, and what tiles of it make."""

    def __init__(self, rows: int, words: int, width: int, dtype: str, *, ignored: int, scale: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.dtype = dtype
        kind = getattr(torch, dtype)
        self.x = (torch.randn(rows, width) * scale).to(kind)
        self.w = torch.randn(words, width).to(kind)
        self.targets = torch.randint(0, words, (rows,))
        self.targets[torch.randperm(rows)[:ignored]] = IGNORED
        self.wide = torch.float64

    def by_torch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss and gradients, in float64."""
        x, w = (side.to(self.wide, copy=True).requires_grad_() for side in (self.x, self.w))
        loss = torch.nn.functional.cross_entropy(x @ w.T, self.targets, ignore_index=IGNORED)
        dx, dw = torch.autograd.grad(loss, (x, w))
        return loss.detach(), dx, dw

    def by_tiles(self, kernel: Any, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, a range of the vocabulary at a time; every tile passes the check."""
        counts = self.targets != IGNORED
        sums = [self.run(kernel, "logit_sums", [self.x, self.w[a:b]], a) for a, b in self.spans(cuts)]
        logsumexp = torch.logsumexp(torch.stack([each[0] for each in sums]), 0)
        likelihood = sum(each[1] for each in sums) - logsumexp
        loss = -(likelihood * counts).sum() / counts.sum()
        rest = [logsumexp, -counts.to(logsumexp.dtype) / counts.sum()]
        spans = self.spans(cuts)
        parts = [self.run(kernel, "logit_dx", [self.x, self.w[a:b]], a, rest)[0].to(self.wide) for a, b in spans]
        dx = torch.stack(parts).sum(dim=0)
        dw = [self.run(kernel, "logit_dw", [self.w[a:b], self.x], a, rest)[0] for a, b in spans]
        return loss, dx, torch.cat(dw)

    def spans(self, cuts: list[int]) -> list[tuple[int, int]]:
        edges = sorted({0, len(self.w), *(cut % len(self.w) for cut in cuts)})
        return list(pairwise(edges))

    def run(
        self, kernel: Any, kind: str, sides: list[torch.Tensor], first: int, rest: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        operands = [to_wire(side) for side in (*sides, self.targets.double() - first, *(rest or []))]
        made = kernel.run(kind, operands, dtype=self.dtype)
        assert verify_logits(kind, operands, made, dtype=self.dtype, seed=first)
        dtypes = [self.dtype] if kind != "logit_sums" else [str(array.dtype) for array in made]
        return [from_wire(array, dtype) for array, dtype in zip(made, dtypes, strict=True)]


@pytest.mark.parametrize("name", ["numpy", "torch"])
@given(
    rows=st.integers(1, 9),
    words=st.integers(2, 40),
    width=st.integers(1, 12),
    dtype=st.sampled_from(sorted(DTYPES)),
    cuts=st.lists(st.integers(1, 40), max_size=3),
    left=st.integers(1, 9),
    scale=st.sampled_from([0.1, 1.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_tiles_together_are_the_cross_entropy(
    name: str, rows: int, words: int, width: int, dtype: str, cuts: list[int], left: int, scale: float, seed: int
) -> None:
    head = Head(rows, words, width, dtype, ignored=max(0, rows - left), scale=scale, seed=seed)
    found, wanted = head.by_tiles(load_kernel(name), cuts), head.by_torch()
    logits = max(1.0, float((head.x.double() @ head.w.double().T).abs().max()))
    sides = max(1.0, *(float(side.abs().max()) for side in (head.x, head.w)))
    tolerance = DTYPES[dtype] if dtype != "float64" else 1e-12
    unit = 1e-15 if dtype == "float64" else 3e-7
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        size = float(theirs.abs().max()) + (sides if number else logits)
        assert torch.allclose(mine.double(), theirs, rtol=0, atol=(tolerance + unit * logits) * size)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_blocks_are_put_together(name: str) -> None:
    head = Head(700, 1500, 8, "float32", ignored=3, scale=1.0, seed=0)
    for mine, theirs in zip(head.by_tiles(load_kernel(name), [700]), head.by_torch(), strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["logit_sums", "logit_dx", "logit_dw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_tiles_are_found(kind: str, dtype: str) -> None:
    head = Head(64, 128, 16, dtype, ignored=1, scale=1.0, seed=0)
    logsumexp = torch.logsumexp(head.x.float() @ head.w.float().T, 1)
    slope = torch.where(head.targets == IGNORED, 0.0, -1 / 63)
    sides = [head.w, head.x] if kind == "logit_dw" else [head.x, head.w]
    rest = [] if kind == "logit_sums" else [logsumexp, slope]
    operands = [to_wire(side) for side in (*sides, head.targets.double(), *rest)]
    made = [np.array(array) for array in load_kernel("numpy").run(kind, operands, dtype=dtype)]

    def passes(change: Any) -> bool:
        wrong = [np.array(array) for array in made]
        change(wrong)
        return verify_logits(kind, operands, wrong, dtype=dtype, seed=1)

    assert passes(lambda wrong: None)
    assert not passes(lambda wrong: wrong[0].fill(0))
    assert not passes(lambda wrong: wrong[0].__setitem__(0, _huge(wrong[0].dtype)))
    assert not passes(lambda wrong: wrong[0].__setitem__(slice(None), wrong[0][::-1].copy()))
    if kind == "logit_sums":
        assert not passes(lambda wrong: wrong[1].__setitem__(5, wrong[1][5] + 1))
        assert not passes(lambda wrong: wrong[0].__setitem__(7, np.nan))


def _huge(dtype: Any) -> Any:
    return to_wire(torch.tensor([1e30], dtype=torch.bfloat16))[0] if dtype == np.uint16 else 1e30

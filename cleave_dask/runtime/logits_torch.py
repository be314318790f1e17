"""A head by vocabulary in torch, whole or a tile of it: for the server, and for devices whose kernel is torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

ROWS = 512
"""Rows of logits that are there at once."""


def run_logits(kind: str, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a gemm of this kind; see `graph.steps.Gemm`."""
    if kind == "logit_sums":
        return _sums(*operands)
    left, right = (operands[1], operands[0]) if kind == "logit_dw" else (operands[0], operands[1])
    dtype, words = left.dtype, _wide(right)
    rows, total = [], torch.zeros_like(words)
    for x, targets, logsumexp, slope in zip(*(part.split(ROWS) for part in (left, *operands[2:])), strict=True):
        wide = _wide(x)
        slopes = torch.mm(wide, words.T).sub_(logsumexp[:, None]).exp_()
        row, word = _hits(targets, len(words))
        slopes[row, word] -= 1
        slopes.mul_(-slope[:, None])
        if kind == "logit_dw":
            total.addmm_(slopes.T, wide)
        else:
            rows.append(torch.mm(slopes, words).to(dtype))
    return (total.to(dtype) if kind == "logit_dw" else torch.cat(rows),)


def _sums(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the logsumexp of its logits, and the logit of its target; 0 if that is not among them."""
    words, sums, found = _wide(w), [], []
    for some, wanted in zip(x.split(ROWS), targets.split(ROWS), strict=True):
        logits = torch.mm(_wide(some), words.T)
        row, word = _hits(wanted, len(words))
        sums.append(torch.logsumexp(logits, 1))
        found.append(torch.zeros_like(sums[-1]).index_copy_(0, row, logits[row, word]))
    return torch.cat(sums), torch.cat(found)


def _hits(targets: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Rows whose target is among the words, and which it is."""
    row = torch.nonzero((targets >= 0) & (targets < words))[:, 0]
    return row, targets[row].long()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

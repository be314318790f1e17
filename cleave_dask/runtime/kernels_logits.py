"""Tiles of a head by vocabulary over an array namespace, numpy or cupy: logits are made block by block and let go.

Everything between operands and results is float32 (float64 for float64); results that are halves are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cleave_dask.runtime.wire import logsumexp_dtype, narrow, widen

BLOCK = (512, 1024)
"""Rows and words of a block of logits: 2 MB in float32."""


def run_logits(xp: Any, kind: str, operands: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    """The result of a tile; `kernels.Kernel` says what each kind takes and makes."""
    if kind == "logit_sums":
        return _sums(xp, dtype, *operands)
    if kind == "logit_dx":
        return (_row_gradients(xp, dtype, *operands),)
    return (_word_gradients(xp, dtype, *operands),)


def _sums(xp: Any, dtype: str, x: Any, w: Any, targets: Any) -> tuple[Any, Any]:
    """For each row the logsumexp of its logits, and the logit of its target; 0 if that is not among them."""
    wide = getattr(xp, logsumexp_dtype(dtype))
    logsumexp, found = xp.empty(x.shape[0], dtype=wide), xp.zeros(x.shape[0], dtype=wide)
    for rows in _blocks(x.shape[0], BLOCK[0]):
        left, top, total = widen(x[rows, ...], dtype), None, None
        for words in _blocks(w.shape[0], BLOCK[1]):
            logits = xp.matmul(left, widen(w[words, ...], dtype).T)
            row, word = _hits(xp, targets[rows], words)
            found[rows][row] = logits[row, word]
            highest = xp.max(logits, axis=1)
            if top is not None:
                highest = xp.maximum(top, highest)
                total = total * xp.exp(top - highest)
            part = xp.sum(xp.exp(logits - highest[:, None]), axis=1)
            top, total = highest, part if total is None else total + part
        logsumexp[rows] = top + xp.log(total)
    return logsumexp, found


def _row_gradients(xp: Any, dtype: str, x: Any, w: Any, targets: Any, logsumexp: Any, slope: Any) -> Any:
    """What these words add to the gradient of each row of x."""
    out = xp.empty(x.shape, dtype=x.dtype)
    for rows in _blocks(x.shape[0], BLOCK[0]):
        left, total = widen(x[rows, ...], dtype), None
        for words in _blocks(w.shape[0], BLOCK[1]):
            right = widen(w[words, ...], dtype)
            part = xp.matmul(_slopes(xp, left, right, targets[rows], logsumexp[rows], slope[rows], words), right)
            total = part if total is None else total + part
        out[rows, ...] = narrow(total, dtype)
    return out


def _word_gradients(xp: Any, dtype: str, w: Any, x: Any, targets: Any, logsumexp: Any, slope: Any) -> Any:
    """What these rows add to the gradient of each word of w."""
    out = xp.empty(w.shape, dtype=w.dtype)
    for words in _blocks(w.shape[0], BLOCK[1]):
        right, total = widen(w[words, ...], dtype), None
        for rows in _blocks(x.shape[0], BLOCK[0]):
            left = widen(x[rows, ...], dtype)
            part = xp.matmul(_slopes(xp, left, right, targets[rows], logsumexp[rows], slope[rows], words).T, left)
            total = part if total is None else total + part
        out[words, ...] = narrow(total, dtype)
    return out


def _slopes(xp: Any, x: Any, w: Any, targets: Any, logsumexp: Any, slope: Any, words: slice) -> Any:
    """The gradient of a block of logits: slope times (1 at the target, less the softmax)."""
    logits = xp.matmul(x, w.T)
    logits -= logsumexp[:, None]
    found = xp.exp(logits)
    row, word = _hits(xp, targets, words)
    found[row, word] -= 1
    found *= -slope[:, None]
    return found


def _hits(xp: Any, targets: Any, words: slice) -> tuple[Any, Any]:
    """Rows whose target is among these words, and which of them it is."""
    row = xp.nonzero((targets >= words.start) & (targets < words.stop))[0]
    return row, (targets[row] - words.start).astype("int64")


def _blocks(extent: int, size: int) -> Iterator[slice]:
    """Slices that cover an extent."""
    for start in range(0, extent, size):
        yield slice(start, min(start + size, extent))

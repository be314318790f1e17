"""What a device does with the operands of a tile, written once over an array namespace: numpy, cupy.

Only the array API standard is used on `xp`, and `widen`/`narrow` for numbers that the namespace cannot multiply well
itself: halves are expanded to float32 block by block, multiplied and summed there, and rounded once at the end.
Attention never holds more than a block of scores: it walks over blocks of query rows, softmax and sums in float32
(float64 for float64), and where it is causal it leaves out the keys that no row of the block may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from cleave_dask.graph.steps import LOGITS
from cleave_dask.runtime.kernels_logits import run_logits
from cleave_dask.runtime.wire import Array, check_operands, logsumexp_dtype, narrow, widen

SCORES = 1 << 18
"""Numbers in a block of scores: 1 MB in float32, which stays in the cache of one core."""
CAUSAL_ROWS = 256
"""Most query rows in a causal block: the half block on the diagonal is all that is computed in vain."""
HALF_EXTENTS = (1024, 1024, 2048)
"""Rows, columns and k of the blocks in which halves are expanded: about 20 MB beside operands and result."""


@dataclass(frozen=True, slots=True)
class ArrayKernel:
    """A kernel over an array namespace; see `kernels.Kernel`."""

    name: str
    xp: Any
    put: Callable[[Array], Any]  # from the network to where the namespace computes
    take: Callable[[Any], Array]  # and back, C-contiguous

    def run(
        self, kind: str, arrays: Sequence[Array], *, dtype: str, causal: bool = False, scale: float | None = None
    ) -> tuple[Array, ...]:
        """The result of a tile; see `kernels.Kernel`."""
        check_operands(kind, arrays, dtype)
        operands = [self.put(array) for array in arrays]
        with np.errstate(all="ignore"):  # infinity and NaN are results like others: whoever asked decides about them
            results = self._compute(kind, operands, dtype, causal, scale)
        return tuple(self.take(result) for result in results)

    def _compute(
        self, kind: str, operands: Sequence[Any], dtype: str, causal: bool, scale: float | None
    ) -> tuple[Any, ...]:
        if kind in ("gemm", "bmm"):
            a, b = operands
            return ((_gemm if kind == "gemm" else _bmm)(self.xp, a, b, dtype),)
        if kind in LOGITS:
            return run_logits(self.xp, kind, operands, dtype)
        problem = _Attention.of(self.xp, dtype, causal, scale, operands)
        return problem.forward() if kind == "attention" else problem.backward(operands)


def _gemm(xp: Any, a: Any, b: Any, dtype: str) -> Any:
    """One product; halves block by block."""
    if dtype in ("float32", "float64"):
        return xp.matmul(a, b)
    (m, k), n = a.shape, b.shape[1]
    out = xp.empty((m, n), dtype=a.dtype)
    for rows in _blocks(m, HALF_EXTENTS[0]):
        for cols in _blocks(n, HALF_EXTENTS[1]):
            total = None
            for ks in _blocks(k, HALF_EXTENTS[2]):
                part = xp.matmul(widen(a[rows, ks], dtype), widen(b[ks, cols], dtype))
                if total is None:
                    total = part
                else:
                    total += part
            out[rows, cols] = narrow(total, dtype)
    return out


def _bmm(xp: Any, a: Any, b: Any, dtype: str) -> Any:
    """A stack of products."""
    if dtype in ("float32", "float64"):
        return xp.matmul(a, b)
    out = xp.empty((*a.shape[:2], b.shape[2]), dtype=a.dtype)
    for index in range(a.shape[0]):
        out[index, ...] = _gemm(xp, a[index, ...], b[index, ...], dtype)
    return out


def _blocks(extent: int, size: int) -> Iterator[slice]:
    """Slices that cover an extent; one empty slice for an empty extent."""
    for start in range(0, max(extent, 1), size):
        yield slice(start, min(start + size, extent))


@dataclass(frozen=True, slots=True)
class _Attention:
    """One attention, its heads regrouped: [pairs of batch and key head, query heads that share it, rows, width]."""

    xp: Any
    dtype: str
    causal: bool
    scale: float
    q: Any
    k: Any  # no axis for the heads that share it: [pairs, rows, width]
    v: Any
    shape: tuple[int, ...]  # of q as it came
    groups: int  # key heads

    @classmethod
    def of(cls, xp: Any, dtype: str, causal: bool, scale: float | None, operands: Sequence[Any]) -> _Attention:
        """From operands as they come: (q, k, v), or those of the backward pass with grad_out before them."""
        q, k, v = operands if len(operands) == 3 else operands[1:4]
        batch, heads, rows, width = q.shape
        groups = k.shape[1]
        if scale is None:
            scale = 1 / sqrt(width) if width else 1.0
        pairs = batch * groups
        return cls(
            xp,
            dtype,
            causal,
            scale,
            q=xp.reshape(q, (pairs, heads // groups, rows, width)),
            k=xp.reshape(k, (pairs, *k.shape[2:])),
            v=xp.reshape(v, (pairs, *v.shape[2:])),
            shape=q.shape,
            groups=groups,
        )

    def forward(self) -> tuple[Any, Any]:
        """Out and logsumexp: for each row, softmax(q k^T scale) v and the logarithm of the softmax's denominator."""
        xp, (pairs, share, rows, _) = self.xp, self.q.shape
        out = xp.empty((pairs, share, rows, self.v.shape[2]), dtype=self.q.dtype)
        logsumexp = xp.empty((pairs, share, rows), dtype=getattr(xp, logsumexp_dtype(self.dtype)))
        for pair in self._pair_blocks():
            k, v = self._load(self.k[pair, ...]), self._load(self.v[pair, ...])
            for row in self._row_blocks():
                seen = self._seen(row)
                scores = self._scores(self._rows(self.q, pair, row) * self.scale, k, row)
                top = xp.max(scores, axis=-1, keepdims=True)
                scores -= top
                weights = xp.exp(scores)
                total = xp.sum(weights, axis=-1, keepdims=True)
                self._write(out, pair, row, narrow(xp.matmul(weights, v[:, :seen, :]) / total, self.dtype))
                self._write(logsumexp, pair, row, top + xp.log(total))
        made = (*self.shape[:3], self.v.shape[2])
        return xp.reshape(out, made), xp.reshape(logsumexp, made[:3])

    def backward(self, operands: Sequence[Any]) -> tuple[Any, Any, Any]:
        """The gradients of q, k and v; the heads that share a key and value head are summed in its gradient."""
        xp, (pairs, share, rows, _) = self.xp, self.q.shape
        grad, out = (xp.reshape(array, (pairs, share, rows, array.shape[3])) for array in (operands[0], operands[4]))
        logsumexp = xp.reshape(operands[5], (pairs, share, rows, 1))
        dq, dk, dv = (xp.empty(array.shape, dtype=array.dtype) for array in (self.q, self.k, self.v))
        for pair in self._pair_blocks():
            k, v = self._load(self.k[pair, ...]), self._load(self.v[pair, ...])
            k_sum, v_sum = xp.zeros(k.shape, dtype=k.dtype), xp.zeros(v.shape, dtype=v.dtype)
            for row in self._row_blocks():
                seen = self._seen(row)
                q, g, o = (self._rows(array, pair, row) for array in (self.q, grad, out))
                q = q * self.scale
                scores = self._scores(q, k, row)
                scores -= xp.reshape(logsumexp[pair, :, row, :], (*q.shape[:2], 1))
                weights = xp.exp(scores)
                v_sum[:, :seen, :] += xp.matmul(_transposed(xp, weights), g)
                slopes = xp.matmul(g, _transposed(xp, v[:, :seen, :]))
                slopes -= xp.sum(g * o, axis=-1, keepdims=True)
                slopes *= weights
                k_sum[:, :seen, :] += xp.matmul(_transposed(xp, slopes), q)
                self._write(dq, pair, row, narrow(xp.matmul(slopes, k[:, :seen, :]) * self.scale, self.dtype))
            dk[pair, ...], dv[pair, ...] = narrow(k_sum, self.dtype), narrow(v_sum, self.dtype)
        shapes = [(self.shape[0], self.groups, *array.shape[1:]) for array in (self.k, self.v)]
        return xp.reshape(dq, self.shape), xp.reshape(dk, shapes[0]), xp.reshape(dv, shapes[1])

    def _row_blocks(self) -> Iterator[slice]:
        """Blocks of query rows such that the scores of one pair fit into SCORES."""
        size = max(1, SCORES // (self.q.shape[1] * self.k.shape[1]))
        return _blocks(self.q.shape[2], min(size, CAUSAL_ROWS) if self.causal else size)

    def _pair_blocks(self) -> Iterator[slice]:
        """Blocks of pairs whose scores fit into SCORES together: many short sequences, one long one at a time."""
        row = next(self._row_blocks())
        return _blocks(self.q.shape[0], max(1, SCORES // (self.q.shape[1] * (row.stop or 1) * self.k.shape[1])))

    def _seen(self, row: slice) -> int:
        """Number of keys that the last of these rows may see."""
        keys: int = self.k.shape[1]
        return min(row.stop, keys) if self.causal else keys

    def _scores(self, q: Any, k: Any, row: slice) -> Any:
        """Scores of a block of scaled query rows against the keys that it may see; -inf above the diagonal."""
        xp, seen = self.xp, self._seen(row)
        scores = xp.matmul(q, _transposed(xp, k[:, :seen, :]))
        if self.causal and seen > row.start:
            count = row.stop - row.start
            visible = xp.reshape(xp.arange(count), (count, 1)) >= xp.arange(seen - row.start)
            by_head = xp.reshape(scores, (scores.shape[0], self.q.shape[1], count, seen))
            corner = by_head[:, :, :, row.start :]
            by_head[:, :, :, row.start :] = xp.where(visible, corner, xp.full((), -float("inf"), dtype=scores.dtype))
            scores = xp.reshape(by_head, scores.shape)
        return scores

    def _rows(self, array: Any, pair: slice, row: slice) -> Any:
        """A block of query rows to compute with; the rows of heads that share keys one after the other."""
        block = array[pair, :, row, :]
        return self._load(self.xp.reshape(block, (block.shape[0], block.shape[1] * block.shape[2], block.shape[3])))

    def _write(self, into: Any, pair: slice, row: slice, block: Any) -> None:
        """The way back from `_rows`."""
        place = into[pair, :, row, ...]
        into[pair, :, row, ...] = self.xp.reshape(block, place.shape)

    def _load(self, array: Any) -> Any:
        return widen(array, self.dtype)


def _transposed(xp: Any, stack: Any) -> Any:
    return xp.moveaxis(stack, -1, -2)

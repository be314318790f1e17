"""Whether a tile of an attention is right, by computing a few of its rows and keys again.

Softmax is not linear, so there is no product to compare with as for a gemm. Instead

- every element of `out`, a mean of v's rows with weights that add up to one, must lie between the least and the largest
  of them: a wild number is found wherever it is;
- PAIRS pairs of batch and key head are drawn at random, and ROWS query rows and ROWS keys of each; those with a result
  that is not finite come first. Their share of the result is computed again in float64 and compared by element.

The device does not know which. A tile that is wrong in a share f of its rows and keys passes with a probability of
about (1 - f)^(PAIRS ROWS): one that is wrong everywhere never, a quarter wrong 1 %. A single wrong row in thousands,
with values that are possible ones, is likely to pass: it is sampling. Its cost does not grow with the tile's heads.

**The error of an honest tile**, with the units of `verification` and g(n) the growth of a sum of n terms: a score
s = scale q k is off by at most e = u_a (g(d) + 2) scale |q| |k|, a weight p = exp(s - m) / sum by p rho with

    rho = e + max e + u_a (2 |s - m| + 8) + 2 u_o                the last where halves are multiplied

and out = p v by (rho + p rho + 2 g(t) u_a) p |v| + u_o |out|. Backward, p = exp(s - logsumexp), z = dO v - D with D the
sum of dO out, and ds = p z is off by p (rho |z| + e_z) + (u_o + 4 u_a) |ds|, e_z = u_a g (|dO| |v| + |dO| |out|). Each
of dq = scale ds k, dk = scale ds^T q and dv = p^T dO follows. SAFETY times these bounds is allowed; honest kernels,
numpy's and torch's, reach an eighth of them in float32 and, torch with halves, up to nine tenths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from cleave_dask.runtime.verification import PRECISIONS, Precision
from cleave_dask.runtime.wire import Array, widen

PAIRS = 4
ROWS = 4
SAFETY = 2.0
EXPONENTIAL = 2.0**-14
"""How good an exponential is where the weights are halves: libraries use quicker ones there."""


def verify_attention(
    operands: Sequence[Array], results: Sequence[Array], *, dtype: str, causal: bool, scale: float | None, seed: int
) -> bool:
    """Whether results are those of the attention of three operands, or of the backward pass of six, where looked at.

    Shapes and dtypes must be right; `kernels.Kernel.run` says which. `seed` draws what is looked at.
    """
    with np.errstate(all="ignore"):
        return _verify(operands, results, dtype, causal, scale, seed)


def _verify(
    operands: Sequence[Array], results: Sequence[Array], dtype: str, causal: bool, scale: float | None, seed: int
) -> bool:
    backward = len(operands) == 6
    q, k = operands[1:3] if backward else operands[:2]
    if 0 in q.shape or 0 in k.shape:
        return True
    wide = [_wide(array, dtype) for array in results]
    if not backward and not _within(wide[0], _wide(operands[2], dtype), PRECISIONS[dtype], k.shape[2]):
        return False
    rng = np.random.default_rng(seed)
    pairs, share = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
    by_query, by_key = (wide[:1], wide[1:]) if backward else (wide, [])
    odd_rows, odd_keys = _odd(by_query, pairs, share * q.shape[2]), _odd(by_key, pairs, k.shape[2])
    for pair in drawn(rng, np.asarray(odd_rows.any(axis=1) | odd_keys.any(axis=1)), PAIRS):
        batch, group = divmod(int(pair), k.shape[1])
        heads = slice(group * share, (group + 1) * share)
        queried = "yynnyy" if backward else "ynn", "ynn" if backward else "yy"  # which have heads of queries
        mine, made = (
            [array[batch, heads if yes == "y" else group] for array, yes in zip(arrays, which, strict=True)]
            for arrays, which in zip((operands, wide), queried, strict=True)
        )
        this, rows = _Pair.of(mine, dtype, causal, scale), drawn(rng, odd_rows[pair], ROWS)
        right = this.backward(made, rows, drawn(rng, odd_keys[pair], ROWS)) if backward else this.forward(made, rows)
        if not right:
            return False
    return True


def _odd(results: Sequence[Array], pairs: int, rows: int) -> Array:
    """By pair and row: whether any of these results is not finite there."""
    odd = np.zeros((pairs, rows), dtype=bool)
    for array in results:
        finite = np.isfinite(array)
        if not finite.all():
            odd |= ~finite.reshape(pairs, rows, -1).all(axis=2)
    return odd


def drawn(rng: np.random.Generator, odd: Array, count: int) -> Array:
    """Some of them at random, but the odd ones first."""
    order = rng.permutation(len(odd))
    return order[np.argsort(~odd[order], kind="stable")][:count]


def _wide(array: Array, dtype: str) -> Array:
    """Numbers as they are computed with; a logsumexp of halves is wide already."""
    wide: Array = array if array.dtype in (np.float32, np.float64) else widen(array, dtype)
    return wide


def _within(out: Array, v: Array, precision: Precision, keys: int) -> bool:
    """Whether each element of out lies between the least and the largest element of its column of v."""
    share = out.shape[1] // v.shape[1]
    low, high = v.min(axis=2), v.max(axis=2)
    slack = (4 * precision.growth(keys) * precision.sum_unit + 4 * precision.unit) * np.maximum(-low, high).clip(0)
    slack += precision.floor(keys)
    low, high = (np.repeat(edge, share, axis=1)[:, :, None, :] for edge in (low - slack, high + slack))
    return not bool(((out < low) | (out > high)).any())


def _nothing() -> Array:
    return np.empty(0)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One key head of one sequence and the query heads that share it, their rows one after the other, in float64."""

    precision: Precision
    causal: bool
    scale: float
    length: int  # query rows of a head
    q: Array
    k: Array
    v: Array
    grad: Array = field(default_factory=_nothing)  # from here on: of the backward pass
    out: Array = field(default_factory=_nothing)
    logsumexp: Array = field(default_factory=_nothing)

    @classmethod
    def of(cls, operands: Sequence[Array], dtype: str, causal: bool, scale: float | None) -> _Pair:
        """From its part of each operand, as they come."""
        wide = [_wide(array, dtype).astype("float64") for array in operands]
        q, k, v = wide[1:4] if len(wide) == 6 else wide
        factor = scale if scale is not None else 1 / sqrt(q.shape[-1])
        common = (PRECISIONS[dtype], causal, factor, q.shape[1], _flat(q), k, v)
        return cls(*common, *((_flat(wide[0]), _flat(wide[4]), wide[5].reshape(-1)) if len(wide) == 6 else ()))

    def forward(self, results: Sequence[Array], rows: Array) -> bool:
        """Whether these rows of out and logsumexp are right."""
        unit, grown = self.precision.sum_unit, self.precision.growth(len(self.k))
        s, e = self._scores(self.q[rows], self.k, rows, np.arange(len(self.k)))
        top = s.max(axis=1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=1, keepdims=True)
        p /= total
        away = np.where(p > 0, np.abs(s - top), 0.0)
        rho = e + e.max(axis=1, keepdims=True) + unit * (2 * away + 8)
        mean = (p * rho).sum(axis=1)
        logsumexp = (top + np.log(total))[:, 0]
        bound = (
            mean
            + (EXPONENTIAL if self.precision.unit else 0.0)
            + unit * (np.abs(logsumexp) + np.abs(top[:, 0]) + grown + 4)
        )
        if not close(results[1].reshape(-1)[rows], logsumexp, bound, PRECISIONS[self.precision.sums]):
            return False
        rho = rho + 2 * self.precision.unit
        slack = rho + (p * rho).sum(axis=1, keepdims=True) + 2 * grown * unit
        out = p @ self.v
        return close(_flat(results[0])[rows], out, (p * slack) @ np.abs(self.v) + self._rounding(out), self.precision)

    def backward(self, results: Sequence[Array], rows: Array, keys: Array) -> bool:
        """Whether these rows of dq and these keys of dk and dv are right."""
        unit, every = self.precision.sum_unit, np.arange(len(self.q))
        p, e_p, ds, e_ds = self._slopes(rows, np.arange(len(self.k)))
        dq = self.scale * ds @ self.k
        bound = self.scale * (e_ds + self.precision.growth(len(self.k)) * unit * np.abs(ds)) @ np.abs(self.k)
        if not close(_flat(results[0])[rows], dq, bound + self._rounding(dq), self.precision):
            return False
        p, e_p, ds, e_ds = (array.T for array in self._slopes(every, keys))
        grown = self.precision.growth(len(self.q)) * unit
        dk, dv = self.scale * ds @ self.q, p @ self.grad
        k_bound = self.scale * (e_ds + grown * np.abs(ds)) @ np.abs(self.q)
        v_bound = (e_p + grown * p) @ np.abs(self.grad)
        return close(results[1][keys], dk, k_bound + self._rounding(dk), self.precision) and close(
            results[2][keys], dv, v_bound + self._rounding(dv), self.precision
        )

    def _scores(self, q: Array, k: Array, rows: Array, keys: Array) -> tuple[Array, Array]:
        """Scores of query rows and keys, and how far they may be off; -inf where a row may not see a key."""
        s = self.scale * q @ k.T
        unit = self.precision.sum_unit * (self.precision.growth(q.shape[1]) + 2)
        e = unit * abs(self.scale) * np.abs(q) @ np.abs(k).T
        if self.causal:
            hidden = (rows % self.length)[:, None] < keys
            s[hidden], e[hidden] = -np.inf, 0.0
        return s, e

    def _slopes(self, rows: Array, keys: Array) -> tuple[Array, Array, Array, Array]:
        """Weights and the gradients of scores, each with how far it may be off."""
        unit, half = self.precision.sum_unit, self.precision.unit
        s, e = self._scores(self.q[rows], self.k[keys], rows, keys)
        logsumexp, grad, out = self.logsumexp[rows][:, None], self.grad[rows], self.out[rows]
        p = np.exp(s - logsumexp)
        smallest = self.precision.smallest  # halves are rounded to it before they are multiplied
        e_p = smallest + p * (e + unit * (2 * np.where(p > 0, np.abs(s), 0.0) + 2 * np.abs(logsumexp) + 8) + 2 * half)
        z = grad @ self.v[keys].T - (grad * out).sum(axis=1, keepdims=True)
        size = np.abs(grad) @ np.abs(self.v[keys]).T + np.abs(grad * out).sum(axis=1, keepdims=True)
        ds = p * z
        e_z = unit * self.precision.growth(grad.shape[1]) * size
        return p, e_p, ds, smallest + e_p * np.abs(z) + p * e_z + (half + 4 * unit) * np.abs(ds)

    def _rounding(self, result: Array) -> Array:
        """What rounding a result to its own dtype adds."""
        return self.precision.unit * np.abs(result) + self.precision.floor(len(self.k))


def _flat(array: Array) -> Array:
    """The rows of several heads as those of one matrix."""
    return array.reshape(-1, array.shape[-1])


def close(found: Any, exact: Array, bound: Array, precision: Precision, safety: float = SAFETY) -> bool:
    """Whether each element is within so many times its bound; what is not finite must not be, or be out of range."""
    wild = ~(np.abs(exact) + safety * bound < precision.largest)
    return bool(np.all(np.where(np.isfinite(found), np.abs(found - exact) <= safety * bound, wild)))

"""Whether a tile of a head by vocabulary is right, by bounds that every row must keep and by computing a few again.

A softmax stands between operands and results, so that no product tells them apart as for a gemm. Instead

- every target's logit is multiplied again: it is one product of a row and a word;
- every number must be a possible one. The logsumexp of v logits x w lies between log v + x (mean of w), by Jensen, and
  log v + |x| max |w|; a row of dX, c (w of its target - mean of w with weights that add up to one at most), within
  2 |c| max |w|; a word of dW within the sum of |c x| over its rows;
- ROWS rows (words, of dW) are drawn at random, those with a result that is not finite first, and computed again.

The device does not know which. A tile that is wrong in a share f of its rows passes with a probability of (1 - f)^ROWS:
one that is wrong everywhere never, one that is wrong in half of them 0.4 %, a single wrong row with possible values
mostly: it is sampling, as for attentions.

**The error of an honest tile**, with units and growth as in `verification`: a logit is off by at most
e = u_a (g(h) + 2) |x| |w|, a logsumexp by the greatest e + u_a (|top| + |logsumexp| + g(v) + 4), a weight
p = exp(z - logsumexp) by

    p rho,   rho = e + u_a (2 |z| + 2 |logsumexp| + 8)

and D = c (1 - p or - p) by |c| (p rho + 4 u_a (1 + p)); dX = D w by (that + g(v) u_a |D|) |w| + u_o |dX|, dW alike.
What is computed again is no more precise than the tile, so SAFETY allows for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np

from cleave_dask.runtime.verification import PRECISIONS, Precision
from cleave_dask.runtime.verification_attention import close, drawn
from cleave_dask.runtime.wire import Array, widen

ROWS = 8
SAFETY = 4.0


def verify_logits(kind: str, operands: Sequence[Array], results: Sequence[Array], *, dtype: str, seed: int) -> bool:
    """Whether results are those of a tile of this kind where looked at; `seed` draws where that is.

    Shapes and dtypes must be right, and targets counted from the tile's first word: see `kernels.Kernel.run`.
    """
    rng, precision = np.random.default_rng(seed), PRECISIONS[dtype]
    first, second = (widen(array, dtype) for array in operands[:2])
    with np.errstate(all="ignore"):
        if kind == "logit_sums":
            return _sums_right(first, second, operands[2], results, precision, rng)
        made = widen(results[0], dtype)
        if kind == "logit_dx":
            return _rows_right(first, second, operands[2:], made, precision, rng)
        return _words_right(first, second, operands[2:], made, precision, rng)


def _sums_right(
    x: Array, w: Array, targets: Array, results: Sequence[Array], precision: Precision, rng: np.random.Generator
) -> bool:
    unit, words, lengths = precision.sum_unit, len(w), _norms(w)
    off = unit * (precision.growth(x.shape[1]) + 2) * _norms(x) * lengths.max()  # of any logit of each row
    logsumexp, found = results
    hit = np.flatnonzero((targets >= 0) & (targets < words))
    exact = np.zeros(len(x), x.dtype)
    exact[hit] = (x[hit] * w[targets[hit].astype("int64")]).sum(axis=1)
    if not close(found, exact, off, precision, SAFETY) or found[np.setdiff1d(np.arange(len(x)), hit)].any():
        return False
    low, high = log(words) + x @ w.mean(axis=0), log(words) + _norms(x) * lengths.max()
    slack = off + unit * (2 * high + precision.growth(words) + 8)  # high is the largest that one can be
    if ((logsumexp < low - SAFETY * (slack + off)) | (logsumexp > high + SAFETY * slack)).any():
        return False
    rows = drawn(rng, ~np.isfinite(logsumexp), ROWS)
    logits = x[rows] @ w.T
    top = logits.max(axis=1)
    exact = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    bound = off[rows] + unit * (np.abs(top) + np.abs(exact) + precision.growth(words) + 4)
    return close(logsumexp[rows], exact, bound, precision, SAFETY)


def _rows_right(
    x: Array, w: Array, vectors: Sequence[Array], made: Array, precision: Precision, rng: np.random.Generator
) -> bool:
    most = 2.0 * np.abs(vectors[2])[:, None] * np.abs(w).max(axis=0)
    if _beyond(made, most, precision, len(w)):
        return False
    rows = drawn(rng, _not_finite(made), ROWS)
    slopes, off = _slopes(x[rows], w, [vector[rows] for vector in vectors], 0, precision)
    return _product_close(made[rows], slopes, off, w, precision)


def _words_right(
    w: Array, x: Array, vectors: Sequence[Array], made: Array, precision: Precision, rng: np.random.Generator
) -> bool:
    most = np.abs(vectors[2]) @ np.abs(x)
    if _beyond(made, np.broadcast_to(most, made.shape), precision, len(x)):
        return False
    for word in drawn(rng, _not_finite(made), ROWS).tolist():
        slopes, off = _slopes(x, w[word : word + 1], vectors, word, precision)
        if not _product_close(made[word : word + 1], slopes.T, off.T, x, precision):
            return False
    return True


def _slopes(x: Array, w: Array, vectors: Sequence[Array], first: int, precision: Precision) -> tuple[Array, Array]:
    """The gradient of the logits of some rows and words, from the word `first` on, and how far each may be off.

    `vectors` are the rows' targets, their logsumexp, and the loss's slope by each.
    """
    targets, logsumexp, slope = vectors
    unit = precision.sum_unit
    logits = x @ w.T
    e = unit * (precision.growth(x.shape[1]) + 2) * _norms(x)[:, None] * _norms(w)
    p = np.exp(logits - logsumexp[:, None])
    rho = e + unit * (2 * np.abs(logits) + 2 * np.abs(logsumexp)[:, None] + 8)
    hit = targets[:, None] == first + np.arange(len(w))
    size = np.abs(slope)[:, None]
    return slope[:, None] * (hit - p), size * (np.where(p > 0, p * rho, 0.0) + 4 * unit * (hit + p))


def _product_close(made: Array, slopes: Array, off: Array, side: Array, precision: Precision) -> bool:
    """Whether these are the slopes times a side, within what both may be off."""
    grown = precision.growth(len(side)) * precision.sum_unit
    exact = slopes @ side
    bound = (off + grown * np.abs(slopes)) @ np.abs(side) + precision.unit * np.abs(exact)
    return close(made, exact, bound + precision.floor(len(side)), precision, SAFETY)


def _beyond(made: Array, most: Array, precision: Precision, terms: int) -> bool:
    """Whether a number is larger than any that is possible; what is possible knows nothing of rounding."""
    slack = 1.0 + SAFETY * (precision.growth(terms) * precision.sum_unit + precision.unit) + 1e-3
    return bool((np.abs(made) > most * slack + SAFETY * precision.floor(terms)).any())


def _not_finite(made: Array) -> Array:
    """Which rows have a number that is none."""
    return np.asarray(~np.isfinite(made).all(axis=1))


def _norms(side: Array) -> Array:
    """The length of each row."""
    return np.asarray(np.sqrt(np.square(side).sum(axis=1)))

"""Whether a tile that came back is the product that was asked for, at a fraction of the cost of multiplying.

Freivalds' product: for random vectors X, C X is compared with A (B X), which costs O(mk + kn + mn) instead of O(mnk).
Rounding makes the two differ for honest tiles too. How much is derived here. u is half the distance from 1 to the next
number: u_a in the precision that sums are kept in (float32 for halves), u_o in the one that a half's sum is rounded to.

**The error of an honest tile.** Each of the k additions to an element rounds a partial sum, by at most u_a of it, and
no partial sum exceeds q = |A| |B|, in whatever order the terms are added. Rounding to a half adds u_o |ab|. Hence

    at worst        |c - ab| <= k u_a q + u_o |ab|                     a theorem, any order
    statistically   |c - ab| <= 6 sqrt(k) u_a q + u_o |ab|             errors of either sign (Higham and Mary, 2019)
    typically       0.4 u_a sqrt(k) r in the 2-norm of a row of C      partial sums that wander like random walks

where r^2 = sum_l a_l^2 |b_l|^2 over the rows b_l of B: the size of a row of C if the signs of its terms were random.

**Sieve.** There are eight vectors X, their entries independent and uniform in +-[1/2, 3/2]; columns of B and C are
first scaled by B's norms, so that a small column counts as much as a large one. The residual of a row, S = the root
mean square of C X - A (B X), is the 2-norm of the row's error up to a factor near 1, plus the rounding of the check
itself, which is as large as the tile's: together 0.6 u_a sqrt(k + n) r at most, typically. A row passes if S <= t with

    t^2 = u_a^2 (k + n) (r^2 + |c|^2) + u_o^2 |c|^2                     |c| the 2-norm of the row of C.

It is tried first with the size of A (B X), known already, in place of r and |c|; few rows need those.

**Verdict.** A row that does not pass is multiplied again in float64 and compared element by element with the
statistical bound. What exceeds that one but not the worst bound is honest where roundings all go one way, as they do
when one number is added thousands of times: how far, the drift of a plain running sum of |a b| shows. So an honest
tile is never rejected, whatever the order of its sums, and a wrong one is rejected once a wrong row is looked at.
In float64, where nothing more precise is at hand, elements are held against twice the worst bound.

**What slips through.** Errors within the bounds above, which cannot be told from rounding, and rows that pass the
sieve by chance. An entry of X has a density of at most 1/2, hence the residual of a row whose error has 2-norm f t has
a density of at most 0.71 / (f t) for each vector, whatever the pattern of the error, and all eight together stay within
t with a probability below 1000 / f^8. The t of the first try varies with X, to 1.7 times the above once in thousands of
rows; even then that is 2e-5 at f = 16 and 7e-8 at f = 32. A single wrong element has nothing to cancel against, and no
entry of X is small: it is seen from f = 4 up. For normal operands with k = 1024 and n = 512 an element may thus be off
by 3e-4 of its typical size in float32, and by a third of it in bfloat16, where the roundings of its row hide it.

**Infinity and NaN** must come from the operands, or from a sum that leaves the range of the dtype.
Products in less than the tile's precision (TF32, halves summed in halves) are not honest in this sense.

Tiles that share a slice of B share its vectors too: B X is computed once (`RightSide`), and that of neighbouring slices
is the sum of theirs. A device learns nothing of them but whether its own tile was accepted, and a device whose tile was
not is asked for no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import Any, Self

import numpy as np

from cleave_dask.errors import InputError
from cleave_dask.resources import shown
from cleave_dask.runtime.wire import Array, as_array, dtype_name, widen, wire_dtype

VECTORS = 8
SPREAD = 6.0
"""Standard deviations that the statistical bound allows for."""
DRIFT = 4.0
"""How much worse than a plain running sum another order may drift."""
EXAMINED = 32
"""Elements beyond the statistical bound whose drift is looked at, the worst ones first."""
SAMPLED = 64
"""Rows of B that tell the scale of its columns, which need not be exact."""
RUN = 16
"""How many of them lie together: a line of the cache."""
BLOCK = 1 << 18
"""Numbers of a matrix that are multiplied by vectors at a time: 1 MB in float32."""
REFERENCE = 1 << 21
"""Numbers of B that are held in float64 at a time when elements are multiplied again: 16 MB."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a dtype's honest products look like."""

    sums: str  # dtype of partial sums
    sum_unit: float  # u_a
    unit: float  # u_o; 0 if sums are not rounded to another dtype
    largest: float
    smallest: float  # numbers below this may be rounded to zero
    squares: tuple[float, float]  # between these, sums of squares are as precise as other sums

    def floor(self, k: int) -> float:
        """Error that is there however small the numbers are: products, sums and result may be rounded to zero."""
        return self.smallest + 2 * k * float(np.finfo(self.sums).tiny)

    def growth(self, k: int) -> float:
        """Bound on the error of a sum of k terms, in units of `sum_unit` times the sum of their sizes."""
        if self.sums == "float64":
            return 2.0 * k + 2  # the reference is no more precise than the tile
        return min(k + 1, SPREAD * sqrt(k) + 2)


PRECISIONS = {
    "float64": Precision("float64", 2**-53, 0, 2.0**1023 * (2 - 2**-52), 2**-1022, (1e-280, 1e280)),
    "float32": Precision("float32", 2**-24, 0, 2.0**127 * (2 - 2**-23), 2**-126, (1e-24, 1e24)),
    "float16": Precision("float32", 2**-24, 2**-11, 2.0**15 * (2 - 2**-10), 2**-24, (1e-24, 1e24)),
    "bfloat16": Precision("float32", 2**-24, 2**-8, 2.0**127 * (2 - 2**-7), 2**-126, (1e-24, 1e24)),
}


def verify_tile(a: Any, b: Any, c: Any, *, seed: int, dtype: str | None = None) -> bool:
    """Whether c is a @ b up to the rounding of an honest product; the module's docstring says what that is.

    Operands are numpy arrays or torch tensors, matrices or stacks of them. `dtype` is theirs unless given, which
    bfloat16 as uint16 needs. `seed` draws the vectors: a device that knows it beforehand can deceive.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed is {shown(seed)}; give a whole number of zero or more")
    name = dtype_name(a) if dtype is None else str(dtype)
    if name not in PRECISIONS:
        raise InputError(
            f"cannot verify a product of {name}, only of {', '.join(PRECISIONS)}; "
            "give dtype='bfloat16' with arrays of uint16 that hold it"
        )
    if any(dtype_name(array) not in (name, wire_dtype(name)) for array in (a, b, c)):
        return False
    a, b, c = as_array(a), as_array(b), as_array(c)
    if a.ndim not in (2, 3) or b.ndim != a.ndim or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return False
    if c.shape != (*a.shape[:-1], b.shape[-1]):
        return False
    if a.ndim == 2:
        return RightSide.of(b, name, [seed]).verify(a, c)
    return all(RightSide.of(b[i], name, [seed, i]).verify(a[i], c[i]) for i in range(len(a)))


@dataclass(frozen=True, slots=True)
class Slices:
    """A matrix as it travels, in parts that follow each other along an axis; copying them together would cost more."""

    parts: tuple[Array, ...]
    axis: int = 0

    @property
    def T(self) -> Slices:
        """The transposed matrix."""
        return Slices(tuple(part.T for part in self.parts), 1 - self.axis)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        whole = [self.parts[0].shape[0], self.parts[0].shape[1]]
        whole[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return whole[0], whole[1]

    @property
    def whole(self) -> Array:
        """One array."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=self.axis)

    def rows(self, which: Array) -> Array:
        """Some rows of it, as one array."""
        if self.axis == 1:
            return np.concatenate([part[which] for part in self.parts], axis=1)
        ends = np.cumsum([len(part) for part in self.parts])
        parts = np.searchsorted(ends, which, side="right")
        found = np.empty((len(which), self.shape[1]), self.parts[0].dtype)
        for number, part in enumerate(self.parts):
            found[parts == number] = part[which[parts == number] - (ends[number] - len(part))]
        return found

    def times(self, dtype: str, vectors: Array) -> Array:
        """The matrix times vectors."""
        if self.axis == 0:
            found = [_times(part, dtype, vectors) for part in self.parts]
            return found[0] if len(found) == 1 else np.concatenate(found)
        ends = np.cumsum([part.shape[1] for part in self.parts])
        each = zip(self.parts, np.split(vectors, ends[:-1]), strict=True)
        return np.asarray(sum(_times(part, dtype, some) for part, some in each))


@dataclass(frozen=True, slots=True)
class RightSide:
    """A slice of B with its random vectors, for all tiles that multiply it."""

    b: tuple[Slices, ...]  # side by side
    dtype: str
    fits: Array  # columns whose squares can be summed
    zero: Array  # columns of zeros
    x: Array  # scaled vectors, 0 in columns that do not fit
    y: Array  # B x

    @classmethod
    def of(cls, b: Array | Slices, dtype: str, seed: list[int]) -> Self:
        """Draw the vectors of a slice and multiply it by them."""
        precision, b = PRECISIONS[dtype], b if isinstance(b, Slices) else Slices((b,))
        rng = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            scale = _column_scale(b, dtype, rng)
            fits = scale > 0
            x = np.asfortranarray(scale[:, None] * _vectors(rng, len(scale), precision.sums), precision.sums)
            y = b.times(dtype, x)
            if not fits.all() and not np.isfinite(y).all():  # a column that is not finite, times zero
                y = np.where(fits, _wide(b.whole, dtype), 0) @ x
            zero = np.zeros(len(fits), bool)
            zero[~fits] = (widen(b.T.rows(np.flatnonzero(~fits)), dtype) == 0).all(axis=1)
            return cls((b,), dtype, fits, zero, x, y)

    @classmethod
    def joined(cls, sides: Sequence[Self]) -> Self:
        """Slices that lie side by side, as one."""
        if len(sides) == 1:
            return sides[0]
        fits, zero, x = (np.concatenate([getattr(side, name) for side in sides]) for name in ("fits", "zero", "x"))
        y = np.sum([side.y for side in sides], axis=0)
        return cls(tuple(part for side in sides for part in side.b), sides[0].dtype, fits, zero, x, y)

    def passes(self, c: Array, expected: Array, k: int) -> bool:
        """Whether every row of c passes the sieve at first sight, where `expected` is a @ y; if not, ask `verify`."""
        if c.size == 0 or k == 0 or not self.fits.all():
            return False
        with np.errstate(all="ignore"):
            return not len(self._conspicuous(c, self.dtype, expected, k)[0])

    def verify(self, a: Array | Slices, c: Array, expected: Array | None = None) -> bool:
        """Whether c is a @ b, for matrices of agreeing shapes; `expected` is a @ y where that is known already."""
        a = a if isinstance(a, Slices) else Slices((a,))
        if c.size == 0 or a.shape[1] == 0:
            return not c.any()
        precision, dtype = PRECISIONS[self.dtype], self.dtype
        with np.errstate(all="ignore"):
            expected = a.times(dtype, self.y) if expected is None else expected
            sieved, kind = c, dtype
            odd = np.flatnonzero(~self.fits)  # columns out of the range in which squares can be summed, or of zeros
            odd = odd[~self.zero[odd] | (widen(c[:, odd], dtype) != 0).any(axis=0)]
            if odd.size:
                left, wide, product = (_wide(array, dtype) for array in (a.whole, self._whole(), c))
                if not _elements_right(left, wide[:, odd], product[:, odd], np.arange(len(c)), precision):
                    return False
                sieved, kind = np.where(self.fits, product, 0), precision.sums
            rows = self._suspects(a, sieved, kind, expected)
            if rows.size == 0:
                return True
            left, product, wide = (_wide(array, dtype) for array in (a.whole, c, self._whole()))
            return _elements_right(left, wide, product, rows, precision)

    def _suspects(self, a: Slices, c: Array, kind: str, expected: Array) -> Array:
        """Rows whose residual is not explained by typical rounding, the least explained first; `kind` is c's dtype."""
        dtype, halves = self.dtype, PRECISIONS[self.dtype].unit ** 2
        rows, residual, sums = self._conspicuous(c, kind, expected, a.shape[1])
        if rows.size == 0:
            return rows
        walk = np.square(widen(a.rows(rows), dtype), dtype="float64") @ _mean_square(self.y)
        size = np.square(widen(c[rows], kind), dtype="float64") @ _mean_square(self.x)
        excess = residual[rows] / (sums * (walk + size) + halves * size)
        excess[~np.isfinite(walk + size + excess)] = np.inf
        order = np.argsort(-excess)
        suspects: Array = rows[order[excess[order] > 1]]
        return suspects

    def _conspicuous(self, c: Array, kind: str, expected: Array, k: int) -> tuple[Array, Array, float]:
        """Rows that do not pass at first, the squares of all residuals, and of what sums may be off by."""
        precision = PRECISIONS[self.dtype]
        residual, size = _mean_square(_times(c, kind, self.x) - expected), _mean_square(expected)
        sums = precision.sum_unit**2 * (k + c.shape[1])
        passed = (residual <= (2 * sums + precision.unit**2) * size) & (size < np.inf)
        return np.flatnonzero(~passed), residual, sums

    def _whole(self) -> Array:
        return np.concatenate([part.whole for part in self.b], axis=1) if len(self.b) > 1 else self.b[0].whole


def _wide(array: Array, dtype: str) -> Array:
    """A matrix to compute with, in a layout that BLAS takes as it is; views cut from a larger one are not copied."""
    wide: Array = widen(array, dtype)
    for across, along in ((0, 1), (1, 0)):
        if wide.strides[along] == wide.itemsize and wide.strides[across] >= wide.itemsize * wide.shape[along]:
            return wide
    return np.ascontiguousarray(wide)


def _times(array: Array, dtype: str, vectors: Array) -> Array:
    """A matrix times vectors, a block of the rows that its memory has at a time.

    Halves are widened by blocks, which are still in the cache when they are used. Smaller blocks cost more: BLAS copies
    the vectors for each of them.
    """
    count = vectors.shape[1]
    if array.strides[0] < array.strides[1]:  # columns are in one piece, not rows
        across, total = np.ascontiguousarray(vectors.T), np.zeros((count, len(array)), vectors.dtype)
        for some in _blocks(array.T):
            total += across[:, some] @ _wide(array.T[some], dtype)
        return total.T
    vectors = np.asfortranarray(vectors) if count <= VECTORS else np.ascontiguousarray(vectors)
    result = np.empty((len(array), count), vectors.dtype)
    for some in _blocks(array):
        np.matmul(_wide(array[some], dtype), vectors, out=result[some])
    return result


def _blocks(array: Array) -> Iterator[slice]:
    """The rows of a matrix, about BLOCK of its numbers at a time."""
    count = max(8, BLOCK // max(1, array.shape[1]))
    return (slice(first, first + count) for first in range(0, len(array), count))


def _column_scale(b: Slices, dtype: str, rng: np.random.Generator) -> Array:
    """What brings each column to norm 1, about; 0 where that is out of range, as for columns of zeros."""
    scale = _scale_by(b, dtype, partial(_runs, rng=rng))
    return scale if scale.all() else _scale_by(b, dtype, _blocks)


def _scale_by(b: Slices, dtype: str, choose: Callable[[Array], Iterable[slice]]) -> Array:
    """What brings each column to norm 1 in the rows that are chosen of each part."""
    each = [_energy((widen(part[some], dtype) for some in choose(part)), part.shape[1], dtype) for part in b.parts]
    energy = np.sum(each, axis=0) if b.axis == 0 else np.concatenate(each)
    low, high = PRECISIONS[dtype].squares
    return np.asarray(np.where((energy > low) & (energy < high), 1 / np.sqrt(energy), 0))


def _energy(blocks: Iterable[Array], columns: int, dtype: str) -> Array:
    """The sum of squares of each column."""
    energy = np.zeros(columns, PRECISIONS[dtype].sums)
    for block in blocks:
        energy += np.einsum("ij,ij->j", block, block)
    return energy


def _runs(array: Array, rng: np.random.Generator) -> Iterator[slice]:
    """SAMPLED rows in runs from a random place on: sequences begin at even ones, with numbers unlike the others.

    Where columns are in one piece, rows apart from each other would cost as much of the memory as all of them.
    """
    step = max(RUN, len(array) * RUN // SAMPLED)
    first = int(rng.integers(step - RUN + 1))
    return (slice(start, start + RUN) for start in range(first, len(array), step))


def _vectors(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Random vectors with entries uniform in +-[1/2, 3/2]."""
    entries: Array = rng.random((count, VECTORS), dtype=dtype)
    entries *= 2
    entries -= 1
    entries += np.copysign(0.5, entries, dtype=dtype)
    return entries


def _mean_square(vectors: Array) -> Array:
    """The mean square of each row, which float64 can hold for any float32."""
    wide = vectors.astype("float64")
    squares: Array = np.einsum("ij,ij->i", wide, wide) / vectors.shape[1]
    return squares


def _elements_right(a: Array, b: Array, c: Array, rows: Array, precision: Precision) -> bool:
    """Whether each element of these rows is right, by multiplying again; a few rows first, for most lies are bold."""
    columns = max(1, REFERENCE // len(b))
    for start, stop in pairwise([0, *range(8, len(rows), 64), len(rows)]):
        some = a[rows[start:stop]].astype("float64")
        for first in range(0, b.shape[1] if len(some) else 0, columns):
            others = b[:, first : first + columns].astype("float64")
            if not _block_right(some, others, c[rows[start:stop], first : first + columns], precision):
                return False
    return True


def _block_right(a: Array, b: Array, c: Array, precision: Precision) -> bool:
    """The verdict on a block of c, given its operands in float64."""
    k = a.shape[1]
    exact, size = a @ b, np.abs(a) @ np.abs(b)
    rounding = precision.unit * np.abs(exact) + precision.floor(k)
    bound = 1.01 * (precision.growth(k) * precision.sum_unit * size + rounding)
    error = np.abs(c - exact)
    overflows = (np.sign(c) * exact + bound >= precision.largest) | (size >= 0.99 * np.finfo(precision.sums).max)
    finite = np.isfinite(c)
    right = np.where(finite & np.isfinite(exact), error <= bound, ~finite & (overflows | ~np.isfinite(exact)))
    if right.all():
        return True
    worst = 1.01 * ((k + 1) * precision.sum_unit * size + rounding)
    if not np.all(right | (error <= worst)):
        return False
    excess = np.where(right, 0, error - bound)
    doubtful = np.argsort(-excess, axis=None)[: min(EXAMINED, np.count_nonzero(~right))]
    i, j = np.unravel_index(doubtful, c.shape)
    return bool(np.all(excess[i, j] <= DRIFT * _drift(np.abs(a[i] * b[:, j].T).astype(precision.sums))))


def _drift(terms: Array) -> Array:
    """How far the running sums of each row, in the precision of its terms, ever get from the true ones."""
    errors: Array = np.abs(np.cumsum(terms, axis=1) - np.cumsum(terms, axis=1, dtype="float64"))
    return np.asarray(errors.max(axis=1))

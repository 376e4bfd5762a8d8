"""Statistics of a tensor's values in one pass and bounded memory.

Contract: `compute_stats` takes an array or a stream of arrays of any sizes and gives a `TensorStats`. float32 (and any
smaller float, widened) runs through `kernels.stats`: counts and extremes are exact, mean and standard deviation are
float64 sums whose bits depend on neither CPU, threads nor how the stream was cut. Integers and float64 go through
NumPy: counts and extremes exact, the rest in float64. Quantiles come from a histogram over the upper 16 bits of a
float32: each is off by at most 1/128 of its value. `tests/test_stats.py` compares with NumPy and `tests/naive.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf, nan, sqrt
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..encodings.run import in_parallel, numpy_dtype
from ..errors import ValueRefusedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bins = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]  # lowest, highest value, how many


_SMALL_INTEGERS = ("int4", "uint4", "int2", "uint2")  # of ml_dtypes, one a byte


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What one pass over a tensor's values found.

    `min`, `max`, `mean`, `std` (of the population) are over the finite values, NaN when there are none; for integers
    `min` and `max` are ints. `subnormals` counts nonzero values below the smallest normal number of the tensor's own
    dtype.
    """

    count: int
    min: float
    max: float
    mean: float
    std: float
    nan: int
    posinf: int
    neginf: int
    zeros: int
    subnormals: int
    _bins: Bins = field(repr=False, compare=False)

    @property
    def finite(self) -> int:
        """How many values are finite."""
        return self.count - self.nan - self.posinf - self.neginf

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return self.zeros / self.count if self.count else 0.0

    def quantiles(self, q: Sequence[float]) -> list[float]:
        """Quantiles of the finite values: for each q the value of rank floor(q * (n - 1)), to within 1/128 of itself.

        0 and 1 give the exact extremes. NaN when there is no finite value.
        """
        import numpy as np

        if any(not 0 <= x <= 1 for x in q):
            raise ValueRefusedError(f"quantiles are between 0 and 1, got {list(q)}")
        if not self.finite:
            return [nan for _ in q]
        low, high, n = self._bins
        above = np.cumsum(n)
        rank = np.floor(np.asarray(q, np.float64) * (self.finite - 1))
        i = np.searchsorted(above, rank, side="right")
        inside = (rank - (above[i] - n[i]) + 0.5) / n[i]
        found = low[i] + (high[i] - low[i]) * inside
        return [float(self.min if x == 0 else self.max if x == 1 else v) for x, v in zip(q, found, strict=True)]

    def histogram(
        self, bins: int = 32, low: float | None = None, high: float | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Counts in equal bins between `low` and `high` (default: the extremes), and the edges; for drawing.

        Counts are not whole numbers: a fine bin that straddles an edge is shared out in proportion.
        """
        import numpy as np

        low, high = self.min if low is None else low, self.max if high is None else high
        if not self.finite or not low <= high:
            return np.zeros(bins), np.full(bins + 1, nan)
        edges = np.linspace(low, high, bins + 1) if low < high else np.linspace(low - 0.5, low + 0.5, bins + 1)
        a, b, n = self._bins
        below = np.zeros(bins + 1)  # how many values are below each edge
        for i, edge in enumerate(edges):
            share = np.where(b > a, (edge - a) / np.where(b > a, b - a, 1), np.where(edge > a, 1.0, 0.0))
            below[i] = (n * np.clip(share, 0, 1)).sum()
        below[-1] = n.sum() if high >= self.max else below[-1]
        return np.diff(below), edges


def compute_stats(
    values: NDArray[Any] | Iterable[NDArray[Any]], *, dtype: str | None = None, threads: int | None = None
) -> TensorStats:
    """Statistics of an array, or of a stream of arrays of one dtype.

    Parameters
    ----------
    values
        Floats, integers or bools of any shape. Nothing larger than one of the arrays is held.
    dtype
        Name of the dtype the tensor has, where the values come widened: it decides what is subnormal.
    threads
        How many; by default up to 8 for large arrays.
    """
    import numpy as np

    stream = iter([values] if isinstance(values, np.ndarray) else values)
    first = next(stream, np.empty(0, np.float32))
    name = first.dtype.name if dtype is None else dtype
    if name in _SMALL_INTEGERS:
        bytes_ = (x.reshape(-1).astype(np.int8) for x in chain([first], stream))
        return _wide(bytes_, integer=True, smallest=0.0)
    if first.dtype.kind == "c":
        raise ValueRefusedError("statistics of complex values are not defined; take the real or imaginary part")
    parts = _flat(first, stream)
    if first.dtype.kind in "iub" or first.dtype == np.float64:
        return _wide(parts, integer=first.dtype.kind in "iub", smallest=_smallest_normal(name))
    return _float32(parts, _smallest_normal(name), threads)


def _flat(first: NDArray[Any], rest: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """The arrays as flat ones: bools as uint8, small floats widened to float32."""
    import numpy as np

    small = first.dtype.kind not in "iub" and first.dtype != np.float64
    for x in chain([first], rest):
        if x.dtype != first.dtype:
            raise ValueRefusedError(f"a stream of {first.dtype} contains {x.dtype}")
        y = np.ascontiguousarray(x).reshape(-1)
        yield y.view(np.uint8) if y.dtype.kind == "b" else y.astype(np.float32, copy=False) if small else y


def _smallest_normal(name: str) -> float:
    """The smallest normal number of a float dtype; 0 for the others, which have no subnormals."""
    import ml_dtypes

    dtype = numpy_dtype(name)
    info: Any = ml_dtypes.finfo
    return 0.0 if dtype.kind in "iub" else float(info(dtype).smallest_normal)


def _resegment(parts: Iterable[NDArray[Any]], size: int) -> Iterator[NDArray[Any]]:
    """The same stream cut into whole multiples of `size` (the last piece is what is left); copies only what it must."""
    import numpy as np

    held: list[NDArray[Any]] = []
    n = 0
    for x in parts:
        if n:
            take = min(x.size, size - n)
            held.append(x[:take].copy())  # the caller may reuse the buffer
            n, x = n + take, x[take:]
            if n < size:
                continue
            yield np.concatenate(held)
            held, n = [], 0
        whole = x.size // size * size
        if whole:
            yield x[:whole]
        if whole < x.size:
            held, n = [x[whole:].copy()], x.size - whole
    if n:
        yield np.concatenate(held)


class _Moments:
    """Count, mean and sum of squared deviations, merged piece by piece (Chan, Golub and LeVeque)."""

    __slots__ = ("mean", "n", "squares")

    def __init__(self) -> None:
        self.n, self.mean, self.squares = 0, 0.0, 0.0

    def merge(self, n: int, pivot: float, total: float, squares: float) -> None:
        """A piece of n values with the sums of (value - pivot) and of its square."""
        if not n:
            return
        mean, deviations = pivot + total / n, max(squares - total * total / n, 0.0)
        delta, both = mean - self.mean, self.n + n
        self.squares += deviations + delta * delta * (self.n * n / both)
        self.mean += delta * (n / both)
        self.n = both

    @property
    def std(self) -> float:
        return sqrt(self.squares / self.n) if self.n else nan


def _float32(parts: Iterable[NDArray[np.float32]], smallest: float, threads: int | None) -> TensorStats:
    import numpy as np

    from ..kernels import stats as k

    table = np.zeros(k.BINS, np.int64)
    moments, low, high, count = _Moments(), inf, -inf, 0
    special = np.zeros(4, np.int64)
    for x in _resegment(parts, k.SEGMENT):
        count += x.size
        for row in _rows(x, table, threads):
            moments.merge(int(row[k.N]), *map(float, (row[k.PIVOT], row[k.SUM], row[k.SQUARES])))
            if row[k.N]:
                low, high = min(low, float(row[k.MIN])), max(high, float(row[k.MAX]))
            special += row[[k.NAN, k.POSINF, k.NEGINF, k.ZERO]].astype(np.int64)
    key = int(np.float32(smallest).view(np.uint32)) >> 16  # a power of two, so the bound of a bin
    tiny = int(table[:key].sum() + table[0x8000 : 0x8000 + key].sum())
    is_nan, posinf, neginf, zeros = map(int, special)
    return _result(count, low, high, moments, (is_nan, posinf, neginf, zeros, tiny - zeros), table)


def _rows(x: NDArray[np.float32], table: NDArray[np.int64], threads: int | None) -> NDArray[np.float64]:
    """Partial results of the segments of `x`; what they hold is added to the histogram."""
    import numpy as np

    from ..kernels import stats as k

    data = x.view()
    data.flags.writeable = False
    rows = np.zeros((-(-x.size // k.SEGMENT), k.COLUMNS))
    lock = Lock()

    def run(a: int, b: int) -> None:
        most = (1 << 31) // k.SEGMENT  # segments before a counter of 32 bits could overflow
        for i in range(a, b, most):
            counters = np.zeros(2 * k.BINS, np.uint32)
            k.stats_f32(data, i, min(b, i + most), rows, counters)
            with lock:
                np.add(table, counters.reshape(2, -1).sum(axis=0, dtype=np.int64), out=table)

    in_parallel(run, len(rows), x.size, threads)
    return rows


def _wide(parts: Iterable[NDArray[Any]], *, integer: bool, smallest: float) -> TensorStats:
    """Integers and float64, by NumPy."""
    import numpy as np

    from ..kernels.stats import BINS, SEGMENT

    table = np.zeros(BINS, np.int64)
    moments, count = _Moments(), 0
    low: Any = inf
    high: Any = -inf
    found = np.zeros(5, np.int64)
    largest = float(np.finfo(np.float32).max)
    for whole in _resegment(parts, SEGMENT):
        for x in np.split(whole, range(SEGMENT, whole.size, SEGMENT)):
            count += x.size
            if not integer:
                found[:3] += [np.isnan(x).sum(), np.isposinf(x).sum(), np.isneginf(x).sum()]
                x = x[np.isfinite(x)]
            if not x.size:
                continue
            found[3:] += [(x == 0).sum(), ((x != 0) & (np.abs(x) < smallest)).sum() if not integer else 0]
            low, high = min(low, x.min().item()), max(high, x.max().item())
            y = x.astype(np.float64)
            d = y - y[0]
            with np.errstate(over="ignore"):  # beyond 1e154 the standard deviation is infinite
                moments.merge(x.size, float(y[0]), float(d.sum()), float(np.dot(d, d)))
            keys = np.clip(y, -largest, largest).astype(np.float32).view(np.uint32) >> 16
            table += np.bincount(keys, minlength=BINS)
    is_nan, posinf, neginf, zeros, tiny = map(int, found)
    return _result(count, low, high, moments, (is_nan, posinf, neginf, zeros, tiny), table)


def _result(
    count: int, low: float, high: float, moments: _Moments, counts: tuple[int, ...], table: NDArray[np.int64]
) -> TensorStats:
    low, high, mean = (low, high, moments.mean) if moments.n else (nan, nan, nan)
    is_nan, posinf, neginf, zeros, tiny = counts
    bins = _fine_bins(table, low, high)
    return TensorStats(count, low, high, mean, moments.std, is_nan, posinf, neginf, zeros, tiny, bins)


def _fine_bins(table: NDArray[np.int64], low: float, high: float) -> Bins:
    """The filled bins of the histogram in ascending order of value; what is below 2**-133 in magnitude counts as 0."""
    import numpy as np

    magnitude = np.arange(1, 0x7F80, dtype=np.uint32) << 16
    a = magnitude.view(np.float32).astype(np.float64)
    b = np.append(a[1:], float(np.finfo(np.float32).max))
    positive, negative = table[1:0x7F80], table[0x8001:0xFF80]
    n = np.concatenate([negative[::-1], [table[0] + table[0x8000]], positive])
    lower = np.concatenate([-b[::-1], [0.0], a])
    upper = np.concatenate([-a[::-1], [0.0], b])
    filled = n > 0
    lower, upper = np.clip(lower[filled], low, high), np.clip(upper[filled], low, high)
    return lower, upper, n[filled]

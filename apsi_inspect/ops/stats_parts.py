"""Statistics of whole segments of a tensor, and how they add up: what `ops.stats` and its tasks share.

Contract: the values of a tensor are cut into segments of `kernels.stats.SEGMENT`, counted from its start. `segments`
gives a `Row` of partial results for each and adds to a histogram; `Sums` takes the rows in order. So the result has the
same bits however the segments were spread over arrays, threads, processes or machines. float32 (and smaller floats,
widened) runs through `kernels.stats`, integers and float64 through NumPy. `tests/test_stats.py` enforces this.
"""

from __future__ import annotations

from itertools import chain
from math import inf, nan, sqrt
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from ..encodings.run import in_parallel, numpy_dtype
from ..errors import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

_SMALL_INTEGERS = ("int4", "uint4", "int2", "uint2")  # of ml_dtypes, one a byte


class Row(NamedTuple):
    """Partial results of a segment: `sum` and `squares` are of the finite values less `pivot`; `tiny`: subnormals."""

    size: int
    n: int
    pivot: float
    sum: float
    squares: float
    low: Any
    high: Any
    nan: int
    posinf: int
    neginf: int
    zeros: int
    tiny: int = 0


class Partial(NamedTuple):
    """Statistics of some whole segments of a tensor, picklable.

    Attributes
    ----------
    rows
        One for each segment.
    keys, counts
        The filled bins of their histogram.
    smallest
        Smallest normal number, where the histogram says how many values are below it; None where the rows do.
    """

    rows: list[Row]
    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    smallest: float | None


class Sums:
    """The sum of rows, in order, and of histograms.

    Count, mean and squared deviations are merged as in Chan, Golub and LeVeque (1983), *The American Statistician* 37.
    """

    def __init__(self) -> None:
        import numpy as np

        from ..kernels.stats import BINS

        self.table = np.zeros(BINS, np.int64)
        self.count = self.n = self.nan = self.posinf = self.neginf = self.zeros = self.tiny = 0
        self.mean, self.squares = 0.0, 0.0
        self.low: Any = inf
        self.high: Any = -inf
        self.smallest: float | None = None

    def add(self, row: Row) -> None:
        """The next segment."""
        self.count += row.size
        self.nan, self.posinf, self.neginf = self.nan + row.nan, self.posinf + row.posinf, self.neginf + row.neginf
        if not row.n:
            return
        self.zeros, self.tiny = self.zeros + row.zeros, self.tiny + row.tiny
        self.low, self.high = min(self.low, row.low), max(self.high, row.high)
        mean, deviations = row.pivot + row.sum / row.n, max(row.squares - row.sum * row.sum / row.n, 0.0)
        delta, both = mean - self.mean, self.n + row.n
        self.squares += deviations + delta * delta * (self.n * row.n / both)
        self.mean += delta * (row.n / both)
        self.n = both

    def add_partial(self, part: Partial) -> None:
        """The next segments."""
        for row in part.rows:
            self.add(row)
        self.table[part.keys] += part.counts
        self.smallest = part.smallest

    @property
    def std(self) -> float:
        """Standard deviation of the population."""
        return sqrt(self.squares / self.n) if self.n else nan

    @property
    def subnormals(self) -> int:
        """Nonzero values below the smallest normal number."""
        import numpy as np

        if self.smallest is None:
            return self.tiny
        key = int(np.float32(self.smallest).view(np.uint32)) >> 16  # a power of two, so the bound of a bin
        return int(self.table[:key].sum() + self.table[0x8000 : 0x8000 + key].sum()) - self.zeros


def partial(values: Iterable[NDArray[Any]], dtype: str | None = None, threads: int | None = None) -> Partial:
    """Statistics of values that begin at a segment, and end at one or at the end of the tensor."""
    import numpy as np

    sums = Sums()
    rows = list(segments(values, sums, dtype, threads))
    keys = np.flatnonzero(sums.table)
    return Partial(rows, keys, sums.table[keys], sums.smallest)


def segments(
    values: Iterable[NDArray[Any]], sums: Sums, dtype: str | None = None, threads: int | None = None
) -> Iterator[Row]:
    """The row of each segment; histogram and smallest normal number go into `sums`."""
    import numpy as np

    stream = iter(values)
    first = next(stream, np.empty(0, np.float32))
    name = first.dtype.name if dtype is None else dtype
    if name in _SMALL_INTEGERS:
        return _wide((x.reshape(-1).astype(np.int8) for x in chain([first], stream)), sums.table, None)
    if first.dtype.kind == "c":
        raise ValueRefusedError("statistics of complex values are not defined; take the real or imaginary part")
    parts = _flat(first, stream)
    if first.dtype.kind in "iub":
        return _wide(parts, sums.table, None)
    if first.dtype == np.float64:
        return _wide(parts, sums.table, _smallest_normal(name))
    sums.smallest = _smallest_normal(name)
    return _float32(parts, sums.table, threads)


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


def _float32(parts: Iterable[NDArray[np.float32]], table: NDArray[np.int64], threads: int | None) -> Iterator[Row]:
    from ..kernels import stats as k

    for x in _resegment(parts, k.SEGMENT):
        for r, begin in zip(_rows(x, table, threads), range(0, x.size, k.SEGMENT), strict=True):
            size = min(k.SEGMENT, x.size - begin)
            pivot, total, squares, low, high = map(float, r[[k.PIVOT, k.SUM, k.SQUARES, k.MIN, k.MAX]])
            n, *special = map(int, r[[k.N, k.NAN, k.POSINF, k.NEGINF, k.ZERO]])
            yield Row(size, n, pivot, total, squares, low, high, *special)


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


def _wide(parts: Iterable[NDArray[Any]], table: NDArray[np.int64], smallest: float | None) -> Iterator[Row]:
    """Integers (`smallest` is None) and float64, by NumPy."""
    import numpy as np

    from ..kernels.stats import SEGMENT

    for whole in _resegment(parts, SEGMENT):
        for x in np.split(whole, range(SEGMENT, whole.size, SEGMENT)):
            yield _wide_row(x, table, smallest)


def _wide_row(x: NDArray[Any], table: NDArray[np.int64], smallest: float | None) -> Row:
    import numpy as np

    size, special = x.size, (0, 0, 0)
    if smallest is not None:
        special = int(np.isnan(x).sum()), int(np.isposinf(x).sum()), int(np.isneginf(x).sum())
        x = x[np.isfinite(x)]
    if not x.size:
        return Row(size, 0, 0.0, 0.0, 0.0, inf, -inf, *special, 0)
    tiny = 0 if smallest is None else int(((x != 0) & (np.abs(x) < smallest)).sum())
    y = x.astype(np.float64)
    d = y - y[0]
    with np.errstate(over="ignore"):  # beyond 1e154 the standard deviation is infinite
        # no np.dot: its bits depend on how many threads the BLAS has
        total, squares = float(d.sum()), float((d * d).sum())
    largest = float(np.finfo(np.float32).max)
    keys = np.clip(y, -largest, largest).astype(np.float32).view(np.uint32) >> 16
    np.add(table, np.bincount(keys, minlength=table.size), out=table)
    low, high = x.min().item(), x.max().item()
    return Row(size, x.size, float(y[0]), total, squares, low, high, *special, int((x == 0).sum()), tiny)

"""Statistics of a tensor's values in one pass and bounded memory.

Contract: `compute_stats` takes an array or a stream of arrays of any sizes and gives a `TensorStats`. Counts and
extremes are exact, mean and standard deviation are float64 sums whose bits depend on neither threads nor how the stream
was cut (`ops.stats_parts`), nor, of float32 and smaller floats, on the CPU. Quantiles come from a histogram over the
upper 16 bits of a float32: each is off by at most 1/128 of its value. `tests/test_stats.py` compares with NumPy and
`tests/naive.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError
from .stats_parts import Sums, segments

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bins = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]  # lowest, highest value, how many


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

    sums = Sums()
    for row in segments([values] if isinstance(values, np.ndarray) else values, sums, dtype, threads):
        sums.add(row)
    return stats_of(sums)


def stats_of(sums: Sums) -> TensorStats:
    """The statistics that all segments of a tensor add up to."""
    s = sums
    low, high, mean = (s.low, s.high, s.mean) if s.n else (nan, nan, nan)
    bins = _fine_bins(s.table, low, high)
    return TensorStats(s.count, low, high, mean, s.std, s.nan, s.posinf, s.neginf, s.zeros, s.subnormals, bins)


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

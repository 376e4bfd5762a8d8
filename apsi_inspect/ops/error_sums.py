"""Sums over pairs of an original and its approximation; they add up over parts of a tensor, tensors and machines.

Contract: `pair_sums` measures two arrays in one pass; `ErrorSums` are frozen, picklable and additive, and every measure
of error is a property of them. A pair of equal infinities or of two NaN has no error and counts; any other pair in
which a value is not finite is counted in `nonfinite` and left out of everything else. Sums are good to some 1e-7 of
themselves (float64 throughout for float64 arrays), counts are exact, and all of it is the same on any CPU.
`tests/test_error_sums.py` compares with NumPy in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log10, nan, sqrt
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ErrorSums", "pair_sums"]


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """What is known of the error of an approximation y of x, as sums over the pairs; ``a + b`` merges.

    Attributes
    ----------
    n
        Pairs that count.
    squares, x_squares, y_squares
        Sums of (x - y)², x² and y².
    max_abs, max_at
        Greatest abs(x - y), to within float32's rounding, and the flat index of the first place that has it.
    zeroed
        Pairs in which x is not 0 and y is.
    clipped
        Values beyond the end of a format's grid; `quant_error` counts them.
    nonfinite
        Pairs that are left out, as x or y is not finite.
    weighted, weights
        Sums of w (x - y)² and of w.
    """

    n: int = 0
    squares: float = 0.0
    x_squares: float = 0.0
    y_squares: float = 0.0
    max_abs: float = 0.0
    max_at: int = 0
    zeroed: float = 0
    clipped: float = 0
    nonfinite: int = 0
    weighted: float = 0.0
    weights: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Both together; of equal greatest errors the place of the first one stands."""
        worse = other if other.max_abs > self.max_abs or not self.n else self
        return ErrorSums(
            self.n + other.n,
            self.squares + other.squares,
            self.x_squares + other.x_squares,
            self.y_squares + other.y_squares,
            worse.max_abs,
            worse.max_at,
            self.zeroed + other.zeroed,
            self.clipped + other.clipped,
            self.nonfinite + other.nonfinite,
            self.weighted + other.weighted,
            self.weights + other.weights,
        )

    def times(self, factor: float) -> ErrorSums:
        """The sums of so many times as many pairs of the same kind: what a sample stands for."""
        if factor == 1:
            return self
        return ErrorSums(
            round(self.n * factor),
            self.squares * factor,
            self.x_squares * factor,
            self.y_squares * factor,
            self.max_abs,
            self.max_at,
            self.zeroed * factor,
            self.clipped * factor,
            round(self.nonfinite * factor),
            self.weighted * factor,
            self.weights * factor,
        )

    @property
    def dot(self) -> float:
        """Sum of x y, which follows from the three sums of squares."""
        return (self.x_squares + self.y_squares - self.squares) / 2

    @property
    def mse(self) -> float:
        """Mean squared error; NaN where nothing counts."""
        return self.squares / self.n if self.n else nan

    @property
    def rmse(self) -> float:
        """Its square root."""
        return sqrt(self.mse)

    @property
    def rel_l2(self) -> float:
        """Norm of the error over the norm of x: 0 where there is no error, infinite where only x is all 0."""
        if not self.n or not self.squares:
            return 0.0 if self.n else nan
        return sqrt(self.squares / self.x_squares) if self.x_squares else inf

    @property
    def max_abs_error(self) -> float:
        """Greatest abs(x - y); NaN where nothing counts."""
        return self.max_abs if self.n else nan

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, 10 log10(sum x² / sum (x - y)²), in dB: infinite where there is no error."""
        if not self.n or not self.squares:
            return inf if self.n else nan
        return 10 * (log10(self.x_squares) - log10(self.squares)) if self.x_squares else -inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between x and y: 1 where they are equal, NaN where only one of them is all 0."""
        if not self.n or not self.squares:
            return 1.0 if self.n else nan
        if not (self.x_squares and self.y_squares):
            return nan
        return max(-1.0, min(1.0, self.dot / sqrt(self.x_squares) / sqrt(self.y_squares)))

    @property
    def zeroed_share(self) -> float:
        """The fraction of pairs in which y is 0 and x is not."""
        return self.zeroed / self.n if self.n else nan

    @property
    def clipped_share(self) -> float:
        """The fraction of pairs in which x lies beyond the end of the grid."""
        return self.clipped / self.n if self.n else nan

    @property
    def weighted_mse(self) -> float:
        """Weighted mean squared error; NaN where no weights were given (or all are 0)."""
        return self.weighted / self.weights if self.weights else nan


def from_rows(rows: NDArray[np.float64], start: int = 0) -> ErrorSums:
    """The rows of `kernels.error` added up in their order; `start` is the flat index of the first pair."""
    import numpy as np

    from ..kernels import error as k

    if not len(rows):
        return ErrorSums()
    total = np.add.reduce(rows, axis=0).tolist()  # along the outer axis: one row after the other
    worst = int(rows[:, k.MAX].argmax())
    return ErrorSums(
        int(total[k.N]),
        total[k.SQUARES],
        total[k.X_SQUARES],
        total[k.Y_SQUARES],
        float(rows[worst, k.MAX]),
        start + int(rows[worst, k.MAX_AT]),
        int(total[k.ZEROED]),
        int(total[k.CLIPPED]),
        int(total[k.NONFINITE]),
        total[k.WEIGHTED],
        total[k.WEIGHTS],
    )


def pair_sums(
    x: NDArray[Any], y: NDArray[Any], start: int = 0, weights: NDArray[np.float32] | None = None
) -> ErrorSums:
    """Measure an approximation, on this thread and without the GIL.

    Parameters
    ----------
    x, y
        The original and the approximation: 1-D arrays of one length, float32 or float64 each.
    start
        The flat index of their first element in the tensor. Parts of a tensor that begin at multiples of
        `kernels.error.SEGMENT` and are added in order give the very bits that the whole gives.
    weights
        One for each pair, or for the columns of rows as long as they are: they repeat, counted from index 0.

    Raises
    ------
    ValueRefusedError
        The arrays do not fit together.
    """
    import numpy as np

    from ..kernels import error as k

    if x.ndim != 1 or x.shape != y.shape or any(a.dtype not in (np.float32, np.float64) for a in (x, y)):
        raise ValueRefusedError(
            f"pairs are two 1-D float32 or float64 arrays of one length, got {x.dtype} {x.shape}, {y.dtype} {y.shape}"
        )
    rows = np.zeros((-(-x.size // k.SEGMENT), k.COLUMNS))
    x, y = _given(x), _given(y)
    narrow = x.dtype == np.float32 and y.dtype == np.float32
    (k.pair_sums if narrow else k.wide_sums)(x, y, rows)
    if weights is not None:
        w = _given(np.asarray(weights, np.float32).reshape(-1))
        if not w.size and x.size:
            raise ValueRefusedError("weights are empty")
        for i, row in enumerate(rows):
            a, b = i * k.SEGMENT, (i + 1) * k.SEGMENT
            k.weigh(x[a:b], y[a:b], w, start + a, row)
    return from_rows(rows, start)


def _given(a: NDArray[Any]) -> NDArray[Any]:
    """Read-only, aligned and in order, as kernels are compiled for."""
    import numpy as np

    ready = np.ascontiguousarray(a)
    view = (ready if ready.flags.aligned else ready.copy()).view()
    view.flags.writeable = False
    return view

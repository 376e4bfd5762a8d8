"""Sums over pairs of an original and its approximation, from which every measure of error follows.

Contract: the pairs are cut into segments of `SEGMENT`, counted from the start of the arrays; `pair_sums` fills a row of
`COLUMNS` partial results for each. Element i of a group of `GROUP` is in lane i % 8; products and the sums of a group
are float32 (nothing cancels: at most 8e-7 of the sum is lost), those of groups float64. Bits depend on neither CPU nor
threads: the vectors are plain LLVM that any CPU has. Where a sum is 0, or so small or so large that float32 products
would have lost it, and where a value is not finite, the segment is done again value by value in float64 (`one_by_one`,
the definition).
`tests/test_error_sums.py` compares with NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ._jit import kernel
from .lanes import fold
from .simd import I32, D, F, M, W, emitter

F32, F64 = np.float32, np.float64
SEGMENT = 1 << 16  # pairs that stay in a core's own cache between two kernels
GROUP = 256  # pairs folded in registers before the accumulators in memory are touched
LANES = 8
# A row of partial results; the scalar product follows from the three sums of squares
N, SQUARES, X_SQUARES, Y_SQUARES, MAX, MAX_AT, ZEROED, NONFINITE, CLIPPED, WEIGHTED, WEIGHTS, COLUMNS = range(12)
LEAST = 1e-30  # a mean square below this: float32 products may have underflowed


def quarters(v: W) -> list[W]:
    """32 lanes as four times eight, which is what LLVM keeps in registers (masks of 32 it would pack into bytes)."""
    return [v.pick(range(i, i + LANES)) for i in range(0, 4 * LANES, LANES)]


class Sums:
    """The sums of a group in registers, inside an emitter."""

    def __init__(self, like: W) -> None:
        zero = like.like(0.0).splat(LANES)
        self.squares = self.x = self.y = self.top = zero
        self.zeroed = zero.bits(I32)

    def add(self, pairs: Iterable[tuple[W, W]]) -> None:
        """32 pairs, four times eight: taken one after the other, so that few registers are in use at a time."""
        halves: list[tuple[W, W, W]] = []
        before: tuple[W, W, W] | None = None
        for x, y in pairs:
            e = x - y
            e = e * e
            self.top = e.gt(self.top).sel(e, self.top)
            self.zeroed = self.zeroed - (y.eq(0.0) & (x.eq(0.0) ^ 1)).sext(I32)
            terms = e, x * x, y * y
            if before is None:
                before = terms
            else:
                halves.append((before[0] + terms[0], before[1] + terms[1], before[2] + terms[2]))
                before = None
        (e, x, y), (f, v, w) = halves
        self.squares, self.x, self.y = self.squares + (e + f), self.x + (x + v), self.y + (y + w)

    def store(self, lanes: M, counts: M) -> W:
        """Into the scratch of the segment; gives the greatest squared error."""
        for i, w in enumerate((self.squares, self.x, self.y)):
            lanes.store(lanes.load(D, LANES, 64 * i) + w.fpext(D), 64 * i)
        counts.store(counts.load(I32, LANES) + self.zeroed)
        return fold(self.top, lambda a, b: a.gt(b).sel(a, b))


@emitter(M, M, M, M, ret=F)
def group(x: M, y: M, lanes: M, counts: M) -> W:
    """Fold `GROUP` finite pairs. A value that is not makes the sums not finite."""
    sums = Sums(x.load(F))
    for i in range(0, GROUP, 4 * LANES):
        x.prefetch(4096 + 4 * i)
        x.prefetch(4096 + 4 * i + 64)
        sums.add((x.load(F, LANES, 4 * k), y.load(F, LANES, 4 * k)) for k in range(i, i + 4 * LANES, LANES))
    return sums.store(lanes, counts)


@kernel
def one_by_one(x, y, start, row):
    """The pairs from `start` on, whatever they are.

    A pair of equal infinities or of two NaN has no error and counts; any other pair that is not finite is counted in
    `NONFINITE` and left out.
    """
    for i in range(start, x.size):
        v, w = F64(x[i]), F64(y[i])
        if np.isfinite(v) and np.isfinite(w):
            e = v - w
            row[SQUARES] += e * e
            row[X_SQUARES] += v * v
            row[Y_SQUARES] += w * w
            if abs(e) > row[MAX]:
                row[MAX], row[MAX_AT] = abs(e), i
            row[ZEROED] += w == 0.0 and v != 0.0
            row[N] += 1
        elif v == w or (np.isnan(v) and np.isnan(w)):
            row[N] += 1
        else:
            row[NONFINITE] += 1


@kernel
def finish(lanes, counts, n, same, row):
    """The lanes of a segment of `n` pairs into `row`; False, and zeros, if it must be done again one by one.

    `same`: it is known that no pair differs.
    """
    for k in range(3):
        total = 0.0
        for j in range(LANES):
            total += lanes[LANES * k + j]
        if not (LEAST * n <= total < np.inf or (same and k == 0)):
            for j in range(COLUMNS):
                row[j] = 0.0
            return False
        row[SQUARES + k] = total
    for j in range(LANES):
        row[ZEROED] += counts[j]
    row[N] = n
    return True


@kernel
def clear(lanes, counts):
    for j in range(3 * LANES):
        lanes[j] = 0.0
    for j in range(LANES):
        counts[j] = 0


@kernel
def equal(x, y):
    """Whether all pairs are equal numbers."""
    different = 0
    for i in range(x.size):
        different += x[i] != y[i]
    return different == 0


@kernel
def worst_of(x, y, start, row):
    """The greatest error of a group that begins at `start`, and where it is."""
    for i in range(x.size):
        e = abs(F32(x[i] - y[i]))
        if e > row[MAX]:
            row[MAX], row[MAX_AT] = e, start + i


@kernel
def segment(x, y, lanes, counts, row):
    """One segment into `row`, zeros on entry; `lanes` and `counts` are scratch."""
    clear(lanes, counts)
    stop, best, where = x.size // GROUP * GROUP, F32(-1.0), 0
    for i in range(0, stop, GROUP):
        top = group(x.ctypes.data + 4 * i, y.ctypes.data + 4 * i, lanes.ctypes.data, counts.ctypes.data)
        if top > best:
            best, where = top, i
    same = best == F32(0.0) and equal(x[:stop], y[:stop])
    if stop and finish(lanes, counts, stop, same, row):
        worst_of(x[where : where + GROUP], y[where : where + GROUP], where, row)
    else:
        stop = 0
    one_by_one(x, y, stop, row)


@kernel
def pair_sums(x, y, rows):
    """All segments of two float32 arrays of one length; `rows` are float64 zeros on entry."""
    lanes, counts = np.empty(3 * LANES, np.float64), np.empty(LANES, np.int32)
    for s in range(rows.shape[0]):
        a, b = s * SEGMENT, min(x.size, (s + 1) * SEGMENT)
        segment(x[a:b], y[a:b], lanes, counts, rows[s])
        rows[s, MAX_AT] += a if rows[s, MAX] > 0.0 else 0


@kernel
def rest(x, y, start, row):
    """The last pairs of a segment, fewer than a group, which begin at `start`: what `segment` does with them."""
    before = row[MAX]
    one_by_one(x, y, 0, row)
    if row[MAX] > before:
        row[MAX_AT] += start


@kernel
def wide_sums(x, y, rows):
    """The same for float64, and for any two kinds of array: the definition for every pair."""
    for s in range(rows.shape[0]):
        a, b = s * SEGMENT, min(x.size, (s + 1) * SEGMENT)
        one_by_one(x[a:b], y[a:b], 0, rows[s])
        rows[s, MAX_AT] += a if rows[s, MAX] > 0.0 else 0


@kernel
def weigh(x, y, weights, start, row):
    """Squared errors times the weight of their column: `weights` repeats from element `start` of the tensor on."""
    n = weights.size
    j = start % n
    for i in range(x.size):
        e, w = F64(x[i]) - F64(y[i]), F64(weights[j])
        if np.isfinite(e):
            row[WEIGHTED] += w * e * e
            row[WEIGHTS] += w
        j = 0 if j + 1 == n else j + 1


@kernel
def outside(x, low, high):
    """How many values lie outside of an interval; NaN does not."""
    found = 0
    for i in range(x.size):
        found += (x[i] < low) | (x[i] > high)
    return found


@emitter(M, M, M, F, F, ret=I32)
def beyond_32(x: M, low: M, high: M, below: W, above: W) -> W:
    """Of 32 values, how many lie further out than `below` and `above` of its width beyond the ends of their grid."""
    n = below.splat(LANES).bits(I32).like(0)
    under, over = below.splat(LANES), above.splat(LANES)
    for k in range(0, 16 * LANES, 4 * LANES):
        v, a, z = (m.load(F, LANES, k) for m in (x, low, high))
        span = z - a
        a, z = a - under * span, z + over * span
        n = n - (v.lt(a.lt(z).sel(a, z)) | v.gt(a.lt(z).sel(z, a))).sext(I32)
    return n.reduce("add")


@kernel
def beyond(x, low, high, below, above):
    """How many values do; `low` and `high` are the ends for each value, in either order. Whole 32s of values."""
    found, a, b, c = 0, x.ctypes.data, low.ctypes.data, high.ctypes.data
    for i in range(0, 4 * x.size, 16 * LANES):
        found += beyond_32(a + i, b + i, c + i, below, above)
    return found


@kernel
def put_codes(raw, size, first, last, code):
    """Bytes [first, last) of every block of `size` bytes become `code`."""
    for b in range(0, raw.size, size):
        raw[b + first : b + last] = code


@kernel
def outside_runs(x, scale, limit, n, step):
    """How many values lie beyond `limit` times the scale of their run of `step` in rows of `n`."""
    runs, found = (n + step - 1) // step, 0
    for r in range(x.size // n):
        for k in range(runs):
            top = scale[r * runs + k] * limit
            part = x[r * n + k * step : r * n + min(n, (k + 1) * step)]
            few = 0
            for i in range(part.size):
                few += abs(part[i]) > top
            found += few
    return found


@kernel
def alone(x, row):
    """The row of values that stay as they are: equal pairs."""
    total = np.zeros(LANES)
    for i in range(x.size):
        v = F64(x[i])
        if np.isfinite(v):
            total[i % LANES] += v * v
    row[N] = x.size
    for j in range(LANES):
        row[X_SQUARES] += total[j]
    row[Y_SQUARES] = row[X_SQUARES]

"""Sums over pairs of an original and its approximation, from which every measure of error follows.

Contract: the pairs are cut into segments of `SEGMENT`, counted from the start of the arrays; `pair_sums` fills a row of
`COLUMNS` partial results for each. A group of 32 elements is one visit: products are float32, four of them (element i,
i + 8, i + 16, i + 24) are added in float32, then in float64 in lane i % 8. Bits depend on neither CPU nor threads: the
vectors are plain LLVM that any CPU has. Where a sum is so small or so large that float32 products would have lost it,
and where a value is not finite, the segment is done again value by value in float64 (`one_by_one`, the definition).
`tests/test_error_sums.py` compares with NumPy in float64.
"""

from __future__ import annotations

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
# Bytes in the scratch of a segment: three times eight float64 lanes, then eight int32 lanes
_X, _Y, _ZERO, SCRATCH = 64, 128, 192, 256


def quarters(v: W) -> W:
    """The sum of the four quarters of 32 lanes."""
    a, b, c, d = (v.pick(range(i, i + LANES)) for i in range(0, 4 * LANES, LANES))
    return (a + b) + (c + d)


class Sums:
    """The sums of a group in registers, inside an emitter."""

    def __init__(self, b: W) -> None:
        zero = b.like(0.0)
        self.squares = self.x = self.y = zero.splat(LANES).fpext(D)
        self.top = zero.splat(4 * LANES)
        self.zeroed = zero.bits(I32).splat(LANES)

    def add(self, x: W, y: W) -> None:
        """32 pairs."""
        e = x - y
        self.squares += quarters(e * e).fpext(D)
        self.x += quarters(x * x).fpext(D)
        self.y += quarters(y * y).fpext(D)
        size = e.abs()
        self.top = size.gt(self.top).sel(size, self.top)
        self.zeroed = self.zeroed - quarters((y.eq(0.0) & (x.eq(0.0) ^ 1)).sext(I32))

    def store(self, acc: M) -> W:
        """Into the scratch of the segment; gives the greatest |x - y|."""
        for off, w in ((0, self.squares), (_X, self.x), (_Y, self.y)):
            acc.store(acc.load(D, LANES, off) + w, off)
        acc.store(acc.load(I32, LANES, _ZERO) + self.zeroed, _ZERO)
        return fold(self.top, lambda a, b: a.gt(b).sel(a, b))


@emitter(M, M, M, ret=F)
def group(x: M, y: M, acc: M) -> W:
    """Fold `GROUP` finite pairs. A value that is not makes the sums not finite."""
    first = x.load(F)
    sums = Sums(first)
    for i in range(0, GROUP, 4 * LANES):
        x.prefetch(4096 + 4 * i)
        x.prefetch(4096 + 4 * i + 64)
        sums.add(x.load(F, 4 * LANES, 4 * i), y.load(F, 4 * LANES, 4 * i))
    return sums.store(acc)


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
def finish(acc, n, row):
    """The lanes of a segment's scratch into `row`; False if it must be done again one by one."""
    lanes, counts = acc[:_ZERO].view(np.float64), acc[_ZERO:].view(np.int32)
    good = True
    for k in range(3):
        total = 0.0
        for j in range(LANES):
            total += lanes[LANES * k + j]
        row[SQUARES + k] = total
        # the error may be 0 exactly; else a sum has to be in the range that float32 products keep
        good &= total < np.inf and (total >= LEAST * n or (k == 0 and row[MAX] == 0.0))
    for j in range(LANES):
        row[ZEROED] += counts[j]
    row[N] = n
    return good


@kernel
def segment(x, y, acc, row):
    """One segment into `row`, zeros on entry; `acc` is scratch of `SCRATCH` bytes."""
    acc[:] = np.uint8(0)
    a, b, c = x.ctypes.data, y.ctypes.data, acc.ctypes.data
    stop, best, where = x.size // GROUP * GROUP, F32(-1.0), 0
    for i in range(0, stop, GROUP):
        top = group(a + 4 * i, b + 4 * i, c)
        if top > best:
            best, where = top, i
    row[MAX] = max(best, F32(0.0))
    if stop and not finish(acc, stop, row):
        row[:] = 0.0
        stop = 0
    elif stop:
        row[MAX_AT] = where + first_at(x, y, where, best)
    one_by_one(x, y, stop, row)


@kernel
def first_at(x, y, start, top):
    """How far from `start` the first pair is that differs by `top`."""
    for i in range(start, min(x.size, start + GROUP)):
        if abs(F32(x[i] - y[i])) == top:
            return i - start
    return 0


@kernel
def pair_sums(x, y, rows):
    """All segments of two float32 arrays of one length; `rows` are float64 zeros on entry."""
    acc = np.empty(SCRATCH, np.uint8)
    for s in range(rows.shape[0]):
        a, b = s * SEGMENT, min(x.size, (s + 1) * SEGMENT)
        segment(x[a:b], y[a:b], acc, rows[s])
        rows[s, MAX_AT] += a


@kernel
def wide_sums(x, y, rows):
    """The same for float64, and for any two kinds of array: the definition for every pair."""
    for s in range(rows.shape[0]):
        a, b = s * SEGMENT, min(x.size, (s + 1) * SEGMENT)
        one_by_one(x[a:b], y[a:b], 0, rows[s])
        rows[s, MAX_AT] += a


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
def outside(x, low, high, size):
    """How many values lie outside of the interval of their group; groups of `size` elements, NaN is inside."""
    found = 0
    for k in range(low.size):
        a, z = low[k], high[k]
        part = x[k * size : min(x.size, (k + 1) * size)]
        n = 0
        for i in range(part.size):
            n += (part[i] < a) | (part[i] > z)
        found += n
    return found

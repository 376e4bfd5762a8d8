"""One pass over float32 values: sums, extremes, counts and a fine histogram.

Contract: the values are cut into segments of `SEGMENT`, counted from the start of the tensor; `stats_f32` fills a row
of partial results for each. Sums run in eight fixed lanes (element i of a segment in lane i % 8), around the segment's
first finite value so that a large mean costs no precision. So the bits depend on neither CPU, threads nor chunking; the
vectors are plain LLVM that any CPU has. `tests/test_stats.py` compares with `tests/naive.py` and NumPy in float64.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import bits
from .simd import I32, D, F, M, W, emitter

F32, F64, U32 = np.float32, np.float64, np.uint32
SEGMENT = 1 << 18
GROUP = 256  # elements folded in registers before the accumulators in memory are touched
LANES = 8
# A row of partial results
N, PIVOT, SUM, SQUARES, MIN, MAX, ZERO, NAN, POSINF, NEGINF, COLUMNS = range(11)
BINS = 1 << 16  # the upper half of a float32: sign, exponent, seven bits of mantissa


def _merge(mem: M, w: W, smaller: bool) -> None:
    before = mem.load(F, LANES)
    mem.store((w.lt(before) if smaller else w.gt(before)).sel(w, before))


@emitter(M, M, M, M, M, M, F)
def group(x: M, sums: M, squares: M, low: M, high: M, zeros: M, pivot: W) -> None:
    """Fold `GROUP` finite values into the accumulators. A value that is not makes the sums not finite."""
    p32 = pivot.splat(LANES)
    p64 = p32.fpext(D)
    s1 = s2 = p64.like(0.0)
    lo = hi = p32
    zero = p32.bits(I32).like(0)
    for i in range(GROUP // LANES):
        off = 4 * LANES * i
        if off % 64 == 0:
            x.prefetch(4096 + off)
        v = x.load(F, LANES, off)
        d = v.fpext(D) - p64
        s1, s2 = s1 + d, s2 + d * d
        lo, hi = v.lt(lo).sel(v, lo), v.gt(hi).sel(v, hi)
        zero = zero - v.eq(0.0).sext(I32)
    sums.store(sums.load(D, LANES) + s1)
    squares.store(squares.load(D, LANES) + s2)
    zeros.store(zeros.load(I32, LANES) + zero)
    _merge(low, lo, True)
    _merge(high, hi, False)


@kernel
def one_by_one(x, start, pivot, sums, squares, low, high, zeros, row):
    """The same for the values from `start` on, whatever they are: not finite ones are counted and left out."""
    for i in range(start, x.size):
        v, j = x[i], i % LANES
        if np.isfinite(v):
            d = F64(v) - F64(pivot)
            sums[j] += d
            squares[j] += d * d
            low[j] = min(low[j], v)
            high[j] = max(high[j], v)
            zeros[j] += v == F32(0.0)
        elif np.isnan(v):
            row[NAN] += 1
        elif v > F32(0.0):
            row[POSINF] += 1
        else:
            row[NEGINF] += 1


@kernel
def reset(pivot, sums, squares, low, high, zeros):
    for j in range(LANES):
        sums[j], squares[j], low[j], high[j], zeros[j] = 0.0, 0.0, pivot, pivot, 0


@kernel
def segment(x, sums, squares, low, high, zeros, row):
    """Partial results of one segment into `row`; the other arrays are scratch.

    The fast loop sums everything; only where that shows a value that is not finite, the segment is done one by one.
    """
    pivot, start = x[0], x.size // GROUP * GROUP
    reset(pivot, sums, squares, low, high, zeros)
    for i in range(0, start, GROUP):
        group(
            x.ctypes.data + 4 * i,
            sums.ctypes.data,
            squares.ctypes.data,
            low.ctypes.data,
            high.ctypes.data,
            zeros.ctypes.data,
            pivot,
        )
    if not (np.isfinite(pivot) and np.isfinite(sums.sum())):
        start = 0
        for v in x:
            pivot = v
            if np.isfinite(v):
                break
        reset(pivot, sums, squares, low, high, zeros)
    one_by_one(x, start, pivot, sums, squares, low, high, zeros, row)
    row[PIVOT], row[MIN], row[MAX] = pivot, low[0], high[0]
    for j in range(LANES):
        row[SUM] += sums[j]
        row[SQUARES] += squares[j]
        row[MIN], row[MAX] = min(row[MIN], low[j]), max(row[MAX], high[j])
        row[ZERO] += zeros[j]
    row[N] = x.size - row[NAN] - row[POSINF] - row[NEGINF]


@kernel
def histogram(x, table):
    """Count the upper halves, in two tables (of `BINS`) by turns so that equal neighbours need not wait."""
    pairs = x.size // 2
    for i in range(pairs):
        table[bits(x[2 * i]) >> U32(16)] += U32(1)
        table[U32(BINS) + (bits(x[2 * i + 1]) >> U32(16))] += U32(1)
    if x.size % 2:
        table[bits(x[x.size - 1]) >> U32(16)] += U32(1)


@kernel
def stats_f32(x, s0, s1, rows, table):
    """Segments [s0, s1) of `x`. `rows`: float64, zeros on entry. `table`: 2 * BINS uint32; empty for no histogram."""
    sums, squares, zeros = np.empty(LANES, np.float64), np.empty(LANES, np.float64), np.empty(LANES, np.int32)
    low, high = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for s in range(s0, s1):
        part = x[s * SEGMENT : min(x.size, (s + 1) * SEGMENT)]
        segment(part, sums, squares, low, high, zeros, rows[s])
        if table.size:
            histogram(part, table)

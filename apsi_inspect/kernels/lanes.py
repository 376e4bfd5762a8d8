"""Helpers for searches that advance sixteen sub-blocks at once, a vector lane each.

ggml's searches add up float32 terms in element order, which forbids vectorising one sub-block. Here element i of
sixteen sub-blocks is one vector, so that every lane rounds exactly as the C does. `tests/test_encode.py` checks the
encoders built on this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .simd import I32, F, M, W

L = 16  # lanes
STEP = 4 * L  # bytes from one vector to the next
MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, ties to even


def transpose8(r: Sequence[W]) -> list[W]:
    """Eight vectors of eight lanes, rows for columns."""
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    t = [r[i].shuf(r[i + 1], k) for i in range(0, 8, 2) for k in (low, high)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    s = [t[i].shuf(t[i + 2], k) for i in (0, 1, 4, 5) for k in (low, high)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [s[i].shuf(s[i + 4], k) for k in (low, high) for i in range(4)]


def columns(src: M, size: int) -> list[W]:
    """Sixteen consecutive sub-blocks of `size` floats -> `size` vectors of sixteen lanes."""
    out = []
    for i in range(0, size, 8):
        halves = [transpose8([src.load(F, 8, 4 * (size * (lane + j) + i)) for j in range(8)]) for lane in (0, 8)]
        out += [a.cat(b) for a, b in zip(*halves, strict=True)]
    return out


def nearest(v: W) -> W:
    """ggml's nearest_int as i32, its wrap-around beyond 2**22 included."""
    return ((v + MAGIC).bits(I32) & 0x007FFFFF) - 0x00400000


def clamp(q: W, low: int, high: int) -> W:
    return q.smin(high).smax(low)


def rounded(v: W, low: int, high: int) -> W:
    """`nearest` then `clamp`, as a float; the same for all |v| < 2**22, and without leaving the float unit."""
    t = v + MAGIC
    t = t.gt(MAGIC + high).sel(t.like(MAGIC + high), t)
    t = t.lt(MAGIC + low).sel(t.like(MAGIC + low), t)
    return t - MAGIC


def fold(v: W, better: Callable[[W, W], W]) -> W:
    """The lanes of `v` reduced pairwise to one value."""
    while v.n > 2:
        v = better(v.pick(range(v.n // 2)), v.pick(range(v.n // 2, v.n)))
    return better(v.lane(0), v.lane(1)) if v.n == 2 else v


def signed_max(xs: Sequence[W]) -> W:
    """In each lane the element of greatest magnitude, the first of several; +0 if there is none."""
    top = best = xs[0].like(0.0)
    for x in xs:
        a = x.abs()
        more = a.gt(top)
        top, best = more.sel(a, top), more.sel(x, best)
    return best


def first_greatest(v: W) -> W:
    """The same over the lanes of one vector, as a scalar."""
    best, top = v.lane(0).like(0.0), v.lane(0).like(0.0)
    for i in range(v.n):
        x = v.lane(i)
        more = x.abs().gt(top)
        top, best = more.sel(x.abs(), top), more.sel(x, best)
    return best


def half_round(d: W) -> tuple[W, W]:
    """A float as a half (i16), and what that half stands for."""
    h = d.float_to_half()
    return h, h.half_to_float()

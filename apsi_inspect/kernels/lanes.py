"""Helpers for searches that advance sixteen sub-blocks at once, a vector lane each.

ggml's searches add up float32 terms in element order, which forbids vectorising one sub-block. Here element i of
sixteen sub-blocks is one vector, so that every lane rounds exactly as the C does. `tests/test_encode.py` checks the
encoders built on this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .simd import I32, I64, F, M, W

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


def loop(b: Any, start: int, stop: int, step: int, carried: Sequence[W], body: Callable[..., Sequence[W]]) -> list[W]:
    """Emit a loop: ``body(i, *carried)`` gives the next `carried`; `i` is a byte offset. Unrolled, compiling drags."""
    before, head, after = b.basic_block, b.append_basic_block("lanes"), b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    phis = [b.phi(w.t) for w in carried]
    new = list(body(W(b, i), *(W(b, p) for p in phis)))
    following = b.add(i, I64(step))
    for phi, first, again in zip(
        [i, *phis], [I64(start), *(w.v for w in carried)], [following, *(w.v for w in new)], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(again, b.basic_block)
    b.cbranch(b.icmp_unsigned("<", following, I64(stop)), head, after)
    b.position_at_end(after)
    return new


def columns(src: M, size: int, dst: M) -> None:
    """Sixteen consecutive sub-blocks of `size` floats -> `size` vectors of sixteen lanes."""

    def body(i: W) -> list[W]:
        part, out = src.plus(i), dst.plus(i * L)
        for lane in (0, 8):
            rows = transpose8([part.load(F, 8, 4 * size * (lane + j)) for j in range(8)])
            for j, row in enumerate(rows):
                out.store(row, STEP * j + 4 * lane)
        return []

    loop(src.b, 0, 4 * size, 32, [], body)


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


def signed_max(xs: M, count: int) -> W:
    """In each lane the element of greatest magnitude, the first of several; +0 if there is none."""

    def body(i: W, top: W, best: W) -> tuple[W, W]:
        x = xs.plus(i).load(F, L)
        more = x.abs().gt(top)
        return more.sel(x.abs(), top), more.sel(x, best)

    zero = zeros(xs.b)
    return loop(xs.b, 0, STEP * count, STEP, [zero, zero], body)[1]


def zeros(b: Any) -> W:
    """Sixteen float lanes of 0."""
    return W(b, F(0.0)).splat(L)


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

"""Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 as explicit vectors, eight blocks at once.

The scales of eight blocks are one vector: one division, one conversion to halves. What that does not cover (blocks of
zeros, a tie between the greatest and the least, scales whose reciprocal overflows) is done again block by block. Same
contract and bits as in `encode_blocks`, whose plain loops are the definition. `tests/test_encode.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._jit import kernel
from .lanes import fold
from .simd import I8, I32, F, M, W, emitter

INF = float("inf")
AHEAD = 4096  # bytes: how far ahead of a streaming read the cache is asked


def ahead(src: M, nbytes: int) -> None:
    for line in range(0, nbytes, 64):
        src.prefetch(AHEAD + line)


def greatest(*vs: W) -> W:
    """Greatest magnitude, as the bits of a float (which order as integers do)."""
    best = vs[0].abs().bits(I32)
    for v in vs[1:]:
        best = best.call("umax", v.abs().bits(I32))
    return fold(best, lambda a, b: a.call("umax", b))


def reciprocal(d: W) -> W:
    """1/d; 0 where d is 0 or so small that its reciprocal overflows."""
    r = d.like(1.0) / d
    return r.abs().lt(INF).sel(r, d.like(0.0))


def first_lane(src: M, mask: W) -> W:
    """The float of `src` at the first lane set in `mask`."""
    return src.plus(mask.mask_bits().cttz() << 2).load(F)


def nibbles(q: W) -> W:
    """Codes in ggml's order: element j low, element j + half high."""
    n = q.n // 2
    return (q.pick(range(n)) | (q.pick(range(n, 2 * n)) << 4)).trunc(I8)


def octets(q: W) -> W:
    """i32 codes within -128..127 as bytes (said so that the saturating packs can be used)."""
    return q.smin(127).smax(-128).trunc(I8)


def away(v: W) -> W:
    """C's roundf followed by a cast to int, as i32: the largest float below a half away from zero, then truncation."""
    half = (v.bits(I32) & 0x80000000) | 0x3EFFFFFF
    return (v + half.bits(F)).fptosi(I32)


@emitter(M, M)
def put_q8_0(src: M, dst: M) -> None:
    ahead(src, 128)
    v = src.load(F, 32)
    d = greatest(v).bits(F) / 127.0
    dst.store(d.float_to_half())
    dst.store(octets(away(v * reciprocal(d).splat(32))), 2)


def symmetric(src: M, dst: M, half: int) -> W:
    """Scale of Q4_0 and Q5_0 into `dst`; the codes as i32."""
    ahead(src, 128)
    v = src.load(F, 32)
    top = greatest(v)
    d = first_lane(src, v.abs().bits(I32).eq(top.splat(32))) / float(-half)
    d = top.eq(0).sel(d.like(-0.0), d)  # C starts its search from +0
    dst.store(d.float_to_half())
    inverse = reciprocal(d)
    tiny = inverse.eq(0.0) & (d.eq(0.0) ^ 1)
    offset = tiny.sel(d.like(0.5), d.like(half + 0.5))
    return (v * inverse.splat(32) + offset.splat(32)).fptosi(I32).smin(2 * half - 1)


@emitter(M, M)
def put_q4_0(src: M, dst: M) -> None:
    dst.store(nibbles(symmetric(src, dst, 8)), 2)


def put_five(q: W, dst: M, off: int) -> None:
    """Fifth bits, then nibbles, of i32 codes."""
    dst.store((q << 27).slt(0).mask_bits(), off)
    dst.store(nibbles(q & 15), off + 4)


@emitter(M, M)
def put_q5_0(src: M, dst: M) -> None:
    put_five(symmetric(src, dst, 16), dst, 2)


def affine(src: M, dst: M, top: int) -> W:
    """Scale and minimum of Q4_1 and Q5_1 into `dst`; the codes as i32."""
    ahead(src, 128)
    v = src.load(F, 32)
    low = fold(v, lambda a, b: a.lt(b).sel(a, b))
    high = fold(v, lambda a, b: a.gt(b).sel(a, b))
    low = first_lane(src, v.eq(low.splat(32)))  # of -0 and +0 the first one
    d = (high - low) / float(top) + 0.0  # never -0
    dst.store(d.float_to_half())
    dst.store(low.float_to_half(), 2)
    inverse = d.lt(INF).sel(reciprocal(d), d.like(0.0))
    v = inverse.eq(0.0).splat(32).sel(low.splat(32), v)  # then all codes are 0, and nothing overflows
    return ((v - low.splat(32)) * inverse.splat(32) + 0.5).fptosi(I32).smin(top)


@emitter(M, M)
def put_q4_1(src: M, dst: M) -> None:
    dst.store(nibbles(affine(src, dst, 15)), 4)


@emitter(M, M)
def put_q5_1(src: M, dst: M) -> None:
    put_five(affine(src, dst, 31), dst, 4)


def eight(ms: list[W], better: Callable[[W, W], W]) -> W:
    """Eight vectors of eight lanes, each reduced to one lane of the result."""
    even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    while len(ms) > 2:
        ms = [better(a.shuf(b, even), a.shuf(b, odd)) for a, b in zip(ms[::2], ms[1::2], strict=True)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return better(ms[0].shuf(ms[1], low), ms[0].shuf(ms[1], high))


def quarters(src: M, k: int) -> list[W]:
    """The elements of block k."""
    return [src.load(F, 8, 128 * k + 32 * i) for i in range(4)]


def over_eight(src: M, key: Callable[[W], W], better: Callable[[W, W], W]) -> W:
    """One value of each of eight blocks."""
    ms = []
    for k in range(8):
        a, b, c, d = (key(v) for v in quarters(src, k))
        ms.append(better(better(a, b), better(c, d)))
    return eight(ms, better)


def least(a: W, b: W) -> W:
    return a.lt(b).sel(a, b)


def most(a: W, b: W) -> W:
    return a.gt(b).sel(a, b)


def put_halves(d: W, dst: M, size: int, off: int = 0) -> None:
    h = d.float_to_half()
    for k in range(8):
        dst.store(h.lane(k), size * k + off)


def good(*masks: W) -> W:
    """1 if all lanes of all masks are set, else 0."""
    m = masks[0]
    for other in masks[1:]:
        m = m & other
    return m.mask_bits().eq(-1).zext(I32)


def eight_8(src: M, dst: M) -> W:
    """Eight blocks of Q8_0; 0 if they must be done again."""
    ahead(src, 1024)
    top = over_eight(src, lambda v: v.abs().bits(I32), lambda a, b: a.call("umax", b)).bits(F)
    d = top / 127.0
    inverse = d.like(1.0) / d
    put_halves(d, dst, 34)
    for k in range(8):
        dst.store(octets(away(src.load(F, 32, 128 * k) * inverse.lane(k).splat(32))), 34 * k + 2)
    return good(inverse.lt(INF))


def eight_symmetric(half: int, size: int) -> Any:
    """Emitter: eight blocks of Q4_0 or Q5_0; 0 if they must be done again."""

    @emitter(M, M, ret=I32)
    def put(src: M, dst: M) -> W:
        ahead(src, 1024)
        high, low = over_eight(src, lambda v: v, most), over_eight(src, lambda v: v, least)
        minus = low.like(0.0) - low
        d = high.gt(minus).sel(high, low) / float(-half)
        inverse = d.like(1.0) / d
        put_halves(d, dst, size)
        for k in range(8):
            v = src.load(F, 32, 128 * k)
            q = (v * inverse.lane(k).splat(32) + (half + 0.5)).fptosi(I32).smin(2 * half - 1)
            put_codes(q, dst, half, size * k + 2)
        return good(inverse.abs().lt(INF), high.eq(minus) ^ 1)

    return put


def put_codes(q: W, dst: M, half: int, off: int) -> None:
    """Codes of 4 or 5 bits."""
    if half == 8:
        dst.store(nibbles(q), off)
    else:
        put_five(q, dst, off)


def eight_affine(half: int, size: int) -> Any:
    """Emitter: eight blocks of Q4_1 or Q5_1; 0 if they must be done again."""

    @emitter(M, M, ret=I32)
    def put(src: M, dst: M) -> W:
        ahead(src, 1024)
        high, low = over_eight(src, lambda v: v, most), over_eight(src, lambda v: v, least)
        d = (high - low) / float(2 * half - 1)
        inverse = d.like(1.0) / d
        put_halves(d, dst, size)
        put_halves(low, dst, size, 2)
        for k in range(8):
            v = src.load(F, 32, 128 * k) - low.lane(k).splat(32)
            q = (v * inverse.lane(k).splat(32) + 0.5).fptosi(I32).smin(2 * half - 1)
            put_codes(q, dst, half, size * k + 4)
        return good(inverse.lt(INF), d.lt(INF), low.eq(0.0) ^ 1)

    return put


eight_q8_0 = emitter(M, M, ret=I32)(eight_8)
eight_q4_0, eight_q5_0 = eight_symmetric(8, 18), eight_symmetric(16, 22)
eight_q4_1, eight_q5_1 = eight_affine(8, 20), eight_affine(16, 24)


@kernel
def encode_q8_0(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    b = b0
    while b < b1:
        step = min(8, b1 - b)
        if step < 8 or eight_q8_0(a + 128 * b, o + 34 * b) == 0:
            for c in range(b, b + step):
                put_q8_0(a + 128 * c, o + 34 * c)
        b += step


@kernel
def encode_q4_0(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    b = b0
    while b < b1:
        step = min(8, b1 - b)
        if step < 8 or eight_q4_0(a + 128 * b, o + 18 * b) == 0:
            for c in range(b, b + step):
                put_q4_0(a + 128 * c, o + 18 * c)
        b += step


@kernel
def encode_q4_1(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    b = b0
    while b < b1:
        step = min(8, b1 - b)
        if step < 8 or eight_q4_1(a + 128 * b, o + 20 * b) == 0:
            for c in range(b, b + step):
                put_q4_1(a + 128 * c, o + 20 * c)
        b += step


@kernel
def encode_q5_0(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    b = b0
    while b < b1:
        step = min(8, b1 - b)
        if step < 8 or eight_q5_0(a + 128 * b, o + 22 * b) == 0:
            for c in range(b, b + step):
                put_q5_0(a + 128 * c, o + 22 * c)
        b += step


@kernel
def encode_q5_1(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    b = b0
    while b < b1:
        step = min(8, b1 - b)
        if step < 8 or eight_q5_1(a + 128 * b, o + 24 * b) == 0:
            for c in range(b, b + step):
                put_q5_1(a + 128 * c, o + 24 * c)
        b += step

"""Encoders of ggml's simple blocks as explicit vectors.

Same contract, same names and same bits as in `encode_blocks`, whose plain loops are the definition. Sources are read
with a prefetch 4 KiB ahead. Q1_0 stays a plain loop: its scale is a sum in element order. Needs what
`_jit.vectors_pay` asks for. `tests/test_encode.py` compares the two.
"""

from __future__ import annotations

from ._jit import kernel
from .encode_blocks import encode_nvfp4 as plain_nvfp4
from .encode_common import floor_log2
from .encode_eights_simd import (
    INF,
    ahead,
    encode_q4_0,
    encode_q4_1,
    encode_q5_0,
    encode_q5_1,
    encode_q8_0,
    greatest,
    nibbles,
    reciprocal,
)
from .encode_iq4_simd import encode_iq4_nl
from .lanes import fold
from .simd import I8, I16, I32, F, M, W, emitter

__all__ = [
    "encode_iq4_nl", "encode_mxfp4", "encode_nvfp4", "encode_q2_0", "encode_q4_0", "encode_q4_1", "encode_q5_0",
    "encode_q5_1", "encode_q8_0", "encode_tq1_0", "encode_tq2_0",
]  # fmt: skip


def crumbs(q: W) -> W:
    """i8 codes: four consecutive ones a byte, the first one low."""
    a, b, c, d = (q.pick(range(i, q.n, 4)) for i in range(4))
    return a | (b << 2) | (c << 4) | (d << 6)


@emitter(M, M)
def put_q2_0(src: M, dst: M) -> None:
    ahead(src, 256)
    v = src.load(F, 64)
    top = greatest(v)
    d = top.bits(F)
    dst.store(d.float_to_half())
    inverse = reciprocal(d)
    centre = (inverse.eq(0.0) & top.gt(0)).sel(d.like(0.0), d.like(1.0))
    q = ((v * inverse.splat(64)).round() + centre.splat(64)).fptosi(I32)
    dst.store(crumbs(q.trunc(I8)), 2)


def ternary(src: M) -> tuple[W, list[W]]:
    """Scale and the eight times 32 digits (0, 1, 2 as i8) of a block of 256."""
    ahead(src, 1024)
    vs = [src.load(F, 32, 128 * i) for i in range(8)]
    d = greatest(*vs).bits(F)
    inverse = reciprocal(d).splat(32)
    return d, [(v * inverse).round().fptosi(I32).trunc(I8) + 1 for v in vs]


@emitter(M, M)
def put_tq2_0(src: M, dst: M) -> None:
    d, q = ternary(src)
    for h in range(2):
        a, b, c, e = q[4 * h : 4 * h + 4]
        dst.store(a | (b << 2) | (c << 4) | (e << 6), 32 * h)
    dst.store(d.float_to_half(), 64)


def trits(digits: list[W]) -> W:
    """i8 digits (most significant first) -> their value as a fraction of 256, rounded up."""
    q = digits[0] * 81
    for digit, power in zip(digits[1:], (27, 9, 3, 1), strict=False):
        q = q + digit * power
    w = (q.zext(I16) << 8) + 242
    return w.w(w.b.udiv(w.v, w.const(243))).trunc(I8)


@emitter(M, M)
def put_tq1_0(src: M, dst: M) -> None:
    d, q = ternary(src)
    dst.store(trits(q[:5]))
    lo, hi = range(16), range(16, 32)
    dst.store(trits([q[5].pick(lo), q[5].pick(hi), q[6].pick(lo), q[6].pick(hi), q[7].pick(lo)]), 32)
    dst.store(trits([q[7].pick(range(16 + 4 * n, 20 + 4 * n)) for n in range(4)]), 48)
    dst.store(d.float_to_half(), 52)


def e2m1(v: W, d: W) -> W:
    """i8 codes of the nearest E2M1 value (`d` is half the unit): ties to the smaller one, no negative zero."""
    a = v.abs()
    code = v.bits(I32).like(0)
    for value, middle in zip((1, 2, 3, 4, 6, 8, 12), (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0), strict=True):
        limit = (d * float(value)).lt(INF).sel(d * middle, d.like(INF))  # what overflows is infinitely far away
        code = code - a.gt(limit.splat(v.n)).sext(I32)  # a set lane is -1
    sign = (v.bits(I32) >> 28) & 8
    return code.eq(0).sel(code, code | sign).trunc(I8)


@emitter(M, ret=F)
def absmax_32(src: M) -> W:
    ahead(src, 128)
    return greatest(src.load(F, 32)).bits(F)


@emitter(M, M, I32)
def put_mxfp4(src: M, dst: M, e: W) -> None:
    dst.store(e.trunc(I8))
    d = e.lt(2).sel(e.like(0x00200000) << e, (e - 1) << 23).bits(F)
    dst.store(nibbles(e2m1(src.load(F, 32), d)), 1)


def ue4m3(v: W) -> tuple[W, W]:
    """ggml's unsigned E4M3 of a scale (i32 lanes), and half the value it stands for."""
    u = v.bits(I32)
    normal = (u >> 20) + ((u >> 19) & 1) - (120 << 3)
    normal = normal.slt(0x78).sel(normal, u.like(0x7E))
    tiny = v.lt(2.0**-6)
    small = tiny.sel(v * 512.0 + 0.5, v.like(0.0)).fptosi(I32).smin(7)
    code = tiny.sel(small, normal)
    return code, ((code << 20).bits(F) * 2.0**119)


@emitter(M, M, ret=I32)
def put_nvfp4(src: M, dst: M) -> W:
    """Whether the block is good: huge values need C's rounding of each distance, which this does not have."""
    ahead(src, 256)
    vs = [src.load(F, 16, 64 * i) for i in range(4)]
    tops = [greatest(v).bits(F) for v in vs]
    top = tops[0].splat(4)
    for i in range(1, 4):
        top = top.w(top.b.insert_element(top.v, tops[i].v, I32(i)))
    code, d = ue4m3(top / 6.0)
    dst.store(code.trunc(I8))
    for i, v in enumerate(vs):
        unit = d.lane(i)
        q = e2m1(v, unit)
        zero = unit.eq(0.0).splat(16)
        dst.store(nibbles(zero.sel(q.like(0), q)), 4 + 8 * i)
    return fold(top.lt(2.0**24).zext(I32), lambda a, b: a & b)


@kernel
def encode_q2_0(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    for b in range(b0, b1):
        put_q2_0(a + 256 * b, o + 18 * b)


@kernel
def encode_tq1_0(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    for b in range(b0, b1):
        put_tq1_0(a + 1024 * b, o + 54 * b)


@kernel
def encode_tq2_0(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    for b in range(b0, b1):
        put_tq2_0(a + 1024 * b, o + 66 * b)


@kernel
def encode_mxfp4(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    for b in range(b0, b1):
        amax = absmax_32(a + 128 * b)
        e = (floor_log2(amax) + 125) & 255 if amax > 0 else 0
        put_mxfp4(a + 128 * b, o + 17 * b, e)


@kernel
def encode_nvfp4(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    for b in range(b0, b1):
        if put_nvfp4(a + 256 * b, o + 36 * b) == 0:
            plain_nvfp4(x, raw, b, b + 1)

"""float32 -> single numbers of 16, 8, 6 and 4 bits, rounded to nearest, ties to even, subnormals included.

F16 and BF16 follow ggml (a NaN becomes 0x7E00 with its sign; a bfloat16 NaN is quieted and keeps its upper payload).
The others follow ml_dtypes 0.6, overflow and NaN included: E4M3FN and the FNUZ types turn overflow into NaN, E5M2 into
infinity, E2M3, E3M2 and E2M1 saturate (and a NaN becomes a zero of the other sign), E8M0 has neither zero nor sign.
`small_float` with ``saturate=True`` is the rule of the .apsim codes. No loop needs more than one element, so the
scalar form of each emitter serves as tail and as the fallback. `tests/test_encode.py` compares with ml_dtypes, NumPy
and ggml on strided and random bit patterns.

Contract of the kernels: see `encode_blocks`; F4 takes 2 elements to 1 byte, F6 4 elements to 3 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from ._jit import kernel
from .simd import I8, I16, I32, F, M, W, emitter

LANES = 32
AHEAD = 4096  # bytes: how far ahead of a streaming read the cache is asked


class SmallFloat(NamedTuple):
    """A float of at most 8 bits: sign, exponent, mantissa bits, and what its top codes mean."""

    bits: int
    mantissa: int
    bias: int
    top: int  # the code of the largest finite value
    over: int  # the code that overflow becomes
    nan: int | None  # the code of a NaN; None: no NaN
    unsigned_zero: bool = False  # FNUZ: one zero, and the NaN takes the place of the negative one


E4M3FN = SmallFloat(8, 3, 7, 0x7E, 0x7F, 0x7F)
E5M2 = SmallFloat(8, 2, 15, 0x7B, 0x7C, 0x7E)
E4M3FNUZ = SmallFloat(8, 3, 8, 0x7F, 0x80, 0x80, True)
E5M2FNUZ = SmallFloat(8, 2, 16, 0x7F, 0x80, 0x80, True)
E2M3 = SmallFloat(6, 3, 1, 0x1F, 0x1F, None)
E3M2 = SmallFloat(6, 2, 3, 0x1F, 0x1F, None)
E2M1 = SmallFloat(4, 1, 1, 0x07, 0x07, None)


def small_float(x: W, f: SmallFloat, *, saturate: bool = False) -> W:
    """The codes of `x` (float) as i32."""
    u = x.bits(I32)
    a = u & 0x7FFFFFFF
    shift = 23 - f.mantissa
    magic = (127 + 1 - f.bias - f.mantissa + 23) << 23  # a float whose ulp is the subnormal step: the FPU rounds
    small = (a.bits(F) + a.like(magic).bits(F)).bits(I32) - magic
    normal = (a + ((a >> shift) & 1) + ((1 << (shift - 1)) - 1 - ((127 - f.bias) << 23)) % 2**32) >> shift
    r = a.lt((128 - f.bias) << 23).sel(small, normal)
    if saturate or f.over == f.top:
        r = r.min_(f.top)
    else:
        r = r.gt(f.top).sel(r.like(f.over), r)
    sign = (u >> (32 - f.bits)) & (1 << (f.bits - 1))
    is_nan = a.gt(0x7F800000)
    if f.unsigned_zero:
        code = r.eq(0).sel(r, r | sign)
        return is_nan.sel(r.like(0x80), code) if saturate else code
    if f.nan is None:
        return is_nan.sel(sign ^ (1 << (f.bits - 1)), r | sign)
    if saturate or f.nan != f.over:
        r = is_nan.sel(r.like(f.nan), r)
    return r | sign


def half_code(x: W) -> W:
    """i16: a float16 as ggml makes it."""
    u = x.bits(I32)
    nan = (u & 0x7FFFFFFF).gt(0x7F800000)
    return nan.sel(((u >> 16) & 0x8000 | 0x7E00).trunc(I16), x.float_to_half())


def bfloat_code(x: W) -> W:
    """i16: a bfloat16 as ggml makes it."""
    u = x.bits(I32)
    rounded = (u + ((u >> 16) & 1) + 0x7FFF) >> 16
    nan = (u & 0x7FFFFFFF).gt(0x7F800000)
    return nan.sel((u >> 16) | 64, rounded).trunc(I16)


def e8m0_code(x: W) -> W:
    """i32: the nearest power of two, ties up; 0xFF for what is not positive and finite."""
    u = x.bits(I32)
    tiny = u.gt(0x00400000).sel(u.like(1), u.like(0))  # a subnormal: as if code 0 were a zero
    r = u.lt(0x00800000).sel(tiny, (u + 0x00400000) >> 23)
    return (u - 1).lt(0x7F7FFFFF).sel(r, u.like(0xFF))  # u is 1 .. largest finite


def pack4(q: W) -> W:
    """i8 codes -> half as many bytes, the first code low."""
    return q.pick(range(0, q.n, 2)) | (q.pick(range(1, q.n, 2)) << 4)


def pack6(q: W) -> W:
    """i32 codes -> 3/4 as many bytes: four codes are one 24-bit little-endian integer."""
    a, b, c, d = (q.pick(range(i, q.n, 4)) for i in range(4))
    words = a | (b << 6) | (c << 12) | (d << 18)
    octets = W(q.b, q.b.bitcast(words.v, ir.VectorType(I8, q.n)))
    return octets.pick(i for i in range(q.n) if i % 4 != 3)


def emit(code: Callable[[W], W], n: int) -> Any:
    """An emitter (source, destination) of n elements: streaming reads for a vector, none for the tail."""

    @emitter(M, M)
    def put(src: M, dst: M) -> None:
        for line in range(0, 4 * n if n >= LANES else 0, 64):
            src.prefetch(AHEAD + line)
        dst.store(code(src.load(F, n)))

    return put


def pair(code: Callable[[W], W]) -> tuple[Any, Any]:
    return emit(code, LANES), emit(code, 1)


def octet(f: SmallFloat) -> Callable[[W], W]:
    """Codes of `f`, one a byte, by the rule of a plain dtype conversion."""
    return lambda x: small_float(x, f).trunc(I8)


f16_n, f16_1 = pair(half_code)
bf16_n, bf16_1 = pair(bfloat_code)
e4m3_n, e4m3_1 = pair(octet(E4M3FN))
e5m2_n, e5m2_1 = pair(octet(E5M2))
e4m3fnuz_n, e4m3fnuz_1 = pair(octet(E4M3FNUZ))
e5m2fnuz_n, e5m2fnuz_1 = pair(octet(E5M2FNUZ))
e8m0_n, e8m0_1 = pair(lambda x: e8m0_code(x).trunc(I8))
e2m3_n, e2m3_1 = pair(octet(E2M3))
e3m2_n, e3m2_1 = pair(octet(E3M2))
e2m1_n, e2m1_1 = pair(octet(E2M1))
f4_n, f4_2 = (emit(lambda x: pack4(small_float(x, E2M1).trunc(I8)), n) for n in (LANES, 2))
e2m3x4_n, e2m3x4_4 = (emit(lambda x: pack6(small_float(x, E2M3)), n) for n in (LANES, 4))
e3m2x4_n, e3m2x4_4 = (emit(lambda x: pack6(small_float(x, E3M2)), n) for n in (LANES, 4))


@kernel
def encode_f16(x, raw, b0, b1):
    """IEEE half, NaN as 0x7E00 with its sign."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        f16_n(a + 4 * b, o + 2 * b)
    for b in range(mid, b1):
        f16_1(a + 4 * b, o + 2 * b)


@kernel
def encode_bf16(x, raw, b0, b1):
    """bfloat16 by ggml's rule."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        bf16_n(a + 4 * b, o + 2 * b)
    for b in range(mid, b1):
        bf16_1(a + 4 * b, o + 2 * b)


@kernel
def encode_f8_e4m3(x, raw, b0, b1):
    """OCP E4M3; overflow and infinity become NaN."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e4m3_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e4m3_1(a + 4 * b, o + b)


@kernel
def encode_f8_e5m2(x, raw, b0, b1):
    """OCP E5M2; overflow becomes infinity."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e5m2_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e5m2_1(a + 4 * b, o + b)


@kernel
def encode_f8_e4m3fnuz(x, raw, b0, b1):
    """E4M3FNUZ; overflow becomes NaN."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e4m3fnuz_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e4m3fnuz_1(a + 4 * b, o + b)


@kernel
def encode_f8_e5m2fnuz(x, raw, b0, b1):
    """E5M2FNUZ; overflow becomes NaN."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e5m2fnuz_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e5m2fnuz_1(a + 4 * b, o + b)


@kernel
def encode_f8_e8m0(x, raw, b0, b1):
    """E8M0: a power of two; NaN for what is not positive."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e8m0_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e8m0_1(a + 4 * b, o + b)


@kernel
def codes_e2m3(x, raw, b0, b1):
    """E2M3, one code a byte; saturates."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e2m3_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e2m3_1(a + 4 * b, o + b)


@kernel
def codes_e3m2(x, raw, b0, b1):
    """E3M2, one code a byte; saturates."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e3m2_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e3m2_1(a + 4 * b, o + b)


@kernel
def codes_e2m1(x, raw, b0, b1):
    """E2M1, one code a byte; saturates."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 32 * 32
    for b in range(b0, mid, 32):
        e2m1_n(a + 4 * b, o + b)
    for b in range(mid, b1):
        e2m1_1(a + 4 * b, o + b)


@kernel
def encode_f4(x, raw, b0, b1):
    """E2M1, two codes a byte, the first one low; b0 and b1 count bytes."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 16 * 16
    for b in range(b0, mid, 16):
        f4_n(a + 8 * b, o + b)
    for b in range(mid, b1):
        f4_2(a + 8 * b, o + b)


@kernel
def encode_f6_e2m3(x, raw, b0, b1):
    """E2M3, four codes in three bytes; a block is four elements."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 8 * 8
    for b in range(b0, mid, 8):
        e2m3x4_n(a + 16 * b, o + 3 * b)
    for b in range(mid, b1):
        e2m3x4_4(a + 16 * b, o + 3 * b)


@kernel
def encode_f6_e3m2(x, raw, b0, b1):
    """E3M2, four codes in three bytes; a block is four elements."""
    a, o = x.ctypes.data, raw.ctypes.data
    mid = b0 + (b1 - b0) // 8 * 8
    for b in range(b0, mid, 8):
        e3m2x4_n(a + 16 * b, o + 3 * b)
    for b in range(mid, b1):
        e3m2x4_4(a + 16 * b, o + 3 * b)


@emitter(M, ret=I32)
def bad_n(src: M) -> W:
    """How many of 32 elements are NaN or infinite."""
    src.prefetch(AHEAD)
    src.prefetch(AHEAD + 64)
    a = src.load(I32, LANES) & 0x7FFFFFFF
    return a.gt(0x7F7FFFFF).mask_bits().ctpop()


@kernel
def count_nonfinite(x, i0, i1):
    """How many of x[i0:i1] are NaN or infinite."""
    a = x.ctypes.data
    mid = i0 + (i1 - i0) // LANES * LANES
    bad = 0
    for i in range(i0, mid, LANES):
        bad += bad_n(a + 4 * i)
    for i in range(mid, i1):
        bad += not np.isfinite(x[i])
    return bad

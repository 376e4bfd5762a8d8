"""Encoders of ggml's simple blocks, as plain loops: the definition, and what runs where vectors do not pay.

Contract: `encode_x(x, raw, b0, b1)` encodes blocks [b0, b1) of `x` (float32, finite) into `raw` (uint8). The bytes are
those of ggml's `ggml_quantize_chunk` without an importance matrix, its quirks included: float32 in C's order, codes by
multiplication with the reciprocal of the unrounded scale, the scale stored as a half. Where that reciprocal or the
span overflows, C's cast of the product is undefined; on x86-64 it gives the codes that are spelt out here.
`tests/test_encode.py` compares with libgguf, libggml, gguf and `tests/naive_encode.py`.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import bits, put_half, put_u32, roundf, unbits
from .encode_common import floor_log2, largest, reciprocal
from .encode_iq4 import encode_iq4_nl

__all__ = [
    "encode_iq4_nl", "encode_mxfp4", "encode_nvfp4", "encode_q1_0", "encode_q2_0", "encode_q4_0", "encode_q4_1",
    "encode_q5_0", "encode_q5_1", "encode_q8_0", "encode_tq1_0", "encode_tq2_0",
]  # fmt: skip

F32, I32, U8, U32 = np.float32, np.int32, np.uint8, np.uint32
INF = F32(np.inf)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
TERNARY = np.array([81, 27, 9, 3, 1], np.int32)


@kernel
def encode_q8_0(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[32 * b : 32 * b + 32], raw[34 * b : 34 * b + 34]
        d = abs(largest(v)) / F32(127)
        put_half(r.ctypes.data, d)
        inverse = reciprocal(d)
        for j in range(32):
            r[2 + j] = U8(I32(roundf(v[j] * inverse)))


@kernel
def symmetric(v, d, half, q):
    """Codes of Q4_0 and Q5_0: truncation of x/d + half + 0.5; 0 where 1/d overflows."""
    inverse = reciprocal(d)
    offset = F32(0.5) if inverse == F32(0) and d != F32(0) else F32(half) + F32(0.5)
    for j in range(32):
        q[j] = min(I32(v[j] * inverse + offset), I32(2 * half - 1))


@kernel
def encode_q4_0(x, raw, b0, b1):
    q = np.empty(32, np.int32)
    for b in range(b0, b1):
        v, r = x[32 * b : 32 * b + 32], raw[18 * b : 18 * b + 18]
        d = largest(v) / F32(-8)
        put_half(r.ctypes.data, d)
        symmetric(v, d, 8, q)
        for j in range(16):
            r[2 + j] = U8(q[j] | (q[16 + j] << I32(4)))


@kernel
def put_five(q, r):
    """The fifth bits of 32 codes, then their nibbles."""
    high = U32(0)
    for j in range(32):
        high |= U32(U32((q[j] >> I32(4)) & I32(1)) << U32(j))
    put_u32(r.ctypes.data, high)
    for j in range(16):
        r[4 + j] = U8((q[j] & I32(15)) | ((q[16 + j] & I32(15)) << I32(4)))


@kernel
def encode_q5_0(x, raw, b0, b1):
    q = np.empty(32, np.int32)
    for b in range(b0, b1):
        v, r = x[32 * b : 32 * b + 32], raw[22 * b : 22 * b + 22]
        d = largest(v) / F32(-16)
        put_half(r.ctypes.data, d)
        symmetric(v, d, 16, q)
        put_five(q, r[2:])


@kernel
def affine(v, top, q, r):
    """Scale and minimum into the head of `r`, codes of Q4_1 and Q5_1 into `q`."""
    low, high = v[0], v[0]
    for j in range(1, 32):
        low = v[j] if v[j] < low else low
        high = v[j] if v[j] > high else high
    d = (high - low) / F32(top)
    put_half(r.ctypes.data, d)
    put_half(r.ctypes.data + 2, low)
    inverse = reciprocal(d) if d < INF else F32(0)
    for j in range(32):
        q[j] = min(I32((v[j] - low) * inverse + F32(0.5)), I32(top)) if inverse != F32(0) else I32(0)


@kernel
def encode_q4_1(x, raw, b0, b1):
    q = np.empty(32, np.int32)
    for b in range(b0, b1):
        r = raw[20 * b : 20 * b + 20]
        affine(x[32 * b : 32 * b + 32], 15, q, r)
        for j in range(16):
            r[4 + j] = U8(q[j] | (q[16 + j] << I32(4)))


@kernel
def encode_q5_1(x, raw, b0, b1):
    q = np.empty(32, np.int32)
    for b in range(b0, b1):
        r = raw[24 * b : 24 * b + 24]
        affine(x[32 * b : 32 * b + 32], 31, q, r)
        put_five(q, r[4:])


@kernel
def encode_q1_0(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[128 * b : 128 * b + 128], raw[18 * b : 18 * b + 18]
        total = F32(0)
        for j in range(128):
            total += abs(v[j])
        put_half(r.ctypes.data, total / F32(128))
        for i in range(16):
            byte = U8(0)
            for j in range(8):
                byte |= U8(U8(v[8 * i + j] >= F32(0)) << U8(j))
            r[2 + i] = byte


@kernel
def encode_q2_0(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[64 * b : 64 * b + 64], raw[18 * b : 18 * b + 18]
        d = abs(largest(v))
        put_half(r.ctypes.data, d)
        inverse = reciprocal(d)
        centre = I32(0) if inverse == F32(0) and d != F32(0) else I32(1)
        for i in range(16):
            byte = I32(0)
            for j in range(4):
                byte |= (I32(roundf(v[4 * i + j] * inverse)) + centre) << I32(2 * j)
            r[2 + i] = U8(byte)


@kernel
def encode_tq2_0(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[256 * b : 256 * b + 256], raw[66 * b : 66 * b + 66]
        d = abs(largest(v))
        put_half(r.ctypes.data + 64, d)
        inverse = reciprocal(d)
        for h in range(2):
            for m in range(32):
                byte = I32(0)
                for n in range(4):
                    byte |= (I32(roundf(v[128 * h + 32 * n + m] * inverse)) + I32(1)) << I32(2 * n)
                r[32 * h + m] = U8(byte)


@kernel
def trits(v, inverse, count, step, r, at):
    """Each of `step` bytes holds `count` ternary digits as a fraction of 256."""
    for m in range(step):
        q = I32(0)
        for n in range(count):
            q += (I32(roundf(v[step * n + m] * inverse)) + I32(1)) * TERNARY[n]
        r[at + m] = U8((q * I32(256) + I32(242)) // I32(243))


@kernel
def encode_tq1_0(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[256 * b : 256 * b + 256], raw[54 * b : 54 * b + 54]
        d = abs(largest(v))
        put_half(r.ctypes.data + 52, d)
        inverse = reciprocal(d)
        trits(v, inverse, 5, 32, r, 0)
        trits(v[160:], inverse, 5, 16, r, 32)
        trits(v[240:], inverse, 4, 4, r, 48)


@kernel
def nearest_e2m1(v, d):
    """The first of the nearest doubled E2M1 values times d."""
    best, err = 0, abs(E2M1_DOUBLED[0] * d - v)
    for i in range(1, 16):
        e = abs(E2M1_DOUBLED[i] * d - v)
        if e < err:
            best, err = i, e
    return I32(best)


@kernel
def encode_mxfp4(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[32 * b : 32 * b + 32], raw[17 * b : 17 * b + 17]
        amax = abs(largest(v))
        e = (floor_log2(amax) + I32(125)) & I32(255) if amax > F32(0) else I32(0)
        d = unbits(U32(0x00200000) << U32(e)) if e < 2 else unbits(U32(U32(e - I32(1)) << U32(23)))
        r[0] = U8(e)
        for j in range(16):
            r[1 + j] = U8(nearest_e2m1(v[j], d) | (nearest_e2m1(v[16 + j], d) << I32(4)))


@kernel
def ue4m3(v):
    """ggml's unsigned E4M3 of a scale: ties up, and 448 (0x7E) for everything from 248 on."""
    u = I32(bits(v))
    if v < F32(2.0**-6):
        return min(I32(v * F32(512) + F32(0.5)), I32(7))
    code = (u >> I32(20)) - I32(120 << 3) + ((u >> I32(19)) & I32(1))
    return I32(0x7E) if code >= I32(0x78) else code


@kernel
def ue4m3_halved(code):
    e, m = code >> I32(3), F32(code & I32(7))
    if e == 0:
        return m * F32(2.0**-10)
    return (F32(1) + m / F32(8)) * unbits(U32(U32(e + I32(127 - 8)) << U32(23)))


@kernel
def encode_nvfp4(x, raw, b0, b1):
    for b in range(b0, b1):
        r = raw[36 * b : 36 * b + 36]
        for s in range(4):
            v = x[64 * b + 16 * s : 64 * b + 16 * s + 16]
            code = ue4m3(abs(largest(v)) / F32(6))
            d = ue4m3_halved(code)
            r[s] = U8(code)
            for j in range(8):
                r[4 + 8 * s + j] = U8(nearest_e2m1(v[j], d) | (nearest_e2m1(v[8 + j], d) << I32(4)))

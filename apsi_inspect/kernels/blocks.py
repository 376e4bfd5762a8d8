"""Decoders of ggml's simple blocks, as plain loops: the definition, and what runs where vectors do not pay.

Contract: `decode_x(raw, out, b0, b1)` decodes blocks [b0, b1) of `raw` (uint8) into `out` (float32), block b to
`out[b * size:(b + 1) * size]`. Arithmetic is float32 in ggml's order, so the bits are ggml's; d, m are halves.
`tests/test_decode.py` compares with gguf, ggml's C code and `tests/naive.py`.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import half_at, u32_at, unbits

F32, I8, I32, U8, U32 = np.float32, np.int8, np.int32, np.uint8, np.uint32
K_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


@kernel
def decode_q4_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 18 : b * 18 + 18], out[b * 32 : b * 32 + 32]
        d = half_at(r.ctypes.data)
        for j in range(16):
            o[j] = F32(I32(I32(r[2 + j] & U8(15)) - I32(8))) * d
        for j in range(16):
            o[16 + j] = F32(I32(I32(r[2 + j] >> U8(4)) - I32(8))) * d


@kernel
def decode_q4_1(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 20 : b * 20 + 20], out[b * 32 : b * 32 + 32]
        d, m = half_at(r.ctypes.data), half_at(r.ctypes.data + 2)
        for j in range(16):
            o[j] = F32(I32(r[4 + j] & U8(15))) * d + m
        for j in range(16):
            o[16 + j] = F32(I32(r[4 + j] >> U8(4))) * d + m


@kernel
def decode_q5_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 22 : b * 22 + 22], out[b * 32 : b * 32 + 32]
        d, h = half_at(r.ctypes.data), u32_at(r.ctypes.data + 2)
        for j in range(16):
            fifth = I32((h >> U32(j)) & U32(1))
            o[j] = F32(I32((I32(r[6 + j] & U8(15)) | (fifth << I32(4))) - I32(16))) * d
        for j in range(16):
            fifth = I32((h >> U32(16 + j)) & U32(1))
            o[16 + j] = F32(I32((I32(r[6 + j] >> U8(4)) | (fifth << I32(4))) - I32(16))) * d


@kernel
def decode_q5_1(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 24 : b * 24 + 24], out[b * 32 : b * 32 + 32]
        d, m, h = half_at(r.ctypes.data), half_at(r.ctypes.data + 2), u32_at(r.ctypes.data + 4)
        for j in range(16):
            fifth = I32((h >> U32(j)) & U32(1))
            o[j] = F32(I32(I32(r[8 + j] & U8(15)) | (fifth << I32(4)))) * d + m
        for j in range(16):
            fifth = I32((h >> U32(16 + j)) & U32(1))
            o[16 + j] = F32(I32(I32(r[8 + j] >> U8(4)) | (fifth << I32(4)))) * d + m


@kernel
def decode_q8_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 34 : b * 34 + 34], out[b * 32 : b * 32 + 32]
        d = half_at(r.ctypes.data)
        for j in range(32):
            o[j] = F32(I8(r[2 + j])) * d


@kernel
def decode_q8_1(raw, out, b0, b1):
    """The second half is d times the sum of the codes: redundant, not read."""
    for b in range(b0, b1):
        r, o = raw[b * 36 : b * 36 + 36], out[b * 32 : b * 32 + 32]
        d = half_at(r.ctypes.data)
        for j in range(32):
            o[j] = F32(I8(r[4 + j])) * d


@kernel
def decode_q1_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 18 : b * 18 + 18], out[b * 128 : b * 128 + 128]
        d = half_at(r.ctypes.data)
        for k in range(16):
            q = r[2 + k]
            for j in range(8):
                o[8 * k + j] = d if (q >> U8(j)) & U8(1) else -d


@kernel
def decode_q2_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 18 : b * 18 + 18], out[b * 64 : b * 64 + 64]
        d = half_at(r.ctypes.data)
        for k in range(16):
            q = r[2 + k]
            for j in range(4):
                o[4 * k + j] = F32(I32(I32((q >> U8(2 * j)) & U8(3)) - I32(1))) * d


@kernel
def decode_iq4_nl(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 18 : b * 18 + 18], out[b * 32 : b * 32 + 32]
        d = half_at(r.ctypes.data)
        for j in range(16):
            o[j] = d * K_IQ4[r[2 + j] & U8(15)]
            o[16 + j] = d * K_IQ4[r[2 + j] >> U8(4)]


@kernel
def decode_mxfp4(raw, out, b0, b1):
    """The scale is 2**(e - 128), halved because the table is doubled; e = 255 is 2**127, not NaN."""
    for b in range(b0, b1):
        r, o = raw[b * 17 : b * 17 + 17], out[b * 32 : b * 32 + 32]
        e = U32(r[0])
        d = unbits(U32(U32(0x00200000) << e) if e < U32(2) else U32(U32(e - U32(1)) << U32(23)))
        for j in range(16):
            o[j] = E2M1_DOUBLED[r[1 + j] & U8(15)] * d
            o[16 + j] = E2M1_DOUBLED[r[1 + j] >> U8(4)] * d


@kernel
def ue4m3(x):
    """ggml's unsigned E4M3 scale, halved: bit 7 is ignored but in 0xFF, which is 240 where 0x7F is 0."""
    e, m = U32((x >> U8(3)) & U8(15)), F32(I32(x & U8(7)))
    if x == U8(0) or x == U8(0x7F):
        return F32(0.0)
    if e == U32(0):
        return F32(m * F32(2.0**-10))
    return F32((F32(1.0) + m * F32(0.125)) * unbits(U32(U32(e + U32(119)) << U32(23))))


@kernel
def decode_nvfp4(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 36 : b * 36 + 36], out[b * 64 : b * 64 + 64]
        for s in range(4):
            d = ue4m3(r[s])
            for j in range(8):
                q = r[4 + 8 * s + j]
                o[16 * s + j] = E2M1_DOUBLED[q & U8(15)] * d
                o[16 * s + 8 + j] = E2M1_DOUBLED[q >> U8(4)] * d


@kernel
def decode_tq2_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 66 : b * 66 + 66], out[b * 256 : b * 256 + 256]
        d = half_at(r.ctypes.data + 64)
        for h in range(2):
            for n in range(4):
                for m in range(32):
                    q = I32((r[32 * h + m] >> U8(2 * n)) & U8(3))
                    o[128 * h + 32 * n + m] = F32(I32(q - I32(1))) * d


@kernel
def trit(x, n):
    """Digit n of a byte that holds base-3 digits as a fraction of 256, minus 1."""
    return F32(I32((I32(U8(x * POWERS_OF_3[n])) * I32(3) >> I32(8)) - I32(1)))


@kernel
def decode_tq1_0(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 54 : b * 54 + 54], out[b * 256 : b * 256 + 256]
        d = half_at(r.ctypes.data + 52)
        for n in range(5):
            for m in range(32):
                o[32 * n + m] = trit(r[m], n) * d
            for m in range(16):
                o[160 + 16 * n + m] = trit(r[32 + m], n) * d
        for n in range(4):
            for m in range(4):
                o[240 + 4 * n + m] = trit(r[48 + m], n) * d

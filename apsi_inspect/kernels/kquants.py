"""Decoders of ggml's K-quants (super-blocks of 256), as plain loops: the definition and the fallback.

Contract as in `blocks`. In each product the half scale is first multiplied by the integer scale, then by the code: that
order makes the bits ggml's. `tests/test_decode.py` compares with gguf, ggml's C code and `tests/naive.py`.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import float_at, half_at

F32, I8, I32, U8 = np.float32, np.int8, np.int32, np.uint8


@kernel
def decode_q2_k(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 84 : b * 84 + 84], out[b * 256 : b * 256 + 256]
        d, dmin = half_at(r.ctypes.data + 80), half_at(r.ctypes.data + 82)
        for j in range(16):
            dl, ml = d * F32(I32(r[j] & U8(15))), dmin * F32(I32(r[j] >> U8(4)))
            q, y, shift = r[16 + 32 * (j // 8) + 16 * (j % 2) :], o[16 * j : 16 * j + 16], U8(2 * (j // 2 % 4))
            for i in range(16):
                y[i] = dl * F32(I32((q[i] >> shift) & U8(3))) - ml


@kernel
def decode_q3_k(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 110 : b * 110 + 110], out[b * 256 : b * 256 + 256]
        d = half_at(r.ctypes.data + 108)
        for j in range(16):
            low = r[96 + j % 8] >> U8(4 * (j // 8)) & U8(15)
            high = r[104 + j % 4] >> U8(2 * (j // 4)) & U8(3)
            dl = d * F32(I32(I32(low | (high << U8(4))) - I32(32)))
            q, hm, y = r[32 + 32 * (j // 8) + 16 * (j % 2) :], r[16 * (j % 2) :], o[16 * j : 16 * j + 16]
            shift, bit = U8(2 * (j // 2 % 4)), U8(j // 2)
            for i in range(16):
                third = I32((hm[i] >> bit) & U8(1))
                y[i] = dl * F32(I32((I32((q[i] >> shift) & U8(3)) | (third << I32(2))) - I32(4)))


@kernel
def scale_min(s, j):
    """The j-th 6-bit scale and minimum of the 12 packed bytes of Q4_K and Q5_K."""
    if j < 4:
        return s[j] & U8(63), s[j + 4] & U8(63)
    return (s[j + 4] & U8(15)) | ((s[j - 4] >> U8(6)) << U8(4)), (s[j + 4] >> U8(4)) | ((s[j] >> U8(6)) << U8(4))


@kernel
def decode_q4_k(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 144 : b * 144 + 144], out[b * 256 : b * 256 + 256]
        d, dmin = half_at(r.ctypes.data), half_at(r.ctypes.data + 2)
        for j in range(8):
            sc, mn = scale_min(r[4:16], j)
            dl, ml = d * F32(I32(sc)), dmin * F32(I32(mn))
            q, y, shift = r[16 + 32 * (j // 2) :], o[32 * j : 32 * j + 32], U8(4 * (j % 2))
            for i in range(32):
                y[i] = dl * F32(I32((q[i] >> shift) & U8(15))) - ml


@kernel
def decode_q5_k(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 176 : b * 176 + 176], out[b * 256 : b * 256 + 256]
        d, dmin = half_at(r.ctypes.data), half_at(r.ctypes.data + 2)
        for j in range(8):
            sc, mn = scale_min(r[4:16], j)
            dl, ml = d * F32(I32(sc)), dmin * F32(I32(mn))
            q, qh, y, shift = r[48 + 32 * (j // 2) :], r[16:48], o[32 * j : 32 * j + 32], U8(4 * (j % 2))
            for i in range(32):
                fifth = (qh[i] >> U8(j)) & U8(1)
                y[i] = dl * F32(I32(((q[i] >> shift) & U8(15)) | (fifth << U8(4)))) - ml


@kernel
def decode_q6_k(raw, out, b0, b1):
    for b in range(b0, b1):
        r, o = raw[b * 210 : b * 210 + 210], out[b * 256 : b * 256 + 256]
        d = half_at(r.ctypes.data + 208)
        for j in range(16):
            dl = d * F32(I8(r[192 + j]))
            h, k, half = j // 8, j // 2 % 4, 16 * (j % 2)
            ql, qh, y = r[64 * h + 32 * (k % 2) + half :], r[128 + 32 * h + half :], o[16 * j : 16 * j + 16]
            low, high = U8(4 * (k // 2)), U8(2 * k)
            for i in range(16):
                q = ((ql[i] >> low) & U8(15)) | (((qh[i] >> high) & U8(3)) << U8(4))
                y[i] = dl * F32(I32(I32(q) - I32(32)))


@kernel
def decode_q8_k(raw, out, b0, b1):
    """A float32 scale; the sums of 16 codes at the end are redundant and not read."""
    for b in range(b0, b1):
        r, o = raw[b * 292 : b * 292 + 292], out[b * 256 : b * 256 + 256]
        d = float_at(r.ctypes.data)
        for j in range(256):
            o[j] = F32(I8(r[4 + j])) * d

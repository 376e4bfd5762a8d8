"""Q2_K, Q4_K and Q5_K, as plain loops: non-negative codes with a minimum (search A).

Contract as in `encode_blocks`. Every sum is taken in element order, products associate to the left, and the minimum
found so far takes part in the next try: each of these shows in the bytes. `tests/test_encode.py` compares with ggml.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import half_at, put_half
from .encode_common import nearest_int, put_crumbs

F32, I32, U8 = np.float32, np.int32, np.uint8


@kernel
def to_code(v, top):
    return max(I32(0), min(I32(top), nearest_int(v)))


@kernel
def misfit(v, w, q, scale, low, absolute):
    """The weighted error of codes, absolute or squared."""
    total = F32(0)
    for i in range(len(v)):
        diff = scale * F32(q[i]) + low - v[i]
        total += w[i] * (abs(diff) if absolute else diff * diff)
    return total


@kernel
def search(v, w, top, rmin, nstep, absolute, q, trial):
    """Codes into `q`; returns the scale and the minimum, negated as it is stored."""
    low, high = v[0], v[0]
    sw, sx = w[0], w[0] * v[0]
    for i in range(1, len(v)):
        low = v[i] if v[i] < low else low
        high = v[i] if v[i] > high else high
        sw += w[i]
        sx += w[i] * v[i]
    low = F32(0) if low > F32(0) else low
    if high == low:
        q[:] = I32(0)
        return F32(0), -low
    inverse = F32(top) / (high - low)
    scale = F32(1) / inverse
    for i in range(len(v)):
        q[i] = to_code(inverse * (v[i] - low), top)
    best = misfit(v, w, q, scale, low, absolute)
    for step in range(nstep + 1):
        inverse = (F32(rmin) + F32(0.1) * F32(step) + F32(top)) / (high - low)
        sl = sl2 = sxl = F32(0)
        for i in range(len(v)):
            trial[i] = to_code(inverse * (v[i] - low), top)
            code = F32(trial[i])
            sl += w[i] * code
            sl2 += w[i] * code * code
            sxl += w[i] * code * v[i]
        det = sw * sl2 - sl * sl
        if det > F32(0):
            s, m = (sw * sxl - sx * sl) / det, (sl2 * sx - sl * sxl) / det
            if m > F32(0):
                s, m = sxl / sl2, F32(0)
            error = misfit(v, w, trial, s, m, absolute)
            if error < best:
                q[:] = trial
                best, scale, low = error, s, m
    return scale, -low


@kernel
def again(v, d, m, top, q):
    """The codes for the scale and minimum that are stored; those of the search stay where that scale is 0."""
    if d != F32(0):
        for i in range(len(v)):
            q[i] = to_code((v[i] + m) / d, top)


@kernel
def greatest(v):
    top = F32(0)
    for j in range(len(v)):
        top = v[j] if v[j] > top else top
    return top


@kernel
def encode_q2_k(x, raw, b0, b1):
    q, trial, w = np.empty(256, np.int32), np.empty(16, np.int32), np.empty(16, np.float32)
    scale, low = np.empty(16, np.float32), np.empty(16, np.float32)
    for b in range(b0, b1):
        v, r = x[256 * b : 256 * b + 256], raw[84 * b : 84 * b + 84]
        for j in range(16):
            sub = v[16 * j : 16 * j + 16]
            for i in range(16):
                w[i] = abs(sub[i])
            scale[j], low[j] = search(sub, w, 3, -0.5, 15, True, q[16 * j : 16 * j + 16], trial)
        ms, mm = greatest(scale), greatest(low)
        put_half(r.ctypes.data + 80, ms / F32(15))
        put_half(r.ctypes.data + 82, mm / F32(15))
        d, dmin = half_at(r.ctypes.data + 80), half_at(r.ctypes.data + 82)
        for j in range(16):
            ls = nearest_int(F32(15) / ms * scale[j]) if ms > F32(0) else I32(0)
            lm = nearest_int(F32(15) / mm * low[j]) if mm > F32(0) else I32(0)
            r[j] = U8(ls | (lm << I32(4)))
            k = 16 * j
            again(v[k : k + 16], d * F32(r[j] & U8(15)), dmin * F32(r[j] >> U8(4)), 3, q[k : k + 16])
        put_crumbs(q, r[16:])


@kernel
def search_45(v, top, rmin, nstep, r, q):
    """Head and codes of a Q4_K or Q5_K super-block."""
    trial, w = np.empty(32, np.int32), np.empty(32, np.float32)
    scale, low = np.empty(8, np.float32), np.empty(8, np.float32)
    for j in range(8):
        sub = v[32 * j : 32 * j + 32]
        total = F32(0)
        for i in range(32):
            total += sub[i] * sub[i]
        mean = np.sqrt(total / F32(32))
        for i in range(32):
            w[i] = mean + abs(sub[i])
        scale[j], low[j] = search(sub, w, top, rmin, nstep, False, q[32 * j : 32 * j + 32], trial)
    ms, mm = greatest(scale), greatest(low)
    put_half(r.ctypes.data, ms / F32(63))
    put_half(r.ctypes.data + 2, mm / F32(63))
    d, dmin = half_at(r.ctypes.data), half_at(r.ctypes.data + 2)
    inverse = F32(63) / ms if ms > F32(0) else F32(0)
    inverse_min = F32(63) / mm if mm > F32(0) else F32(0)
    for j in range(8):
        ls = min(I32(63), nearest_int(inverse * scale[j]) & I32(255))
        lm = min(I32(63), nearest_int(inverse_min * low[j]) & I32(255))
        if j < 4:
            r[4 + j], r[8 + j] = U8(ls), U8(lm)
        else:
            r[8 + j] = U8((ls & I32(15)) | ((lm & I32(15)) << I32(4)))
            r[j] |= U8((ls >> I32(4)) << I32(6))
            r[4 + j] |= U8((lm >> I32(4)) << I32(6))
        again(v[32 * j : 32 * j + 32], d * F32(ls), dmin * F32(lm), top, q[32 * j : 32 * j + 32])


@kernel
def put_nibbles(q, r):
    """Q4_K and Q5_K: two codes a byte, 32 elements apart."""
    for j in range(4):
        for i in range(32):
            r[32 * j + i] = U8((q[64 * j + i] & I32(15)) | ((q[64 * j + 32 + i] & I32(15)) << I32(4)))


@kernel
def encode_q4_k(x, raw, b0, b1):
    q = np.empty(256, np.int32)
    for b in range(b0, b1):
        r = raw[144 * b : 144 * b + 144]
        search_45(x[256 * b : 256 * b + 256], 15, -1.0, 20, r, q)
        put_nibbles(q, r[16:])


@kernel
def encode_q5_k(x, raw, b0, b1):
    q = np.empty(256, np.int32)
    for b in range(b0, b1):
        r = raw[176 * b : 176 * b + 176]
        search_45(x[256 * b : 256 * b + 256], 31, -0.5, 15, r, q)
        for i in range(32):
            high = I32(0)
            for j in range(8):
                high |= (q[32 * j + i] >> I32(4)) << I32(j)
            r[16 + i] = U8(high)
        put_nibbles(q, r[48:])

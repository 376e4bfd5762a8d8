"""Q3_K and Q6_K, as plain loops: signed codes, scaled by the greatest element (searches B and C).

Contract as in `encode_blocks`; sums in element order. `tests/test_encode.py` compares with ggml.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import half_at, put_half
from .encode_common import largest, nearest_int, put_crumbs

F32, I8, I32, U8 = np.float32, np.int8, np.int32, np.uint8
EPS = F32(1e-15)


@kernel
def to_code(v, n):
    return max(I32(-n), min(I32(n - 1), nearest_int(v)))


@kernel
def improve(v, q, a, b):
    """Search B: one code at a time takes the value that suits the others, up to five times around."""
    for _ in range(5):
        changed = False
        for i in range(16):
            w = v[i] * v[i]
            sa = a - w * v[i] * F32(q[i])
            if not sa > F32(0):
                continue
            sb = b - w * F32(q[i]) * F32(q[i])
            new = to_code(v[i] * sb / sa, 4)
            if new == q[i]:
                continue
            sa += w * v[i] * F32(new)
            sb += w * F32(new) * F32(new)
            if sb > F32(0) and sa * sa * b > a * a * sb:
                q[i], a, b, changed = new, sa, sb, True
        if not changed:
            break
    return a / b if b > F32(0) else F32(0)


@kernel
def sums(v, q):
    """The sums of w*x*q and w*q*q with w = x*x."""
    a = b = F32(0)
    for i in range(16):
        w = v[i] * v[i]
        a += w * v[i] * F32(q[i])
        b += w * F32(q[i]) * F32(q[i])
    return a, b


@kernel
def search_3(v, q):
    """Stored codes 0..7 into `q`; returns the scale."""
    top = largest(v)
    if abs(top) < EPS:
        q[:] = I32(0)
        return F32(0)
    inverse = F32(-4) / top
    for i in range(16):
        q[i] = to_code(inverse * v[i], 4)
    a, b = sums(v, q)
    scale = improve(v, q, a, b)
    q += I32(4)
    return scale


@kernel
def encode_q3_k(x, raw, b0, b1):
    q, low, scale = np.empty(256, np.int32), np.empty(256, np.int32), np.empty(16, np.float32)
    for b in range(b0, b1):
        v, r = x[256 * b : 256 * b + 256], raw[110 * b : 110 * b + 110]
        for j in range(16):
            scale[j] = search_3(v[16 * j : 16 * j + 16], q[16 * j : 16 * j + 16])
        top = largest(scale)
        inverse = F32(-32) / top
        put_half(r.ctypes.data + 108, F32(1) / inverse if top != F32(0) else F32(0))
        d = half_at(r.ctypes.data + 108)
        r[:32] = U8(0)
        r[96:108] = U8(0)
        for j in range(16):
            code = I32(0)
            if top != F32(0):
                code = max(I32(-32), min(I32(31), I32(I8(nearest_int(inverse * scale[j]))))) + I32(32)
            r[96 + j % 8] |= U8((code & I32(15)) << I32(4 * (j // 8)))
            r[104 + j % 4] |= U8((code >> I32(4)) << I32(2 * (j // 4)))
            dd = d * F32(code - I32(32))
            if dd != F32(0):
                for i in range(16 * j, 16 * j + 16):
                    q[i] = to_code(v[i] / dd, 4) + I32(4)
        for i in range(256):
            r[i % 32] |= U8((q[i] >> I32(2)) << I32(i // 32))
            low[i] = q[i] & I32(3)
        put_crumbs(low, r[32:])


@kernel
def search_6(v, q, trial):
    """Stored codes 0..63 into `q`; returns the scale."""
    top = largest(v)
    if abs(top) < EPS:
        q[:] = I32(0)
        return F32(0)
    scale = best = F32(0)
    for k in range(-10, 10):  # the first one is the plain guess
        if k == 0:
            continue
        inverse = -(F32(32) + (F32(0.1) * F32(k) if k > -10 else F32(0))) / top
        for i in range(16):
            trial[i] = to_code(inverse * v[i], 32)
        a, b = sums(v, trial)
        if k == -10:
            scale = a / b if b != F32(0) else F32(0)
            best = scale * a
            q[:] = trial
        elif b > F32(0) and a * a > best * b:
            q[:] = trial
            scale = a / b
            best = scale * a
    q += I32(32)
    return scale


@kernel
def put_six(q, r):
    """Low nibbles, then the upper two bits, of 256 six-bit codes."""
    for h in range(2):
        for i in range(32):
            a, b = q[128 * h + i], q[128 * h + 32 + i]
            c, d = q[128 * h + 64 + i], q[128 * h + 96 + i]
            r[64 * h + i] = U8((a & I32(15)) | ((c & I32(15)) << I32(4)))
            r[64 * h + 32 + i] = U8((b & I32(15)) | ((d & I32(15)) << I32(4)))
            high = (a >> I32(4)) | ((b >> I32(4)) << I32(2)) | ((c >> I32(4)) << I32(4)) | ((d >> I32(4)) << I32(6))
            r[128 + 32 * h + i] = U8(high)


@kernel
def encode_q6_k(x, raw, b0, b1):
    q, trial, scale = np.empty(256, np.int32), np.empty(16, np.int32), np.empty(16, np.float32)
    for b in range(b0, b1):
        v, r = x[256 * b : 256 * b + 256], raw[210 * b : 210 * b + 210]
        for j in range(16):
            scale[j] = search_6(v[16 * j : 16 * j + 16], q[16 * j : 16 * j + 16], trial)
        top = largest(scale)
        if abs(top) < EPS:
            r[:] = U8(0)
            continue
        inverse = F32(-128) / top
        put_half(r.ctypes.data + 208, F32(1) / inverse)
        d = half_at(r.ctypes.data + 208)
        for j in range(16):
            code = I8(min(I32(127), nearest_int(inverse * scale[j])))
            r[192 + j] = U8(code)
            dd = d * F32(code)
            if dd != F32(0):
                for i in range(16 * j, 16 * j + 16):
                    q[i] = to_code(v[i] / dd, 32) + I32(32)
        put_six(q, r)

"""IQ4_NL and IQ4_XS, as plain loops: sixteen uneven code values, the scale found by fifteen more tries (search D).

Contract as in `encode_blocks`: the bytes of `ggml_quantize_chunk` without an importance matrix (not those of
`quantize_row_iq4_nl_ref`, which does not search). `tests/test_encode.py` compares.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import put_half
from .encode_common import nearest_int

F32, I32, U8 = np.float32, np.int32, np.uint8
VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MIDDLES = (VALUES[:-1] + VALUES[1:]) / np.float32(2)
EPS = F32(1e-15)


@kernel
def index(v):
    """The nearest of `VALUES`, ties to the upper one; a NaN ends at the last."""
    i = I32(0)
    for k in range(15):
        i += I32(not v < MIDDLES[k])
    return i


@kernel
def search(v):
    """The scale of a sub-block of 32."""
    amax, top = F32(0), F32(0)
    for j in range(32):
        if abs(v[j]) > amax:
            amax, top = abs(v[j]), v[j]
    if amax < EPS:
        return F32(0)
    d = best = F32(0)
    for t in range(-8, 8):  # the first one is the plain guess
        inverse = F32(1) / (-top / VALUES[0]) if t == -8 else F32(t - 127) / top
        a = b = F32(0)
        for j in range(32):
            q = VALUES[index(inverse * v[j])]
            w = v[j] * v[j]
            a += w * q * v[j]
            b += w * q * q
        if t == -8:
            d = a / b if b > F32(0) else F32(0)
            best = d * a
        elif b > F32(0) and a * a > best * b:
            d = a / b
            best = d * a
    return d


@kernel
def put_codes(v, d, r):
    """Codes of 32 elements for the scale d, as nibbles."""
    inverse = F32(1) / d if d != F32(0) else F32(0)
    for j in range(16):
        r[j] = U8(index(v[j] * inverse) | (index(v[16 + j] * inverse) << I32(4)))


@kernel
def encode_iq4_nl(x, raw, b0, b1):
    for b in range(b0, b1):
        v, r = x[32 * b : 32 * b + 32], raw[18 * b : 18 * b + 18]
        d = search(v)
        put_half(r.ctypes.data, d)
        put_codes(v, d, r[2:])


@kernel
def encode_iq4_xs(x, raw, b0, b1):
    scale = np.empty(8, np.float32)
    for b in range(b0, b1):
        v, r = x[256 * b : 256 * b + 256], raw[136 * b : 136 * b + 136]
        amax, top = F32(0), F32(0)
        for j in range(8):
            scale[j] = search(v[32 * j : 32 * j + 32])
            if abs(scale[j]) > amax:
                amax, top = abs(scale[j]), scale[j]
        d = -top / F32(32)
        put_half(r.ctypes.data, d)
        inverse = F32(1) / d if d != F32(0) else F32(0)
        r[2:8] = U8(0)
        for j in range(8):
            code = max(I32(-32), min(I32(31), nearest_int(inverse * scale[j])))
            put_codes(v[32 * j : 32 * j + 32], d * F32(code), r[8 + 16 * j :])
            code += I32(32)
            r[4 + j // 2] |= U8((code & I32(15)) << I32(4 * (j % 2)))
            r[2 + j // 4] |= U8((code >> I32(4)) << I32(2 * (j % 4)))

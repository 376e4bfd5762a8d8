"""Small pieces that several encoders share, as ggml computes them (plain loops).

Part of the cache key of every kernel (`_jit.SHARED`). `tests/test_encode.py` covers them through the encoders.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import bits

F32, I32, U8, U32 = np.float32, np.int32, np.uint8, np.uint32
INF = F32(np.inf)


@kernel
def nearest_int(v):
    """Ties to even by adding 1.5 * 2**23, with ggml's wrap-around beyond 2**22."""
    return I32(bits(v + F32(12582912.0)) & U32(0x007FFFFF)) - I32(0x00400000)


@kernel
def reciprocal(d):
    """1/d; 0 where d is 0 or so small that its reciprocal overflows."""
    r = F32(1) / d
    return r if abs(r) < INF else F32(0)


@kernel
def largest(v):
    """The element of greatest magnitude, the first of several."""
    amax, m = F32(0), F32(0)
    for j in range(len(v)):
        a = abs(v[j])
        if a > amax:
            amax, m = a, v[j]
    return m


@kernel
def floor_log2(a):
    """floor(log2f(a)) of a positive float, as C computes it: the logarithm rounded to float32 before the floor.

    Just below a power of two 2**e that rounding reaches e, for the last ln 2 * 2**p of the 2**23 mantissas, where
    2**(p - 23) is the spacing of floats just below e.
    """
    u = I32(bits(a))
    if u < I32(0x00800000):  # subnormal: normalised by an exact multiplication
        u = I32(bits(a * F32(2.0**32))) - I32(32 << 23)
    e = (u >> I32(23)) - I32(127)
    missing = I32(0x00800000) - (u & I32(0x007FFFFF))
    upper = abs(e + I32(1)) - I32(e >= 0)
    p = F32(1)
    while I32(2) * I32(p) <= upper:
        p *= F32(2)
    return e + I32(F32(missing) <= p * F32(0.6931472)) if upper > 0 else e


@kernel
def put_crumbs(q, r):
    """Q2_K and Q3_K: four codes a byte, 32 elements apart."""
    for h in range(2):
        for i in range(32):
            k = 128 * h + i
            r[32 * h + i] = U8(q[k] | (q[k + 32] << I32(2)) | (q[k + 64] << I32(4)) | (q[k + 96] << I32(6)))

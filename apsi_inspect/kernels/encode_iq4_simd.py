"""IQ4_NL and IQ4_XS, sixteen sub-blocks searched at once, a lane each.

Same contract, same names and same bits as in `encode_iq4`, whose plain loops are the definition.
`tests/test_encode.py` compares the two.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ._jit import kernel
from .lanes import STEP, L, clamp, columns, first_greatest, loop, nearest, signed_max, zeros
from .simd import I8, I16, I32, I64, F, M, W, emitter

EPS = 1e-15
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MIDDLES = tuple((a + b) / 2 for a, b in pairwise(VALUES))
# State: scale, greatest element, best score; then the elements, lane-major.
SCALE, TOP, BEST, XS = 0, STEP, 2 * STEP, 3 * STEP
BYTES = XS + 32 * STEP


def value(v: W) -> W:
    """The nearest of `VALUES`, ties to the upper one; a NaN ends at the last."""
    q = v.like(VALUES[15])
    for middle, k in zip(reversed(MIDDLES), reversed(VALUES[:15]), strict=True):
        q = v.lt(middle).sel(v.like(k), q)
    return q


def index(v: W) -> W:
    """Its index, as i8."""
    i = v.bits(I32).like(15)
    for middle in MIDDLES:
        i = i + v.lt(middle).sext(I32)
    return i.trunc(I8)


def sums(s: M, inverse: W) -> list[W]:
    """The sums of w*q*x and w*q*q with w = x*x, for the values nearest to x * inverse."""

    def body(i: W, a: W, b: W) -> list[W]:
        x = s.plus(i).load(F, L)
        q = value(inverse * x)
        w = x * x
        return [a + w * q * x, b + w * q * q]

    return loop(s.b, XS, XS + 32 * STEP, STEP, [zeros(s.b)] * 2, body)


@emitter(M, M)
def start(src: M, s: M) -> None:
    """Transpose; the guess from the greatest element. A lane that counts as zero gets an infinite one and scale 0."""
    elements = s.plus(W(s.b, I64(XS)))
    columns(src, 32, elements)
    top = signed_max(elements, 32)
    zero = top.abs().lt(EPS)
    a, b = sums(s, top.like(1.0) / (top / 127.0))
    d = b.gt(0.0).sel(a / b, b.like(0.0))
    s.store(zero.sel(d.like(0.0), d), SCALE)
    s.store(zero.sel(d.like(float("inf")), d * a), BEST)
    s.store(top, TOP)


@emitter(M, F)
def attempt(s: M, span: W) -> None:
    a, b = sums(s, span.splat(L) / s.load(F, L, TOP))
    best = s.load(F, L, BEST)
    better = b.gt(0.0) & (a * a).gt(best * b)
    d = a / b
    s.store(better.sel(d, s.load(F, L, SCALE)), SCALE)
    s.store(better.sel(d * a, best), BEST)


def nibbles(src: M, d: W) -> W:
    """Codes of 32 elements for the scale d."""
    inverse = d.eq(0.0).sel(d.like(0.0), d.like(1.0) / d)
    q = index(src.load(F, 32) * inverse.splat(32))
    return q.pick(range(16)) | (q.pick(range(16, 32)) << 4)


@emitter(M, F, M)
def put_nl(src: M, d: W, dst: M) -> None:
    dst.store(d.float_to_half())
    dst.store(nibbles(src, d), 2)


@emitter(M, M)
def put_head(scales: M, dst: M) -> None:
    """d and the integer scales of an IQ4_XS super-block; leaves the scales that its codes are for."""
    scale = scales.load(F, 8)
    d = first_greatest(scale) / -32.0
    inverse = d.eq(0.0).sel(d.like(0.0), d.like(1.0) / d)
    code = clamp(nearest(inverse.splat(8) * scale), -32, 31)
    dl = d.splat(8) * code.sitofp()
    dst.store(d.float_to_half())
    code = code + 32
    high = (code >> 4) << code.vector(range(0, 16, 2))
    dst.store(high.reduce("or").trunc(I16), 2)
    low = (code & 15).trunc(I8)
    dst.store(low.pick(range(0, 8, 2)) | (low.pick(range(1, 8, 2)) << 4), 4)
    scales.store(dl)


@emitter(M, F, M)
def put_nibbles(src: M, d: W, dst: M) -> None:
    dst.store(nibbles(src, d))


@kernel
def search(a, s):
    """Scales of sixteen sub-blocks at address `a`."""
    start(a, s)
    for t in range(-7, 8):
        attempt(s, np.float32(t - 127))


@kernel
def encode_iq4_nl(x, raw, b0, b1):
    state, last = np.empty(BYTES, np.uint8), np.zeros(32 * L, np.float32)
    o, s, f = raw.ctypes.data, state.ctypes.data, state.view(np.float32)
    for b in range(b0, b1, L):
        count = min(L, b1 - b)
        a = x.ctypes.data + 128 * b
        if count < L:  # the last ones must not look beyond their end
            last[: 32 * count] = x[32 * b : 32 * b1]
            a = last.ctypes.data
        search(a, s)
        for j in range(count):
            put_nl(a + 128 * j, f[SCALE // 4 + j], o + 18 * (b + j))
    last[0] = 0  # keeps the memory alive to here


@kernel
def encode_iq4_xs(x, raw, b0, b1):
    state, last = np.empty(BYTES, np.uint8), np.zeros(512, np.float32)
    o, s, f = raw.ctypes.data, state.ctypes.data, state.view(np.float32)
    for b in range(b0, b1, 2):
        count = min(2, b1 - b)
        a = x.ctypes.data + 1024 * b
        if count < 2:
            last[:256] = x[256 * b : 256 * b1]
            a = last.ctypes.data
        search(a, s)
        for j in range(8 * count):
            dst = o + 136 * (b + j // 8)
            if j % 8 == 0:
                put_head(s + SCALE + 4 * j, dst)
            put_nibbles(a + 128 * j, f[SCALE // 4 + j], dst + 8 + 16 * (j % 8))
    last[0] = 0

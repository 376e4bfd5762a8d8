"""IQ4_NL and IQ4_XS, sixteen sub-blocks searched at once, a lane each.

Same contract, same names and same bits as in `encode_iq4`, whose plain loops are the definition.
`tests/test_encode.py` compares the two.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ._jit import kernel
from .lanes import STEP, L, clamp, columns, first_greatest, nearest, signed_max
from .simd import I8, I16, I32, F, M, W, emitter

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


def sums(xs: list[W], inverse: W) -> tuple[W, W]:
    a = b = xs[0].like(0.0)
    for x in xs:
        q = value(inverse * x)
        w = x * x
        a, b = a + w * q * x, b + w * q * q
    return a, b


@emitter(M, M)
def start(src: M, s: M) -> None:
    """Transpose; the guess from the greatest element. A lane that counts as zero gets an infinite one and scale 0."""
    xs = columns(src, 32)
    top = signed_max(xs)
    zero = top.abs().lt(EPS)
    inverse = top.like(1.0) / (top / 127.0)
    a, b = sums(xs, inverse)
    d = b.gt(0.0).sel(a / b, b.like(0.0))
    s.store(zero.sel(d.like(0.0), d), SCALE)
    s.store(zero.sel(d.like(float("inf")), d * a), BEST)
    s.store(top, TOP)
    for i, x in enumerate(xs):
        s.store(x, XS + STEP * i)


@emitter(M, F)
def attempt(s: M, span: W) -> None:
    inverse = span.splat(L) / s.load(F, L, TOP)
    a, b = sums([s.load(F, L, XS + STEP * i) for i in range(32)], inverse)
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


@emitter(M, M, M)
def put_xs(src: M, scales: M, dst: M) -> None:
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
    for j in range(8):
        dst.store(nibbles(M(src.b, src.b.add(src.a, src.a.type(128 * j))), dl.lane(j)), 8 + 16 * j)


@kernel
def search(a, s):
    """Scales of sixteen sub-blocks at address `a`."""
    start(a, s)
    for t in range(-7, 8):
        attempt(s, np.float32(t - 127))


@kernel
def nl_16(x, b, count, raw, state):
    """Up to sixteen blocks of IQ4_NL; `x` begins at the first and holds sixteen."""
    a, o, s = x.ctypes.data, raw.ctypes.data, state.ctypes.data
    search(a, s)
    f = state.view(np.float32)
    for j in range(count):
        put_nl(a + 128 * j, f[SCALE // 4 + j], o + 18 * (b + j))


@kernel
def encode_iq4_nl(x, raw, b0, b1):
    state = np.empty(BYTES, np.uint8)
    whole = b0 + (b1 - b0) // L * L
    for b in range(b0, whole, L):
        nl_16(x[32 * b : 32 * b + 32 * L], b, L, raw, state)
    if whole < b1:
        last = np.zeros(32 * L, np.float32)
        last[: 32 * (b1 - whole)] = x[32 * whole : 32 * b1]
        nl_16(last, whole, b1 - whole, raw, state)


@kernel
def xs_2(x, b, count, raw, state):
    """One or two super-blocks of IQ4_XS; `x` begins at the first and holds two."""
    a, o, s = x.ctypes.data, raw.ctypes.data, state.ctypes.data
    search(a, s)
    for h in range(count):
        put_xs(a + 1024 * h, s + SCALE + 32 * h, o + 136 * (b + h))


@kernel
def encode_iq4_xs(x, raw, b0, b1):
    state = np.empty(BYTES, np.uint8)
    for b in range(b0, b1 - 1, 2):
        xs_2(x[256 * b : 256 * b + 512], b, 2, raw, state)
    if (b1 - b0) % 2:
        last = np.zeros(512, np.float32)
        last[:256] = x[256 * b1 - 256 : 256 * b1]
        xs_2(last, b1 - 1, 1, raw, state)

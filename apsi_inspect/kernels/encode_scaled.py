"""float32 -> the codes and scales of .apsim's quantized formats (`docs/apsim-format.md`, section 5).

scale = greatest magnitude of the block / largest code, a true division in float32; code = x / scale, another one, to
the nearest code, ties to even, saturating. A block of zeros has scale 0; a scale that would round to 0 is the smallest
float. One code a byte comes out; `pack_nibbles` and `pack_bits6` pack them as the file holds them. Kinds are numbered
as in `KINDS`.
`tests/test_encode_scaled.py` compares with files another implementation wrote and with `tests/naive_encode.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jit import kernel
from .encode_floats import AHEAD, E2M1, E2M3, E3M2, E4M3FN, E5M2, LANES, SmallFloat, pack4, pack6, small_float
from .lanes import fold, rounded
from .simd import I8, I32, F, M, W, emitter

KINDS: tuple[tuple[str, float], ...] = (
    ("int8", 127), ("int4", 7), ("fp8", 448), ("fp8_e5m2", 57344), ("fp6", 7.5), ("fp6_e3m2", 28), ("fp4", 6),
)  # fmt: skip
_RULES: tuple[int | SmallFloat, ...] = (127, 7, E4M3FN, E5M2, E2M3, E3M2, E2M1)
TOPS = np.array([top for _, top in KINDS], np.float32)
SMALLEST = np.float32(2.0**-149)
F32 = np.float32


def put_codes(rule: int | SmallFloat, n: int) -> Any:
    """Emitter (elements, their scales, codes) of n elements."""

    @emitter(M, M, M)
    def put(src: M, scale: M, dst: M) -> None:
        d = scale.load(F, n)
        v = src.load(F, n) / d.eq(0.0).sel(d.like(1.0), d)
        if isinstance(rule, int):
            q = rounded(v, -rule, rule).fptosi(I32)
            q = q & 15 if rule == 7 else q
        else:
            q = small_float(v, rule, saturate=True)
        dst.store(q.trunc(I8))

    return put


int8_n, int4_n, fp8_n, e5m2_n, fp6_n, e3m2_n, fp4_n = (put_codes(rule, LANES) for rule in _RULES)
int8_1, int4_1, fp8_1, e5m2_1, fp6_1, e3m2_1, fp4_1 = (put_codes(rule, 1) for rule in _RULES)


@kernel
def put_n(kind, src, scale, dst):
    """32 elements of a kind."""
    if kind == 0:
        int8_n(src, scale, dst)
    elif kind == 1:
        int4_n(src, scale, dst)
    elif kind == 2:
        fp8_n(src, scale, dst)
    elif kind == 3:
        e5m2_n(src, scale, dst)
    elif kind == 4:
        fp6_n(src, scale, dst)
    elif kind == 5:
        e3m2_n(src, scale, dst)
    else:
        fp4_n(src, scale, dst)


@kernel
def put_1(kind, src, scale, dst):
    """One element of a kind."""
    if kind == 0:
        int8_1(src, scale, dst)
    elif kind == 1:
        int4_1(src, scale, dst)
    elif kind == 2:
        fp8_1(src, scale, dst)
    elif kind == 3:
        e5m2_1(src, scale, dst)
    elif kind == 4:
        fp6_1(src, scale, dst)
    elif kind == 5:
        e3m2_1(src, scale, dst)
    else:
        fp4_1(src, scale, dst)


@emitter(M, M)
def raise_n(src: M, top: M) -> None:
    """32 running maxima of magnitude, as the bits of floats."""
    src.prefetch(AHEAD)
    src.prefetch(AHEAD + 64)
    top.store(top.load(I32, LANES).call("umax", src.load(F, LANES).abs().bits(I32)))


@emitter(M, M)
def raise_1(src: M, top: M) -> None:
    top.store(top.load(I32).call("umax", src.load(F).abs().bits(I32)))


@emitter(M, ret=F)
def greatest_of(top: M) -> W:
    return fold(top.load(I32, LANES), lambda a, b: a.call("umax", b)).bits(F)


@kernel
def absmax(x, i0, i1, top):
    """Greatest magnitude of x[i0:i1]; `top` is room for 32 floats."""
    a, t = x.ctypes.data, top.ctypes.data
    top[:] = F32(0)
    mid = i0 + (i1 - i0) // LANES * LANES
    for i in range(i0, mid, LANES):
        raise_n(a + 4 * i, t)
    for i in range(mid, i1):
        raise_1(a + 4 * i, t)
    return greatest_of(t)


@kernel
def scale_of(amax, largest):
    d = amax / largest
    return SMALLEST if d == F32(0) and amax > F32(0) else d


@kernel
def encode_runs(x, codes, scale, kind, n, step, given, r0, r1):
    """Blocks that are runs of memory: `step` elements along rows of n. `given`: one scale for all, already there."""
    a, o = x.ctypes.data, codes.ctypes.data
    room, same = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    t = same.ctypes.data
    blocks = (n + step - 1) // step
    for r in range(r0, r1):
        for k in range(blocks):
            i, stop = r * n + k * step, r * n + min(n, (k + 1) * step)
            if not given:
                scale[r * blocks + k] = scale_of(absmax(x, i, stop, room), TOPS[kind])
            same[:] = scale[0 if given else r * blocks + k]
            while i + LANES <= stop:
                put_n(kind, a + 4 * i, t, o + i)
                i += LANES
            while i < stop:
                put_1(kind, a + 4 * i, t, o + i)
                i += 1
    same[0] = F32(0)  # keeps the memory alive to here


@kernel
def encode_across(x, codes, scale, kind, length, step, inner, u0, u1):
    """Blocks across rows of `inner` elements: block u has up to `step` of the `length` rows of its slab."""
    a, o, t = x.ctypes.data, codes.ctypes.data, scale.ctypes.data
    blocks = (length + step - 1) // step
    mid = inner // LANES * LANES
    for u in range(u0, u1):
        first = u // blocks * length + u % blocks * step
        stop = min(first + step, (u // blocks + 1) * length)
        top = scale[u * inner : (u + 1) * inner]
        top[:] = F32(0)
        for row in range(first, stop):
            for i in range(0, mid, LANES):
                raise_n(a + 4 * (row * inner + i), t + 4 * (u * inner + i))
            for i in range(mid, inner):
                raise_1(a + 4 * (row * inner + i), t + 4 * (u * inner + i))
        for i in range(inner):
            top[i] = scale_of(top[i], TOPS[kind])
        for row in range(first, stop):
            for i in range(0, mid, LANES):
                put_n(kind, a + 4 * (row * inner + i), t + 4 * (u * inner + i), o + row * inner + i)
            for i in range(mid, inner):
                put_1(kind, a + 4 * (row * inner + i), t + 4 * (u * inner + i), o + row * inner + i)


@emitter(M, M)
def nibbles_n(src: M, dst: M) -> None:
    dst.store(pack4(src.load(I8, LANES)))


@emitter(M, M)
def bits6_n(src: M, dst: M) -> None:
    dst.store(pack6(src.load(I8, LANES).zext(I32)))


@kernel
def pack_nibbles(codes, out, n, r0, r1):
    """Rows of n codes -> rows of ceil(n/2) bytes, the first code low, padded with code 0."""
    a, o = codes.ctypes.data, out.ctypes.data
    width = (n + 1) // 2
    mid = n // LANES * LANES
    for r in range(r0, r1):
        for i in range(0, mid, LANES):
            nibbles_n(a + r * n + i, o + r * width + i // 2)
        for i in range(mid, n, 2):
            high = codes[r * n + i + 1] if i + 1 < n else np.uint8(0)
            out[r * width + i // 2] = np.uint8(codes[r * n + i] | (high << np.uint8(4)))


@kernel
def pack_bits6(codes, out, n, r0, r1):
    """Rows of n codes -> rows of 3*ceil(n/4) bytes: four codes a 24-bit little-endian integer, padded with code 0."""
    a, o = codes.ctypes.data, out.ctypes.data
    width = (n + 3) // 4 * 3
    mid = n // LANES * LANES
    for r in range(r0, r1):
        for i in range(0, mid, LANES):
            bits6_n(a + r * n + i, o + r * width + i // 4 * 3)
        for i in range(mid, n, 4):
            word = np.uint32(0)
            for j in range(min(4, n - i)):
                word |= np.uint32(np.uint32(codes[r * n + i + j]) << np.uint32(6 * j))
            for j in range(3):
                out[r * width + i // 4 * 3 + j] = np.uint8((word >> np.uint32(8 * j)) & np.uint32(255))

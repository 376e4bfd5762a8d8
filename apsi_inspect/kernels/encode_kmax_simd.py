"""Q3_K and Q6_K, sixteen sub-blocks at once, a lane each (searches B and C: signed codes, no minimum).

Same contract and bits as in `encode_kmax`, whose plain loops are the definition. Search B moves one code of a
sub-block at a time and waits for a division each time, so two super-blocks advance side by side.
`tests/test_encode.py` compares bit by bit.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .lanes import STEP, L, clamp, columns, first_greatest, half_round, loop, nearest, rounded, signed_max, zeros
from .simd import I8, I32, I64, F, M, W, emitter

EPS = 1e-15
ABREAST = 2  # super-blocks of search B side by side
# State of sixteen sub-blocks: scale, sums A and B, best inverse scale, final scale; then elements and codes.
SCALE, A, B, BEST, DD = (STEP * i for i in range(5))
XS = 5 * STEP
QS = XS + 16 * STEP
WS, WX = QS + 16 * STEP, QS + 32 * STEP  # search B: x*x and x*x*x
BYTES = QS + 48 * STEP


def get(s: M, off: int) -> W:
    return s.load(F, L, off)


def live_max(s: M) -> W:
    """The signed greatest element; infinite in a lane that counts as zero, whose codes and sums then are 0."""
    top = signed_max(s.plus(W(s.b, I64(XS))), 16)
    return top.abs().lt(EPS).sel(top.like(float("inf")), top)


def sums(s: M, inverse: W, low: int, high: int) -> list[W]:
    """Codes for an inverse scale (left in the state) and their sums of w*x*q and w*q*q with w = x*x."""

    def body(i: W, a: W, b: W) -> list[W]:
        x = s.plus(i).load(F, L)
        q = rounded(inverse * x, low, high)
        s.plus(i).store(q, QS - XS)
        w = x * x
        s.plus(i).store(w, WS - XS)
        s.plus(i).store(w * x, WX - XS)
        return [a + w * x * q, b + w * q * q]

    return loop(s.b, XS, XS + 16 * STEP, STEP, [zeros(s.b)] * 2, body)


@emitter(M, M)
def start3(src: M, s: M) -> None:
    """Elements, first codes and their sums."""
    columns(src, 16, s.plus(W(s.b, I64(XS))))
    top = live_max(s)
    a, b = sums(s, top.like(-4.0) / top, -4, 3)
    s.store(a, A)
    s.store(b, B)


def improved(here: M, a: W, b: W) -> list[W]:
    """Search B for one element of sixteen sub-blocks: the new sums, and the lanes that took a better code."""
    x, q, w, wx = here.load(F, L), *(here.load(F, L, off - XS) for off in (QS, WS, WX))
    sa, sb = a - wx * q, b - w * q * q
    new = clamp(nearest(x * sb / sa), -4, 3).sitofp()
    na, nb = sa + wx * new, sb + w * new * new
    take = sa.gt(0.0) & nb.gt(0.0) & (na * na * b).gt(a * a * nb) & (new.eq(q) ^ 1)
    here.store(take.sel(new, q), QS - XS)
    return [take.sel(na, a), take.sel(nb, b), take]


@emitter(M, ret=I32)
def pass3(s: M) -> W:
    """Once around the elements of several super-blocks side by side; 0 if no code changed."""
    states = [s.plus(W(s.b, I64(BYTES * k))) for k in range(ABREAST)]

    def body(i: W, *carried: W) -> list[W]:
        *sums, changed = carried
        out = []
        for k, state in enumerate(states):
            *ab, take = improved(state.plus(i), *sums[2 * k : 2 * k + 2])
            out += ab
            changed = changed | take
        return [*out, changed]

    sums = [get(state, off) for state in states for off in (A, B)]
    none = sums[0].eq(0.0) & sums[0].gt(0.0)
    *sums, changed = loop(s.b, XS, XS + 16 * STEP, STEP, [*sums, none], body)
    for k, v in enumerate(sums):
        states[k // 2].store(v, (A, B)[k % 2])
    return changed.mask_bits().zext(I32)


@emitter(M)
def scale3(s: M) -> None:
    a, b = get(s, A), get(s, B)
    s.store(b.gt(0.0).sel(a / b, b.like(0.0)), SCALE)


@emitter(M, M)
def head3(s: M, dst: M) -> None:
    """The 6-bit scales and d of a Q3_K super-block."""
    scale = get(s, SCALE)
    top = first_greatest(scale)
    none = top.eq(0.0)
    inverse = top.like(-32.0) / top
    code = clamp(nearest(inverse.splat(L) * scale).trunc(I8).sext(I32), -32, 31) + 32
    code = none.sel(code.like(0), code)
    h, d = half_round(none.sel(top.like(0.0), top.like(1.0) / inverse))
    s.store(d.splat(L) * (code - 32).sitofp(), DD)
    q = code.trunc(I8)
    lo, hi = q & 15, q >> 4
    dst.store(lo.pick(range(8)) | (lo.pick(range(8, 16)) << 4), 96)
    fours = [hi.pick(range(4 * k, 4 * k + 4)) << (2 * k) for k in range(4)]
    dst.store(fours[0] | fours[1] | fours[2] | fours[3], 104)
    dst.store(h, 108)


@emitter(M, F, M)
def codes3(src: M, d: W, dst: M) -> None:
    dst.store((clamp(nearest(src.load(F, 16) / d.splat(16)), -4, 3) + 4).trunc(I8))


@emitter(M, M)
def pack3(q: M, dst: M) -> None:
    """Third bits into the high mask, the others two bits each."""
    rows = [q.load(I8, 32, 32 * j) for j in range(8)]
    mask = rows[0] >> 2
    for j in range(1, 8):
        mask = mask | ((rows[j] >> 2) << j)
    dst.store(mask)
    for h in range(2):
        a, b, c, d = (r & 3 for r in rows[4 * h : 4 * h + 4])
        dst.store(a | (b << 2) | (c << 4) | (d << 6), 32 + 32 * h)


@emitter(M, M)
def start6(src: M, s: M) -> None:
    """Search C: nineteen inverse scales near -32 / greatest, the one with the least error kept."""
    columns(src, 16, s.plus(W(s.b, I64(XS))))
    top = live_max(s)
    best = top.like(-32.0) / top
    a, b = sums(s, best, -32, 31)
    scale = b.eq(0.0).sel(b.like(0.0), a / b)
    s.store(top, A)
    s.store(scale * a, B)
    s.store(scale, SCALE)
    s.store(best, BEST)


@emitter(M, F)
def step6(s: M, span: W) -> None:
    inverse = span.splat(L) / get(s, A)
    a, b = sums(s, inverse, -32, 31)
    best = get(s, B)
    better = b.gt(0.0) & (a * a).gt(best * b)
    scale = a / b
    s.store(better.sel(scale, get(s, SCALE)), SCALE)
    s.store(better.sel(scale * a, best), B)
    s.store(better.sel(inverse, get(s, BEST)), BEST)


@emitter(M, M, ret=I32)
def head6(s: M, dst: M) -> W:
    """Scales and d of a Q6_K super-block; 0 if it counts as zero."""
    scale = get(s, SCALE)
    top = first_greatest(scale)
    inverse = top.like(-128.0) / top
    h, d = half_round(top.like(1.0) / inverse)
    code = nearest(inverse.splat(L) * scale).smin(127).trunc(I8)
    s.store(d.splat(L) * code.sitofp(), DD)
    dst.store(code, 192)
    dst.store(h, 208)
    return top.abs().lt(EPS).sel(W(s.b, I32(0)), W(s.b, I32(1)))


@emitter(M, F, M)
def codes6(src: M, d: W, dst: M) -> None:
    dst.store((clamp(nearest(src.load(F, 16) / d.splat(16)), -32, 31) + 32).trunc(I8))


@emitter(M, F, M)
def found6(src: M, inverse: W, dst: M) -> None:
    dst.store((clamp(nearest(src.load(F, 16) * inverse.splat(16)), -32, 31) + 32).trunc(I8))


@emitter(M, M)
def pack6(q: M, dst: M) -> None:
    for h in range(2):
        a, b, c, d = (q.load(I8, 32, 128 * h + 32 * k) for k in range(4))
        dst.store((a & 15) | (c << 4), 64 * h)
        dst.store((b & 15) | (d << 4), 64 * h + 32)
        dst.store((a >> 4) | ((b >> 4) << 2) | ((c >> 4) << 4) | ((d >> 4) << 6), 128 + 32 * h)


SPANS6 = np.array([-(np.float32(32) + np.float32(0.1) * np.float32(k)) for k in range(-9, 10) if k], np.float32)


@kernel
def finish3(a, b, raw, state, codes):
    """Head and codes of a super-block whose search has ended; `a` is the address of its elements."""
    o, s, q = raw.ctypes.data + 110 * b, state.ctypes.data, codes.ctypes.data
    f = state.view(np.float32)
    scale3(s)
    head3(s, o)
    for j in range(16):
        if f[DD // 4 + j] != 0:
            codes3(a + 64 * j, f[DD // 4 + j], q + 16 * j)
        else:  # the codes of the search stay; a zero sub-block has 0, not 4
            live = False
            for i in range(16):
                live |= abs(f[(XS + STEP * i) // 4 + j]) >= np.float32(EPS)
            for i in range(16):
                codes[16 * j + i] = np.uint8(f[(QS + STEP * i) // 4 + j] + np.float32(4)) if live else np.uint8(0)
    pack3(q, o)


@kernel
def encode_q3_k(x, raw, b0, b1):
    states, codes = np.zeros((ABREAST, BYTES), np.uint8), np.empty(256, np.uint8)
    s, a = states.ctypes.data, x.ctypes.data
    for b in range(b0, b1, ABREAST):
        count = min(ABREAST, b1 - b)
        for h in range(count):  # the last ones have at their side whatever came before
            start3(a + 1024 * (b + h), s + BYTES * h)
        for _ in range(5):
            if pass3(s) == 0:
                break
        for h in range(count):
            finish3(a + 1024 * (b + h), b + h, raw, states[h], codes)


@kernel
def encode_q6_k(x, raw, b0, b1):
    state, codes = np.empty(BYTES, np.uint8), np.empty(256, np.uint8)
    s, q, a = state.ctypes.data, codes.ctypes.data, x.ctypes.data
    f = state.view(np.float32)
    for b in range(b0, b1):
        o = raw.ctypes.data + 210 * b
        start6(a + 1024 * b, s)
        for i in range(18):
            step6(s, SPANS6[i])
        if head6(s, o) == 0:
            raw[210 * b : 210 * b + 210] = 0
            continue
        for j in range(16):
            src = a + 1024 * b + 64 * j
            if f[DD // 4 + j] != 0:
                codes6(src, f[DD // 4 + j], q + 16 * j)
            elif np.isinf(f[A // 4 + j]):  # a zero sub-block has 0, not 32
                codes[16 * j : 16 * j + 16] = 0
            else:
                found6(src, f[BEST // 4 + j], q + 16 * j)
        pack6(q, o)

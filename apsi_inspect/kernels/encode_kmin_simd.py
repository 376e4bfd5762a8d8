"""Q2_K, Q4_K and Q5_K, sixteen sub-blocks searched at once (search A: non-negative codes with a minimum).

Same contract and bits as in `encode_kmin`, whose plain loops are the definition. `SEARCH` holds what advances from
step to step; elements, weights and codes stand lane-major behind it. A step rounds in the float unit when the ends of
every lane's range stay below 2**22, which holds except for degenerate data; otherwise it rounds as ggml's nearest_int
wraps around.
`tests/test_encode.py` compares bit by bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jit import kernel
from .lanes import STEP, L, clamp, columns, fold, half_round, loop, nearest, rounded, zeros
from .simd import I8, I32, I64, F, M, W, emitter

# Vectors of the state, by their offset: the top of the range (infinite in a flat lane, whose scale stays 0), the same
# finite, its bottom, the best minimum, error and scale so far, the sums of w and w*x, the inverse scale and minimum of
# the best codes, this step's inverse scale, flat lanes (all ones), and the final scale and minimum of each sub-block.
SEARCH = ("top", "high", "low", "minimum", "error", "scale", "sw", "sx", "best", "at", "inverse", "flat", "dd", "mm")
TOP, HIGH, LOW, MIN, ERR, SCALE, SW, SX, BEST, AT, INV, FLAT, DD, MM = (STEP * i for i in range(len(SEARCH)))
XS = STEP * len(SEARCH)
WS = XS + 32 * STEP
QS = WS + 32 * STEP
BYTES = QS + 32 * STEP


def get(s: M, off: int) -> W:
    return s.load(F, L, off)


def at(s: M, i: W, off: int = 0) -> W:
    """The vector at a byte offset that a loop counts."""
    return s.plus(i).load(F, L, off)


def misfit(diff: W, absolute: bool) -> W:
    return diff.abs() if absolute else diff * diff


def weigh(s: M, size: int, absolute: bool) -> list[W]:
    """Store the weights; lowest and highest element, sums of w and w*x."""
    mean = None
    if not absolute:
        add = loop(s.b, XS, XS + STEP * size, STEP, [zeros(s.b)], lambda i, t: [t + at(s, i) * at(s, i)])
        mean = (add[0] / float(size)).call("sqrt")

    def weight(i: W) -> tuple[W, W]:
        x = at(s, i)
        w = x.abs() if mean is None else mean + x.abs()
        s.plus(i).store(w, WS - XS)
        return x, w

    def body(i: W, low: W, high: W, sw: W, sx: W) -> list[W]:
        x, w = weight(i)
        return [x.lt(low).sel(x, low), x.gt(high).sel(x, high), sw + w, sx + w * x]

    x, w = weight(W(s.b, I64(XS)))
    return loop(s.b, XS + STEP, XS + STEP * size, STEP, [x, x, w, w * x], body)


def start(size: int, n: int, absolute: bool) -> Any:
    """Emitter: transpose sixteen sub-blocks, weigh them, and make the first guess."""

    @emitter(M, M)
    def put(src: M, s: M) -> None:
        columns(src, size, s.plus(W(s.b, I64(XS))))
        low, high, sw, sx = weigh(s, size, absolute)
        zero = low.like(0.0)
        minimum = low.gt(0.0).sel(zero, low)
        flat = high.eq(minimum)
        inverse = zero.like(float(n)) / (high - minimum)
        scale = zero.like(1.0) / inverse

        def body(i: W, error: W) -> list[W]:
            x, w = at(s, i), at(s, i, WS - XS)
            diff = scale * clamp(nearest(inverse * (x - minimum)), 0, n).sitofp() + minimum - x
            return [error + w * misfit(diff, absolute)]

        error = loop(s.b, XS, XS + STEP * size, STEP, [zero], body)[0]
        top = flat.sel(zero.like(float("inf")), high)
        scale = flat.sel(zero, scale)
        state = (top, high, low, minimum, error, scale, sw, sx, inverse, minimum)
        for off, v in zip((TOP, HIGH, LOW, MIN, ERR, SCALE, SW, SX, BEST, AT), state, strict=True):
            s.store(v, off)
        s.store(flat.sext(I32), FLAT)

    return put


@emitter(M, F, ret=I32)
def prepare(s: M, span: W) -> W:
    """This step's inverse scale; 1 if some lane leaves the range in which floats can be rounded by adding."""
    minimum = get(s, MIN)
    inverse = span.splat(L) / (get(s, TOP) - minimum)
    s.store(inverse, INV)
    fine = [(inverse * (get(s, end) - minimum)).abs().lt(2.0**22) for end in (HIGH, LOW)]
    return (fine[0] & fine[1]).mask_bits().eq(-1).sel(W(s.b, I32(0)), W(s.b, I32(1)))


def step(size: int, n: int, absolute: bool, exact: bool) -> Any:
    """Emitter: one step of the search with the inverse scale that `prepare` left."""

    @emitter(M)
    def put(s: M) -> None:
        inverse, minimum = get(s, INV), get(s, MIN)
        zero = minimum.like(0.0)

        def code(i: W, sl: W, sl2: W, sxl: W) -> list[W]:
            x, w = at(s, i), at(s, i, WS - XS)
            v = inverse * (x - minimum)
            q = clamp(nearest(v), 0, n).sitofp() if exact else rounded(v, 0, n)
            s.plus(i).store(q, QS - XS)
            wq = w * q
            return [sl + wq, sl2 + wq * q, sxl + wq * x]

        sl, sl2, sxl = loop(s.b, XS, XS + STEP * size, STEP, [zero] * 3, code)
        sw, sx = get(s, SW), get(s, SX)
        det = sw * sl2 - sl * sl
        scale, least = (sw * sxl - sx * sl) / det, (sl2 * sx - sl * sxl) / det
        above = least.gt(0.0)
        scale, least = above.sel(sxl / sl2, scale), above.sel(zero, least)

        def misfits(i: W, error: W) -> list[W]:
            diff = scale * at(s, i, QS - XS) + least - at(s, i)
            return [error + at(s, i, WS - XS) * misfit(diff, absolute)]

        error = loop(s.b, XS, XS + STEP * size, STEP, [zero], misfits)[0]
        before = get(s, ERR)
        better = det.gt(0.0) & error.lt(before)
        s.store(better.sel(error, before), ERR)
        for off, v in ((SCALE, scale), (BEST, inverse), (AT, minimum), (MIN, least)):
            s.store(better.sel(v, get(s, off)), off)

    return put


def larger(a: W, b: W) -> W:
    return a.gt(b).sel(a, b)


def share(v: W, top: W, n: int) -> W:
    """Integer scales of a super-block: nearest(n / top * v), 0 if nothing is positive."""
    inverse = top.gt(0.0).sel(top.like(float(n)) / top, top.like(0.0))
    return nearest(inverse.splat(v.n) * v) & 255


def store_scales(s: M, at: int, d: W, ls: W, dmin: W, lm: W) -> tuple[W, W]:
    """The scales that decoding will use into the state (lanes from `at`); the two halves to store."""
    (h, d), (hmin, dmin) = half_round(d), half_round(dmin)
    s.store(d.splat(ls.n) * ls.sitofp(), DD + 4 * at)
    s.store(dmin.splat(lm.n) * lm.sitofp(), MM + 4 * at)
    return h, hmin


def head45(half: int) -> Any:
    """Emitter: the head of a Q4_K or Q5_K super-block, from lanes 0..7 or 8..15."""

    @emitter(M, M)
    def put(s: M, dst: M) -> None:
        at = 8 * half
        scale = s.load(F, 8, SCALE + 4 * at)
        minimum = s.load(F, 8, MIN + 4 * at)
        minimum = (minimum.bits(I32) ^ 0x80000000).bits(F)
        zero = scale.like(0.0)
        ms, mm = fold(larger(scale, zero), larger), fold(larger(minimum, zero), larger)
        ls, lm = share(scale, ms, 63).min_(63), share(minimum, mm, 63).min_(63)
        h, hmin = store_scales(s, at, ms / 63.0, ls, mm / 63.0, lm)
        dst.store(h)
        dst.store(hmin, 2)
        a, b = (v.pick(range(4)).trunc(I8) for v in (ls, lm))
        c, d = (v.pick(range(4, 8)).trunc(I8) for v in (ls, lm))
        dst.store((a | ((c >> 4) << 6)).cat(b | ((d >> 4) << 6)), 4)
        dst.store((c & 15) | ((d & 15) << 4), 12)

    return put


@emitter(M, M)
def head2(s: M, dst: M) -> None:
    """Scales and halves of a Q2_K super-block."""
    scale = get(s, SCALE)
    minimum = (get(s, MIN).bits(I32) ^ 0x80000000).bits(F)
    zero = scale.like(0.0)
    ms, mm = fold(larger(scale, zero), larger), fold(larger(minimum, zero), larger)
    both = (share(scale, ms, 15) | (share(minimum, mm, 15) << 4)) & 255
    h, hmin = store_scales(s, 0, ms / 15.0, both & 15, mm / 15.0, both >> 4)
    dst.store(both.trunc(I8))
    dst.store(h, 80)
    dst.store(hmin, 82)


def codes(size: int, n: int) -> Any:
    """Emitter: the codes of one sub-block, one a byte, for its final scale and minimum."""

    @emitter(M, F, F, M)
    def put(src: M, d: W, m: W, dst: M) -> None:
        v = (src.load(F, size) + m.splat(size)) / d.splat(size)
        dst.store(clamp(nearest(v), 0, n).trunc(I8))

    return put


def codes_of_search(size: int, n: int) -> Any:
    """Emitter: the codes the search ended with; they stay where the final scale is 0."""

    @emitter(M, F, F, M)
    def put(src: M, inverse: W, m: W, dst: M) -> None:
        v = inverse.splat(size) * (src.load(F, size) - m.splat(size))
        dst.store(clamp(nearest(v), 0, n).trunc(I8))

    return put


@emitter(M, M)
def pack_nibbles(q: M, dst: M) -> None:
    for j in range(4):
        dst.store((q.load(I8, 32, 64 * j) & 15) | (q.load(I8, 32, 64 * j + 32) << 4), 32 * j)


@emitter(M, M)
def pack_fifth(q: M, dst: M) -> None:
    high = q.load(I8, 32) >> 4
    for j in range(1, 8):
        high = high | ((q.load(I8, 32, 32 * j) >> 4) << j)
    dst.store(high)


@emitter(M, M)
def pack_crumbs(q: M, dst: M) -> None:
    for h in range(2):
        a, b, c, d = (q.load(I8, 32, 128 * h + 32 * n) for n in range(4))
        dst.store(a | (b << 2) | (c << 4) | (d << 6), 32 * h)


start2, step2, exact2 = start(16, 3, True), step(16, 3, True, False), step(16, 3, True, True)
start4, step4, exact4 = start(32, 15, False), step(32, 15, False, False), step(32, 15, False, True)
start5, step5, exact5 = start(32, 31, False), step(32, 31, False, False), step(32, 31, False, True)
codes2, codes4, codes5 = codes(16, 3), codes(32, 15), codes(32, 31)
found2, found4, found5 = codes_of_search(16, 3), codes_of_search(32, 15), codes_of_search(32, 31)
head_a, head_b = head45(0), head45(1)


def spans(n: int, rmin: float, nstep: int) -> np.ndarray:
    """rmin + 0.1 * step + n of every step, rounded as C rounds it."""
    f = np.float32
    return np.array([f(f(rmin) + f(f(0.1) * f(i))) + f(n) for i in range(nstep + 1)], f)


SPANS2, SPANS4, SPANS5 = spans(3, -0.5, 15), spans(15, -1.0, 20), spans(31, -0.5, 15)


@kernel
def encode_q2_k(x, raw, b0, b1):
    a, o = x.ctypes.data, raw.ctypes.data
    state = np.empty(BYTES + 256, np.uint8)
    s = state.ctypes.data
    q = s + BYTES
    f = state[:XS].view(np.float32)
    for b in range(b0, b1):
        start2(a + 1024 * b, s)
        for i in range(16):
            if prepare(s, SPANS2[i]) == 0:
                step2(s)
            else:
                exact2(s)
        head2(s, o + 84 * b)
        for j in range(16):
            src, dst = a + 1024 * b + 64 * j, q + 16 * j
            if f[DD // 4 + j] != 0:
                codes2(src, f[DD // 4 + j], f[MM // 4 + j], dst)
            elif f[FLAT // 4 + j] != 0:  # all ones: a NaN
                state[BYTES + 16 * j : BYTES + 16 * j + 16] = 0
            else:
                found2(src, f[BEST // 4 + j], f[AT // 4 + j], dst)
        pack_crumbs(q, o + 84 * b + 16)
    state[0] = 0  # keeps the memory alive to here


@kernel
def pair_of_4(a, b, count, raw, state):
    """One or two super-blocks of Q4_K; `a` is the address of sixteen sub-blocks."""
    o, s = raw.ctypes.data, state.ctypes.data
    f = state[:XS].view(np.float32)
    q = s + BYTES
    start4(a, s)
    for i in range(21):
        if prepare(s, SPANS4[i]) == 0:
            step4(s)
        else:
            exact4(s)
    for h in range(count):
        dst = o + 144 * (b + h)
        if h == 0:
            head_a(s, dst)
        else:
            head_b(s, dst)
        for j in range(8):
            k, src = 8 * h + j, a + 1024 * h + 128 * j
            if f[DD // 4 + k] != 0:
                codes4(src, f[DD // 4 + k], f[MM // 4 + k], q + 32 * j)
            elif f[FLAT // 4 + k] != 0:
                state[BYTES + 32 * j : BYTES + 32 * j + 32] = 0
            else:
                found4(src, f[BEST // 4 + k], f[AT // 4 + k], q + 32 * j)
        pack_nibbles(q, dst + 16)


@kernel
def pair_of_5(a, b, count, raw, state):
    """The same for Q5_K."""
    o, s = raw.ctypes.data, state.ctypes.data
    f = state[:XS].view(np.float32)
    q = s + BYTES
    start5(a, s)
    for i in range(16):
        if prepare(s, SPANS5[i]) == 0:
            step5(s)
        else:
            exact5(s)
    for h in range(count):
        dst = o + 176 * (b + h)
        if h == 0:
            head_a(s, dst)
        else:
            head_b(s, dst)
        for j in range(8):
            k, src = 8 * h + j, a + 1024 * h + 128 * j
            if f[DD // 4 + k] != 0:
                codes5(src, f[DD // 4 + k], f[MM // 4 + k], q + 32 * j)
            elif f[FLAT // 4 + k] != 0:
                state[BYTES + 32 * j : BYTES + 32 * j + 32] = 0
            else:
                found5(src, f[BEST // 4 + k], f[AT // 4 + k], q + 32 * j)
        pack_fifth(q, dst + 16)
        pack_nibbles(q, dst + 48)


@kernel
def encode_q4_k(x, raw, b0, b1):
    state, last = np.empty(BYTES + 256, np.uint8), np.zeros(512, np.float32)
    if (b1 - b0) % 2:  # the odd one out must not look beyond its end
        last[:256] = x[256 * b1 - 256 : 256 * b1]
    for b in range(b0, b1, 2):
        a = x.ctypes.data + 1024 * b if b + 1 < b1 else last.ctypes.data
        pair_of_4(a, b, min(2, b1 - b), raw, state)
    last[0] = 0  # keeps the memory alive to here


@kernel
def encode_q5_k(x, raw, b0, b1):
    state, last = np.empty(BYTES + 256, np.uint8), np.zeros(512, np.float32)
    if (b1 - b0) % 2:  # the odd one out must not look beyond its end
        last[:256] = x[256 * b1 - 256 : 256 * b1]
    for b in range(b0, b1, 2):
        a = x.ctypes.data + 1024 * b if b + 1 < b1 else last.ctypes.data
        pair_of_5(a, b, min(2, b1 - b), raw, state)
    last[0] = 0  # keeps the memory alive to here

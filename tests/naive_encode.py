"""Obvious NumPy twins of every encoder in `apsi_inspect.kernels.encode_*`.

Written from the published description of the formats, not from the kernels: a loop over the elements of a block,
vectorised over blocks, so that every float32 sum is taken in element order as ggml's C takes it.  Each function maps
float32 of shape (blocks, block_size) to uint8 of shape (blocks, block_bytes).  `tests/test_encode.py` checks these
twins against the outside references (libgguf, libggml, ml_dtypes) and the kernels against both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import ml_dtypes
import numpy as np

F32 = np.float32
EPS = F32(1e-15)
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], F32)

Twin = Callable[[np.ndarray], np.ndarray]


# ---------------------------------------------------------------- pieces


def half(d: np.ndarray) -> np.ndarray:
    """Float32 (blocks,) -> the two little-endian bytes of its float16, (blocks, 2)."""
    return np.ascontiguousarray(d, F32).astype("<f2")[:, None].view(np.uint8)


def half_value(d: np.ndarray) -> np.ndarray:
    """What `half` stores, widened again."""
    return np.asarray(d, F32).astype(np.float16).astype(F32)


def reciprocal(d: np.ndarray) -> np.ndarray:
    return np.where(d == 0, F32(0), F32(1) / d).astype(F32)


def c_int(v: np.ndarray) -> np.ndarray:
    """C's (int)v on x86-64: truncation; NaN and what does not fit give -2**31."""
    fits = np.abs(v) < F32(2**31)
    return np.where(fits, np.trunc(np.where(fits, v, 0)), -(2**31)).astype(np.int64)


def away(v: np.ndarray) -> np.ndarray:
    """C's roundf: to nearest, ties away from zero (float64 keeps the half exact)."""
    w = v.astype(np.float64)
    return np.copysign(np.floor(np.abs(w) + 0.5), w)


def nearest(v: np.ndarray) -> np.ndarray:
    """ggml's nearest_int: ties to even by the 1.5 * 2**23 trick, with its wrap-around far outside the range."""
    bits = (v.astype(F32) + F32(12582912.0)).astype(F32).view(np.int32).astype(np.int64)
    return (bits & 0x007FFFFF) - 0x00400000


def signed_max(x: np.ndarray) -> np.ndarray:
    """The element of greatest magnitude of each row, the first one when several tie."""
    return x[np.arange(len(x)), np.argmax(np.abs(x), axis=1)]


def running_sum(terms: np.ndarray) -> np.ndarray:
    """Sum along the last axis, one float32 addition after another."""
    total = np.zeros(terms.shape[:-1], F32)
    for i in range(terms.shape[-1]):
        total = (total + terms[..., i]).astype(F32)
    return total


def nibbles(codes: np.ndarray) -> np.ndarray:
    """ggml's order: element j low, element j + half high."""
    n = codes.shape[1] // 2
    return (codes[:, :n] | codes[:, n:] << 4).astype(np.uint8)


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(p).astype(np.uint8) for p in parts], axis=1)


# ---------------------------------------------------------------- simple blocks


def q8_0(x: np.ndarray) -> np.ndarray:
    d = (np.abs(x).max(axis=1) / F32(127)).astype(F32)
    codes = c_int(away(x * reciprocal(d)[:, None]))
    return join(half(d), codes & 255)


def q4_0(x: np.ndarray) -> np.ndarray:
    d = (signed_max(x) / F32(-8)).astype(F32)
    d[np.abs(x).max(axis=1) == 0] = F32(-0.0)  # C starts from +0 and keeps it when nothing is greater
    codes = c_int(x * reciprocal(d)[:, None] + F32(8.5)) & 255
    return join(half(d), nibbles(np.minimum(codes, 15)))


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    return np.packbits((codes >> 4 & 1).astype(np.uint8), axis=1, bitorder="little")


def q5_0(x: np.ndarray) -> np.ndarray:
    d = (signed_max(x) / F32(-16)).astype(F32)
    d[np.abs(x).max(axis=1) == 0] = F32(-0.0)
    codes = np.minimum(c_int(x * reciprocal(d)[:, None] + F32(16.5)) & 255, 31)
    return join(half(d), _fifth_bits(codes), nibbles(codes & 15))


def _min_max(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lo, hi = x[:, 0].copy(), x[:, 0].copy()  # strict comparisons: of -0 and +0 the first one stays
    for i in range(1, x.shape[1]):
        lo = np.where(x[:, i] < lo, x[:, i], lo)
        hi = np.where(x[:, i] > hi, x[:, i], hi)
    d = ((hi - lo) / F32(top)).astype(F32)
    codes = c_int((x - lo[:, None]) * reciprocal(d)[:, None] + F32(0.5)) & 255
    return d, lo, codes


def q4_1(x: np.ndarray) -> np.ndarray:
    d, lo, codes = _min_max(x, 15)
    return join(half(d), half(lo), nibbles(np.minimum(codes, 15)))


def q5_1(x: np.ndarray) -> np.ndarray:
    d, lo, codes = _min_max(x, 31)
    return join(half(d), half(lo), _fifth_bits(codes), nibbles(codes & 15))


def q1_0(x: np.ndarray) -> np.ndarray:
    d = (running_sum(np.abs(x)) / F32(128)).astype(F32)
    return join(half(d), np.packbits(x >= 0, axis=1, bitorder="little"))


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """Four consecutive codes a byte, low bits first."""
    c = codes.reshape(len(codes), -1, 4)
    return c[..., 0] | c[..., 1] << 2 | c[..., 2] << 4 | c[..., 3] << 6


def q2_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(axis=1)
    codes = np.clip(c_int(away(x * reciprocal(d)[:, None])) + 1, 0, 3)
    return join(half(d), _two_bits(codes))


def _ternary(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d = np.abs(x).max(axis=1)
    v = away(x * reciprocal(d)[:, None])
    return d, np.where(np.isfinite(v), v, 0).astype(np.int64) + 1


def tq2_0(x: np.ndarray) -> np.ndarray:
    d, codes = _ternary(x)
    c = codes.reshape(-1, 2, 4, 32)
    return join((c[:, :, 0] | c[:, :, 1] << 2 | c[:, :, 2] << 4 | c[:, :, 3] << 6).reshape(-1, 64), half(d))


def tq1_0(x: np.ndarray) -> np.ndarray:
    d, codes = _ternary(x)

    def digits(c: np.ndarray) -> np.ndarray:  # (blocks, digit, byte)
        q = sum(c[:, n] * 3 ** (4 - n) for n in range(c.shape[1]))
        return (q * 256 + 242) // 243

    parts = [codes[:, :160].reshape(-1, 5, 32), codes[:, 160:240].reshape(-1, 5, 16), codes[:, 240:].reshape(-1, 4, 4)]
    return join(*[digits(c) for c in parts], half(d))


def floor_log2(a: np.ndarray) -> np.ndarray:
    """floor(log2f(a)) with log2 rounded to float32 first, as C rounds it."""
    return np.floor(np.array([F32(math.log2(v)) for v in a.astype(np.float64).tolist()], F32)).astype(np.int64)


def _nearest_e2m1(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    best = np.zeros(x.shape, np.int64)
    err = np.abs(E2M1_DOUBLED[0] * d[:, None] - x)
    for i in range(1, 16):
        e = np.abs(E2M1_DOUBLED[i] * d[:, None] - x)
        best, err = np.where(e < err, i, best), np.where(e < err, e, err)
    return best


def mxfp4(x: np.ndarray) -> np.ndarray:
    amax = np.abs(x).max(axis=1)
    e = np.where(amax > 0, floor_log2(np.where(amax > 0, amax, 1)) - 2 + 127, 0) & 255
    d = np.ldexp(1.0, e - 128).astype(F32)
    return join(e[:, None], nibbles(_nearest_e2m1(x, d)))


def ue4m3(v: float) -> int:
    """ggml's unsigned E4M3 of a scale: ties up, and 0x7E from 248 on."""
    x = min(F32(v), F32(448))
    if not x > 0:
        return 0
    bits = int(x.view(np.uint32))
    exponent = (bits >> 23) - 127 + 7
    if exponent <= 0:
        mantissa = min(int(F32(x * F32(512) + F32(0.5))), 7)
        return max(mantissa, 0)
    if exponent >= 15:
        return 0x7E
    code = (exponent << 3 | bits >> 20 & 7) + (bits >> 19 & 1)
    return 0x7E if code >> 3 >= 15 else code


def ue4m3_value(code: int) -> float:
    """Half the value, as the doubled E2M1 codes want it."""
    e, m = code >> 3 & 15, code & 7
    if code in (0, 0x7F):
        return 0.0
    return 0.5 * (m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))


def nvfp4(x: np.ndarray) -> np.ndarray:
    sub = x.reshape(-1, 16)
    scale = np.array([ue4m3(a) for a in (np.abs(sub).max(axis=1) / F32(6)).astype(F32)], np.int64)
    codes = _nearest_e2m1(sub, np.array([ue4m3_value(int(s)) for s in scale], F32))
    return join(scale.reshape(-1, 4), nibbles(codes).reshape(-1, 32))


# ---------------------------------------------------------------- IQ4


def iq4_index(v: np.ndarray) -> np.ndarray:
    """Index of the nearest table value, ties to the upper one; NaN falls through to the last."""
    k = IQ4_VALUES
    mid = [(float(a) + float(b)) / 2 for a, b in pairwise(k)]
    return sum((~(v < F32(m))).astype(np.int64) for m in mid)


def _iq4_scale(x: np.ndarray) -> np.ndarray:
    """Search D for rows of 32."""
    w = (x * x).astype(F32)
    smax = signed_max(x)

    def sums(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = IQ4_VALUES[iq4_index((inverse[:, None] * x).astype(F32))]
        return running_sum(w * q * x), running_sum(w * q * q)

    a, b = sums(F32(1) / (-smax / IQ4_VALUES[0]))
    d = np.where(b > 0, a / b, F32(0)).astype(F32)
    best = (d * a).astype(F32)
    for t in range(-7, 8):
        a, b = sums(F32(t - 127) / smax)
        better = (b > 0) & (a * a > best * b)
        d = np.where(better, a / b, d).astype(F32)
        best = np.where(better, d * a, best).astype(F32)
    return np.where(np.abs(smax) < EPS, F32(0), d).astype(F32)


def iq4_nl(x: np.ndarray) -> np.ndarray:
    d = _iq4_scale(x)
    return join(half(d), nibbles(iq4_index(x * reciprocal(d)[:, None])))


def iq4_xs(x: np.ndarray) -> np.ndarray:
    n = len(x)
    scale = _iq4_scale(x.reshape(-1, 32)).reshape(n, 8)
    d = (-first_greatest(scale) / F32(32)).astype(F32)
    code = np.clip(nearest(reciprocal(d)[:, None] * scale), -32, 31)
    dl = (d[:, None] * code.astype(F32)).astype(F32)
    q = nibbles(iq4_index(x.reshape(-1, 32) * reciprocal(dl.reshape(-1))[:, None]))
    code += 32
    high = sum((code[:, j] >> 4) << 2 * j for j in range(8)).astype("<u2")[:, None].view(np.uint8)
    low = (code[:, 0::2] & 15) | (code[:, 1::2] & 15) << 4
    return join(half(d), high, low, q.reshape(n, 128))


def first_greatest(scale: np.ndarray) -> np.ndarray:
    """The signed scale of greatest magnitude in each row, starting from +0 with strict comparisons."""
    best = np.zeros(len(scale), F32)
    for j in range(scale.shape[1]):
        best = np.where(np.abs(scale[:, j]) > np.abs(best), scale[:, j], best)
    return best


# ---------------------------------------------------------------- K-quants


def search_min(
    x: np.ndarray, w: np.ndarray, top: int, rmin: float, nstep: int, *, absolute: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Search A: codes, scale and stored minimum of each row."""

    def error(s: np.ndarray, q: np.ndarray, m: np.ndarray) -> np.ndarray:
        diff = (s[:, None] * q + m[:, None] - x).astype(F32)
        return running_sum(w * (np.abs(diff) if absolute else diff * diff))

    def encode(inverse: np.ndarray, m: np.ndarray) -> np.ndarray:
        return np.clip(nearest(inverse[:, None] * (x - m[:, None])), 0, top).astype(F32)

    lo, hi = x.min(axis=1), x.max(axis=1)
    lo = np.where(lo > 0, F32(0), lo)
    flat = hi == lo
    sw, sx = running_sum(w), running_sum(w * x)
    inverse = (F32(top) / (hi - lo)).astype(F32)
    scale = (F32(1) / inverse).astype(F32)
    codes = encode(inverse, lo)
    best = error(scale, codes, lo)
    start = lo
    for step in range(nstep + 1):
        inverse = ((F32(rmin) + F32(0.1) * F32(step) + F32(top)) / (hi - lo)).astype(F32)
        q = encode(inverse, lo)
        sl, sl2, sxl = running_sum(w * q), running_sum(w * q * q), running_sum(w * q * x)
        det = sw * sl2 - sl * sl
        s = ((sw * sxl - sx * sl) / det).astype(F32)
        m = ((sl2 * sx - sl * sxl) / det).astype(F32)
        s = np.where(m > 0, sxl / sl2, s).astype(F32)
        m = np.where(m > 0, F32(0), m).astype(F32)
        err = error(s, q, m)
        better = (det > 0) & (err < best)
        codes = np.where(better[:, None], q, codes)
        best, scale, lo = np.where(better, err, best), np.where(better, s, scale), np.where(better, m, lo)
    codes = np.where(flat[:, None], F32(0), codes)
    return codes.astype(np.int64), np.where(flat, F32(0), scale), -np.where(flat, start, lo)


def q2_k(x: np.ndarray) -> np.ndarray:
    n = len(x)
    sub = x.reshape(-1, 16)
    codes, scale, minimum = search_min(sub, np.abs(sub), 3, -0.5, 15, absolute=True)
    scale, minimum = scale.reshape(n, 16), minimum.reshape(n, 16)

    def share(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        top = np.maximum(v.max(axis=1), F32(0))
        inverse = (F32(15) / top)[:, None]
        return np.where(top > 0, top / F32(15), 0), np.where(top[:, None] > 0, nearest(inverse * v), 0)

    d, ls = share(scale)
    dmin, lm = share(minimum)
    sc = (ls | lm << 4) & 255
    dd = (half_value(d)[:, None] * (sc & 15).astype(F32)).reshape(-1, 1)
    mm = (half_value(dmin)[:, None] * (sc >> 4).astype(F32)).reshape(-1, 1)
    again = np.clip(nearest((sub + mm) / dd), 0, 3)
    q = np.where(dd == 0, codes, again).reshape(n, 2, 4, 32)
    qs = (q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).reshape(n, 64)
    return join(sc, qs, half(d), half(dmin))


def _q45_k(x: np.ndarray, top: int, rmin: float, nstep: int) -> tuple[np.ndarray, np.ndarray]:
    """Head (d, dmin, scales) and codes (blocks, 8, 32)."""
    n = len(x)
    sub = x.reshape(-1, 32)
    w = (np.sqrt(running_sum(sub * sub) / F32(32))[:, None] + np.abs(sub)).astype(F32)
    codes, scale, minimum = search_min(sub, w, top, rmin, nstep, absolute=False)
    scale, minimum = scale.reshape(n, 8), minimum.reshape(n, 8)
    ms, mm = np.maximum(scale.max(axis=1), F32(0)), np.maximum(minimum.max(axis=1), F32(0))
    ls = np.minimum(nearest(np.where(ms > 0, F32(63) / ms, F32(0))[:, None] * scale) & 255, 63)
    lm = np.minimum(nearest(np.where(mm > 0, F32(63) / mm, F32(0))[:, None] * minimum) & 255, 63)
    packed = np.zeros((n, 12), np.int64)
    packed[:, :4] = ls[:, :4] | (ls[:, 4:] >> 4) << 6
    packed[:, 4:8] = lm[:, :4] | (lm[:, 4:] >> 4) << 6
    packed[:, 8:] = (ls[:, 4:] & 15) | (lm[:, 4:] & 15) << 4
    d, dmin = (ms / F32(63)).astype(F32), (mm / F32(63)).astype(F32)
    dd = (half_value(d)[:, None] * ls.astype(F32)).reshape(-1, 1)
    off = (half_value(dmin)[:, None] * lm.astype(F32)).reshape(-1, 1)
    again = np.clip(nearest((sub + off) / dd), 0, top)
    return join(half(d), half(dmin), packed), np.where(dd == 0, codes, again).reshape(n, 8, 32)


def q4_k(x: np.ndarray) -> np.ndarray:
    head, q = _q45_k(x, 15, -1.0, 20)
    return join(head, (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(x), 128))


def q5_k(x: np.ndarray) -> np.ndarray:
    head, q = _q45_k(x, 31, -0.5, 15)
    high = sum((q[:, j] >> 4) << j for j in range(8))
    low = q & 15
    return join(head, high, (low[:, 0::2] | low[:, 1::2] << 4).reshape(len(x), 128))


def _search_q3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Search B: stored codes 0..7 and scale of each row of 16."""
    smax = signed_max(x)
    w = (x * x).astype(F32)
    wx = (w * x).astype(F32)
    codes = np.clip(nearest((F32(-4) / smax)[:, None] * x), -4, 3).astype(F32)
    a, b = running_sum(wx * codes), running_sum(w * codes * codes)
    live = np.ones(len(x), bool)
    for _ in range(5):
        changed = np.zeros(len(x), bool)
        for i in range(16):
            q = codes[:, i]
            sa, sb = a - wx[:, i] * q, b - w[:, i] * q * q
            new = np.clip(nearest(x[:, i] * sb / sa), -4, 3).astype(F32)
            na, nb = sa + wx[:, i] * new, sb + w[:, i] * new * new
            take = live & (sa > 0) & (new != q) & (nb > 0) & (na * na * b > a * a * nb)
            codes[:, i] = np.where(take, new, q)
            a, b = np.where(take, na, a).astype(F32), np.where(take, nb, b).astype(F32)
            changed |= take
        live &= changed
    zero = np.abs(smax) < EPS
    scale = np.where(b > 0, a / b, F32(0)).astype(F32)
    return np.where(zero[:, None], 0, codes + 4).astype(np.int64), np.where(zero, F32(0), scale)


def q3_k(x: np.ndarray) -> np.ndarray:
    n = len(x)
    sub = x.reshape(-1, 16)
    codes, scale = _search_q3(sub)
    scale = scale.reshape(n, 16)
    ms = first_greatest(scale)
    inverse = (F32(-32) / ms).astype(F32)
    sc = np.clip(nearest(inverse[:, None] * scale).astype(np.int8).astype(np.int64), -32, 31) + 32
    sc = np.where(ms[:, None] == 0, 0, sc)
    d = np.where(ms == 0, F32(0), F32(1) / inverse).astype(F32)
    dd = (half_value(d)[:, None] * (sc - 32).astype(F32)).reshape(-1, 1)
    q = np.where(dd == 0, codes, np.clip(nearest(sub / dd), -4, 3) + 4).reshape(n, 8, 32)
    hmask = sum((q[:, j] >> 2) << j for j in range(8))
    p = (q & 3).reshape(n, 2, 4, 32)
    low = (sc[:, :8] & 15) | (sc[:, 8:] & 15) << 4
    high = sum((sc[:, 4 * k : 4 * k + 4] >> 4) << 2 * k for k in range(4))
    qs = (p[:, :, 0] | p[:, :, 1] << 2 | p[:, :, 2] << 4 | p[:, :, 3] << 6).reshape(n, 64)
    return join(hmask, qs, low, high, half(d))


def _search_q6(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Search C: stored codes 0..63 and scale of each row of 16."""
    smax = signed_max(x)
    w = (x * x).astype(F32)

    def attempt(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q = np.clip(nearest(inverse[:, None] * x), -32, 31).astype(F32)
        return q, running_sum(w * x * q), running_sum(w * q * q)

    codes, a, b = attempt((F32(-32) / smax).astype(F32))
    scale = np.where(b != 0, a / b, F32(0)).astype(F32)
    best = (scale * a).astype(F32)
    for k in [*range(-9, 0), *range(1, 10)]:
        q, a, b = attempt((-(F32(32) + F32(0.1) * F32(k)) / smax).astype(F32))
        better = (b > 0) & (a * a > best * b)
        codes = np.where(better[:, None], q, codes)
        scale = np.where(better, a / b, scale).astype(F32)
        best = np.where(better, scale * a, best).astype(F32)
    zero = np.abs(smax) < EPS
    return np.where(zero[:, None], 0, codes + 32).astype(np.int64), np.where(zero, F32(0), scale)


def q6_k(x: np.ndarray) -> np.ndarray:
    n = len(x)
    sub = x.reshape(-1, 16)
    codes, scale = _search_q6(sub)
    scale = scale.reshape(n, 16)
    ms = first_greatest(scale)
    inverse = (F32(-128) / ms).astype(F32)
    d = (F32(1) / inverse).astype(F32)
    sc = np.minimum(127, nearest(inverse[:, None] * scale)).astype(np.int8)
    dd = (half_value(d)[:, None] * sc.astype(F32)).reshape(-1, 1)
    q = np.where(dd == 0, codes, np.clip(nearest(sub / dd), -32, 31) + 32).reshape(n, 2, 4, 32)
    low = q & 15
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2).reshape(n, 128)
    qh = sum((q[:, :, k] >> 4) << 2 * k for k in range(4)).reshape(n, 64)
    out = join(ql, qh, sc.view(np.uint8), half(d))
    out[np.abs(ms) < EPS] = 0
    return out


# ---------------------------------------------------------------- single numbers


def bf16(x: np.ndarray) -> np.ndarray:
    """ggml's rule: ties to even, NaN quieted keeping its upper payload bits."""
    u = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.int64)
    rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, u >> 16 | 64, rounded).astype("<u2").reshape(-1, 1).view(np.uint8)


def f16(x: np.ndarray) -> np.ndarray:
    """NumPy's cast, except that a NaN becomes 0x7E00 with its sign, as in ggml."""
    h = np.ascontiguousarray(x, F32).astype("<f2").view("<u2").reshape(-1)
    sign = (np.ascontiguousarray(x, F32).view(np.uint32).reshape(-1) >> 16 & 0x8000).astype("<u2")
    return np.where(np.isnan(x).reshape(-1), sign | 0x7E00, h).astype("<u2")[:, None].view(np.uint8)


def cast(name: str) -> Twin:
    """The ml_dtypes conversion, one code a byte."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    return lambda x: np.ascontiguousarray(x, F32).reshape(-1, 1).astype(dtype).view(np.uint8)


def pack4(codes: np.ndarray) -> np.ndarray:
    """Two consecutive codes a byte, the first one low."""
    c = codes.reshape(-1, 2).astype(np.uint8)
    return (c[:, :1] | c[:, 1:] << 4).astype(np.uint8)


def pack6(codes: np.ndarray) -> np.ndarray:
    """Four codes as a 24-bit little-endian integer."""
    c = codes.reshape(-1, 4).astype(np.uint32)
    word = c[:, 0] | c[:, 1] << 6 | c[:, 2] << 12 | c[:, 3] << 18
    return np.stack([word & 255, word >> 8 & 255, word >> 16], axis=1).astype(np.uint8)


GGML: dict[str, tuple[int, int, Twin]] = {
    # name: (block_size, block_bytes, twin)
    "Q8_0": (32, 34, q8_0),
    "Q4_0": (32, 18, q4_0),
    "Q4_1": (32, 20, q4_1),
    "Q5_0": (32, 22, q5_0),
    "Q5_1": (32, 24, q5_1),
    "Q1_0": (128, 18, q1_0),
    "Q2_0": (64, 18, q2_0),
    "TQ1_0": (256, 54, tq1_0),
    "TQ2_0": (256, 66, tq2_0),
    "MXFP4": (32, 17, mxfp4),
    "NVFP4": (64, 36, nvfp4),
    "IQ4_NL": (32, 18, iq4_nl),
    "IQ4_XS": (256, 136, iq4_xs),
    "Q2_K": (256, 84, q2_k),
    "Q3_K": (256, 110, q3_k),
    "Q4_K": (256, 144, q4_k),
    "Q5_K": (256, 176, q5_k),
    "Q6_K": (256, 210, q6_k),
}


def encode(name: str, x: np.ndarray) -> np.ndarray:
    """Any of `GGML`: float32 of any shape whose size is a whole number of blocks -> flat bytes."""
    size, _, twin = GGML[name]
    with np.errstate(all="ignore"):
        return twin(np.ascontiguousarray(x, F32).reshape(-1, size)).reshape(-1)

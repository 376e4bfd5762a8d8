"""Decoders of K-quants as explicit vectors; same contract, names and bits as in `kquants`.

A large aligned result is written past the caches. Needs what `_jit.vectors_pay` asks for. `tests/test_decode.py`
compares the two.
"""

from __future__ import annotations

from ._jit import kernel
from .simd import I8, F, M, Put, W, stored_and_streamed, streams


def _halves(v: W, j: int) -> W:
    """Element j sixteen times, then element j + 1 sixteen times."""
    return v.pick([j] * 16 + [j + 1] * 16)


def _q2_k(src: M, put: Put) -> None:
    s = src.load(I8, 16)
    dl = src.half(80).splat(16) * (s & 15).uitofp(F)
    ml = src.half(82).splat(16) * (s >> 4).uitofp(F)
    for h in range(2):
        q = src.load(I8, 32, 16 + 32 * h)
        for k in range(4):
            j = 8 * h + 2 * k
            put(_halves(dl, j) * ((q >> (2 * k)) & 3).uitofp(F) - _halves(ml, j), 64 * j)


def _q3_k(src: M, put: Put) -> None:
    s, high = src.load(I8, 8, 96), src.load(I8, 4, 104).pick([0, 1, 2, 3] * 4)
    low = (s & 15).cat(s >> 4)
    high = (high >> high.vector(2 * (j // 4) for j in range(16))) & 3
    dl = src.half(108).splat(16) * ((low | (high << 4)) - 32).sitofp(F)
    hm = src.load(I8, 32)
    for h in range(2):
        q = src.load(I8, 32, 32 + 32 * h)
        for k in range(4):
            third = ((hm >> (4 * h + k)) & 1) << 2
            v = (((q >> (2 * k)) & 3) | third) - 4
            put(_halves(dl, 8 * h + 2 * k) * v.sitofp(F), 512 * h + 128 * k)


def _scales_mins(src: M) -> tuple[W, W]:
    """The eight scales and minima of Q4_K and Q5_K, times d and dmin."""
    a, b, c = src.load(I8, 4, 4), src.load(I8, 4, 8), src.load(I8, 4, 12)
    sc = (a & 63).cat((c & 15) | ((a >> 6) << 4))
    mn = (b & 63).cat((c >> 4) | ((b >> 6) << 4))
    return src.half(0).splat(8) * sc.uitofp(F), src.half(2).splat(8) * mn.uitofp(F)


def _q4_k(src: M, put: Put) -> None:
    dl, ml = _scales_mins(src)
    for j in range(8):
        q = src.load(I8, 32, 16 + 32 * (j // 2))
        q = q >> 4 if j % 2 else q & 15
        put(dl.pick([j] * 32) * q.uitofp(F) - ml.pick([j] * 32), 128 * j)


def _q5_k(src: M, put: Put) -> None:
    dl, ml = _scales_mins(src)
    qh = src.load(I8, 32, 16)
    for j in range(8):
        q = src.load(I8, 32, 48 + 32 * (j // 2))
        q = q >> 4 if j % 2 else q & 15
        q = q | (((qh >> j) & 1) << 4)
        put(dl.pick([j] * 32) * q.uitofp(F) - ml.pick([j] * 32), 128 * j)


def _q6_k(src: M, put: Put) -> None:
    dl = src.half(208).splat(16) * src.load(I8, 16, 192).sitofp(F)
    for h in range(2):
        a, b = src.load(I8, 32, 64 * h), src.load(I8, 32, 64 * h + 32)
        qh = src.load(I8, 32, 128 + 32 * h)
        for k, low in enumerate((a & 15, b & 15, a >> 4, b >> 4)):
            q = (low | (((qh >> (2 * k)) & 3) << 4)) - 32
            put(_halves(dl, 8 * h + 2 * k) * q.sitofp(F), 512 * h + 128 * k)


def _q8_k(src: M, put: Put) -> None:
    d = src.load(F).splat(32)
    for k in range(8):
        put(src.load(I8, 32, 4 + 32 * k).sitofp(F) * d, 128 * k)


put_q2_k, stream_q2_k = stored_and_streamed(_q2_k)
put_q3_k, stream_q3_k = stored_and_streamed(_q3_k)
put_q4_k, stream_q4_k = stored_and_streamed(_q4_k)
put_q5_k, stream_q5_k = stored_and_streamed(_q5_k)
put_q6_k, stream_q6_k = stored_and_streamed(_q6_k)
put_q8_k, stream_q8_k = stored_and_streamed(_q8_k)


# The loops differ in three names and a size. Numba's cache wants a function of its own for each, in a file.
@kernel
def decode_q2_k(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q2_k(r + b * 84, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_q2_k(r + b * 84, o + b * 1024)


@kernel
def decode_q3_k(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q3_k(r + b * 110, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_q3_k(r + b * 110, o + b * 1024)


@kernel
def decode_q4_k(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q4_k(r + b * 144, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_q4_k(r + b * 144, o + b * 1024)


@kernel
def decode_q5_k(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q5_k(r + b * 176, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_q5_k(r + b * 176, o + b * 1024)


@kernel
def decode_q6_k(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q6_k(r + b * 210, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_q6_k(r + b * 210, o + b * 1024)


@kernel
def decode_q8_k(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q8_k(r + b * 292, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_q8_k(r + b * 292, o + b * 1024)

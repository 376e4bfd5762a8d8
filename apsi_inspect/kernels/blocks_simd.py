"""Decoders of simple blocks as explicit vectors, for the types where LLVM's own loops fall behind C.

Same contract, same names and same bits as in `blocks`, whose plain loops are the definition. A large aligned result is
written past the caches. Needs what `_jit.vectors_pay` asks for. `tests/test_decode.py` compares the two.
"""

from __future__ import annotations

from ._jit import kernel
from .simd import I8, I16, I32, F, M, Put, W, stored_and_streamed, streams


def _nibbles(q: W) -> W:
    """ggml's order: all low nibbles, then all high ones."""
    return (q & 15).cat(q >> 4)


def q4_0(src: M, put: Put) -> None:
    put((_nibbles(src.load(I8, 16, 2)) - 8).sitofp(F) * src.half().splat(32))


def q4_1(src: M, put: Put) -> None:
    put(_nibbles(src.load(I8, 16, 4)).uitofp(F) * src.half().splat(32) + src.half(2).splat(32))


def _fifth_bits(h: W) -> W:
    """The 32 bits of an i32 as bytes 0 or 16."""
    v = h.splat(32) >> h.vector(range(32))
    return ((v & 1) << 4).trunc(I8)


def q5_0(src: M, put: Put) -> None:
    q = _nibbles(src.load(I8, 16, 6)) | _fifth_bits(src.load(I32, off=2))
    put((q - 16).sitofp(F) * src.half().splat(32))


def q5_1(src: M, put: Put) -> None:
    q = _nibbles(src.load(I8, 16, 8)) | _fifth_bits(src.load(I32, off=4))
    put(q.uitofp(F) * src.half().splat(32) + src.half(2).splat(32))


def q8_0(src: M, put: Put) -> None:
    src.prefetch(4096)
    put(src.load(I8, 32, 2).sitofp(F) * src.half().splat(32))


def _q8_1(src: M, put: Put) -> None:
    put(src.load(I8, 32, 4).sitofp(F) * src.half().splat(32))


def _tq2_0(src: M, put: Put) -> None:
    d = src.half(64).splat(32)
    for h in range(2):
        q = src.load(I8, 32, 32 * h)
        for n in range(4):
            put((((q >> (2 * n)) & 3) - 1).sitofp(F) * d, 512 * h + 128 * n)


def _trits(q: W, power: int) -> W:
    """A base-3 digit of bytes that hold a fraction of 256, minus 1."""
    return ((((q * power).zext(I16) * 3) >> 8) - 1).sitofp(F)


def _tq1_0(src: M, put: Put) -> None:
    d = src.half(52).splat(16)
    a, b, c = src.load(I8, 16), src.load(I8, 16, 16), src.load(I8, 16, 32)
    for n in range(5):
        put(_trits(a, 3**n) * d, 128 * n)
        put(_trits(b, 3**n) * d, 128 * n + 64)
        put(_trits(c, 3**n) * d, 640 + 64 * n)
    last = src.load(I8, 4, 48).pick([0, 1, 2, 3] * 4)
    put(_trits(last * last.vector(3 ** (i // 4) for i in range(16)), 1) * d, 960)


def _e2m1_doubled(q: W) -> W:
    """Twice the value of E2M1 codes (bytes): 0 1 2 3 4 6 8 12, the greatest of three lines; code 8 is +0 as in ggml."""
    c = q & 7
    v = c.call("smax", (c << 1) - 4).call("smax", (c << 2) - 16)
    minus = q.like(0) - (q >> 3)  # all ones where negative
    return ((v ^ minus) - minus).sitofp(F)


def _mxfp4(src: M, put: Put) -> None:
    e = src.load(I8).zext(I32)
    d = e.lt(2).sel(e.like(0x00200000) << (e & 1), (e - 1) << 23).bits(F)
    put(_e2m1_doubled(_nibbles(src.load(I8, 16, 1))) * d.splat(32))


def _nvfp4(src: M, put: Put) -> None:
    s = src.load(I8, 4).zext(I32)
    v = (((s & 0x7F) << 20).bits(F) * 2.0**119).bits(I32)  # E4M3 in place, rebiased by 120, halved
    d = s.eq(0x7F).sel(s.like(0), v).bits(F)
    for i in range(4):
        put(_e2m1_doubled(_nibbles(src.load(I8, 8, 4 + 8 * i))) * d.lane(i).splat(16), 64 * i)


put_q4_0, stream_q4_0 = stored_and_streamed(q4_0)
put_q4_1, stream_q4_1 = stored_and_streamed(q4_1)
put_q5_0, stream_q5_0 = stored_and_streamed(q5_0)
put_q5_1, stream_q5_1 = stored_and_streamed(q5_1)
put_q8_0, stream_q8_0 = stored_and_streamed(q8_0)
put_q8_1, stream_q8_1 = stored_and_streamed(_q8_1)
put_tq2_0, stream_tq2_0 = stored_and_streamed(_tq2_0)
put_tq1_0, stream_tq1_0 = stored_and_streamed(_tq1_0)
put_mxfp4, stream_mxfp4 = stored_and_streamed(_mxfp4)
put_nvfp4, stream_nvfp4 = stored_and_streamed(_nvfp4)


# The loops differ in three names and two sizes. Numba's cache wants a function of its own for each, in a file.
@kernel
def decode_q4_0(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q4_0(r + b * 18, o + b * 128)
    else:
        for b in range(b0, b1):
            put_q4_0(r + b * 18, o + b * 128)


@kernel
def decode_q4_1(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q4_1(r + b * 20, o + b * 128)
    else:
        for b in range(b0, b1):
            put_q4_1(r + b * 20, o + b * 128)


@kernel
def decode_q5_0(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q5_0(r + b * 22, o + b * 128)
    else:
        for b in range(b0, b1):
            put_q5_0(r + b * 22, o + b * 128)


@kernel
def decode_q5_1(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q5_1(r + b * 24, o + b * 128)
    else:
        for b in range(b0, b1):
            put_q5_1(r + b * 24, o + b * 128)


@kernel
def decode_q8_0(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q8_0(r + b * 34, o + b * 128)
    else:
        for b in range(b0, b1):
            put_q8_0(r + b * 34, o + b * 128)


@kernel
def decode_q8_1(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_q8_1(r + b * 36, o + b * 128)
    else:
        for b in range(b0, b1):
            put_q8_1(r + b * 36, o + b * 128)


@kernel
def decode_tq2_0(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_tq2_0(r + b * 66, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_tq2_0(r + b * 66, o + b * 1024)


@kernel
def decode_tq1_0(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_tq1_0(r + b * 54, o + b * 1024)
    else:
        for b in range(b0, b1):
            put_tq1_0(r + b * 54, o + b * 1024)


@kernel
def decode_mxfp4(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_mxfp4(r + b * 17, o + b * 128)
    else:
        for b in range(b0, b1):
            put_mxfp4(r + b * 17, o + b * 128)


@kernel
def decode_nvfp4(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    if streams(o, out.size):
        for b in range(b0, b1):
            stream_nvfp4(r + b * 36, o + b * 256)
    else:
        for b in range(b0, b1):
            put_nvfp4(r + b * 36, o + b * 256)

"""F16, BF16, E4M3FN and E5M2 to float32 as explicit vectors; same contract and values as in `floats`.

A large aligned result is written past the caches. Needs what `_jit.vectors_pay` asks for. `tests/test_decode.py`
compares the two over all codes.
"""

from __future__ import annotations

from ._jit import kernel
from .bits import half_at, u16_at, unbits
from .floats import U32
from .simd import I8, I16, I32, F, M, Put, W, stored_and_streamed, streams

LANES = 32


def _f16(src: M, put: Put) -> None:
    put(src.load(I16, LANES).half_to_float())


def _bf16(src: M, put: Put) -> None:
    put((src.load(I16, LANES).zext(I32) << 16).bits(F))


def _e4m3_values(c: W) -> W:
    """E4M3FN: exponent and mantissa in place, rebiased by a multiplication that also scales the subnormals."""
    u = c.zext(I32)
    a = u & 0x7F
    v = ((a << 20).bits(F) * 2.0**120).bits(I32)
    v = a.eq(0x7F).sel(v.like(0x7FC00000), v)
    return (v | ((u & 0x80) << 24)).bits(F)


def _e4m3(src: M, put: Put) -> None:
    put(_e4m3_values(src.load(I8, LANES)))


def _e5m2(src: M, put: Put) -> None:
    """E5M2 is the upper byte of a half."""
    put((src.load(I8, LANES).zext(I16) << 8).half_to_float())


put_f16, stream_f16 = stored_and_streamed(_f16)
put_bf16, stream_bf16 = stored_and_streamed(_bf16)
put_e4m3, stream_e4m3 = stored_and_streamed(_e4m3)
put_e5m2, stream_e5m2 = stored_and_streamed(_e5m2)


# Elements [b0, b1) start and end anywhere: the vectors begin at b0, which streaming needs to be a multiple of 16, and a
# scalar loop finishes. The loops differ in a few names; Numba's cache wants a function of its own for each, in a file.


@kernel
def widen_f16(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    end = b0 + (b1 - b0) // LANES * LANES
    if streams(out) and b0 % 16 == 0:
        for i in range(b0, end, LANES):
            stream_f16(r + 2 * i, o + 4 * i)
    else:
        for i in range(b0, end, LANES):
            put_f16(r + 2 * i, o + 4 * i)
    for i in range(end, b1):
        out[i] = half_at(r + 2 * i)


@kernel
def widen_bf16(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    end = b0 + (b1 - b0) // LANES * LANES
    if streams(out) and b0 % 16 == 0:
        for i in range(b0, end, LANES):
            stream_bf16(r + 2 * i, o + 4 * i)
    else:
        for i in range(b0, end, LANES):
            put_bf16(r + 2 * i, o + 4 * i)
    for i in range(end, b1):
        out[i] = unbits(U32(U32(u16_at(r + 2 * i)) << U32(16)))


@kernel
def widen_e4m3(raw, out, b0, b1, table):
    r, o = raw.ctypes.data, out.ctypes.data
    end = b0 + (b1 - b0) // LANES * LANES
    if streams(out) and b0 % 16 == 0:
        for i in range(b0, end, LANES):
            stream_e4m3(r + i, o + 4 * i)
    else:
        for i in range(b0, end, LANES):
            put_e4m3(r + i, o + 4 * i)
    for i in range(end, b1):
        out[i] = table[raw[i]]


@kernel
def widen_e5m2(raw, out, b0, b1, table):
    r, o = raw.ctypes.data, out.ctypes.data
    end = b0 + (b1 - b0) // LANES * LANES
    if streams(out) and b0 % 16 == 0:
        for i in range(b0, end, LANES):
            stream_e5m2(r + i, o + 4 * i)
    else:
        for i in range(b0, end, LANES):
            put_e5m2(r + i, o + 4 * i)
    for i in range(end, b1):
        out[i] = table[raw[i]]

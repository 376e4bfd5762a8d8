"""Plain floats to float32 as explicit vectors; same contract and values as in `floats`.

A large aligned result is written past the caches. Needs what `_jit.vectors_pay` asks for. `tests/test_decode.py`
compares the two over all codes.
"""

from __future__ import annotations

from ._jit import kernel
from .bits import half_at, u16_at, unbits
from .codes_simd import bits6_row, nibble_row, none_row
from .floats import U32
from .simd import I16, I32, F, M, Put, stored_and_streamed, streams

LANES = 32


def _f16(src: M, put: Put) -> None:
    put(src.load(I16, LANES).half_to_float())


def _bf16(src: M, put: Put) -> None:
    put((src.load(I16, LANES).zext(I32) << 16).bits(F))


put_f16, stream_f16 = stored_and_streamed(_f16)
put_bf16, stream_bf16 = stored_and_streamed(_bf16)


# Elements [b0, b1) start and end anywhere: the vectors begin at b0, which streaming needs to be a multiple of 16, and a
# scalar loop finishes. The loops differ in a few names; Numba's cache wants a function of its own for each, in a file.


@kernel
def widen_f16(raw, out, b0, b1):
    r, o = raw.ctypes.data, out.ctypes.data
    end = b0 + (b1 - b0) // LANES * LANES
    if streams(o, out.size) and b0 % 16 == 0:
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
    if streams(o, out.size) and b0 % 16 == 0:
        for i in range(b0, end, LANES):
            stream_bf16(r + 2 * i, o + 4 * i)
    else:
        for i in range(b0, end, LANES):
            put_bf16(r + 2 * i, o + 4 * i)
    for i in range(end, b1):
        out[i] = unbits(U32(U32(u16_at(r + 2 * i)) << U32(16)))


@kernel
def widen_none(raw, out, b0, b1, table, kind):
    stream = streams(out.ctypes.data, out.size) and b0 % 16 == 0
    none_row(raw[b0:b1], out[b0:b1], table, kind, stream)


@kernel
def widen_nibble(raw, out, b0, b1, table, kind):
    stream = streams(out.ctypes.data, out.size) and b0 % 8 == 0
    nibble_row(raw[b0:b1], out[2 * b0 : 2 * b1], table, kind, stream)


@kernel
def widen_bits6(raw, out, b0, b1, table, kind):
    stream = streams(out.ctypes.data, out.size) and b0 % 4 == 0
    bits6_row(raw[3 * b0 : 3 * b1], out[4 * b0 : 4 * b1], table, kind, stream)

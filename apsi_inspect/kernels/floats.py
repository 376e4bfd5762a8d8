"""Plain floats: halves, bfloat16, the 8-, 6- and 4-bit formats; to float32, and packed codes to one code a byte.

Contract: `widen_x(raw, out, b0, b1, …)` reads blocks [b0, b1) of `raw` (uint8, any alignment; a block is one element,
two nibbles or four 6-bit codes) into float32 `out`; every conversion is exact, NaN stays NaN (a signalling one may come
out quiet). For codes of a byte or less, `table` and `kind` are as in `codes`. `unpack_x(raw, out, b0, b1)` takes blocks
of packed codes to uint8 codes. `tests/test_decode.py` compares every code with ml_dtypes.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bits import half_at, u16_at, unbits
from .codes import bits6_row, nibble_row, none_row

U8, U32 = np.uint8, np.uint32


@kernel
def widen_f16(raw, out, b0, b1):
    p = raw.ctypes.data
    for i in range(b0, b1):
        out[i] = half_at(p + 2 * i)


@kernel
def widen_bf16(raw, out, b0, b1):
    p = raw.ctypes.data
    for i in range(b0, b1):
        out[i] = unbits(U32(U32(u16_at(p + 2 * i)) << U32(16)))


@kernel
def widen_none(raw, out, b0, b1, table, kind):
    none_row(raw[b0:b1], out[b0:b1], table, kind)


@kernel
def widen_nibble(raw, out, b0, b1, table, kind):
    nibble_row(raw[b0:b1], out[2 * b0 : 2 * b1], table, kind)


@kernel
def widen_bits6(raw, out, b0, b1, table, kind):
    bits6_row(raw[3 * b0 : 3 * b1], out[4 * b0 : 4 * b1], table, kind)


@kernel
def unpack_nibbles(raw, out, b0, b1):
    """Two codes a byte, the first in the low bits."""
    for i in range(b0, b1):
        out[2 * i] = raw[i] & U8(15)
        out[2 * i + 1] = raw[i] >> U8(4)


@kernel
def unpack_crumbs(raw, out, b0, b1):
    """Four codes of two bits a byte, the first in the low bits."""
    for i in range(b0, b1):
        for k in range(4):
            out[4 * i + k] = (raw[i] >> U8(2 * k)) & U8(3)


@kernel
def widen_c32(raw, out, b0, b1):
    """Complex numbers of two halves: real and imaginary part, to float32 each."""
    p = raw.ctypes.data
    for i in range(2 * b0, 2 * b1):
        out[i] = half_at(p + 2 * i)


@kernel
def unpack_bits6(raw, out, b0, b1):
    """Four codes in three bytes, a little-endian stream of bits."""
    for i in range(b0, b1):
        a, b, c = raw[3 * i], raw[3 * i + 1], raw[3 * i + 2]
        out[4 * i] = a & U8(63)
        out[4 * i + 1] = (a >> U8(6)) | ((b & U8(15)) << U8(2))
        out[4 * i + 2] = (b >> U8(4)) | ((c & U8(3)) << U8(4))
        out[4 * i + 3] = c >> U8(2)

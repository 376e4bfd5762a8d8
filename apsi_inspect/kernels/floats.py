"""Plain floats: halves, bfloat16, the 8-, 6- and 4-bit formats; to float32, and packed codes to one code a byte.

Contract: `widen_x(raw, out, b0, b1)` reads elements [b0, b1) of `raw` (uint8, any alignment) into float32 `out`; every
conversion is exact, NaN stays NaN (a signalling one may come out quiet). `widen8(raw, out, b0, b1, table)` does it for
any 8-bit format with the table that `value_table` computes from the format's parameters. `unpack_x(raw, out, b0, b1)`
takes blocks of packed codes to uint8 codes. `tests/test_decode.py` compares every code with ml_dtypes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ._jit import kernel
from .bits import half_at, u16_at, unbits

U8, U32 = np.uint8, np.uint32


class Format(NamedTuple):
    """A small float: widths of exponent and mantissa, bias, and which codes are special.

    `special` is ``"ieee"`` (top exponent: infinities and NaN), ``"fn"`` (only the all-ones code of each sign is NaN),
    ``"fnuz"`` (the code of -0 is the one NaN), ``"none"``, or ``"e8m0"`` (no sign, no zero, all ones NaN).
    """

    exponent: int
    mantissa: int
    bias: int
    special: str


FORMATS = {
    "float8_e4m3fn": Format(4, 3, 7, "fn"),
    "float8_e5m2": Format(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": Format(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": Format(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": Format(8, 0, 127, "e8m0"),
    "float6_e2m3fn": Format(2, 3, 1, "none"),
    "float6_e3m2fn": Format(3, 2, 3, "none"),
    "float4_e2m1fn": Format(2, 1, 1, "none"),
}


def _value(f: Format, code: int) -> float:
    """The value of one code, by the definition."""
    top = (1 << f.exponent) - 1
    m, e = code & ((1 << f.mantissa) - 1), (code >> f.mantissa) & top
    if f.special == "e8m0":
        return float("nan") if e == top else 2.0 ** (e - f.bias)
    sign = -1.0 if code >> (f.mantissa + f.exponent) & 1 else 1.0
    if f.special == "fnuz" and sign < 0 and e == m == 0:
        return float("nan")
    if f.special == "fn" and e == top and m == (1 << f.mantissa) - 1:
        return float("nan")
    if f.special == "ieee" and e == top:
        return float("nan") if m else sign * float("inf")
    fraction = m / (1 << f.mantissa)
    return sign * (fraction * 2.0 ** (1 - f.bias) if e == 0 else (1 + fraction) * 2.0 ** (e - f.bias))


@cache
def value_table(dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The 256 values of a byte read as the given format (names of ml_dtypes); bits above its width do not count."""
    f = FORMATS[dtype]
    width = f.exponent + f.mantissa + (f.special != "e8m0")
    table = np.array([_value(f, code & ((1 << width) - 1)) for code in range(256)], np.float32)
    table.flags.writeable = False
    return table


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
def widen8(raw, out, b0, b1, table):
    for i in range(b0, b1):
        out[i] = table[raw[i]]


widen_e4m3 = widen_e5m2 = widen8  # `floats_simd` has their own


@kernel
def unpack_nibbles(raw, out, b0, b1):
    """Two codes a byte, the first in the low bits."""
    for i in range(b0, b1):
        out[2 * i] = raw[i] & U8(15)
        out[2 * i + 1] = raw[i] >> U8(4)


@kernel
def unpack_bits6(raw, out, b0, b1):
    """Four codes in three bytes, a little-endian stream of bits."""
    for i in range(b0, b1):
        a, b, c = raw[3 * i], raw[3 * i + 1], raw[3 * i + 2]
        out[4 * i] = a & U8(63)
        out[4 * i + 1] = (a >> U8(6)) | ((b & U8(15)) << U8(2))
        out[4 * i + 2] = (b >> U8(4)) | ((c & U8(3)) << U8(4))
        out[4 * i + 3] = c >> U8(2)

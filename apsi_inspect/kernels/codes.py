"""Rows of codes to float32 by the table of the values of a byte: plain loops, the definition and the fallback.

Contract: `x_row(c, y, table, kind)` reads `y.size` codes from the bytes `c` (of the packing x; a packed row may end
with unused bits). `kind` is the place of the format in `KINDS`; only the explicit vectors of `codes_simd` look at it.
`tests/test_decode.py` and `tests/test_scaled.py` compare every code with ml_dtypes.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel

U8, U16 = np.uint8, np.uint16
KINDS = (
    "int8", "int4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
)  # fmt: skip


@kernel
def none_row(c, y, table, kind):
    """One code a byte."""
    for j in range(y.size):
        y[j] = table[c[j]]


@kernel
def nibble_row(c, y, table, kind):
    """Two codes a byte, the first in the low bits."""
    for k in range(y.size // 2):
        y[2 * k] = table[c[k] & U8(15)]
        y[2 * k + 1] = table[c[k] >> U8(4)]
    if y.size % 2:
        y[y.size - 1] = table[c[y.size // 2] & U8(15)]


@kernel
def bits6_row(c, y, table, kind):
    """Four codes in three bytes, a little-endian stream of bits."""
    for k in range(y.size // 4):
        a, b, e = c[3 * k], c[3 * k + 1], c[3 * k + 2]
        y[4 * k] = table[a & U8(63)]
        y[4 * k + 1] = table[(a >> U8(6)) | ((b & U8(15)) << U8(2))]
        y[4 * k + 2] = table[(b >> U8(4)) | ((e & U8(3)) << U8(4))]
        y[4 * k + 3] = table[e >> U8(2)]
    for j in range(y.size // 4 * 4, y.size):
        at = j * 6 // 8
        two = U16(c[at]) | (U16(c[at + 1]) << U16(8))  # rows are padded to whole groups of four: there is a next byte
        y[j] = table[(two >> U16(j * 6 % 8)) & U16(63)]

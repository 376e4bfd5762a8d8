"""The quantized tensors of .apsim: codes of a row to values by a table, times the scale of their block, in float32.

Contract: `decode_x(codes, out, r0, r1, table, scale, block, inner, length, along)` decodes rows [r0, r1) of the logical
array seen as a matrix over its last axis. `codes` is uint8 (rows of packed codes, padded as the format says), `out`
float32 (rows, n), `table` the values of all codes, `scale` a float32 matrix. Element j of a row uses column
`j // block` (block = 1: a scale an element). Row r uses the row `scale_row(r, inner, length, along)` of the scales: the
blocked axis has `length` positions of `inner` rows each, and `along` positions share their scales.
`tests/test_scaled.py` compares with files of another implementation and `tests/naive.py`.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel

U8 = np.uint8


@kernel
def scale_row(r, inner, length, along):
    """The row of scales of a row of values."""
    outer, position = r // (inner * length), r // inner % length
    return (outer * ((length + along - 1) // along) + position // along) * inner + r % inner


@kernel
def apply_scale(y, s, block):
    """Multiply a row by its scales."""
    n = y.size
    if block == 1:
        for j in range(n):
            y[j] *= s[j]
        return
    for k in range((n + block - 1) // block):
        d = s[k]
        z = y[k * block : min(n, (k + 1) * block)]
        for j in range(z.size):
            z[j] *= d


@kernel
def decode_none(codes, out, r0, r1, table, scale, block, inner, length, along):
    """One code a byte."""
    n = out.shape[1]
    for r in range(r0, r1):
        c, y = codes[r * n : (r + 1) * n], out[r]
        for j in range(n):
            y[j] = table[c[j]]
        apply_scale(y, scale[scale_row(r, inner, length, along)], block)


@kernel
def decode_nibble(codes, out, r0, r1, table, scale, block, inner, length, along):
    """Two codes a byte, the first in the low bits; a row of odd length ends with an unused nibble."""
    n = out.shape[1]
    width = (n + 1) // 2
    for r in range(r0, r1):
        c, y = codes[r * width : (r + 1) * width], out[r]
        for k in range(n // 2):
            y[2 * k] = table[c[k] & U8(15)]
            y[2 * k + 1] = table[c[k] >> U8(4)]
        if n % 2:
            y[n - 1] = table[c[width - 1] & U8(15)]
        apply_scale(y, scale[scale_row(r, inner, length, along)], block)


@kernel
def decode_bits6(codes, out, r0, r1, table, scale, block, inner, length, along):
    """Four codes in three bytes, a little-endian stream of bits; rows are padded to a multiple of four codes."""
    n = out.shape[1]
    width = (n + 3) // 4 * 3
    for r in range(r0, r1):
        c, y = codes[r * width : (r + 1) * width], out[r]
        for k in range(n // 4):
            a, b, e = c[3 * k], c[3 * k + 1], c[3 * k + 2]
            y[4 * k] = table[a & U8(63)]
            y[4 * k + 1] = table[(a >> U8(6)) | ((b & U8(15)) << U8(2))]
            y[4 * k + 2] = table[(b >> U8(4)) | ((e & U8(3)) << U8(4))]
            y[4 * k + 3] = table[e >> U8(2)]
        for j in range(n // 4 * 4, n):
            k = j * 6 // 8
            two = np.uint32(c[k]) | np.uint32(np.uint32(c[k + 1]) << np.uint32(8)) if k + 1 < width else np.uint32(c[k])
            y[j] = table[(two >> np.uint32(j * 6 % 8)) & np.uint32(63)]
        apply_scale(y, scale[scale_row(r, inner, length, along)], block)

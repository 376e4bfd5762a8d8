"""The quantized tensors of .apsim: codes of a row to values by a table, times the scale of their block, in float32.

Contract: `decode_x(codes, out, r0, r1, table, kind, scale, block, inner, length, along)` decodes rows [r0, r1) of the
logical array seen as a matrix over its last axis. `codes` is uint8 (rows of packed codes, padded as the format says),
`out` float32 (rows, n), `table` and `kind` are as in `codes`, `scale` is a float32 matrix. Element j of a row uses
column `j // block` (block = 1: a scale an element). Row r uses the row `scale_row(r, inner, length, along)` of the
scales: the blocked axis has `length` positions of `inner` rows each, and `along` positions share their scales.
`tests/test_scaled.py` compares with files of another implementation and `tests/naive.py`.
"""

from __future__ import annotations

from ._jit import kernel
from .codes import bits6_row, nibble_row, none_row


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
def decode_none(codes, out, r0, r1, table, kind, scale, block, inner, length, along):
    """One code a byte."""
    n = out.shape[1]
    width = n
    for r in range(r0, r1):
        none_row(codes[r * width : (r + 1) * width], out[r], table, kind)
        apply_scale(out[r], scale[scale_row(r, inner, length, along)], block)


@kernel
def decode_nibble(codes, out, r0, r1, table, kind, scale, block, inner, length, along):
    """Two codes a byte; a row of odd length ends with an unused nibble."""
    n = out.shape[1]
    width = (n + 1) // 2
    for r in range(r0, r1):
        nibble_row(codes[r * width : (r + 1) * width], out[r], table, kind)
        apply_scale(out[r], scale[scale_row(r, inner, length, along)], block)


@kernel
def decode_bits6(codes, out, r0, r1, table, kind, scale, block, inner, length, along):
    """Four codes in three bytes; rows are padded to a multiple of four codes."""
    n = out.shape[1]
    width = (n + 3) // 4 * 3
    for r in range(r0, r1):
        bits6_row(codes[r * width : (r + 1) * width], out[r], table, kind)
        apply_scale(out[r], scale[scale_row(r, inner, length, along)], block)

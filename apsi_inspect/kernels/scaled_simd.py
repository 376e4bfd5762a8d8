"""The quantized tensors of .apsim with the rows of `codes_simd`; same contract, names and bits as in `scaled`."""

from __future__ import annotations

from ._jit import kernel
from .codes_simd import bits6_row, nibble_row, none_row
from .scaled import apply_scale, scale_row


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

"""Codes and scales of block formats taken apart, for drawing: how often a code occurs, how scales spread.

Contract: `unpack` gives the codes of whole blocks as unsigned numbers, and `scales` the factor of each group of values
that shares one, both as ggml reads them (`docs/formats.md`, 2.9). `tests/test_plots.py` compares both with the `gguf`
library. Types whose codes are entries of a codebook (IQ1 to IQ3, TQ1_0) have scales here and no codes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..encodings import ENCODINGS
from ..errors import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..encodings import Encoding

    Blocks = NDArray[np.uint8]


class Layout(NamedTuple):
    """Where the codes of a block stand.

    Attributes
    ----------
    bits
        Of a code.
    zero
        What is taken from a code to give its signed number.
    fields
        Byte ranges of the block that hold nothing but codes.
    unpack
        From (n, block_bytes) bytes to codes.
    """

    bits: int
    zero: int
    fields: tuple[tuple[int, int], ...]
    unpack: Callable[[Any], NDArray[np.uint8]]


def _packed(blocks: Blocks, begin: int, end: int, bits: int) -> NDArray[np.uint8]:
    """Codes of 1, 2, 4 or 8 bits, side by side in bytes; their order does not matter."""
    part = blocks[:, begin:end]
    return np.concatenate([(part >> s) & (2**bits - 1) for s in range(0, 8, bits)], axis=1)


def _q5(blocks: Blocks, high: int) -> NDArray[np.uint8]:
    """Q5_0, Q5_1: nibbles, and a fifth bit for each of 32."""
    fifth = np.unpackbits(blocks[:, high : high + 4], axis=1, bitorder="little")
    nibbles = blocks[:, high + 4 : high + 20]
    codes: NDArray[np.uint8] = np.concatenate([nibbles & 15, nibbles >> 4], axis=1) | fifth << 4
    return codes


def _q5_k(blocks: Blocks) -> NDArray[np.uint8]:
    high, low = blocks[:, 16:48], blocks[:, 48:176].reshape(-1, 4, 32)
    parts = []
    for i in range(4):
        parts += [low[:, i] & 15 | (high >> 2 * i & 1) << 4, low[:, i] >> 4 | (high >> 2 * i + 1 & 1) << 4]
    return np.concatenate(parts, axis=1)


def _q6_k(blocks: Blocks) -> NDArray[np.uint8]:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    parts = []
    for half in range(2):
        for i in range(4):
            nibble = low[:, half, i % 2] >> 4 * (i // 2) & 15
            parts.append(nibble | (high[:, half] >> 2 * i & 3) << 4)
    return np.concatenate(parts, axis=1)


def _q3_k(blocks: Blocks) -> NDArray[np.uint8]:
    high, low = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 32)
    parts = [(low[:, half] >> 2 * i & 3) | (high >> 4 * half + i & 1) << 2 for half in range(2) for i in range(4)]
    return np.concatenate(parts, axis=1)


def _plain(bits: int, zero: int, begin: int, end: int) -> Layout:
    return Layout(bits, zero, ((begin, end),), partial(_packed, begin=begin, end=end, bits=bits))


LAYOUTS: dict[str, Layout] = {
    "Q4_0": _plain(4, 8, 2, 18), "Q4_1": _plain(4, 0, 4, 20), "IQ4_NL": _plain(4, 0, 2, 18),
    "MXFP4": _plain(4, 0, 1, 17), "NVFP4": _plain(4, 0, 4, 36), "Q8_0": _plain(8, 0, 2, 34),
    "Q8_1": _plain(8, 0, 4, 36), "Q8_K": _plain(8, 0, 4, 260), "Q2_K": _plain(2, 0, 16, 80),
    "Q4_K": _plain(4, 0, 16, 144), "IQ4_XS": _plain(4, 0, 8, 136), "TQ2_0": _plain(2, 1, 0, 64),
    "Q5_0": Layout(5, 16, ((2, 22),), partial(_q5, high=2)), "Q5_1": Layout(5, 0, ((4, 24),), partial(_q5, high=4)),
    "Q5_K": Layout(5, 0, ((16, 176),), _q5_k), "Q6_K": Layout(6, 32, ((0, 192),), _q6_k),
    "Q3_K": Layout(3, 4, ((0, 96),), _q3_k),
}  # fmt: skip
_SIGNED = ("Q8_0", "Q8_1", "Q8_K")  # two's complement


def codes_of(encoding: Encoding, raw: Any) -> NDArray[np.int64]:
    """The codes of whole blocks, signed where the format means them so.

    Raises
    ------
    ValueRefusedError
        The format has no codes of its own.
    """
    layout = LAYOUTS.get(encoding.name)
    if layout is None:
        raise ValueRefusedError(
            f"{encoding.name} has no codes that could be counted (values, or entries of a codebook)"
        )
    codes = layout.unpack(_blocks(encoding, raw))
    signed = codes.view(np.int8) if encoding.name in _SIGNED else codes
    return signed.astype(np.int64).reshape(-1) - layout.zero


def code_range(encoding: Encoding) -> tuple[int, int]:
    """The least and the greatest code."""
    layout = LAYOUTS[encoding.name]
    zero = 128 if encoding.name in _SIGNED else layout.zero
    return -zero, 2**layout.bits - 1 - zero


def _blocks(encoding: Encoding, raw: Any) -> Blocks:
    return np.frombuffer(raw, np.uint8).reshape(-1, encoding.block_bytes)


def _half(blocks: Blocks, offset: int) -> NDArray[np.float64]:
    """The float16 at an offset of each block, as a column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float64)


def _six_bits(blocks: Blocks) -> NDArray[np.uint8]:
    """The eight 6-bit scales of Q4_K and Q5_K."""
    s = blocks[:, 4:16]
    return np.concatenate([s[:, :4] & 63, (s[:, 8:12] & 15) | (s[:, :4] >> 6) << 4], axis=1)


def _scales_q3_k(blocks: Blocks) -> NDArray[np.float64]:
    s = blocks[:, 96:108]
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    high = np.concatenate([s[:, 8:12] >> 2 * i & 3 for i in range(4)], axis=1)
    scales: NDArray[np.float64] = _half(blocks, 108) * ((low | high << 4).astype(np.float64) - 32)
    return scales


def _scales_iq4_xs(blocks: Blocks) -> NDArray[np.float64]:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2").astype(np.int64)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    six = (low | (high >> 2 * np.arange(8) & 3) << 4).astype(np.float64)
    scales: NDArray[np.float64] = _half(blocks, 0) * (six - 32)
    return scales


def _scales_nvfp4(blocks: Blocks) -> NDArray[np.float64]:
    """Four bytes, an unsigned E4M3 each."""
    from ml_dtypes import float8_e4m3fn

    scales: NDArray[np.float64] = np.ascontiguousarray(blocks[:, :4] & 0x7F).view(float8_e4m3fn).astype(np.float64)
    return scales


_SCALES: dict[str, Callable[[Any], NDArray[np.float64]]] = {
    "Q2_K": lambda b: _half(b, 80) * (b[:, :16] & 15),
    "Q3_K": _scales_q3_k,
    "Q4_K": lambda b: _half(b, 0) * _six_bits(b),
    "Q5_K": lambda b: _half(b, 0) * _six_bits(b),
    "Q6_K": lambda b: _half(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8),
    "IQ4_XS": _scales_iq4_xs,
    "Q8_K": lambda b: np.ascontiguousarray(b[:, :4]).view("<f4").astype(np.float64),
    "MXFP4": lambda b: np.ldexp(1.0, b[:, :1].astype(np.int64) - 127),
    "NVFP4": _scales_nvfp4,
}


def scales_of(encoding: Encoding, raw: Any) -> NDArray[np.float64]:
    """The scale of each group of values in whole blocks: of a block, or of its parts where these have their own.

    Raises
    ------
    ValueRefusedError
        The format has no scales.
    """
    if encoding.is_block and encoding.name in ENCODINGS:
        own = _SCALES.get(encoding.name)
        blocks = _blocks(encoding, raw)
        if own is not None:
            return own(blocks).reshape(-1)
        if encoding.swap and encoding.name != "IQ1_M":
            return _half(blocks, encoding.swap[0][0]).reshape(-1)
    raise ValueRefusedError(f"{encoding.name} has no scales that could be shown")


def levels(encoding: Encoding, raw: Any) -> NDArray[np.float64]:
    """What the first values of one block could be with its scales as they are: its quantization grid."""
    from ..encodings.values import decode

    layout = LAYOUTS[encoding.name]
    count = 4096 // min(encoding.block_size, 16)
    blocks = np.repeat(_blocks(encoding, raw)[:1], count, axis=0)
    rng = np.random.default_rng(0)
    for begin, end in layout.fields:
        blocks[:, begin:end] = rng.integers(0, 256, (count, end - begin), np.uint8)
    values = decode(encoding, blocks.reshape(-1), (count, encoding.block_size), threads=1)
    return np.unique(values[:, :16].astype(np.float64))

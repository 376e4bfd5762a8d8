"""Decoders of ggml's IQ types (super-blocks of 256) over codebooks.

Contract as in `blocks`, with the codebook as one more argument: `decode_x(raw, out, b0, b1, grid)`, grid int8 in C
order. A codebook entry covers 8 elements (IQ1, IQ2) or 4 (IQ3); the few vector operations of an entry are emitted as
vectors, which any CPU has; everything else is a plain loop. `codebook(name)` loads the tables from the `gguf` package
(they follow no rule) and checks them. `tests/test_decode.py` compares with gguf, ggml's C code and `tests/naive.py`.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np

from ._jit import kernel
from .bits import half_at, half_to_float, u16_at, u32_at
from .blocks import K_IQ4
from .simd import I8, I32, F, M, W, emitter

F32, I32_, U8, U16, U32 = np.float32, np.int32, np.uint8, np.uint16, np.uint32

# class of gguf.quants, shape, SHA-256 of the table as int8 in C order (docs/formats.md, 2.9)
CODEBOOKS = {
    "IQ2_XXS": ("IQ2_XXS", (256, 8), "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54"),
    "IQ2_XS": ("IQ2_XS", (512, 8), "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de"),
    "IQ2_S": ("IQ2_S", (1024, 8), "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88"),
    "IQ3_XXS": ("IQ3_XXS", (256, 4), "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d"),
    "IQ3_S": ("IQ3_S", (512, 4), "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f"),
    "IQ1_S": ("IQ1_S", (2048, 8), "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a"),
    "IQ1_M": ("IQ1_S", (2048, 8), "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a"),
}


@cache
def codebook(name: str) -> np.ndarray[Any, np.dtype[np.int8]]:
    """The codebook of an IQ type, from the `gguf` package.

    Raises
    ------
    ValueError
        The installed `gguf` package holds another table than the one ggml's files are made with.
    """
    from gguf import quants

    source, shape, digest = CODEBOOKS[name]
    cls = getattr(quants, source)
    cls.init_grid()
    grid = np.ascontiguousarray(cls.grid.reshape(shape), dtype=np.int8)
    found = hashlib.sha256(grid.tobytes()).hexdigest()
    if found != digest:
        raise ValueError(
            f"the codebook {name} of the installed gguf package has SHA-256 {found}, expected {digest}: "
            "install another version of gguf"
        )
    grid.flags.writeable = False
    return grid


# One codebook entry: n grid values times a scale, with signs (bit j of `signs` negates element j) or with a shift.
def _signed(dst: M, entry: M, signs: W, scale: W, n: int) -> None:
    v = entry.load(I8, n).sitofp(F) * scale.splat(n)
    flip = (signs.splat(n) << signs.vector(range(31, 31 - n, -1))) & 0x80000000
    dst.store((v.bits(I32) ^ flip).bits(F))


@emitter(M, M, I32, F)
def put8(dst: M, entry: M, signs: W, scale: W) -> None:
    _signed(dst, entry, signs, scale, 8)


@emitter(M, M, I32, F)
def put4(dst: M, entry: M, signs: W, scale: W) -> None:
    _signed(dst, entry, signs, scale, 4)


@emitter(M, M, F, F)
def put8_shifted(dst: M, entry: M, shift: W, scale: W) -> None:
    dst.store(scale.splat(8) * (entry.load(I8, 8).sitofp(F) + shift.splat(8)))


@emitter(I32, ret=I32)
def even(n: W) -> W:
    """A 7-bit sign index as a byte of signs: bit 7 makes the number of set bits even."""
    return n | ((n.ctpop() & 1) << 7)


@kernel
def decode_iq2_xxs(raw, out, b0, b1, grid):
    g = grid.ctypes.data
    for b in range(b0, b1):
        r, o = raw[b * 66 :].ctypes.data, out[b * 256 :].ctypes.data
        d = half_at(r)
        for i in range(8):
            a, s = u32_at(r + 2 + 8 * i), u32_at(r + 6 + 8 * i)
            db = d * (F32(0.5) + F32(I32_(s >> U32(28)))) * F32(0.25)
            for k in range(4):
                index = (a >> U32(8 * k)) & U32(255)
                put8(o + 128 * i + 32 * k, g + 8 * index, even((s >> U32(7 * k)) & U32(127)), db)


@kernel
def decode_iq2_xs(raw, out, b0, b1, grid):
    g = grid.ctypes.data
    for b in range(b0, b1):
        p, o = raw[b * 74 : b * 74 + 74], out[b * 256 :].ctypes.data
        r = p.ctypes.data
        d = half_at(r)
        for i in range(8):
            for k in range(4):
                w = U32(u16_at(r + 2 + 8 * i + 2 * k))
                scale = (p[66 + i] >> U8(4 * (k // 2))) & U8(15)
                db = d * (F32(0.5) + F32(I32_(scale))) * F32(0.25)
                put8(o + 128 * i + 32 * k, g + 8 * (w & U32(511)), even(w >> U32(9)), db)


@kernel
def decode_iq2_s(raw, out, b0, b1, grid):
    g = grid.ctypes.data
    for b in range(b0, b1):
        p, o = raw[b * 82 : b * 82 + 82], out[b * 256 :].ctypes.data
        d = half_at(p.ctypes.data)
        for i in range(8):
            for k in range(4):
                index = I32_(p[2 + 4 * i + k]) | ((I32_(p[66 + i] >> U8(2 * k)) & I32_(3)) << I32_(8))
                scale = (p[74 + i] >> U8(4 * (k // 2))) & U8(15)
                db = d * (F32(0.5) + F32(I32_(scale))) * F32(0.25)
                put8(o + 128 * i + 32 * k, g + 8 * index, U32(p[34 + 4 * i + k]), db)


@kernel
def decode_iq3_xxs(raw, out, b0, b1, grid):
    g = grid.ctypes.data
    for b in range(b0, b1):
        p, o = raw[b * 98 : b * 98 + 98], out[b * 256 :].ctypes.data
        r = p.ctypes.data
        d = half_at(r)
        for i in range(8):
            s = u32_at(r + 66 + 4 * i)
            db = d * (F32(0.5) + F32(I32_(s >> U32(28)))) * F32(0.5)
            for k in range(4):
                signs = even((s >> U32(7 * k)) & U32(127))
                put4(o + 128 * i + 32 * k, g + 4 * I32_(p[2 + 8 * i + 2 * k]), signs, db)
                put4(o + 128 * i + 32 * k + 16, g + 4 * I32_(p[3 + 8 * i + 2 * k]), signs >> U32(4), db)


@kernel
def decode_iq3_s(raw, out, b0, b1, grid):
    g = grid.ctypes.data
    for b in range(b0, b1):
        p, o = raw[b * 110 : b * 110 + 110], out[b * 256 :].ctypes.data
        d = half_at(p.ctypes.data)
        for i in range(8):
            scale = (p[106 + i // 2] >> U8(4 * (i % 2))) & U8(15)
            db = d * F32(I32_(1 + 2 * I32_(scale)))
            for k in range(8):
                index = I32_(p[2 + 8 * i + k]) | ((I32_(p[66 + i] >> U8(k)) & I32_(1)) << I32_(8))
                signs = U32(p[74 + 4 * i + k // 2]) >> U32(4 * (k % 2))
                put4(o + 128 * i + 16 * k, g + 4 * index, signs, db)


@kernel
def decode_iq1_s(raw, out, b0, b1, grid):
    g = grid.ctypes.data
    for b in range(b0, b1):
        p, o = raw[b * 50 : b * 50 + 50], out[b * 256 :].ctypes.data
        r = p.ctypes.data
        d = half_at(r)
        for i in range(8):
            h = I32_(u16_at(r + 34 + 2 * i))
            dl = d * F32(I32_(2 * ((h >> I32_(12)) & I32_(7)) + 1))
            delta = F32(-0.125) if h & I32_(0x8000) else F32(0.125)
            for k in range(4):
                index = I32_(p[2 + 4 * i + k]) | (((h >> I32_(3 * k)) & I32_(7)) << I32_(8))
                put8_shifted(o + 128 * i + 32 * k, g + 8 * index, delta, dl)


@kernel
def decode_iq1_m(raw, out, b0, b1, grid):
    """The half scale is spread over the top nibbles of the four words of scales."""
    g = grid.ctypes.data
    for b in range(b0, b1):
        p, o = raw[b * 56 : b * 56 + 56], out[b * 256 :].ctypes.data
        r = p.ctypes.data
        h = I32_(0)
        for k in range(4):
            h |= (I32_(u16_at(r + 48 + 2 * k)) >> I32_(12)) << I32_(4 * k)
        d = half_to_float(U16(h))
        for i in range(8):
            scales = I32_(u16_at(r + 48 + 2 * (i // 2)))
            for k in range(4):
                dl = d * F32(I32_(2 * ((scales >> I32_(6 * (i % 2) + 3 * (k // 2))) & I32_(7)) + 1))
                n = I32_(p[32 + 2 * i + k // 2] >> U8(4 * (k % 2))) & I32_(15)
                index = I32_(p[4 * i + k]) | ((n & I32_(7)) << I32_(8))
                delta = F32(-0.125) if n & I32_(8) else F32(0.125)
                put8_shifted(o + 128 * i + 32 * k, g + 8 * index, delta, dl)


@kernel
def decode_iq4_xs(raw, out, b0, b1):
    """No codebook: the sixteen values of IQ4_NL."""
    for b in range(b0, b1):
        r, o = raw[b * 136 : b * 136 + 136], out[b * 256 : b * 256 + 256]
        d, high = half_at(r.ctypes.data), I32_(u16_at(r.ctypes.data + 2))
        for i in range(8):
            low = I32_(r[4 + i // 2] >> U8(4 * (i % 2))) & I32_(15)
            dl = d * F32(I32_((low | (((high >> I32_(2 * i)) & I32_(3)) << I32_(4))) - I32_(32)))
            q, y = r[8 + 16 * i : 24 + 16 * i], o[32 * i : 32 * i + 32]
            for j in range(16):
                y[j] = dl * K_IQ4[q[j] & U8(15)]
                y[16 + j] = dl * K_IQ4[q[j] >> U8(4)]

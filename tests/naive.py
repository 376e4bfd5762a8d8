"""The obvious twin of every decoder, written from `docs/formats.md` 2.9 and 3.1, one block or one value at a time.

A block decoder takes the bytes of one block (a uint8 array) and gives its float32 values; `i` counts the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
f32 = np.float32
K = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], f32)
F = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], f32)


def f16(b: Array, at: int) -> Any:
    return b[at : at + 2].copy().view("<f2")[0].astype(f32)


def u16(b: Array, at: int) -> int:
    return int.from_bytes(b[at : at + 2].tobytes(), "little")


def u32(b: Array, at: int) -> int:
    return int.from_bytes(b[at : at + 4].tobytes(), "little")


def i8(b: Array) -> Array:
    return b.view(np.int8).astype(f32)


def nibbles(qs: Array) -> Array:
    """All low nibbles, then all high ones."""
    return np.concatenate([qs & 15, qs >> 4]).astype(int)


def q4_0(b: Array) -> Array:
    return (nibbles(b[2:]) - 8).astype(f32) * f16(b, 0)


def q4_1(b: Array) -> Array:
    return nibbles(b[4:]).astype(f32) * f16(b, 0) + f16(b, 2)


def fifth(b: Array, at: int) -> Array:
    return np.array([u32(b, at) >> i & 1 for i in range(32)]) * 16


def q5_0(b: Array) -> Array:
    return (nibbles(b[6:]) + fifth(b, 2) - 16).astype(f32) * f16(b, 0)


def q5_1(b: Array) -> Array:
    return (nibbles(b[8:]) + fifth(b, 4)).astype(f32) * f16(b, 0) + f16(b, 2)


def q8_0(b: Array) -> Array:
    return i8(b[2:]) * f16(b, 0)


def q8_1(b: Array) -> Array:
    return i8(b[4:]) * f16(b, 0)


def q8_k(b: Array) -> Array:
    return i8(b[4:260]) * b[:4].copy().view("<f4")[0]


def q1_0(b: Array) -> Array:
    d = f16(b, 0)
    return np.array([d if b[2 + i // 8] >> (i % 8) & 1 else -d for i in range(128)], f32)


def q2_0(b: Array) -> Array:
    i = np.arange(64)
    return ((b[2 + i // 4] >> (2 * (i % 4)) & 3).astype(f32) - f32(1)) * f16(b, 0)


def iq4_nl(b: Array) -> Array:
    return K[nibbles(b[2:])] * f16(b, 0)


def mxfp4(b: Array) -> Array:
    return F[nibbles(b[1:])] * f32(math.ldexp(1.0, int(b[0]) - 128))


def ue4m3(x: int) -> Any:
    if x in (0, 0x7F):
        return f32(0)
    e, m = x >> 3 & 15, x & 7
    return f32((m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) * 0.5)


def nvfp4(b: Array) -> Array:
    return np.concatenate([F[nibbles(b[4 + 8 * s : 12 + 8 * s])] * ue4m3(int(b[s])) for s in range(4)])


def tq2_0(b: Array) -> Array:
    i = np.arange(256)
    h, n, m = i // 128, i % 128 // 32, i % 32
    return ((b[32 * h + m] >> (2 * n) & 3).astype(f32) - f32(1)) * f16(b, 64)


def tq1_0(b: Array) -> Array:
    def digit(byte: int, n: int) -> int:
        return ((int(byte) * 3**n % 256) * 3 >> 8) - 1

    first = [digit(b[m], n) for n in range(5) for m in range(32)]
    second = [digit(b[32 + m], n) for n in range(5) for m in range(16)]
    last = [digit(b[48 + m], n) for n in range(4) for m in range(4)]
    return np.array(first + second + last, f32) * f16(b, 52)


def q2_k(b: Array) -> Array:
    i = np.arange(256)
    h, r, j = i // 128, i % 128, i // 16
    q = (b[16 + 32 * h + r % 32] >> (2 * (r // 32)) & 3).astype(f32)
    return f16(b, 80) * (b[j] & 15).astype(f32) * q - f16(b, 82) * (b[j] >> 4).astype(f32)


def q3_k(b: Array) -> Array:
    i = np.arange(256)
    h, r, j = i // 128, i % 128, i // 16
    low = np.where(j < 8, b[96 + j % 8] & 15, b[96 + j % 8] >> 4).astype(int)
    scale = (low | (b[104 + j % 4].astype(int) >> (2 * (j // 4)) & 3) << 4) - 32
    q = (b[32 + 32 * h + r % 32] >> (2 * (r // 32)) & 3).astype(int) - np.where(b[i % 32] >> (i // 32) & 1, 0, 4)
    return f16(b, 108) * scale.astype(f32) * q.astype(f32)


def scale_min(s: Array, j: int) -> tuple[int, int]:
    if j < 4:
        return int(s[j]) & 63, int(s[j + 4]) & 63
    return int(s[j + 4]) & 15 | int(s[j - 4]) >> 6 << 4, int(s[j + 4]) >> 4 | int(s[j]) >> 6 << 4


def q45_k(b: Array, qs: int) -> Array:
    i = np.arange(256)
    j = i // 32
    pairs = np.array([scale_min(b[4:16], k) for k in range(8)])
    byte = b[qs + 32 * (j // 2) + i % 32]
    q = np.where(j % 2, byte >> 4, byte & 15).astype(int)
    if qs == 48:
        q += (b[16 + i % 32] >> j & 1).astype(int) * 16
    return f16(b, 0) * pairs[j, 0].astype(f32) * q.astype(f32) - f16(b, 2) * pairs[j, 1].astype(f32)


def q4_k(b: Array) -> Array:
    return q45_k(b, 16)


def q5_k(b: Array) -> Array:
    return q45_k(b, 48)


def q6_k(b: Array) -> Array:
    i = np.arange(256)
    h, r = i // 128, i % 128
    k, m = r // 32, r % 32
    byte = b[64 * h + m + 32 * (k % 2)]
    q = np.where(k < 2, byte & 15, byte >> 4).astype(int) | (b[128 + 32 * h + m].astype(int) >> (2 * k) & 3) << 4
    return f16(b, 208) * i8(b[192:208])[i // 16] * (q - 32).astype(f32)


# IQ types: `grid` is the codebook. sign byte n of 7 bits: bit 7 makes the number of set bits even.
def signs(byte: int) -> Array:
    return np.array([-1 if byte >> j & 1 else 1 for j in range(8)], f32)


def even(n: int) -> int:
    return n | (bin(n).count("1") & 1) << 7


def iq2_xxs(b: Array, grid: Array) -> Array:
    out = []
    for g in range(8):
        s = u32(b, 6 + 8 * g)
        db = f16(b, 0) * (f32(0.5) + f32(s >> 28)) * f32(0.25)
        out += [db * grid[b[2 + 8 * g + k]] * signs(even(s >> 7 * k & 127)) for k in range(4)]
    return np.concatenate(out)


def iq2_xs(b: Array, grid: Array) -> Array:
    out = []
    for g in range(8):
        for k in range(4):
            w, scale = u16(b, 2 + 8 * g + 2 * k), int(b[66 + g]) >> (0 if k < 2 else 4) & 15
            db = f16(b, 0) * (f32(0.5) + f32(scale)) * f32(0.25)
            out.append(db * grid[w & 511] * signs(even(w >> 9)))
    return np.concatenate(out)


def iq2_s(b: Array, grid: Array) -> Array:
    out = []
    for g in range(8):
        for k in range(4):
            index, scale = int(b[2 + 4 * g + k]) + 256 * (int(b[66 + g]) >> 2 * k & 3), int(b[74 + g])
            db = f16(b, 0) * (f32(0.5) + f32(scale >> (0 if k < 2 else 4) & 15)) * f32(0.25)
            out.append(db * grid[index] * signs(int(b[34 + 4 * g + k])))
    return np.concatenate(out)


def iq3_xxs(b: Array, grid: Array) -> Array:
    out = []
    for g in range(8):
        s = u32(b, 66 + 4 * g)
        db = f16(b, 0) * (f32(0.5) + f32(s >> 28)) * f32(0.5)
        for k in range(4):
            values = np.concatenate([grid[b[2 + 8 * g + 2 * k]], grid[b[3 + 8 * g + 2 * k]]])
            out.append(db * values * signs(even(s >> 7 * k & 127)))
    return np.concatenate(out)


def iq3_s(b: Array, grid: Array) -> Array:
    out = []
    for g in range(8):
        nibble = int(b[106 + g // 2]) >> (4 * (g % 2)) & 15
        db = f16(b, 0) * f32(1 + 2 * nibble)
        for k in range(8):
            index = int(b[2 + 8 * g + k]) + 256 * (int(b[66 + g]) >> k & 1)
            negative = signs(int(b[74 + 4 * g + k // 2]))[4 * (k % 2) : 4 * (k % 2) + 4]
            out.append(db * grid[index] * negative)
    return np.concatenate(out)


def iq1_s(b: Array, grid: Array) -> Array:
    out = []
    for g in range(8):
        h = u16(b, 34 + 2 * g)
        dl, delta = f16(b, 0) * f32(2 * (h >> 12 & 7) + 1), f32(-0.125 if h >> 15 else 0.125)
        out += [dl * (grid[int(b[2 + 4 * g + k]) + 256 * (h >> 3 * k & 7)] + delta) for k in range(4)]
    return np.concatenate(out)


def iq1_m(b: Array, grid: Array) -> Array:
    words = [u16(b, 48 + 2 * k) for k in range(4)]
    bits = sum((w >> 12) << 4 * k for k, w in enumerate(words))
    d = np.array([bits], np.uint16).view(np.float16)[0].astype(f32)
    out = []
    for g in range(8):
        for k in range(4):
            n = int(b[32 + 2 * g + k // 2]) >> (4 * (k % 2)) & 15
            s = words[g // 2] >> (6 * (g % 2) + 3 * (k // 2)) & 7
            delta = f32(-0.125 if n & 8 else 0.125)
            out.append(d * f32(2 * s + 1) * (grid[int(b[4 * g + k]) + 256 * (n & 7)] + delta))
    return np.concatenate(out)


def iq4_xs(b: Array) -> Array:
    out = []
    for g in range(8):
        low = int(b[4 + g // 2]) >> (4 * (g % 2)) & 15
        dl = f16(b, 0) * f32((low | (u16(b, 2) >> 2 * g & 3) << 4) - 32)
        out.append(dl * K[nibbles(b[8 + 16 * g : 24 + 16 * g])])
    return np.concatenate(out)


BLOCKS: dict[str, Callable[..., Array]] = {
    f.__name__.upper(): f
    for f in (
        *(q4_0, q4_1, q5_0, q5_1, q8_0, q8_1, q8_k, q1_0, q2_0, iq4_nl, mxfp4, nvfp4, tq2_0, tq1_0),
        *(q2_k, q3_k, q4_k, q5_k, q6_k, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m, iq4_xs),
    )
}


def decode_blocks(name: str, raw: Array, block_bytes: int, *grid: Array) -> Array:
    """All blocks of `raw`, one after the other."""
    with np.errstate(all="ignore"):
        return np.concatenate([BLOCKS[name](b, *grid) for b in raw.reshape(-1, block_bytes)]).astype(f32, copy=False)


def small_float(code: int, exponent: int, mantissa: int, bias: int) -> float:
    """The value of a sign-exponent-mantissa code that is neither infinite nor NaN."""
    m, e = code & ((1 << mantissa) - 1), code >> mantissa & ((1 << exponent) - 1)
    size = math.ldexp(m, 1 - bias - mantissa) if e == 0 else math.ldexp(m + (1 << mantissa), e - bias - mantissa)
    return -size if code >> (exponent + mantissa) & 1 else size


def unpack(raw: bytes, width: int, count: int) -> list[int]:
    """`count` codes of `width` bits from a little-endian stream of bits."""
    stream = int.from_bytes(raw, "little")
    return [stream >> (width * i) & ((1 << width) - 1) for i in range(count)]


def scaled_code(fmt: str, code: int) -> float:
    """The value of a code of an .apsim format."""
    if fmt in ("int8", "int4"):
        width = int(fmt[3:])
        return float(code - (1 << width) if code >> (width - 1) else code)
    shape = {"fp8": (4, 3, 7), "fp8_e5m2": (5, 2, 15), "fp6": (2, 3, 1), "fp6_e3m2": (3, 2, 3), "fp4": (2, 1, 1)}[fmt]
    return small_float(code, *shape)


def decode_scaled(
    fmt: str, raw: bytes, scale: Array, shape: Sequence[int], axis: int | None, block: int | None
) -> Array:
    """`docs/apsim-format.md`, section 5, one element at a time."""
    width = {"int8": 8, "int4": 4, "fp8": 8, "fp8_e5m2": 8, "fp6": 6, "fp6_e3m2": 6, "fp4": 4}[fmt]
    n = shape[-1] if shape else 1
    row = {8: n, 4: -(-n // 2), 6: -(-n // 4) * 3}[width]
    out = np.empty(tuple(shape), f32)
    for flat, where in enumerate(np.ndindex(*shape)):
        r, j = divmod(flat, n)
        code = unpack(raw[r * row : (r + 1) * row], width, n)[j]
        at = [] if axis is None else list(where)
        if axis is not None:
            at[axis] //= block or shape[axis]
        out[where] = f32(scaled_code(fmt, code)) * scale[tuple(at)]
    return out


def stats(x: Array, smallest_normal: float) -> dict[str, Any]:
    """Statistics of floats in float64, one after the other."""
    finite = [float(v) for v in x.reshape(-1) if math.isfinite(v)]
    mean = math.fsum(finite) / len(finite) if finite else math.nan
    square = math.fsum((v - mean) ** 2 for v in finite) / len(finite) if finite else math.nan
    return {
        "count": x.size,
        "min": min(finite, default=math.nan),
        "max": max(finite, default=math.nan),
        "mean": mean,
        "std": math.sqrt(square) if finite else math.nan,
        "nan": sum(math.isnan(v) for v in x.reshape(-1)),
        "posinf": sum(v == math.inf for v in x.reshape(-1)),
        "neginf": sum(v == -math.inf for v in x.reshape(-1)),
        "zeros": sum(v == 0 for v in finite),
        "subnormals": sum(0 < abs(v) < smallest_normal for v in finite),
    }

"""Rows of codes to float32 as explicit vectors; same contract, names and values as in `codes`.

32 codes at a time are unpacked and computed by the definition of their format; the table serves the rest of a row.
With `stream` the values are written past the caches, which needs `y` on a cache line. Needs what
`_jit.vectors_pay` asks for. `tests/test_decode.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._jit import kernel
from .codes import KINDS
from .codes import bits6_row as plain_bits6
from .codes import nibble_row as plain_nibble
from .codes import none_row as plain_none
from .formats import FORMATS, Format
from .simd import I8, I16, I32, F, M, Put, W, stored_and_streamed

LANES = 32


def _bytes(src: M) -> W:
    return src.load(I8, LANES)


def _nibbles(src: M) -> W:
    q = src.load(I8, LANES // 2)
    return (q & 15).shuf(q >> 4, [16 * (j % 2) + j // 2 for j in range(LANES)])


def _bits6(src: M) -> W:
    q = src.load(I8, 24)
    low = q.pick([6 * j // 8 for j in range(LANES)]).zext(I16)
    high = q.pick([min(6 * j // 8 + 1, 23) for j in range(LANES)]).zext(I16)
    two = low | (high << 8)
    return ((two >> two.vector(6 * j % 8 for j in range(LANES))) & 63).trunc(I8)


def _small_float(c: W, f: Format) -> W:
    """The code as the half with the same fields, which the CPU widens (subnormals cost nothing so), then rebiased."""
    if f.special == "e8m0":
        return _power_of_two(c)
    width = f.exponent + f.mantissa
    u = c.zext(I16)
    a = u & ((1 << width) - 1)
    h = (a << (10 - f.mantissa)) | ((u >> width) << 15)
    if f.exponent == 5 and f.special == "fnuz":  # the top exponent is a number here, not one in a half
        v = _without_specials(a, u >> width)
    else:
        v = h.half_to_float()
    v = v * 2.0 ** (15 - f.bias) if f.bias != 15 else v
    nan = v.like(float("nan"))
    if f.special == "fn":
        return a.eq((1 << width) - 1).sel(nan, v)
    return u.eq(1 << width).sel(nan, v) if f.special == "fnuz" else v


def _without_specials(a: W, sign: W) -> W:
    """E5M2 with bias 15 and nothing but numbers, by float32's own fields."""
    v = ((a.zext(I32) << 21).bits(F) * 2.0**112).bits(I32)
    return (v | (sign.zext(I32) << 31)).bits(F)


def _power_of_two(c: W) -> W:
    """E8M0: no sign, no zero; code 0 is half the smallest normal."""
    u = c.zext(I32)
    v = u.eq(0).sel(u.like(0x00400000), u << 23)
    return u.eq(0xFF).sel(u.like(0x7FC00000), v).bits(F)


def _body(codes: Callable[[M], W], kind: str) -> Callable[[M, Put], None]:
    def body(src: M, put: Put) -> None:
        c = codes(src)
        if kind == "int4":
            c = ((c & 15) ^ 8) - 8
        put(c.sitofp(F) if kind.startswith("int") else _small_float(c, FORMATS[kind]))

    return body


def _pair(kind: str) -> tuple[Any, Any]:
    width = int(kind[-1]) if kind.startswith("int") else int(kind[5])
    return stored_and_streamed(_body({8: _bytes, 6: _bits6, 4: _nibbles}[width], kind))


put_int8, stream_int8 = _pair(KINDS[0])
put_int4, stream_int4 = _pair(KINDS[1])
put_e4m3, stream_e4m3 = _pair(KINDS[2])
put_e5m2, stream_e5m2 = _pair(KINDS[3])
put_e4m3fnuz, stream_e4m3fnuz = _pair(KINDS[4])
put_e5m2fnuz, stream_e5m2fnuz = _pair(KINDS[5])
put_e8m0, stream_e8m0 = _pair(KINDS[6])
put_e2m3, stream_e2m3 = _pair(KINDS[7])
put_e3m2, stream_e3m2 = _pair(KINDS[8])
put_e2m1, stream_e2m1 = _pair(KINDS[9])


@kernel
def put_kind(kind, src, dst):
    """32 values with ordinary stores."""
    if kind == 0:
        put_int8(src, dst)
    elif kind == 1:
        put_int4(src, dst)
    elif kind == 2:
        put_e4m3(src, dst)
    elif kind == 3:
        put_e5m2(src, dst)
    elif kind == 4:
        put_e4m3fnuz(src, dst)
    elif kind == 5:
        put_e5m2fnuz(src, dst)
    elif kind == 6:
        put_e8m0(src, dst)
    elif kind == 7:
        put_e2m3(src, dst)
    elif kind == 8:
        put_e3m2(src, dst)
    else:
        put_e2m1(src, dst)


@kernel
def stream_kind(kind, src, dst):
    """32 values with streaming stores."""
    if kind == 0:
        stream_int8(src, dst)
    elif kind == 1:
        stream_int4(src, dst)
    elif kind == 2:
        stream_e4m3(src, dst)
    elif kind == 3:
        stream_e5m2(src, dst)
    elif kind == 4:
        stream_e4m3fnuz(src, dst)
    elif kind == 5:
        stream_e5m2fnuz(src, dst)
    elif kind == 6:
        stream_e8m0(src, dst)
    elif kind == 7:
        stream_e2m3(src, dst)
    elif kind == 8:
        stream_e3m2(src, dst)
    else:
        stream_e2m1(src, dst)


@kernel
def whole(c, y, kind, step, stream):
    """All whole vectors of a row, from `step` bytes each; how many vectors they were."""
    n = y.size // LANES
    src, dst = c.ctypes.data, y.ctypes.data
    if stream:
        for i in range(n):
            stream_kind(kind, src + step * i, dst + 4 * LANES * i)
    else:
        for i in range(n):
            put_kind(kind, src + step * i, dst + 4 * LANES * i)
    return n


@kernel
def none_row(c, y, table, kind, stream=False):
    n = whole(c, y, kind, 32, stream)
    plain_none(c[32 * n :], y[LANES * n :], table, kind)


@kernel
def nibble_row(c, y, table, kind, stream=False):
    n = whole(c, y, kind, 16, stream)
    plain_nibble(c[16 * n :], y[LANES * n :], table, kind)


@kernel
def bits6_row(c, y, table, kind, stream=False):
    n = whole(c, y, kind, 24, stream)
    plain_bits6(c[24 * n :], y[LANES * n :], table, kind)

"""The small floats by their definition: the parameters of each, and the table of its values.

`docs/formats.md`, 3.1. `tests/test_decode.py` compares every code with ml_dtypes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np


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
def value_table(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The 256 values of a byte read as ``"int8"``, ``"int4"`` or a small float (names of ml_dtypes).

    Bits above the format's width do not count.
    """
    if name in ("int8", "int4"):
        sign = 1 << (int(name[3:]) - 1)
        values = [float((code & (2 * sign - 1) ^ sign) - sign) for code in range(256)]
    else:
        f = FORMATS[name]
        width = f.exponent + f.mantissa + (f.special != "e8m0")
        values = [_value(f, code & ((1 << width) - 1)) for code in range(256)]
    table = np.array(values, np.float32)
    table.flags.writeable = False
    return table

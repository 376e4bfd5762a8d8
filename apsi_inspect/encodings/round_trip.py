"""The kernels of one encoding for small pieces: values to bytes and back, without the checks and threads around them.

Contract: `encoder` and `decoder` give functions ``(values, bytes, first block, last block)`` and ``(bytes, values, …)``
over contiguous aligned arrays of the right sizes, which the caller answers for; what is read is read-only. Values that
are not finite are the caller's to keep from an encoding that cannot hold them. `CLIP` says how a block's grid is found.
`tests/test_error.py` enforces this.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import Encoding
from .encode import _FLOATS
from .run import kernel
from .values import _WIDEN, _extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Run = Callable[[NDArray[Any], NDArray[Any], int, int], Any]


@cache
def encoder(encoding: Encoding) -> Run:
    """From float32 to a block format or a small float."""
    spec = encoding.encode if encoding.is_block else _FLOATS[encoding.name]
    assert spec is not None
    return kernel(spec)


@cache
def decoder(encoding: Encoding) -> Run:
    """From a block format or a small float to float32."""
    extra: tuple[Any, ...]
    if encoding.is_block:
        assert encoding.decode is not None
        f, extra = kernel(encoding.decode), _extra(encoding)
    else:
        f, extra = kernel(_WIDEN[encoding.name]), ()
        if encoding.name not in ("F16", "BF16"):
            from ..kernels.codes import KINDS
            from ..kernels.formats import value_table

            extra = value_table(encoding.dtype), KINDS.index(encoding.dtype)
    if not extra:
        return f
    return lambda raw, out, a, b: f(raw, out, a, b, *extra)


class Grid(NamedTuple):
    """How the ends of a block's grid are found: by decoding the block with all its codes at the lowest, at the highest.

    Attributes
    ----------
    codes
        The bytes of a block that hold codes, as slices.
    lowest, highest
        What each of them is when all codes are at an end.
    below, above
        Half of the last step at either end, as a fraction of the width of the grid.
    """

    codes: tuple[slice, ...]
    lowest: int
    highest: int
    below: float
    above: float


def _even(levels: int, *codes: tuple[int, int], lowest: int = 0x00, highest: int = 0xFF) -> Grid:
    """Evenly spaced levels."""
    half = 0.5 / (levels - 1)
    return Grid(tuple(slice(*c) for c in codes), lowest, highest, half, half)


_IQ4 = (11.5 / 240, 12 / 240)  # -127, -104 … 89, 113
_E2M1 = (1 / 12, 1 / 12)  # -6, -4 … 4, 6
CLIP: dict[str, Grid] = {
    "Q8_0": _even(255, (2, 34), lowest=0x81, highest=0x7F),
    "Q4_0": _even(16, (2, 18)),
    "Q4_1": _even(16, (4, 20)),
    "Q5_0": _even(32, (2, 22)),
    "Q5_1": _even(32, (4, 24)),
    "Q2_K": _even(4, (16, 80)),
    "Q3_K": _even(8, (0, 96)),
    "Q4_K": _even(16, (16, 144)),
    "Q5_K": _even(32, (16, 176)),
    "Q6_K": _even(64, (0, 192)),
    "IQ4_NL": Grid((slice(2, 18),), 0x00, 0xFF, *_IQ4),
    "IQ4_XS": Grid((slice(8, 136),), 0x00, 0xFF, *_IQ4),
    "TQ1_0": _even(3, (0, 52)),
    "TQ2_0": _even(3, (0, 64), highest=0xAA),
    "MXFP4": Grid((slice(1, 17),), 0xFF, 0x77, *_E2M1),
    "NVFP4": Grid((slice(4, 36),), 0xFF, 0x77, *_E2M1),
    "Q1_0": _even(2, (2, 18)),
    "Q2_0": _even(4, (2, 18)),
}
# Half a step beyond the greatest number of a small float; of float32 and wider ones nothing lies beyond
LIMITS = {
    "F16": 65520.0,
    "BF16": 255.5 * 2.0**120,
    "F8_E4M3": 464.0,
    "F8_E5M2": 61440.0,
    "F8_E4M3FNUZ": 248.0,
    "F8_E5M2FNUZ": 61440.0,
    "F8_E8M0": 1.5 * 2.0**127,
    "F4": 7.0,
    "F6_E2M3": 7.75,
    "F6_E3M2": 30.0,
    "int8": 127.5,
    "int4": 7.5,
    "fp8": 464.0,
    "fp8_e5m2": 61440.0,
    "fp6": 7.75,
    "fp6_e3m2": 30.0,
    "fp4": 7.0,
}

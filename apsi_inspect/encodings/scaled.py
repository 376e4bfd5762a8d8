"""The quantized formats of .apsim (`docs/apsim-format.md`, 5): codes in one tensor, float32 scales in its companion.

`Encoding` gives the codes' own size; `QParams` says where their scales are and along which axis they run.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from ..errors import ValueRefusedError
from .base import Encoding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class QParams(NamedTuple):
    """How the scales of a quantized tensor apply.

    Attributes
    ----------
    axis
        The axis that a block runs along; None: one scale for the whole tensor (and for bf16, which has none).
    block
        Elements of a block along `axis`; None: the whole axis.
    scale_shape
        Shape of the scales; None for bf16.
    scale_offset, scale_nbytes
        Where the float32 scales stand in the file.
    packing
        ``"none"``, ``"nibble"`` or ``"bits6"``.
    """

    axis: int | None
    block: int | None
    scale_shape: tuple[int, ...] | None
    scale_offset: int
    scale_nbytes: int
    packing: str


# format -> (encoding of the codes, dtype in the file, packing)
_FORMATS = {
    "int8": (1, 1, "I8", "none"),
    "int4": (2, 1, "U8", "nibble"),
    "fp8": (1, 1, "F8_E4M3", "none"),
    "fp8_e5m2": (1, 1, "F8_E5M2", "none"),
    "fp6": (4, 3, "U8", "bits6"),
    "fp6_e3m2": (4, 3, "U8", "bits6"),
    "fp4": (2, 1, "U8", "nibble"),
    "bf16": (1, 2, "BF16", "none"),
}
SCALED: tuple[Encoding, ...] = tuple(
    Encoding(name, size, nbytes, "float32", "scaled", "scaled:decode")
    for name, (size, nbytes, _, _) in _FORMATS.items()
)
CODE_DTYPE: dict[str, str] = {name: row[2] for name, row in _FORMATS.items()}
PACKING: dict[str, str] = {name: row[3] for name, row in _FORMATS.items()}


def whole_number(value: Any, what: str) -> int:
    """An int from any integer (NumPy's too); a bool, a float or a string is refused."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueRefusedError(f"{what} is {value!r:.40}; a whole number was expected")

"""Does rounding explain a difference: one tensor's values rounded to the encoding of the other.

Contract: `rounding_of` gives, for the coarser of two tensors, a function from the finer one's values to what our own
encoder makes of them, and whether these are the very bytes (for .apsim and affine codes: values) that are stored. A
difference is *explained* (`explained`) where that holds for the whole tensor, or where its root mean square and its
greatest value are within `ALLOWED` of those of our own rounding of the same values; for the IQ types, which only ggml
makes, within `ALLOWED` of the relative error in `TYPICAL`. Two lossy encodings add their errors: √2 times that.

The numbers are measured on Gaussian, Student t (3 degrees of freedom) and uniform values and on weights of MiniLM:
ggml's quantizers with an importance matrix make a root mean square error of 0.9 to 1.15 of that without, and a greatest
error of up to 6 times; floats that are cut off rather than rounded have twice the error. `tests/test_compare.py`
compares with ggml.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..encodings.encode import can_encode, encode
from ..encodings.encode_scaled import quantize_scaled
from ..encodings.run import numpy_dtype
from ..encodings.values import decode, decode_scaled
from ..errors import ValueRefusedError
from .affine import affine_values, nearest_values
from .inputs import FileInput, Input, ScaledInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..encodings import Encoding
    from ..model import Tensor
    from .error_sums import ErrorSums

# kind -> (root mean square error, greatest error), as multiples of those of our own rounding
ALLOWED = {"plain": (2.1, 2.1), "block": (1.25, 8.0), "scaled": (1.25, 8.0), "affine": (1.25, 8.0)}
# What the codes of the .apsim formats of floats are
_CODES = {
    "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp6": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn",
    "fp4": "float4_e2m1fn",
}  # fmt: skip
# Relative error (rel_l2) of ggml's quantizers on Gaussian values
TYPICAL = {
    "IQ1_S": 0.57, "IQ1_M": 0.55, "IQ2_XXS": 0.50, "IQ2_XS": 0.40, "IQ2_S": 0.30, "IQ3_XXS": 0.22, "IQ3_S": 0.17,
}  # fmt: skip


class Rounded(NamedTuple):
    """Values in another encoding: `exact` where they are what is stored, else the `values` that our rounding gives."""

    exact: bool
    values: NDArray[Any] | None


class Rounding(Protocol):
    """Rounds values of elements [a, b) as the coarser tensor would have them; None: they cannot be so stored."""

    kind: str

    def __call__(self, values: NDArray[Any], a: int, b: int) -> Rounded | None:
        """`values` are the finer tensor's, flat."""


def kind_of(tensor: Tensor) -> str:
    """``"plain"``, ``"block"``, ``"scaled"``, ``"affine"``; "" where values are no floats."""
    if tensor.affine is not None:
        return "affine"
    kind = tensor.info.encoding.kind
    return kind if kind in ("block", "scaled") else "plain" if kind == "float" else ""


def is_lossy(tensor: Tensor) -> bool:
    """Whether its values were rounded much: fewer than 16 bits a weight."""
    return kind_of(tensor) != "" and tensor.bpw < 15


def coarser(a: Tensor, b: Tensor) -> str:
    """``"a"`` or ``"b"``, whose encoding has fewer bits (`b` of two equals); "" where rounding explains nothing."""
    if not kind_of(a) or not kind_of(b):
        return ""
    same = a.info.encoding == b.info.encoding and kind_of(a) == kind_of(b) != "scaled" and a.affine is None
    return "" if same else "a" if a.bpw < b.bpw else "b"


def rounding_of(tensor: Tensor, source: Input) -> Rounding | None:
    """How the coarser tensor rounds; None where we have no encoder for it."""
    if tensor.affine is not None:
        return _Affine(tensor)
    if isinstance(source, ScaledInput):
        return _Scaled(source)
    encoding = tensor.info.encoding
    if isinstance(source, FileInput) and can_encode(encoding):
        return _Encoded(encoding, source)
    return None


class _Encoded:
    """A plain float or a block format: by bytes."""

    def __init__(self, encoding: Encoding, source: FileInput) -> None:
        self.kind = "block" if encoding.is_block else "plain"
        self.encoding, self.source = encoding, source

    def __call__(self, values: NDArray[Any], a: int, b: int) -> Rounded | None:
        try:
            made = encode(self.encoding, values, threads=1)
        except ValueRefusedError:  # values that are not finite: this encoding cannot have come from them
            return None
        if np.array_equal(made, np.frombuffer(self.source.raw(a, b), np.uint8)):
            return Rounded(True, None)
        return Rounded(False, _float(decode(self.encoding, made, (b - a,), threads=1)))


class _Scaled:
    """An .apsim format: by values, box by box; with the file's own scales where a block spans several boxes."""

    kind = "scaled"

    def __init__(self, source: ScaledInput) -> None:
        self.source = source

    def __call__(self, values: NDArray[Any], a: int, b: int) -> Rounded | None:
        fmt, q = self.source.encoding.name, self.source.qparams
        box, scale, axis, block = self.source.box(a, b)
        along = self.source.shape[q.axis] if q.axis is not None else 0
        whole = b - a == prod(self.source.shape) if axis is None else box[axis] >= min(q.block or along, along)
        try:
            if scale is not None and not whole:
                z = _nearest(fmt, values.reshape(box), _spread(scale, box, axis, block))
            else:
                made = quantize_scaled(values.reshape(box), fmt, axis, block, threads=1)
                codes = made.codes.reshape(-1).view(np.uint8)
                z = decode_scaled(fmt, codes, made.scale, box, axis, block, q.packing, threads=1).reshape(-1)
        except ValueRefusedError:
            return None
        return Rounded(np.array_equal(z, self.source.read(a, b)), z)


def _spread(scale: NDArray[np.float32], box: tuple[int, ...], axis: int | None, block: int | None) -> NDArray[Any]:
    """Scales as they broadcast over a box."""
    if axis is None or block is None:
        return scale
    return np.repeat(scale, block, axis)[(*[slice(None)] * axis, slice(box[axis]))]


def _nearest(fmt: str, values: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
    """The nearest code of each value, with scales that are given; flat."""
    from ..kernels.encode_scaled import KINDS

    if not np.isfinite(values).all():
        raise ValueRefusedError("values are not finite")
    top = np.float32(dict(KINDS)[fmt])
    codes = np.clip(values / np.where(scale == 0, np.float32(1), scale), -top, top)
    codes = codes.astype(numpy_dtype(_CODES[fmt])) if fmt in _CODES else np.rint(codes)
    nearest: NDArray[Any] = (codes.astype(np.float32) * scale).reshape(-1)
    return nearest


class _Affine:
    """Codes with given scales and zero points: by values."""

    kind = "affine"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, values: NDArray[Any], a: int, b: int) -> Rounded | None:
        if not np.isfinite(values).all():
            return None
        z = nearest_values(self.tensor, values, a)
        return Rounded(np.array_equal(z, affine_values(self.tensor, a, b)), z)


def _float(values: NDArray[Any]) -> NDArray[Any]:
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)


def explained(sums: ErrorSums, own: ErrorSums | None, kind: str, encoding: str, both_lossy: bool) -> bool:
    """Whether the difference is no greater than rounding makes it.

    Parameters
    ----------
    sums
        Of the two tensors.
    own
        Of the finer one and our own rounding of it; None where we have none.
    kind, encoding
        Of the coarser tensor.
    """
    more = sqrt(2) if both_lossy else 1.0
    rms, greatest = (limit * more for limit in ALLOWED[kind])
    if sums.nonfinite:
        return False
    if own is not None:
        return own.n == sums.n and sums.rmse <= rms * own.rmse and sums.max_abs <= greatest * own.max_abs
    return encoding in TYPICAL and sums.rel_l2 <= rms * TYPICAL[encoding]

"""The values of integer codes with a scale and a zero point: ``(q - zero_point) * scale``, in float32.

Contract: a range of elements takes memory for that range only. The difference is exact; the product is rounded once, to
float32, where scales are float32 numbers or a float64 tensor (PyTorch's per-channel scales), as onnx and torch do.
`tests/test_affine.py` compares with both.
"""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings import ENCODINGS
from ..encodings.run import numpy_dtype
from ..encodings.values import decode
from .inputs import SCRATCH, even_cuts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..encodings.affine import Affine
    from ..model import Tensor


def affine_values(tensor: Tensor, first: int = 0, last: int | None = None) -> NDArray[np.float32]:
    """Elements [first, last) of a tensor of codes, flat; `first` is a multiple of its block size."""
    last = tensor.numel if last is None else last
    codes, (scale, zero) = _codes(tensor, first, last), _grid(tensor, first, last)
    return _product(codes if zero is None else codes - zero, scale)


def nearest_values(tensor: Tensor, values: NDArray[Any], first: int) -> NDArray[np.float32]:
    """What finite values become in the codes of a tensor, with its scales and zero points: the nearest of each.

    Parameters
    ----------
    values
        Flat, in place of the tensor's elements from `first` on.
    """
    scale, zero = _grid(tensor, first, first + values.size)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        codes = np.nan_to_num(values / scale)  # a scale of 0 has but the value 0
    kind = numpy_dtype(tensor.info.encoding.dtype)
    if tensor.info.encoding.kind == "float":
        return _product(codes.astype(kind).astype(np.float32), scale)
    import ml_dtypes

    ends: Any = ml_dtypes.iinfo(kind)  # type: ignore[no-untyped-call, unused-ignore]
    offset: Any = 0 if zero is None else zero
    return _product(np.clip(np.rint(codes) + offset, ends.min, ends.max) - offset, scale)


def _product(codes: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    product: NDArray[Any] = codes.astype(scale.dtype) * scale
    values: NDArray[np.float32] = product.astype(np.float32, copy=False)
    return values


def _grid(tensor: Tensor, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Scale and zero point of each element of a range, or the one of all; None: 0."""
    affine = tensor.affine
    assert affine is not None
    scale: Any = np.float32(affine.scale) if isinstance(affine.scale, float) else np.asarray(affine.scale)
    scale = np.asarray(scale if scale.dtype == np.float64 else scale.astype(np.float32))
    zero = None if affine.zero_point is None else _wide(np.asarray(affine.zero_point))
    if affine.axis is None:
        return scale.reshape(()), None if zero is None else zero.reshape(())
    where = _places(affine, tensor.shape, first, last)
    return scale.reshape(-1)[where], None if zero is None else zero.reshape(-1)[where]


def _codes(tensor: Tensor, first: int, last: int) -> NDArray[Any]:
    encoding = tensor.info.encoding
    a, z = (-(-e * encoding.block_bytes // encoding.block_size) for e in (first, last))
    raw = tensor.source.view(tensor.offset + a, z - a)
    return _wide(decode(encoding, raw, (last - first,), swap=tensor.byte_order != sys.byteorder))


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    """Integers as int64, small floats as float32: differences are then exact."""
    if values.dtype.kind in "iu" or values.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return values.astype(np.int64)
    return values.astype(np.float32)


def _places(affine: Affine, shape: tuple[int, ...], first: int, last: int) -> NDArray[np.int64]:
    """Which scale belongs to each element."""
    assert affine.axis is not None
    inner, length = prod(shape[affine.axis + 1 :]), shape[affine.axis]
    e = np.arange(first, last, dtype=np.int64)
    k = e // inner % length
    if affine.block is None:
        return k
    blocks = -(-length // affine.block)
    places: NDArray[np.int64] = (e // (inner * length) * blocks + k // affine.block) * inner + e % inner
    return places


class AffineInput:
    """A tensor of codes as the float32 values it stands for, for writing."""

    def __init__(self, tensor: Tensor, name: str | None = None) -> None:
        self.name = tensor.name if name is None else name
        self.encoding, self.shape = ENCODINGS["F32"], tensor.shape
        self._tensor = tensor

    def cuts(self, block: int) -> list[tuple[int, int]]:
        """See `Input`."""
        from math import lcm

        return even_cuts(self._tensor.numel, lcm(block, self._tensor.info.encoding.block_size))

    def read(self, a: int, b: int) -> NDArray[Any]:
        """See `Input`."""
        out = SCRATCH.bytes("values", 4 * (b - a)).view(np.float32)
        out[:] = affine_values(self._tensor, a, b)
        return out

    def raw(self, a: int, b: int) -> Any:
        """See `Input`."""
        return self.read(a, b).astype("<f4").view(np.uint8)

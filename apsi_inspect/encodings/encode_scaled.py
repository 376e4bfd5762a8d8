"""From float32 values to the codes and scales of an .apsim quantized tensor (`docs/apsim-format.md`, section 5).

Contract: `quantize_scaled` gives exactly the arrays that stand in the file. All arithmetic is float32, codes are the
nearest ones, ties to even, saturating; non-finite input is refused (bf16 takes it). `tests/test_encode_scaled.py`
compares with files that another implementation wrote.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ValueRefusedError, quote
from .encode import check_finite, encode
from .plain import PLAIN
from .run import in_parallel, kernel, numpy_dtype
from .scaled import CODE_DTYPE, PACKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["ScaledCodes", "quantize_scaled"]

_BF16 = next(e for e in PLAIN if e.name == "BF16")
_DTYPES = {e.name: e.dtype for e in PLAIN}


class ScaledCodes(NamedTuple):
    """The codes and scales of a quantized tensor as the file holds them.

    Attributes
    ----------
    codes
        The codes, packed; dtype and shape are those of the file.
    scale
        The float32 scales; None for bf16.
    scale_shape
        Their shape: ``()`` for one scale, None for bf16.
    packing
        ``"none"``, ``"nibble"`` or ``"bits6"``.
    """

    codes: NDArray[Any]
    scale: NDArray[np.float32] | None
    scale_shape: tuple[int, ...] | None
    packing: str


def quantize_scaled(
    x: ArrayLike,
    fmt: str,
    axis: int | None = None,
    block: int | None = None,
    *,
    name: str | None = None,
    threads: int | None = None,
) -> ScaledCodes:
    """Quantize an array.

    Parameters
    ----------
    x
        Real values of any shape; wider than float32 they are rounded to float32 first.
    fmt
        ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp8_e5m2"``, ``"fp6"``, ``"fp6_e3m2"``, ``"fp4"`` or ``"bf16"``.
    axis
        The axis that a block runs along, so that ``axis=-1`` gives one scale per row; None: one scale in all.
    block
        Elements of a block along `axis`; None: the whole axis.
    name
        The tensor's name, for messages.
    threads
        How many; by default up to 8 for large tensors.

    Raises
    ------
    ValueRefusedError
        Unknown format, an axis that is not there, a block below 1, values that are no real numbers or not finite (named
        and counted).
    """
    import numpy as np

    array = np.asarray(x)
    tensor = "" if name is None else f"tensor {quote(name)}: "
    if fmt not in PACKING:
        raise ValueRefusedError(f"{tensor}unknown format {fmt!r}; known: {', '.join(PACKING)}")
    if array.dtype.kind not in "biuf" and (array.dtype.kind != "V" or array.dtype.type is np.void):
        kind = "complex" if array.dtype.kind == "c" else f"{array.dtype}"
        raise ValueRefusedError(f"{tensor}its values are {kind:.40}; only real numbers can be quantized")
    if fmt == "bf16":
        raw = encode(_BF16, array, threads=threads, name=name)
        return ScaledCodes(raw.view(numpy_dtype("bfloat16")).reshape(array.shape), None, None, "none")
    axis, step = _blocks(array.shape, axis, block, tensor)
    check_finite(array, name, fmt, threads=threads)
    values = np.ascontiguousarray(array, np.float32).reshape(array.shape)
    values = values if values.flags.aligned else values.copy()
    scale_shape = _scale_shape(array.shape, axis, step)
    scale = np.zeros(scale_shape, np.float32)
    codes = np.empty(array.size, np.uint8)
    if array.size:
        _fill(values, codes, scale, fmt, axis, step, threads)
    packing = PACKING[fmt]
    return ScaledCodes(_packed(codes, fmt, array.shape, packing, threads), scale, scale_shape, packing)


def _blocks(shape: tuple[int, ...], axis: int | None, block: int | None, tensor: str) -> tuple[int | None, int]:
    """The axis counted from the front, and the elements of a block along it."""
    if axis is None:
        if block is not None:
            raise ValueRefusedError(f"{tensor}a block of {block} needs an axis to run along")
        return None, 1
    if not -len(shape) <= axis < len(shape):
        raise ValueRefusedError(f"{tensor}no axis {axis} in shape {shape}")
    if block is not None and block < 1:
        raise ValueRefusedError(f"{tensor}a block has at least one element, not {block}")
    axis %= len(shape)
    return axis, max(shape[axis], 1) if block is None else min(block, max(shape[axis], 1))


def _scale_shape(shape: tuple[int, ...], axis: int | None, step: int) -> tuple[int, ...]:
    return () if axis is None else (*shape[:axis], -(-shape[axis] // step), *shape[axis + 1 :])


def _fill(
    x: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scale: NDArray[np.float32],
    fmt: str,
    axis: int | None,
    step: int,
    threads: int | None,
) -> None:
    """Scales and codes, one a byte, in as many parts as there are blocks."""
    from ..kernels.encode_scaled import KINDS

    kind = [name for name, _ in KINDS].index(fmt)
    flat, scales = x.reshape(-1).view(), scale.reshape(-1)
    flat.flags.writeable = False
    if axis is None:
        scales[0] = _one_scale(flat, KINDS[kind][1], threads)
    if axis is None or axis == x.ndim - 1:
        n = x.shape[-1] if x.ndim else 1
        f, given, along = kernel("encode_scaled:encode_runs"), axis is None, n if axis is None else step
        in_parallel(lambda a, b: f(flat, codes, scales, kind, n, along, given, a, b), x.size // n, x.size, threads)
    else:
        g, inner, length = kernel("encode_scaled:encode_across"), prod(x.shape[axis + 1 :]), x.shape[axis]
        blocks = scale.size // inner
        in_parallel(lambda a, b: g(flat, codes, scales, kind, length, step, inner, a, b), blocks, x.size, threads)


def _one_scale(flat: NDArray[np.float32], largest: float, threads: int | None) -> np.float32:
    """The scale of a whole tensor."""
    import numpy as np

    from ..kernels.encode_scaled import scale_of

    f: Callable[..., Any] = kernel("encode_scaled:absmax")
    tops: list[np.float32] = []
    in_parallel(lambda a, b: tops.append(f(flat, a, b, np.empty(32, np.float32))), flat.size, flat.size, threads)
    return np.float32(scale_of(np.float32(max(tops)), np.float32(largest)))


def _packed(
    codes: NDArray[np.uint8], fmt: str, shape: tuple[int, ...], packing: str, threads: int | None
) -> NDArray[Any]:
    """The codes as the file holds them."""
    import numpy as np

    if packing == "none":
        return codes.view(numpy_dtype(_DTYPES[CODE_DTYPE[fmt]])).reshape(shape)
    shape = shape or (1,)
    n = shape[-1]
    width = (n + 1) // 2 if packing == "nibble" else (n + 3) // 4 * 3
    out = np.empty((*shape[:-1], width), np.uint8)
    if out.size:
        f, target = kernel(f"encode_scaled:pack_{'nibbles' if packing == 'nibble' else packing}"), out.reshape(-1)
        in_parallel(lambda a, b: f(codes, target, n, a, b), codes.size // n, codes.size, threads)
    return out

"""From the codes and scales of an .apsim quantized tensor to float32 values.

Contract: `decode_scaled` refuses anything that does not fit together before a kernel sees it. The value of a code times
the scale of its block, rounded once, in float32. `tests/test_scaled.py` compares with files that another implementation
wrote and with `tests/naive.py`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ..errors import ValueRefusedError
from .run import aligned_empty, bytes_of, in_parallel, kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .run import Buffer

# .apsim formats: kernel in `kernels.scaled` by packing, and what a code is, as `kernels.codes.KINDS` calls it
_CODES = {
    "int8": ("none", "int8"),
    "int4": ("nibble", "int4"),
    "fp8": ("none", "float8_e4m3fn"),
    "fp8_e5m2": ("none", "float8_e5m2"),
    "fp6": ("bits6", "float6_e2m3fn"),
    "fp6_e3m2": ("bits6", "float6_e3m2fn"),
    "fp4": ("nibble", "float4_e2m1fn"),
}
_PACKED_WIDTH = {"none": (1, 1), "nibble": (2, 1), "bits6": (4, 3)}  # codes in how many bytes


def decode_scaled(
    format: str,
    codes: Buffer,
    scale: NDArray[np.float32] | None,
    shape: Sequence[int],
    axis: int | None,
    block: int | None,
    packing: str | None = None,
    out: NDArray[np.float32] | None = None,
    *,
    threads: int | None = None,
) -> NDArray[np.float32]:
    """The values of an .apsim quantized tensor: the value of each code times the scale of its block, in float32.

    Parameters
    ----------
    format
        ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp8_e5m2"``, ``"fp6"``, ``"fp6_e3m2"``, ``"fp4"`` or ``"bf16"``.
    codes
        The bytes of the codes as the file holds them, rows padded as the packing says.
    scale
        The float32 scales; None for bf16.
    shape, axis, block
        Logical shape; the axis that a block runs along, None for one scale in all; elements of a block, None for the
        whole axis.
    packing
        As in the file; checked against the format when given.
    out, threads
        As in `decode_into`.

    Raises
    ------
    ValueRefusedError
        Codes, scales and shape do not belong together.
    """
    import numpy as np

    shape = tuple(shape)
    out = aligned_empty(shape) if out is None else out
    if out.shape != shape or out.dtype != np.float32 or not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueRefusedError(f"out must be a writable C-contiguous float32 array of shape {shape}")
    if format == "bf16":
        return _widen_bf16(bytes_of(codes), out, threads)
    if format not in _CODES:
        raise ValueRefusedError(f"unknown format {format!r}; known: {', '.join([*_CODES, 'bf16'])}")
    known, code = _CODES[format]
    if packing not in (None, known):
        raise ValueRefusedError(f"codes of {format} are packed as {known!r}, not {packing!r}")
    n, rows = (shape[-1], prod(shape[:-1])) if shape else (1, 1)
    data = bytes_of(codes)
    _expect(format, shape, rows * _row_bytes(n, known), data.size)
    scales, columns, layout = _scale_layout(scale, shape, axis, block)
    if out.size:
        from ..kernels.codes import KINDS
        from ..kernels.formats import value_table

        f, matrix = kernel(f"scaled:decode_{known}"), out.reshape(rows, n)
        what = value_table(code), KINDS.index(code)
        in_parallel(lambda a, b: f(data, matrix, a, b, *what, scales, columns, *layout), rows, out.size, threads)
    return out


def _row_bytes(n: int, packing: str) -> int:
    per, nbytes = _PACKED_WIDTH[packing]
    return -(-n // per) * nbytes


def _expect(format: str, shape: tuple[int, ...], expected: int, found: int) -> None:
    if expected != found:
        raise ValueRefusedError(f"{format} codes of shape {shape} take {expected} bytes, got {found}")


def _widen_bf16(data: NDArray[np.uint8], out: NDArray[np.float32], threads: int | None) -> NDArray[np.float32]:
    _expect("bf16", out.shape, 2 * out.size, data.size)
    f, flat = kernel("floats:widen_bf16"), out.reshape(-1)
    in_parallel(lambda a, b: f(data, flat, a, b), out.size, out.size, threads)
    return out


def _scale_layout(
    scale: NDArray[np.float32] | None, shape: tuple[int, ...], axis: int | None, block: int | None
) -> tuple[NDArray[np.float32], int, tuple[int, int, int]]:
    """The scales as a matrix, how many elements share a column, and (inner, length, along) of `scaled.scale_row`."""
    import numpy as np

    if scale is None:
        raise ValueRefusedError("scales are missing")
    n, rows = (shape[-1], prod(shape[:-1])) if shape else (1, 1)
    if axis is None:
        expected: tuple[int, ...] = ()
        columns, layout = max(n, 1), (1, max(rows, 1), max(rows, 1))
    else:
        if not 0 <= axis < len(shape) or (block is not None and block < 1):
            raise ValueRefusedError(f"no axis {axis} with blocks of {block} in shape {shape}")
        step = max(shape[axis], 1) if block is None else block
        expected = (*shape[:axis], -(-shape[axis] // step), *shape[axis + 1 :])
        last = axis == len(shape) - 1
        columns = step if last else 1
        layout = (1, 1, 1) if last else (prod(shape[axis + 1 : -1]), shape[axis], step)
    if scale.shape != expected or scale.dtype != np.float32:
        raise ValueRefusedError(f"expected float32 scales of shape {expected}, got {scale.dtype} {scale.shape}")
    matrix = np.ascontiguousarray(scale).reshape(-1, expected[-1] if expected else 1) if scale.size else scale
    matrix = matrix.view()
    matrix.flags.writeable = False
    return matrix, columns, layout

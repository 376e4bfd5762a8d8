"""From stored bytes to values: picks the kernel, splits the blocks over threads, deals with the other byte order.

Contract: the caller has checked that the bytes are there; this module checks that their number fits the shape and never
lets a kernel see anything else (kernels check no bounds). A kernel is compiled on its first use, or loaded from Numba's
cache. The explicit-vector twin of a kernel is taken where the CPU has what it needs. Values do not depend on the number
of threads. `tests/test_decode.py` and `tests/test_scaled.py` compare with independent decoders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError
from .base import Encoding

if TYPE_CHECKING:
    from collections.abc import Buffer, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Range = Callable[[int, int], None]

MAX_THREADS = 8
THREADED_FROM = 1 << 20  # elements: below, starting a thread costs more than it saves
STEP = 1 << 16  # elements that pass through a scratch buffer at a time

# Plain encodings to float32: the kernel in `kernels.floats`; True: it takes the table of the encoding's values.
_WIDEN = {
    "F16": ("floats:widen_f16", False),
    "BF16": ("floats:widen_bf16", False),
    "F8_E4M3": ("floats:widen_e4m3", True),
    "F8_E5M2": ("floats:widen_e5m2", True),
    "F8_E8M0": ("floats:widen8", True),
    "F8_E4M3FNUZ": ("floats:widen8", True),
    "F8_E5M2FNUZ": ("floats:widen8", True),
    "F4": ("floats:widen8", True),
    "F6_E2M3": ("floats:widen8", True),
    "F6_E3M2": ("floats:widen8", True),
}
# .apsim formats: kernel in `kernels.scaled` by packing, and the value of a code (bits, or the name of a small float)
_CODES: dict[str, tuple[str, int | str]] = {
    "int8": ("none", 8),
    "int4": ("nibble", 4),
    "fp8": ("none", "float8_e4m3fn"),
    "fp8_e5m2": ("none", "float8_e5m2"),
    "fp6": ("bits6", "float6_e2m3fn"),
    "fp6_e3m2": ("bits6", "float6_e3m2fn"),
    "fp4": ("nibble", "float4_e2m1fn"),
}
_PACKED_WIDTH = {"none": (1, 1), "nibble": (2, 1), "bits6": (4, 3)}  # codes in how many bytes


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy or ml_dtypes dtype of that name."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


def aligned_empty(shape: Sequence[int], dtype: Any = "float32") -> NDArray[Any]:
    """`np.empty` whose first byte stands on a cache line, which streaming stores need (NumPy promises 16 bytes)."""
    import numpy as np

    dtype = np.dtype(dtype)
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(tuple(shape))


@cache
def kernel(spec: str) -> Callable[..., None]:
    """The kernel named ``"module:function"``: its explicit-vector twin where there is one and the CPU is up to it."""
    from ..kernels._jit import vectors_pay

    module, name = spec.split(":")
    if module in ("blocks", "kquants", "floats") and vectors_pay():
        twin = getattr(import_module(f"..kernels.{module}_simd", __package__), name, None)
        if twin is not None:
            return twin  # type: ignore[no-any-return]
    return getattr(import_module(f"..kernels.{module}", __package__), name)  # type: ignore[no-any-return]


def _extra(encoding: Encoding) -> tuple[Any, ...]:
    """What a kernel takes besides bytes, result and range: the codebook of the IQ types that have one."""
    if encoding.decode is None or not encoding.decode.startswith("iquants:"):
        return ()
    from ..kernels.iquants import CODEBOOKS, codebook

    return (codebook(encoding.name),) if encoding.name in CODEBOOKS else ()


def in_parallel(run: Range, count: int, elements: int, threads: int | None) -> None:
    """Call `run(start, stop)` over [0, count), in equal parts on several threads when `elements` make it worth while."""
    if threads is None:
        threads = min(os.cpu_count() or 1, MAX_THREADS) if elements >= THREADED_FROM else 1
    threads = max(1, min(threads, count))
    if threads == 1:
        run(0, count)
        return
    from concurrent.futures import ThreadPoolExecutor

    align = 64  # so that a part of a plain tensor begins on a cache line too
    edges = [count * i // threads // align * align for i in range(threads)] + [count]
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(run, a, b) for a, b in zip(edges[1:-1], edges[2:], strict=True)]
        run(edges[0], edges[1])
        for f in others:
            f.result()


def _bytes_of(raw: Buffer) -> NDArray[np.uint8]:
    """A read-only view of a buffer as bytes (read-only so that a kernel is compiled for one kind of array)."""
    import numpy as np

    view = raw.view() if isinstance(raw, np.ndarray) else np.frombuffer(raw, np.uint8)
    if not view.flags.c_contiguous:
        raise ValueRefusedError("the bytes of a tensor must be C-contiguous")
    view = view.reshape(-1).view(np.uint8)
    view.flags.writeable = False
    return view


def _check(encoding: Encoding, raw: NDArray[np.uint8], numel: int) -> int:
    """The number of blocks; refuses bytes that are not exactly `numel` elements."""
    expected = encoding.nbytes(numel)
    if expected is None:
        raise ValueRefusedError(
            f"{numel} elements do not fill whole {encoding.name} blocks of {encoding.block_size}"
        )
    if raw.size != expected:
        raise ValueRefusedError(f"{numel} elements of {encoding.name} take {expected} bytes, got {raw.size}")
    return numel // encoding.block_size


def swap_fields(encoding: Encoding, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of whole blocks with the bytes of every multi-byte field in the other order."""
    import numpy as np

    blocks = np.array(raw).reshape(-1, encoding.block_bytes)
    for offset, size, count in encoding.swap:
        field = blocks[:, offset : offset + size * count].reshape(len(blocks), count, size)
        blocks[:, offset : offset + size * count] = field[:, :, ::-1].reshape(len(blocks), -1)
    flat = blocks.reshape(-1)
    flat.flags.writeable = False
    return flat


def decode_into(
    encoding: Encoding,
    raw: Buffer,
    out: NDArray[Any],
    *,
    threads: int | None = None,
    swap: bool = False,
) -> None:
    """Decode whole blocks into an array.

    Parameters
    ----------
    encoding
        How the bytes are to be read.
    raw
        The bytes, at any alignment: exactly those of `out.size` elements.
    out
        C-contiguous and writable. Its dtype is the encoding's (`Encoding.dtype`), or float32 for a float encoding of
        at most 16 bits, which is exact.
    threads
        How many; by default up to 8 for large tensors. The values are the same for any number.
    swap
        The bytes are in the other byte order than this machine's.

    Raises
    ------
    ValueRefusedError
        The number of bytes does not fit, or `out` cannot take the values.
    """
    import numpy as np

    data = _bytes_of(raw)
    blocks = _check(encoding, data, out.size)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueRefusedError("out must be a writable C-contiguous array")
    flat = out.reshape(-1)
    if out.dtype != numpy_dtype(encoding.dtype):
        if out.dtype != np.float32 or encoding.name not in _WIDEN:
            raise ValueRefusedError(f"{encoding.name} decodes to {encoding.dtype}, not to {out.dtype}")
        run = _widen(encoding, data, flat, swap)
    elif encoding.decode is None:
        run = _copy(encoding, data, flat, swap)
    else:
        run = _decode(encoding, data, flat, swap)
    in_parallel(run, blocks, out.size, threads)


def _copy(encoding: Encoding, data: NDArray[np.uint8], flat: NDArray[Any], swap: bool) -> Range:
    """The bytes are the values."""
    import numpy as np

    target, n = flat.view(np.uint8), encoding.block_bytes

    def run(a: int, b: int) -> None:
        part = target[a * n : b * n]
        if encoding.kind == "bool":
            np.not_equal(data[a:b], 0, out=flat[a:b])
        elif swap and encoding.swap:
            for i in range(a, b, STEP):
                j = min(b, i + STEP)
                target[i * n : j * n] = swap_fields(encoding, data[i * n : j * n])
        else:
            np.copyto(part, data[a * n : b * n])

    return run


def _decode(encoding: Encoding, data: NDArray[np.uint8], flat: NDArray[Any], swap: bool) -> Range:
    """A block format, or packed codes to one code a byte."""
    import numpy as np

    assert encoding.decode is not None
    f, extra = kernel(encoding.decode), _extra(encoding)
    target = flat if encoding.is_block else flat.view(np.uint8)
    if not (swap and encoding.swap):
        return lambda a, b: f(data, target, a, b, *extra)
    size, nbytes, step = encoding.block_size, encoding.block_bytes, STEP // encoding.block_size

    def run(a: int, b: int) -> None:
        for i in range(a, b, step):
            j = min(b, i + step)
            f(swap_fields(encoding, data[i * nbytes : j * nbytes]), target[i * size : j * size], 0, j - i, *extra)

    return run


def _widen(encoding: Encoding, data: NDArray[np.uint8], flat: NDArray[np.float32], swap: bool) -> Range:
    """A small float to float32; what is packed or in the other byte order passes through a scratch buffer."""
    import numpy as np

    spec, by_table = _WIDEN[encoding.name]
    f, extra = kernel(spec), ()
    if by_table:
        from ..kernels.floats import value_table

        extra = (value_table(encoding.dtype),)
    if encoding.decode is None and not (swap and encoding.swap):
        return lambda a, b: f(data, flat, a, b, *extra)
    size, nbytes, step = encoding.block_size, encoding.block_bytes, STEP // encoding.block_size
    unpack = None if encoding.decode is None else kernel(encoding.decode)

    def run(a: int, b: int) -> None:
        scratch = np.empty(step * size, np.uint8)
        codes = scratch.view()
        codes.flags.writeable = False
        for i in range(a, b, step):
            j = min(b, i + step)
            part, n = data[i * nbytes : j * nbytes], (j - i) * size
            if unpack is None:
                f(swap_fields(encoding, part), flat[i * size : j * size], 0, n, *extra)
            else:
                unpack(part, scratch, 0, j - i)
                f(codes, flat[i * size : j * size], 0, n, *extra)

    return run


def decode(
    encoding: Encoding,
    raw: Buffer,
    shape: Sequence[int],
    *,
    out: NDArray[Any] | None = None,
    threads: int | None = None,
    swap: bool = False,
) -> NDArray[Any]:
    """The values of a tensor as an array of `shape`.

    Without `out` a plain encoding comes as a read-only view of the bytes (no copy) whenever the bytes are the values;
    everything else is a new array, or `out`, which `decode_into` fills and describes.
    """
    shape = tuple(shape)
    if out is not None:
        if out.shape != shape:
            raise ValueRefusedError(f"out has shape {out.shape}, the tensor {shape}")
        decode_into(encoding, raw, out, threads=threads, swap=swap)
        return out
    dtype = numpy_dtype(encoding.dtype)
    data = _bytes_of(raw)
    _check(encoding, data, prod(shape))
    odd_bools = encoding.kind == "bool" and bool(data.size) and int(data.max()) > 1
    if encoding.decode is None and not (swap and encoding.swap) and not odd_bools:
        return data.view(dtype).reshape(shape)
    out = aligned_empty(shape, dtype)
    decode_into(encoding, data, out, threads=threads, swap=swap)
    return out


@cache
def _code_values(format: str) -> NDArray[np.float32]:
    """The values of all 256 bytes as codes of an .apsim format; bits above a code's width do not count."""
    import numpy as np

    kind = _CODES[format][1]
    if isinstance(kind, str):
        from ..kernels.floats import value_table

        return value_table(kind)
    low = np.arange(256) & ((1 << kind) - 1)
    table = (low - ((low >> (kind - 1)) << kind)).astype(np.float32)
    table.flags.writeable = False
    return table


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
        from . import ENCODINGS

        decode_into(ENCODINGS["BF16"], codes, out, threads=threads)
        return out
    if format not in _CODES:
        raise ValueRefusedError(f"unknown format {format!r}; known: {', '.join([*_CODES, 'bf16'])}")
    known = _CODES[format][0]
    if packing not in (None, known):
        raise ValueRefusedError(f"codes of {format} are packed as {known!r}, not {packing!r}")
    n, rows = (shape[-1], prod(shape[:-1])) if shape else (1, 1)
    data, (per, nbytes) = _bytes_of(codes), _PACKED_WIDTH[known]
    if data.size != rows * (-(-n // per) * nbytes):
        raise ValueRefusedError(f"{format} codes of shape {shape} take {rows * (-(-n // per) * nbytes)} bytes, got {data.size}")
    table, columns, layout = _scale_layout(scale, shape, axis, block)
    if out.size:
        f, matrix, values = kernel(f"scaled:decode_{known}"), out.reshape(rows, n), _code_values(format)
        in_parallel(lambda a, b: f(data, matrix, a, b, values, table, columns, *layout), rows, out.size, threads)
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

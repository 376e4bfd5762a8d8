"""From stored bytes to values: picks the kernel, hands it ranges of blocks, deals with the other byte order.

Contract: the caller has checked that the bytes are there; this module checks that their number fits the shape and never
lets a kernel see anything else (kernels check no bounds). A kernel is compiled on its first use, or loaded from Numba's
cache. The explicit-vector twin of a kernel is taken where the CPU has what it needs. Values do not depend on the number
of threads. `tests/test_decode.py` and `tests/test_scaled.py` compare with independent decoders.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError
from .base import Encoding
from .run import aligned_empty, bytes_of, in_parallel, kernel, numpy_dtype
from .scaled_values import decode_scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .run import Buffer, Range

__all__ = ["aligned_empty", "decode", "decode_into", "decode_scaled", "numpy_dtype"]

STEP = 1 << 16  # elements that pass through a scratch buffer at a time

# Plain encodings to float32: the kernel in `kernels.floats`.
_WIDEN = {
    "F16": "floats:widen_f16",
    "BF16": "floats:widen_bf16",
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), "floats:widen_none"),
    "F4": "floats:widen_nibble",
    "F6_E2M3": "floats:widen_bits6",
    "F6_E3M2": "floats:widen_bits6",
}


def _extra(encoding: Encoding) -> tuple[Any, ...]:
    """What a kernel takes besides bytes, result and range: the codebook of the IQ types that have one."""
    if encoding.decode is None or not encoding.decode.startswith("iquants:"):
        return ()
    from ..kernels.iquants import CODEBOOKS, codebook

    return (codebook(encoding.name),) if encoding.name in CODEBOOKS else ()


def _check(encoding: Encoding, raw: NDArray[np.uint8], numel: int) -> int:
    """The number of blocks; refuses bytes that are not exactly `numel` elements."""
    expected = encoding.nbytes(numel)
    if expected is None and encoding.is_packed:
        expected = -(-numel * encoding.block_bytes // encoding.block_size)
    if expected is None:
        raise ValueRefusedError(f"{numel} elements do not fill whole {encoding.name} blocks of {encoding.block_size}")
    if raw.size != expected:
        raise ValueRefusedError(f"{numel} elements of {encoding.name} take {expected} bytes, got {raw.size}")
    return numel // encoding.block_size


def _decode_rest(encoding: Encoding, data: NDArray[np.uint8], flat: NDArray[Any]) -> None:
    """The elements of a last block that is not full, by way of a full one."""
    import numpy as np

    rest = flat.size % encoding.block_size
    block = np.zeros(encoding.block_bytes, np.uint8)
    tail = data[flat.size // encoding.block_size * encoding.block_bytes :]
    block[: tail.size] = tail
    values = np.empty(encoding.block_size, flat.dtype)
    decode_into(encoding, block, values, threads=1)
    flat[flat.size - rest :] = values[:rest]


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

    data = bytes_of(raw)
    blocks = _check(encoding, data, out.size)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueRefusedError("out must be a writable C-contiguous array")
    flat = out.reshape(-1)
    if out.size % encoding.block_size:
        _decode_rest(encoding, data, flat)
        data = data[: blocks * encoding.block_bytes]
        flat = flat[: blocks * encoding.block_size]
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
    """A block format, packed codes to one code a byte, or complex halves to floats."""
    import numpy as np

    assert encoding.decode is not None
    f, extra = kernel(encoding.decode), _extra(encoding)
    parts = encoding.kind == "complex"
    target = flat if encoding.is_block else flat.view(np.float32 if parts else np.uint8)
    if not (swap and encoding.swap):
        return lambda a, b: f(data, target, a, b, *extra)
    size, nbytes, step = encoding.block_size + parts, encoding.block_bytes, STEP // encoding.block_size

    def run(a: int, b: int) -> None:
        for i in range(a, b, step):
            j = min(b, i + step)
            f(swap_fields(encoding, data[i * nbytes : j * nbytes]), target[i * size : j * size], 0, j - i, *extra)

    return run


def _widen(encoding: Encoding, data: NDArray[np.uint8], flat: NDArray[np.float32], swap: bool) -> Range:
    """A small float to float32; halves in the other byte order are turned a piece at a time."""
    f = kernel(_WIDEN[encoding.name])
    if encoding.block_bytes == 2:
        if not swap:
            return lambda a, b: f(data, flat, a, b)

        def run(a: int, b: int) -> None:
            for i in range(a, b, STEP):
                j = min(b, i + STEP)
                f(swap_fields(encoding, data[2 * i : 2 * j]), flat[i:j], 0, j - i)

        return run
    from ..kernels.codes import KINDS
    from ..kernels.formats import value_table

    table, kind = value_table(encoding.dtype), KINDS.index(encoding.dtype)
    return lambda a, b: f(data, flat, a, b, table, kind)


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
    data = bytes_of(raw)
    _check(encoding, data, prod(shape))
    odd_bools = encoding.kind == "bool" and bool(data.size) and int(data.max()) > 1
    if encoding.decode is None and not (swap and encoding.swap) and not odd_bools:
        return data.view(dtype).reshape(shape)
    out = aligned_empty(shape, dtype)
    decode_into(encoding, data, out, threads=threads, swap=swap)
    return out

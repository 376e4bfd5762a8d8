"""From values to stored bytes: picks the kernel, hands it ranges of blocks, refuses what a format cannot hold.

Contract: the bytes do not depend on the number of threads, nor on the layout or alignment of the input. Block formats
are ggml's, bit for bit (`ggml_quantize_chunk` without an importance matrix), with C's quirks: see `docs/formats.md`,
2.10 and 2.11. Conversion to a plain float follows ml_dtypes: overflow becomes infinity or NaN where the format has
them (float8_e4m3fn: NaN above 464) and saturates where it has neither (6 and 4 bits). Wider values pass through float32
first, as in ml_dtypes; only float64 to float16 is direct. Values that are not finite are refused, before anything is
returned, by every format that cannot hold them. `tests/test_encode.py` enforces all this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from .base import Encoding
from .run import aligned_empty, in_parallel, kernel, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["can_encode", "check_finite", "encode", "holds_nonfinite"]

STEP = 1 << 15  # elements that are checked, and converted where need be, while they are in the cache

# Plain floats that a kernel makes; the other plain encodings are the bytes of the array itself.
_FLOATS = {
    name: f"encode_floats:encode_{name.lower()}"
    for name in (
        "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2",
    )
}  # fmt: skip
_WITHOUT_NAN = ("F4", "F6_E2M3", "F6_E3M2")


def can_encode(encoding: Encoding) -> bool:
    """Whether `encode` makes this encoding (all but the IQ types that need a codebook, Q8_1, Q8_K and the .apsim
    formats, for which there is `quantize_scaled`)."""
    return encoding.kind != "scaled" and (encoding.encode is not None or not encoding.is_block)


def holds_nonfinite(encoding: Encoding) -> bool:
    """Whether NaN and infinity have a meaning in this encoding (for some 8-bit floats infinity becomes NaN)."""
    return encoding.kind in ("float", "complex") and encoding.name not in _WITHOUT_NAN


def _flat(x: NDArray[Any]) -> NDArray[Any]:
    """A read-only 1-D view (of a copy where the elements do not lie in order)."""
    import numpy as np

    flat = np.ascontiguousarray(x).reshape(-1).view()
    flat.flags.writeable = False
    return flat


def _ready(flat: NDArray[Any]) -> bool:
    import numpy as np

    return flat.dtype == np.float32 and flat.flags.aligned


def _part(flat: NDArray[Any], i: int, j: int) -> NDArray[np.float32]:
    """Elements [i, j) as aligned float32, read-only."""
    import numpy as np

    with np.errstate(over="ignore"):
        part: NDArray[np.float32] = flat[i:j].astype(np.float32)
    part.flags.writeable = False
    return part


def _counter() -> Callable[..., int]:
    f: Callable[..., Any] = kernel("encode_floats:count_nonfinite")
    return f


def count_nonfinite(x: NDArray[Any], threads: int | None = None) -> int:
    """How many elements are NaN, infinite, or beyond the range of float32."""
    flat = _flat(x)
    f = _counter()
    counts: list[int] = []

    def run(a: int, b: int) -> None:
        if _ready(flat):
            counts.append(f(flat, a, b))
            return
        for i in range(a, b, STEP):
            part = _part(flat, i, min(b, i + STEP))
            counts.append(f(part, 0, part.size))

    if flat.size:
        in_parallel(run, flat.size, flat.size, threads)
    return sum(counts)


def _refuse(count: int, numel: int, what: str, name: str | None) -> ValueRefusedError:
    tensor = "" if name is None else f"tensor {quote(name)}: "
    return ValueRefusedError(
        f"{tensor}{count} of {numel} values {'is' if count == 1 else 'are'} not finite (NaN, infinite or beyond"
        f" float32), which {what} cannot hold; nothing was written"
    )


def check_finite(
    x: ArrayLike, name: str | None = None, what: str = "a quantized format", *, threads: int | None = None
) -> None:
    """Refuse values that are not finite.

    Parameters
    ----------
    x
        The values.
    name
        The tensor's name, for the message.
    what
        What cannot hold them, for the message.
    threads
        As in `encode`.

    Raises
    ------
    ValueRefusedError
        Naming the tensor and how many values are NaN, infinite or beyond float32's range.
    """
    import numpy as np

    array = np.asarray(x)
    count = count_nonfinite(array, threads)
    if count:
        raise _refuse(count, array.size, what, name)


def encode(
    encoding: Encoding,
    x: ArrayLike,
    *,
    out: NDArray[np.uint8] | None = None,
    threads: int | None = None,
    name: str | None = None,
) -> NDArray[np.uint8]:
    """The bytes that store values in an encoding.

    Parameters
    ----------
    encoding
        A plain encoding or a block format (see `can_encode`).
    x
        Real values of any dtype and layout. The last axis of a block format must be a whole number of blocks. An
        integer, boolean or complex encoding takes only values of its own dtype: no silent rounding.
    out
        Where to put the bytes: a writable C-contiguous uint8 array of exactly their number. By default a new one.
    threads
        How many; by default up to 8 for large tensors.
    name
        The tensor's name, for messages.

    Returns
    -------
    ndarray of uint8
        `out`, or a new 1-D array.

    Raises
    ------
    ValueRefusedError
        The shape does not fit the blocks, the encoding has no encoder, or values are not finite where it cannot hold
        that. What `out` then holds is unspecified.
    """
    import numpy as np

    array = np.asarray(x)
    nbytes = _check(encoding, array, name)
    if out is None:
        out = aligned_empty((nbytes,), np.uint8)
    elif out.dtype != np.uint8 or out.size != nbytes or not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueRefusedError(f"out must be a writable C-contiguous uint8 array of {nbytes} bytes")
    if nbytes:
        spec = encoding.encode if encoding.is_block else _FLOATS.get(encoding.name)
        if spec is None or _same(encoding, array):
            _store(encoding, array, out.reshape(-1))
        else:
            _run(encoding, spec, array, out.reshape(-1), threads, name)
    return out


def _check(encoding: Encoding, x: NDArray[Any], name: str | None) -> int:
    """How many bytes it takes."""
    import numpy as np

    tensor = "" if name is None else f"tensor {quote(name)}: "
    if not can_encode(encoding):
        raise ValueRefusedError(f"{tensor}{encoding.name} cannot be encoded here, only decoded")
    row = x.shape[-1] if x.ndim else 1
    if encoding.is_block and (x.ndim == 0 or row % encoding.block_size):
        raise ValueRefusedError(
            f"{tensor}{encoding.name} takes rows of whole blocks of {encoding.block_size};"
            f" the last axis of shape {x.shape} has {row}"
        )
    nbytes = encoding.nbytes(x.size)
    if nbytes is None:
        raise ValueRefusedError(
            f"{tensor}{encoding.name} takes multiples of {encoding.block_size} elements, got {x.size}"
        )
    target = numpy_dtype(encoding.dtype)
    if encoding.kind in ("int", "uint", "bool", "complex"):
        if x.dtype.newbyteorder("=") != target:
            raise ValueRefusedError(f"{tensor}{encoding.name} takes {target} values, got {x.dtype}")
    elif x.dtype.kind not in "fiubV" or x.dtype.type is np.void:  # ml_dtypes are of kind V too
        raise ValueRefusedError(f"{tensor}{encoding.name} takes real numbers, got {x.dtype}")
    return nbytes


def _same(encoding: Encoding, x: NDArray[Any]) -> bool:
    """Whether the array's own bytes, or a direct NumPy cast, are what is wanted."""
    if encoding.is_block or encoding.block_size > 1:
        return False
    target = numpy_dtype(encoding.dtype)
    return x.dtype == target or (encoding.name == "F16" and x.dtype.itemsize > 4)


def _store(encoding: Encoding, x: NDArray[Any], out: NDArray[np.uint8]) -> None:
    """The bytes of the array, cast by NumPy where it is of another dtype."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(x, numpy_dtype(encoding.dtype))
    np.copyto(out, values.reshape(-1).view(np.uint8))


def _run(
    encoding: Encoding, spec: str, x: NDArray[Any], out: NDArray[np.uint8], threads: int | None, name: str | None
) -> None:
    """Blocks through a kernel, a cacheful at a time: checked, then encoded."""
    flat, f, size = _flat(x), kernel(spec), encoding.block_size
    check = None if holds_nonfinite(encoding) else _counter()
    ready, step, nbytes = _ready(flat), max(STEP // size, 1), encoding.block_bytes
    bad: list[int] = []

    def run(a: int, b: int) -> None:
        if ready and check is None:
            f(flat, out, a, b)
            return
        for i in range(a, b, step):
            j = min(b, i + step)
            part = flat if ready else _part(flat, i * size, j * size)
            first = i if ready else 0
            count = check(part, first * size, (first + j - i) * size) if check else 0
            if count:
                bad.append(count)
            elif not bad:
                f(part, out[(i - first) * nbytes :], first, first + j - i)

    in_parallel(run, flat.size // size, flat.size, threads)
    if bad:
        raise _refuse(sum(bad), flat.size, encoding.name, name)

"""Values of a tensor: whole, a part, or streamed; what `Tensor` calls upward (`display.py`).

A part is cut out of the stored blocks first, and only those are decoded. `tests/test_read.py` compares every form with
the whole tensor, and that with independent readers.
"""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

from ..encodings.values import aligned_empty, decode, decode_scaled
from ..errors import ApsiError, ValueRefusedError, quote, visible
from ..formats.base import is_mapped
from ..listing import human_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ..encodings import Encoding
    from ..model import Tensor
    from .stats import TensorStats

STREAM = 1 << 20  # elements of a chunk when a tensor is streamed
_FETCH = 8 << 20  # bytes that are fetched at a time where a file is not mapped


def _swapped(tensor: Tensor) -> bool:
    return tensor.byte_order != sys.byteorder


def _scales(tensor: Tensor, lo: int = 0, hi: int | None = None) -> NDArray[np.float32] | None:
    """The scales, or those of rows [lo, hi) of the first axis, which no block spans."""
    import numpy as np

    q = tensor.qparams
    if q is None or q.scale_shape is None:
        return None
    offset, nbytes, shape = q.scale_offset, q.scale_nbytes, q.scale_shape
    if hi is not None and shape:
        row = nbytes // shape[0]
        offset, nbytes, shape = offset + lo * row, (hi - lo) * row, (hi - lo, *shape[1:])
    raw = np.frombuffer(tensor.source.view(offset, nbytes), "<f4")
    return raw.astype(np.float32, copy=False).reshape(shape)


def read_tensor(tensor: Tensor, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """All values: a read-only view of the file where the bytes are the values, else a new array (or `out`)."""
    q = tensor.qparams
    if tensor.affine is not None:
        return _affine(tensor, out)
    if q is not None:
        return decode_scaled(
            tensor.encoding, tensor.raw(), _scales(tensor), tensor.shape, q.axis, q.block, q.packing, out
        )
    if tensor.numel == 0 and max(tensor.shape) >> 32:  # NumPy multiplies the other dimensions too
        raise ValueRefusedError(f"tensor {quote(tensor.name)}: NumPy has no array of the shape {tensor.shape}")
    return decode(tensor.info.encoding, tensor.raw(), tensor.shape, out=out, swap=_swapped(tensor))


def _affine(tensor: Tensor, out: NDArray[Any] | None) -> NDArray[Any]:
    """Codes with a scale and a zero point, as the values they stand for."""
    from .affine import affine_values

    values = affine_values(tensor).reshape(tensor.shape)
    if out is None:
        return values
    out[...] = values
    return out


def read_part(tensor: Tensor, key: Any) -> NDArray[Any]:
    """``tensor[key]`` for integers, slices and an ellipsis (anything NumPy takes is applied after the cut).

    Raises
    ------
    IndexError
        As NumPy does.
    """
    key = key if isinstance(key, tuple) else (key,)
    if tensor.qparams is not None or not tensor.info.encoding.is_block:
        return _plain_part(tensor, key)
    split = _outer_and_last(tensor.shape, key)
    return _index(read_tensor(tensor), key) if split is None else _block_part(tensor, *split)


def _index(values: NDArray[Any], key: tuple[Any, ...]) -> NDArray[Any]:
    picked: NDArray[Any] = values[key]
    return picked


def _plain_part(tensor: Tensor, key: tuple[Any, ...]) -> NDArray[Any]:
    """Whole-byte values are indexed in place; packed ones and quantized tensors are decoded by rows first."""
    plain = tensor.qparams is None and tensor.info.encoding.decode is None
    if tensor.affine is not None or (plain and is_mapped(tensor.source)):
        return _index(read_tensor(tensor), key)
    bounds = _bounds(tensor.shape, key)
    rows = _rows_of(tensor)
    if bounds is None or rows is None:
        return _index(read_tensor(tensor), key)
    (lo, hi), rest = bounds[0][0], (bounds[1][0], *_ellipsis(key, tensor.ndim)[1:])
    return _index(rows(lo, hi), rest)


def _rows_of(tensor: Tensor) -> Any:
    """A function that decodes rows [lo, hi) of the first axis, where rows are whole bytes; else None."""
    if tensor.ndim < 2 or not tensor.numel:
        return None
    inner, q = prod(tensor.shape[1:]), tensor.qparams
    nbytes = (tensor.nbytes - (q.scale_nbytes if q else 0)) // tensor.shape[0]

    def raw(lo: int, hi: int) -> memoryview:
        return tensor.source.view(tensor.offset + lo * nbytes, (hi - lo) * nbytes)

    if q is None:
        if tensor.info.encoding.nbytes(inner) is None:
            return None
        return lambda lo, hi: decode(
            tensor.info.encoding, raw(lo, hi), (hi - lo, *tensor.shape[1:]), swap=_swapped(tensor)
        )
    if q.axis == 0 or tensor.ndim < 2:
        return None
    return lambda lo, hi: decode_scaled(
        tensor.encoding, raw(lo, hi), _scales(tensor, lo, hi), (hi - lo, *tensor.shape[1:]), q.axis, q.block, q.packing
    )


def _ellipsis(key: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """The key with its ellipsis written out, one entry an axis."""
    at = next((i for i, k in enumerate(key) if k is Ellipsis), None)
    head, tail = (key, ()) if at is None else (key[:at], key[at + 1 :])
    return (*head, *[slice(None)] * (ndim - len(head) - len(tail)), *tail)


def _bounds(shape: tuple[int, ...], key: tuple[Any, ...]) -> tuple[list[tuple[int, int]], tuple[Any, ...]] | None:
    """The box of elements that a basic key touches, and the key relative to it; None for any other key."""
    dots = sum(k is Ellipsis for k in key)
    basic = all(k is Ellipsis or _is_basic(k) for k in key)
    if not shape or not basic or dots > 1 or len(key) - dots > len(shape):
        return None
    spans: list[tuple[int, int]] = []
    rest: list[Any] = []
    for k, n in zip(_ellipsis(key, len(shape)), shape, strict=True):
        if isinstance(k, slice):
            picked = range(n)[k]
            lo, hi = (min(picked), max(picked) + 1) if len(picked) else (0, 0)
            spans.append((lo, hi))
            stop = picked.stop - lo
            rest.append(slice(picked.start - lo, stop if stop >= 0 else None, picked.step) if len(picked) else slice(0))
        else:
            i = int(k)
            if not -n <= i < n:
                return None  # NumPy raises the IndexError, on the whole shape
            spans.append((i % n, i % n + 1))
            rest.append(0)
    return spans, tuple(rest)


def _outer_and_last(shape: tuple[int, ...], key: tuple[Any, ...]) -> tuple[tuple[Any, ...], int | slice] | None:
    """The key of all axes but the last, and that of the last; None where only the whole tensor will do.

    Blocks run along the last axis, so that NumPy can pick rows of blocks before anything is decoded: by integers and
    slices, or by one array of integers (or of bools, a dimension long) among slices.
    """
    import numpy as np

    if not shape or sum(k is Ellipsis for k in key) > 1 or len(key) - (any(k is Ellipsis for k in key)) > len(shape):
        return None
    *outer, last = _ellipsis(key, len(shape))
    arrays = 0
    for i, k in enumerate(outer):
        if isinstance(k, list | np.ndarray):
            outer[i] = picked = np.asarray(k)
            if picked.dtype.kind not in "iu" and not (picked.dtype.kind == "b" and picked.ndim == 1):
                return None
            arrays += 1
        elif not _is_basic(k):
            return None
    if (
        not _is_basic(last)
        or arrays > 1
        or (arrays and not all(isinstance(k, slice | np.ndarray) for k in (*outer, last)))
    ):
        return None
    return tuple(outer), last


def _is_basic(key: Any) -> bool:
    import numpy as np

    return isinstance(key, slice | np.integer) or (isinstance(key, int) and not isinstance(key, bool))


def _block_part(tensor: Tensor, outer: tuple[Any, ...], last: int | slice) -> NDArray[Any]:
    """Decode the blocks that the picked rows need, and no others."""
    import numpy as np

    encoding, row = tensor.info.encoding, tensor.shape[-1]
    if isinstance(last, slice):
        picked = range(row)[last]
        lo, hi = (min(picked), max(picked) + 1) if len(picked) else (0, 0)
    else:
        if not -row <= last < row:
            raise IndexError(f"index {last} is out of bounds for axis {tensor.ndim - 1} with size {row}")
        lo = int(last) % row
        hi = lo + 1
    size = encoding.block_size
    first, end = lo // size, -(-hi // size)
    raw, rows, outer = _fetched_rows(tensor, outer)
    blocks = raw.reshape(*rows, row // size, encoding.block_bytes)[(*outer, slice(first, end))]
    shape = (*blocks.shape[:-2], (end - first) * size)
    values = decode(encoding, np.ascontiguousarray(blocks).reshape(-1), shape, swap=_swapped(tensor))
    if not isinstance(last, slice):
        return _index(values, (..., lo - first * size))
    if not len(picked):
        return _index(values, (..., slice(0)))
    start, stop = picked.start - first * size, picked.stop - first * size
    return _index(values, (..., slice(start, stop if stop >= 0 else None, picked.step)))


def _fetched_rows(tensor: Tensor, outer: tuple[Any, ...]) -> tuple[NDArray[np.uint8], tuple[int, ...], tuple[Any, ...]]:
    """Stored bytes, their shape without the last axis, and the key in them: of a mapped file all, else picked rows."""
    import numpy as np

    bounds = None if is_mapped(tensor.source) or not outer else _bounds(tensor.shape[:1], outer[:1])
    if bounds is None:
        return np.frombuffer(tensor.raw(), np.uint8), tensor.shape[:-1], outer
    (lo, hi), nbytes = bounds[0][0], tensor.nbytes // max(tensor.shape[0], 1)
    raw = np.frombuffer(tensor.source.view(tensor.offset + lo * nbytes, (hi - lo) * nbytes), np.uint8)
    return raw, (hi - lo, *tensor.shape[1:-1]), (bounds[1][0], *outer[1:])


def stream(
    tensor: Tensor, chunk: int = STREAM, *, widen: bool = False, first: int = 0, last: int | None = None
) -> Iterator[NDArray[Any]]:
    """The values in flat pieces of about `chunk` elements, in order; memory stays bounded by a piece.

    With `widen`, floats of at most 16 bits come as float32, in a buffer that is used again for the next piece.
    `first` and `last`: only these elements; both at whole blocks, or the end.
    """
    encoding, last = tensor.info.encoding, tensor.numel if last is None else last
    if tensor.qparams is not None:
        yield from _stream_rows(tensor, chunk, first, last)
        return
    step = max(1, chunk // encoding.block_size) * encoding.block_size
    if tensor.affine is not None:
        from .affine import affine_values

        yield from (affine_values(tensor, i, min(i + step, last)) for i in range(first, last, step))
        return
    small = widen and encoding.kind in ("float", "block") and encoding.dtype not in ("float32", "float64")
    buffer = aligned_empty((min(step, last - first),), "float32") if small or (widen and encoding.is_block) else None
    wide = last - first if is_mapped(tensor.source) else max(_FETCH // max(_stored(encoding, step), 1), 1) * step
    for start in range(first, last, max(wide, 1)):
        end, base = min(start + wide, last), _stored(encoding, start)
        raw = tensor.source.view(tensor.offset + base, _stored(encoding, end) - base)
        for i in range(start, end, step):
            count = min(step, end - i)
            part = raw[_stored(encoding, i) - base : _stored(encoding, i + count) - base]
            out = None if buffer is None else buffer[:count]
            yield decode(encoding, part, (count,), out=out, swap=_swapped(tensor))


def _stored(encoding: Encoding, n: int) -> int:
    """Bytes of the first `n` elements; the last byte of packed values may be padded."""
    return -(-n * encoding.block_bytes // encoding.block_size)


def _stream_rows(tensor: Tensor, chunk: int, first: int, last: int) -> Iterator[NDArray[Any]]:
    rows = _rows_of(tensor)
    if rows is None:
        yield read_tensor(tensor).reshape(-1)[first:last]
        return
    row = max(1, prod(tensor.shape[1:]))
    step, begin, end = max(1, chunk // row), first // row, -(-last // row)
    for i in range(begin, end, step):
        j = min(i + step, end)
        yield rows(i, j).reshape(-1)[max(first - i * row, 0) : min(last, j * row) - i * row]


def dtype_of(tensor: Tensor) -> str:
    """Name of the dtype in which the values come, for statistics."""
    return "float32" if tensor.affine is not None else tensor.info.encoding.dtype


def tensor_stats(tensor: Tensor) -> TensorStats:
    """Statistics of the values, streamed; kept with the tensor."""
    if tensor.kept_stats is None:
        from .stats import compute_stats

        tensor.kept_stats = compute_stats(stream(tensor, widen=True), dtype=dtype_of(tensor))
    return tensor.kept_stats


BRIEF = 1 << 22  # elements up to which `repr` looks at the values
_LEVELS = "▁▂▃▄▅▆▇█"


def tensor_repr(tensor: Tensor) -> str:
    """One line: name, shape, encoding, unit, bytes; for a small tensor also what the values are like."""
    unit = f" [{tensor.unit}]" if tensor.unit is not None else ""
    shape = " × ".join(map(str, tensor.shape)) or "scalar"
    head = f"{visible(tensor.name, 80)}: {shape} {tensor.encoding}{unit}, {human_size(tensor.nbytes)}"
    small = tensor.numel <= BRIEF and tensor.info.encoding.kind != "complex" and is_mapped(tensor.source)
    wanted = tensor.kept_stats is not None or small
    if not wanted or not tensor.numel:
        return f"<Tensor {head}>"
    try:
        return f"<Tensor {head}; {stats_line(tensor_stats(tensor))}>"
    except ApsiError:  # closed, or changed on disk: what the header said still stands
        return f"<Tensor {head}>"


def stats_line(s: TensorStats) -> str:
    """``-0.51 … 0.48, mean 0.0003 ± 0.077, ▁▂▅█▅▂▁, 3.1 % zeros``; anything unusual is counted."""
    odd = [f"{n} {word}" for n, word in ((s.nan, "NaN"), (s.posinf, "+Inf"), (s.neginf, "-Inf")) if n]
    if s.zeros:
        odd.append(f"{100 * s.sparsity:.3g} % zeros")
    if s.subnormals:
        odd.append(f"{s.subnormals} subnormal")
    if not s.finite:
        return ", ".join(odd)
    if s.min == s.max:
        return ", ".join([f"all {s.min:.4g}" if s.finite == s.count else f"all finite ones {s.min:.4g}", *odd])
    counts, _ = s.histogram(12)
    top = max(float(counts.max()), 1e-300)
    bars = "".join(_LEVELS[min(7, int(8 * c / top))] if c > 0 else " " for c in counts)
    return ", ".join([f"{s.min:.4g} … {s.max:.4g}", f"mean {s.mean:.3g} ± {s.std:.3g}", f"▕{bars}▏", *odd])

"""Values of tensors in bounded pieces, whatever holds them: an array, a tensor of a file, a quantized .apsim tensor.

Contract: `cuts` divides a tensor into flat element ranges that a target's blocks and the source's own blocks both begin
at; `read` gives the values of one range and `raw` its stored bytes. A file is read into a buffer, not mapped, so that
memory stays bounded by a few pieces. Any number of threads may read ranges at once. `tests/test_convert.py` compares
every kind of input with the whole tensor.
"""

from __future__ import annotations

import os
import sys
import threading
from math import lcm, prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..encodings import ENCODINGS, Encoding
from ..encodings.run import MAX_THREADS, aligned_empty, numpy_dtype
from ..encodings.values import decode_into, decode_scaled, swap_fields
from ..errors import ValueRefusedError, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..encodings.scaled import QParams
    from ..model import Tensor

# Elements that are decoded and encoded at a time: fewer where more threads do so, to keep the memory of all the same.
PIECE = (1 << 20) // max(2, min(os.cpu_count() or 1, MAX_THREADS))
_WIDENED = ("F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")


class Input(Protocol):
    """A tensor that is to be written."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]

    def cuts(self, block: int) -> list[tuple[int, int]]:
        """Element ranges, in order, each beginning at a multiple of `block`."""

    def read(self, a: int, b: int) -> NDArray[Any]:
        """Values [a, b), flat: float32 for floats of at most 16 bits and for blocks, else the tensor's own dtype.

        Valid until the same thread reads again.
        """

    def raw(self, a: int, b: int) -> Any:
        """Stored bytes of [a, b), little-endian."""


class _Scratch(threading.local):
    """Buffers of one thread, kept from piece to piece."""

    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}

    def bytes(self, use: str, n: int) -> NDArray[np.uint8]:
        """An uninitialised buffer of `n` bytes on a cache line."""
        have = self.buffers.get(use)
        if have is None or have.size < n:
            have = self.buffers[use] = aligned_empty((n,), np.uint8)
        return have[:n]


SCRATCH = _Scratch()


def even_cuts(numel: int, block: int, piece: int = PIECE) -> list[tuple[int, int]]:
    """Ranges of about `piece` elements that begin at multiples of `block`."""
    step = max(piece // block, 1) * block
    return [(a, min(a + step, numel)) for a in range(0, numel, step)]


def fill(source: Any, offset: int, out: NDArray[np.uint8]) -> None:
    """Read bytes of a file into a buffer."""
    read_into = getattr(source, "read_into", None)
    if read_into is not None:
        read_into(offset, out.data)
    else:
        out[:] = np.frombuffer(source.read_at(offset, out.size), np.uint8)


class ArrayInput:
    """An array in memory; only an array whose elements do not lie in order is copied, as a whole."""

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        native = array.dtype.newbyteorder("=")
        encoding = _BY_DTYPE.get(native)
        if encoding is None:
            raise ValueRefusedError(f"tensor {quote(name)}: dtype {array.dtype} cannot be stored")
        self.name, self.encoding, self.shape = name, encoding, array.shape
        self._dtype = native
        self._flat = np.ascontiguousarray(array).reshape(-1)

    def cuts(self, block: int) -> list[tuple[int, int]]:
        """See `Input`."""
        return even_cuts(self._flat.size, lcm(block, self.encoding.block_size))

    def read(self, a: int, b: int) -> NDArray[Any]:
        """See `Input`."""
        part = self._flat[a:b].astype(self._dtype, copy=False)
        if self.encoding.name not in _WIDENED:
            return part
        if self.encoding.block_size > 1:
            return part.astype(np.float32)
        out = SCRATCH.bytes("values", 4 * (b - a)).view(np.float32)
        decode_into(self.encoding, part.view(np.uint8), out, threads=1)
        return out

    def raw(self, a: int, b: int) -> Any:
        """See `Input`."""
        if self.encoding.block_size > 1:
            from ..encodings.encode import encode

            return encode(self.encoding, self._flat[a:b], threads=1)
        return self._flat[a:b].astype(self._dtype.newbyteorder("<"), copy=False).view(np.uint8)


_BY_DTYPE: dict[np.dtype[Any], Encoding] = {
    numpy_dtype(e.dtype): e for e in ENCODINGS.values() if e.kind not in ("block", "scaled")
}


class FileInput:
    """A plain or block tensor of an opened file."""

    def __init__(self, tensor: Tensor, name: str | None = None) -> None:
        self.name = tensor.name if name is None else name
        self.encoding, self.shape = tensor.info.encoding, tensor.shape
        self._tensor, self._numel = tensor, tensor.numel
        self._swap = tensor.byte_order != "little" and bool(self.encoding.swap)
        self._native = sys.byteorder == "little"

    def cuts(self, block: int) -> list[tuple[int, int]]:
        """See `Input`."""
        return even_cuts(self._numel, lcm(block, self.encoding.block_size))

    @property
    def direct(self) -> str:
        """The encoding, where its bytes are this machine's own; else ""."""
        return "" if self._swap or not self._native else self.encoding.name

    def stored(self, a: int, b: int) -> NDArray[np.uint8]:
        """The bytes of a range in this thread's buffer, as the file has them."""
        first, last = self._range(a, b)
        out = SCRATCH.bytes("raw", last - first)
        fill(self._tensor.source, first, out)
        return out

    def _range(self, a: int, b: int) -> tuple[int, int]:
        """Where the bytes of elements [a, b) stand; the last byte of packed values may be padded."""
        size, nbytes, begin = self.encoding.block_size, self.encoding.block_bytes, self._tensor.offset
        return begin + a // size * nbytes, begin + -(-b * nbytes // size)

    def read(self, a: int, b: int) -> NDArray[Any]:
        """See `Input`."""
        data = self.stored(a, b)
        name = self.encoding.name
        dtype = np.dtype(np.float32) if name in _WIDENED or self.encoding.is_block else numpy_dtype(self.encoding.dtype)
        out = SCRATCH.bytes("values", (b - a) * dtype.itemsize).view(dtype)
        decode_into(self.encoding, data, out, threads=1, swap=self._swap if self._native else not self._swap)
        return out

    def raw(self, a: int, b: int) -> Any:
        """See `Input`."""
        if self._swap:
            return swap_fields(self.encoding, self.stored(a, b))
        first, last = self._range(a, b)
        return self._tensor.source.read_at(first, last - first)


class ScaledInput:
    """A quantized tensor of an .apsim file: codes and scales, decoded box by box."""

    def __init__(self, tensor: Tensor, name: str | None = None) -> None:
        self.name = tensor.name if name is None else name
        self.encoding, self.shape = tensor.info.encoding, tensor.shape
        q = tensor.qparams
        assert q is not None
        self.qparams: QParams = q
        self.tensor, self._numel = tensor, tensor.numel
        codes, nbytes = {"none": (1, 1), "nibble": (2, 1), "bits6": (4, 3)}[q.packing]
        self._packed = codes, nbytes * (2 if self.encoding.name == "bf16" else 1)
        self._row = self.shape[-1] if self.shape else 1
        self._across = q.axis is not None and q.axis < len(self.shape) - 1
        self._along = self.shape[q.axis] if q.axis is not None else 1
        self._inner = prod(self.shape[q.axis + 1 :]) if q.axis is not None else 1

    def cuts(self, block: int) -> list[tuple[int, int]]:
        """Whole rows of the last axis; where blocks run along another axis, boxes that one set of scales serves."""
        n, q, row = self._numel, self.qparams, self._row
        if n <= PIECE or row % block:  # a target that packs elements across odd rows takes the tensor whole
            return [(0, n)] if n else []
        if not self._across:
            whole = row if row <= PIECE or n > row else lcm(block, q.block or 1, self._packed[0])
            return even_cuts(n, whole)
        box, length = self._along * self._inner, min(q.block or self._along, self._along) * self._inner
        if box <= PIECE:
            return [(a, a + box) for a in range(0, n, box)]
        unit = max(PIECE // length, 1) * length
        spans = [(o + a, o + min(a + unit, box)) for o in range(0, n, box) for a in range(0, box, unit)]
        if unit <= PIECE:
            return spans
        step = PIECE // self._inner * self._inner  # places along the axis within one block, or rows of one place
        if step:
            return [(i, min(i + step, z)) for a, z in spans for i in range(a, z, step)]
        step = max(PIECE // row, 1) * row
        places = [p for a, z in spans for p in range(a, z, self._inner)]
        return [(i, min(i + step, p + self._inner)) for p in places for i in range(p, p + self._inner, step)]

    def _scales(self, first: int, count: int) -> NDArray[np.float32]:
        out = SCRATCH.bytes("scales", 4 * count)
        fill(self.tensor.source, self.qparams.scale_offset + 4 * first, out)
        values: NDArray[np.float32] = out.view("<f4").astype(np.float32, copy=False)
        return values

    def raw(self, a: int, b: int) -> Any:
        """Codes of whole rows (or of a part of the only row)."""
        row, (codes, nbytes) = self._row, self._packed
        if a % row or b % row:
            first, last = a // codes * nbytes, -(-b // codes) * nbytes
        else:
            width = -(-row // codes) * nbytes
            first, last = a // row * width, b // row * width
        return self.tensor.source.read_at(self.tensor.offset + first, last - first)

    def read(self, a: int, b: int) -> NDArray[Any]:
        """See `Input`."""
        q, codes = self.qparams, self.raw(a, b)
        out = SCRATCH.bytes("values", 4 * (b - a)).view(np.float32)
        box, scale, axis, block = self.box(a, b)
        decode_scaled(self.encoding.name, codes, scale, box, axis, block, q.packing, out.reshape(box), threads=1)
        return out

    def box(self, a: int, b: int) -> tuple[tuple[int, ...], NDArray[np.float32] | None, int | None, int | None]:
        """Shape, scales, axis and block of a range of `cuts` as a tensor of its own."""
        q, row = self.qparams, self._row
        if b - a == self._numel:
            scale = None if q.scale_shape is None else self._scales(0, prod(q.scale_shape)).reshape(q.scale_shape)
            return self.shape, scale, q.axis, q.block
        part = bool(a % row or b % row)
        box: tuple[int, ...] = (b - a,) if part else ((b - a) // row, row)
        if q.scale_shape is None:
            return box, None, None, None
        if q.axis is None:
            return box, self._scales(0, 1).reshape(()), None, None
        if self._across:
            return self._box_across(a, b)
        block = q.block or row
        if part:
            first = a // block
            count = -(-b // block) - first
            return box, self._scales(first, count), 0, block if count > 1 else None
        per_row = -(-row // block)
        scale = self._scales(a // row * per_row, box[0] * per_row).reshape(-1, per_row)
        return box, scale, 1, block if per_row > 1 else None

    def _box_across(self, a: int, b: int) -> tuple[tuple[int, ...], NDArray[np.float32], int, int | None]:
        inner, row, block = self._inner, self._row, self.qparams.block or self._along
        outer, place = divmod(a // inner, self._along)
        first = (outer * -(-self._along // block) + place // block) * inner
        if (b - a) % inner:  # rows of one place along the axis
            shape = 1, (b - a) // row, row
            return shape, self._scales(first + a % inner, b - a).reshape(shape), 0, None
        count = (b - a) // inner
        blocks = -(-count // block)
        scale = self._scales(first, blocks * inner).reshape(blocks, inner // row, row)
        return (count, inner // row, row), scale, 0, block if blocks > 1 else None


def input_of(tensor: Tensor, name: str | None = None) -> Input:
    """The input for a tensor of an opened file."""
    if tensor.affine is not None:
        from .affine import AffineInput

        return AffineInput(tensor, name)
    return ScaledInput(tensor, name) if tensor.qparams is not None else FileInput(tensor, name)

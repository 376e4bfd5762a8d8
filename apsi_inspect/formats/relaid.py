"""Sources that lay bytes out anew: for tensors whose bytes do not stand in the file one after the other.

Contract: each gives the row-major bytes of one tensor (or one unpacked member) under the same offsets as if they began
at `offset` of the file, so that every reader of `Tensor.source` works as it does on a plain one. Memory is what is
asked for, at most `MAX_EXPANDED` where the tensor is larger than what is stored; `INFLATED_LIMITS` bound what is
unpacked. NumPy is imported on use. `tests/test_relaid.py` and `tests/test_torch.py` enforce this.
"""

from __future__ import annotations

from math import prod

from ..errors import ModelFileError, TruncatedFileError, quote
from .zip_archive import Member, inflate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..source import ByteSource

MAX_EXPANDED = 1 << 30
# Unpacked bytes from which on deflated members may have at most so many times their packed size. Weights
# seldom shrink to less than a half; only what is the same all over shrinks like this.
INFLATED_LIMITS = ((64 << 20, 200), (MAX_EXPANDED, 16))


class Relaid:
    """What the sources of this module share: a range is checked, then made."""

    def __init__(self, name: str, offset: int, nbytes: int) -> None:
        self.name, self.offset, self.nbytes = name, offset, nbytes
        self.size = offset + nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Copy of a range."""
        return bytes(self.view(offset, nbytes))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A range, made anew."""
        if offset < self.offset or nbytes < 0 or offset + nbytes > self.size:
            raise TruncatedFileError(self.name, f"bytes {offset} to {offset + nbytes} are outside of the tensor")
        return self._make(offset - self.offset, nbytes) if nbytes else memoryview(b"")

    def _make(self, begin: int, nbytes: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release."""


class StridedSource(Relaid):
    """A tensor with strides over a range of another source.

    Parameters
    ----------
    base, begin, length
        The stored bytes it lies in.
    start, strides
        In elements of `width` bytes; checked by the caller against `length`.
    conj, neg
        The values are the complex conjugate, or the negative, of what is stored; `dtype` is theirs.
    """

    def __init__(
        self,
        base: ByteSource,
        begin: int,
        length: int,
        start: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        width: int,
        transform: tuple[str, bool, bool] | None = None,
    ) -> None:
        super().__init__(base.name, begin + start * width, prod(shape) * width)
        self.base, self.begin, self.length = base, begin, length
        self.start, self.shape, self.strides, self.width = start, shape, strides, width
        self.transform = transform

    def _make(self, begin: int, nbytes: int) -> memoryview:
        import numpy as np

        if nbytes > MAX_EXPANDED and self.nbytes > self.length:
            raise ModelFileError(
                self.name,
                f"a tensor of {self.nbytes} bytes is made of {self.length} stored ones (an expanded view); "
                f"at most {MAX_EXPANDED} are made at once",
                hint="read a part of it",
            )
        first, last = begin // self.width, -(-(begin + nbytes) // self.width)
        part = self._elements(first, last)
        if self.transform is not None:
            part = _transformed(part, *self.transform)
        raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        cut: Any = raw[begin - first * self.width : begin - first * self.width + nbytes]
        cut.flags.writeable = False
        return memoryview(cut)

    def _elements(self, first: int, last: int) -> Any:
        """Elements [first, last) in row-major order; rows are cut out first, so that little more is copied."""
        import numpy as np

        dims = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1] or [(1, 1)]
        dtype = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}[self.width]
        stored = np.frombuffer(self.base.view(self.begin, self.length // self.width * self.width), np.uint8)
        flat: Any = stored.view(dtype)[self.start :]
        whole = np.lib.stride_tricks.as_strided(
            flat, [n for n, _ in dims], [s * self.width for _, s in dims], writeable=False
        )
        if last - first == whole.size:
            return whole
        inner = whole.size // len(whole)
        a, z = first // inner, -(-last // inner)
        if (z - a) * inner > 4 * (last - first):
            return whole.flat[first:last]
        return np.ascontiguousarray(whole[a:z]).reshape(-1)[first - a * inner : last - a * inner]


def _transformed(part: Any, dtype: str, conj: bool, neg: bool) -> Any:
    import numpy as np

    from ..encodings.run import numpy_dtype

    values = np.ascontiguousarray(part).reshape(-1).view(numpy_dtype(dtype))
    values = np.conj(values) if conj else values
    return -values if neg else values


class InflatedSource(Relaid):
    """A deflated member of a ZIP archive, unpacked when it is read; one at a time is kept.

    Its offsets begin at the member's place in the file. `packed`, `unpacked`: sizes of all deflated members that may be
    read from this archive, whose sum is limited as well as each of them.
    """

    def __init__(self, base: ByteSource, member: Member, packed: int = 0, unpacked: int = 0) -> None:
        super().__init__(base.name, member.offset, member.size)
        self.base, self.member = base, member
        self.total = packed, unpacked
        self._data: memoryview | None = None

    def _make(self, begin: int, nbytes: int) -> memoryview:
        data = self._data
        if data is None:
            self._check(self.member.packed, self.member.size, "")
            self._check(*self.total, " with the other deflated members")
            packed = self.base.view(self.member.offset, self.member.packed)
            data = inflate(packed, self.member.size, self.name, self.member.name)
            global _kept
            if _kept is not None:
                _kept._data = None
            self._data, _kept = data, self
        return data[begin : begin + nbytes]

    def _check(self, packed: int, size: int, what: str) -> None:
        """Refuse a decompression bomb before any of it is unpacked."""
        for least, ratio in INFLATED_LIMITS:
            if size > least and size > ratio * packed:
                raise ModelFileError(
                    self.name,
                    f"ZIP member {quote(self.member.name)}{what} unpacks from {packed} bytes to {size}; above {least} "
                    f"bytes at most {ratio} times the packed size is read (a decompression bomb?)",
                    hint="if you trust the file, pack it anew without compression",
                )


_kept: InflatedSource | None = None


class HeldSource(Relaid):
    """Bytes that were read with the header: an array inside a pickle."""

    def __init__(self, name: str, offset: int, data: bytes) -> None:
        super().__init__(name, offset, len(data))
        self._data = memoryview(data)

    def _make(self, begin: int, nbytes: int) -> memoryview:
        return self._data[begin : begin + nbytes]


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many stored elements a tensor spans from its first one."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def check_extent(file: str, name: str, have: int, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse a tensor that reaches beyond the elements of its storage."""
    need = extent(shape, strides)
    if need and start + need > have:
        raise ModelFileError(
            file, f"needs elements {start} to {start + need} of its storage, which has {have}", f"tensor {quote(name)}"
        )

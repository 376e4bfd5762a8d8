"""Typed fields of ONNX that hold varints, as the bytes that raw_data would have.

`count_varints` needs no NumPy; the values are decoded when they are read, all at once. `tests/test_onnx.py` compares
every data type with onnx.
"""

from __future__ import annotations

from ..errors import ModelFileError
from .relaid import Relaid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..source import ByteSource

_MORE = bytes(range(0x80, 0x100))  # bytes after which a varint goes on
_PIECE = 1 << 20


def count_varints(source: ByteSource, begin: int, end: int) -> int:
    """How many varints a packed run holds."""
    count = 0
    for at in range(begin, end, _PIECE):
        count += len(source.read_at(at, min(_PIECE, end - at)).translate(None, _MORE))
    if end > begin and source.read_at(end - 1, 1)[0] >= 0x80:
        raise ModelFileError(source.name, "is not valid protobuf (ONNX): a list of numbers does not end", f"byte {end}")
    return count


class VarintSource(Relaid):
    """The packed elements of a tensor whose values stand in varints.

    Parameters
    ----------
    runs, loose
        Ranges of packed varints, then values that were written one by one, as 64-bit numbers.
    bits
        Of an element. Of 2 and 4 bits a value is a byte of several; of 6 bits a value is one element.
    """

    def __init__(
        self, base: ByteSource, offset: int, nbytes: int, runs: list[tuple[int, int]], loose: bytes, bits: int
    ) -> None:
        super().__init__(base.name, offset, nbytes)
        self.base, self.runs, self.loose, self.bits = base, runs, loose, bits

    def _make(self, begin: int, nbytes: int) -> memoryview:
        import numpy as np

        parts = [_decode(np.frombuffer(self.base.view(a, z - a), np.uint8)) for a, z in self.runs if z > a]
        values = np.concatenate([*parts, np.frombuffer(self.loose, "<u8")])
        if self.bits == 6:
            raw: Any = _pack6(values)
        else:
            raw = values.astype(f"<u{max(self.bits, 8) // 8}").view(np.uint8)
        raw = raw[begin : begin + nbytes]
        raw.flags.writeable = False
        return memoryview(raw)


def _decode(raw: Any) -> Any:
    """Varints to unsigned 64-bit numbers, all at once: byte after byte of those that go on."""
    import numpy as np

    ends = np.flatnonzero(raw < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1])
    length = ends - starts + 1
    values = np.zeros(len(ends), np.uint64)
    for k in range(min(int(length.max(initial=0)), 10)):
        longer = length > k
        values[longer] |= (raw[starts[longer] + k] & 0x7F).astype(np.uint64) << np.uint64(7 * k)
    return values


def _pack6(values: Any) -> Any:
    """One code a number to a little-endian stream of six bits each."""
    import numpy as np

    codes = np.zeros(-(-len(values) // 4) * 4, np.uint32)
    codes[: len(values)] = values & np.uint64(63)
    quads = codes.reshape(-1, 4)
    words = quads[:, 0] | quads[:, 1] << 6 | quads[:, 2] << 12 | quads[:, 3] << 18
    packed = np.ascontiguousarray(words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]).reshape(-1)
    return packed[: -(-len(values) * 6 // 8)]

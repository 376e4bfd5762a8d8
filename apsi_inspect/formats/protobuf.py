"""The protobuf wire format, read lazily: fields and where they are, by small windows of the file.

Contract: `Wire.fields` goes over the fields of a message between two places of a file; what is length-delimited is
given as a range and not read. A field that reaches beyond its message, a varint of more than ten bytes or an unknown
wire type is a ModelFileError. At most `MAX_FIELDS` fields are read of one file. `tests/test_onnx.py` enforces this.
"""

from __future__ import annotations

from ..errors import ModelFileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..source import ByteSource

    Field = tuple[int, int, int, int]  # number, wire type, value or begin, end

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_FIELDS = 10_000_000
_WINDOW = 1 << 16
_LONGEST = 20  # bytes of a tag and a varint


class Wire:
    """A file as protobuf messages."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.count = source, 0
        self._buffer, self._begin = b"", 0

    def fail(self, reason: str, at: int) -> ModelFileError:
        """An error at a place of the file."""
        return ModelFileError(self.source.name, f"is not valid protobuf (ONNX): {reason} at byte {at}")

    def beyond(self, length: int, at: int) -> ModelFileError:
        """The error of a field that is longer than the message it is in."""
        return self.fail(f"a field of {length} bytes reaches beyond its message (truncated?)", at)

    def _load(self, at: int) -> None:
        self._begin = at
        self._buffer = self.source.read_at(at, min(_WINDOW, self.source.size - at))

    def fields(self, at: int, end: int) -> Iterator[Field]:
        """The fields of the message in bytes [at, end).

        Yields (number, wire type, value, 0) for a varint, (number, wire type, begin, end) for anything else.
        """
        while at < end:
            offset = at - self._begin
            buffer = self._buffer
            if offset < 0 or offset + _LONGEST > len(buffer):
                self._load(at)
                offset, buffer = 0, self._buffer
            self.count += 1
            if self.count > MAX_FIELDS:
                raise self.fail(f"more than {MAX_FIELDS} fields", at)
            tag = buffer[offset]  # most numbers have one byte
            offset += 1
            if tag >= 0x80:
                tag, offset = self._varint(offset - 1, at)
            number, kind = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                raise self.fail(f"field number {number}", at)
            if kind == BYTES and offset < len(buffer) and (length := buffer[offset]) < 0x80:
                begin = self._begin + offset + 1
                following = begin + length
                if following > end:
                    raise self.beyond(length, at)
                yield number, kind, begin, following
                at = following
                continue
            if kind == VARINT:
                value, offset = self._varint(offset, at)
                following = self._begin + offset
                if following > end:
                    raise self.fail("a number reaches beyond its message", at)
                yield number, kind, value, 0
                at = following
                continue
            if kind == BYTES:
                length, offset = self._varint(offset, at)
            elif kind in (FIXED64, FIXED32):
                length = 8 if kind == FIXED64 else 4
            else:
                raise self.fail(f"wire type {kind}", at)
            begin = self._begin + offset
            if begin + length > end:
                raise self.beyond(length, at)
            yield number, kind, begin, begin + length
            at = begin + length

    def _varint(self, offset: int, at: int) -> tuple[int, int]:
        buffer = self._buffer
        value = shift = 0
        try:
            while True:
                byte = buffer[offset]
                offset += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    return value & 0xFFFFFFFFFFFFFFFF, offset
                shift += 7
                if shift > 63:
                    raise self.fail("a number of more than ten bytes", at)
        except IndexError:
            raise self.fail("the file ends within a number", at) from None

    def read(self, begin: int, end: int) -> bytes:
        """The bytes of a range."""
        offset = begin - self._begin
        if 0 <= offset and end - self._begin <= len(self._buffer):
            return self._buffer[offset : end - self._begin]
        return self.source.read_at(begin, end - begin)

    def text(self, begin: int, end: int, limit: int = 1 << 20) -> str:
        """A text field."""
        if end - begin > limit:
            raise self.fail(f"a text of {end - begin} bytes, at most {limit} are read", begin)
        offset = begin - self._begin
        stop = end - self._begin
        raw = self._buffer[offset:stop] if 0 <= offset and stop <= len(self._buffer) else self.read(begin, end)
        return raw.decode("utf-8", "replace")

    def packed(self, begin: int, end: int, limit: int = 1 << 20) -> list[int]:
        """The numbers of a packed field of varints."""
        raw = self.read(begin, end) if end - begin <= limit else b""
        if end - begin > limit or (raw and raw[-1] >= 0x80):
            raise self.fail("a list of numbers that is too long or does not end", begin)
        out: list[int] = []
        value = shift = 0
        for byte in raw:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                out.append(value & 0xFFFFFFFFFFFFFFFF)
                value = shift = 0
            elif shift > 63:
                raise self.fail("a number of more than ten bytes", begin)
        return out


def signed(value: int) -> int:
    """A varint as a signed 64-bit number."""
    return value - (1 << 64) if value >> 63 else value

"""The key-value pairs of a GGUF file: typed, checked, arrays decoded when they are read.

`Cursor` reads forward through the header in windows, with every length checked against the file before it is used.
`Metadata` is a Mapping: scalars and strings are Python values, an array is an `Array` that knows its type, length and
place. Nothing loops over a declared count that the file cannot hold. Tests: `tests/test_gguf.py`, `tests/test_fuzz.py`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence

from ..errors import ModelFileError, TruncatedFileError, quote
from ..model import Finding
from .base import warm_scan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import numpy as np

    from ..source import ByteSource

# type id -> (name, struct code, bytes); 8 and 9 are strings and arrays
SCALARS = {
    0: ("UINT8", "B", 1),
    1: ("INT8", "b", 1),
    2: ("UINT16", "H", 2),
    3: ("INT16", "h", 2),
    4: ("UINT32", "I", 4),
    5: ("INT32", "i", 4),
    6: ("FLOAT32", "f", 4),
    7: ("BOOL", "B", 1),
    10: ("UINT64", "Q", 8),
    11: ("INT64", "q", 8),
    12: ("FLOAT64", "d", 8),
}
STRING, ARRAY, BOOL = 8, 9, 7
NAMES = {**{i: row[0] for i, row in SCALARS.items()}, STRING: "STRING", ARRAY: "ARRAY"}
_NUMPY = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
MAX_STRINGS = 1 << 22  # in the arrays of a file; five times the largest vocabulary known, with its merges
MAX_ARRAYS = 1 << 16  # nested in arrays
MAX_STRING = 1 << 30  # bytes; ggml's limit
MAX_KEY = 65_535  # bytes; the limit of the GGUF specification
MAX_KEYS = 1 << 20
MAX_NESTING = 4
_LONG = 1 << 20  # bytes from which a string is decoded when it is read, as arrays are
_WINDOW, _FIRST_WINDOW = 1 << 20, 1 << 13  # read ahead: doubled while reading forward, small again after a jump
ENDS = 3  # first and last elements shown of a long array


class Cursor:
    """A forward reader over a source, in windows; every read is checked against the end of the file."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self._base, self._pos, self._buf = 0, 0, b""
        self._window = _FIRST_WINDOW
        self._counted = {"strings": 0, "nested arrays": 0}
        self.set_layout("little", 8)

    def set_layout(self, byte_order: str, word: int) -> None:
        """Byte order, and bytes of a length (4 in version 1, 8 later)."""
        self.sign, self.byte_order, self.word = "<" if byte_order == "little" else ">", byte_order, word
        self._u32 = struct.Struct(self.sign + "I").unpack_from
        self._len = struct.Struct(self.sign + ("Q" if word == 8 else "I")).unpack_from
        self._info = struct.Struct(self.sign + "IQ").unpack_from

    @property
    def usual_layout(self) -> bool:
        """Little-endian with 64-bit lengths: what scans are made for."""
        return self.sign == "<" and self.word == 8

    @property
    def position(self) -> int:
        """Absolute position of the next byte."""
        return self._base + self._pos

    def _need(self, n: int, what: str) -> None:
        if self._pos + n > len(self._buf):
            self.seek(self.position, what, n)

    def seek(self, position: int, what: str, n: int = 0) -> None:
        """Go to an absolute position, with at least `n` bytes of window behind it."""
        if position + n > self.source.size:
            raise TruncatedFileError(
                self.source.name,
                f"{what} ends at byte {position + n}, but the file has {self.source.size} bytes: truncated",
            )
        at = position - self._base
        if 0 <= at and at + n <= len(self._buf):
            self._pos = at
            return
        self._window = min(self._window * 2, _WINDOW) if at - len(self._buf) < self._window else _FIRST_WINDOW
        size = min(max(n, self._window), self.source.size - position)
        self._buf, self._base, self._pos = self.source.read_at(position, size), position, 0

    def window(self) -> tuple[bytes, int]:
        """The bytes at hand, and where in them the next one stands (for a loop that checks by itself)."""
        return self._buf, self._pos

    def take(self, n: int, what: str) -> bytes:
        """The next `n` bytes."""
        self._need(n, what)
        pos = self._pos
        self._pos = pos + n
        return self._buf[pos : pos + n]

    def u32(self, what: str) -> int:
        """The next 32-bit number."""
        self._need(4, what)
        value: int = self._u32(self._buf, self._pos)[0]
        self._pos += 4
        return value

    def length(self, what: str) -> int:
        """The next count or length."""
        self._need(self.word, what)
        value: int = self._len(self._buf, self._pos)[0]
        self._pos += self.word
        return value

    def lengths(self, n: int, what: str) -> tuple[int, ...]:
        """The next `n` lengths."""
        raw = self.take(n * self.word, what)
        return struct.unpack(f"{self.sign}{n}{'Q' if self.word == 8 else 'I'}", raw)

    def type_and_offset(self, what: str) -> tuple[int, int]:
        """A tensor's type id and relative offset."""
        self._need(12, what)
        value: tuple[int, int] = self._info(self._buf, self._pos)
        self._pos += 12
        return value

    def string(self, what: str, limit: int) -> bytes:
        """The next length-prefixed string."""
        n = self.length(what)
        if n > limit:
            raise ModelFileError(self.source.name, f"has {n} bytes, more than the limit of {limit}", what)
        return self.take(n, what)

    def count(self, what: str, n: int, limit: int, where: str) -> None:
        """Refuse more than `limit` of something in all arrays of the file (a sparse file can declare any number)."""
        self._counted[what] += n
        if self._counted[what] > limit:
            raise ModelFileError(self.source.name, f"more than {limit} {what} in the metadata are not read", where)

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings without making one."""
        word, unpack = self.word, self._len
        scan = warm_scan(count, 1024) if self.usual_layout else None
        while count:
            self._need(word, what)
            buf, pos = self._buf, self._pos
            if scan is not None:
                pos, count = scan.skip_strings(buf, pos, count)
            done = 0
            try:
                for done in range(count):  # noqa: B007  (read where the window ends)
                    pos += word + unpack(buf, pos)[0]
                count = 0
            except (struct.error, OverflowError):  # beyond the window
                count -= done
            self.seek(self._base + pos, what)


class Array(Sequence["Any"]):
    """An array value of GGUF metadata; its elements are decoded when they are read.

    Attributes
    ----------
    element_type
        ``"STRING"``, ``"FLOAT32"``, ``"ARRAY"``, …
    """

    def __init__(self, cursor: Cursor, what: str, depth: int = 0) -> None:
        self._source, self._order, self._word = cursor.source, cursor.byte_order, cursor.word
        self._what = what
        self._type = cursor.u32(what)
        if self._type not in NAMES:
            raise ModelFileError(cursor.source.name, f"array of unknown element type {self._type}", what)
        self._count = cursor.length(what)
        self._start = cursor.position
        self._tail = self._start
        self._children: list[Array] = []
        self._index: Sequence[int] | None = None
        self._skip(cursor, depth)
        self._end = cursor.position

    @property
    def element_type(self) -> str:
        """Name of the element type."""
        return NAMES[self._type]

    def _skip(self, cursor: Cursor, depth: int) -> None:
        """Step over the elements, refusing a count that the file cannot hold."""
        least = {STRING: cursor.word, ARRAY: 4 + cursor.word}.get(self._type) or SCALARS[self._type][2]
        if self._count * least > cursor.source.size - cursor.position:
            raise TruncatedFileError(
                cursor.source.name, f"array of {self._count} {self.element_type} does not fit into the file", self._what
            )
        if self._type == STRING:
            self._skip_strings(cursor)
        elif self._type == ARRAY:
            cursor.count("nested arrays", self._count, MAX_ARRAYS, self._what)
            if depth >= MAX_NESTING:
                raise ModelFileError(cursor.source.name, f"arrays nested {depth + 1} deep are not read", self._what)
            self._children = [Array(cursor, self._what, depth + 1) for _ in range(self._count)]
        else:
            cursor.seek(cursor.position + self._count * least, self._what)

    def _skip_strings(self, cursor: Cursor) -> None:
        cursor.count("strings", self._count, MAX_STRINGS, self._what)
        cursor.skip_strings(max(self._count - ENDS, 0), self._what)
        self._tail = cursor.position
        cursor.skip_strings(min(self._count, ENDS), self._what)

    def __len__(self) -> int:
        return self._count

    def _strings(self, start: int, count: int) -> Iterator[str]:
        word, order = self._word, self._order
        data = self._source.view(start, self._end - start)
        pos = 0
        for _ in range(count):
            n = int.from_bytes(data[pos : pos + word], order)  # type: ignore[arg-type]
            pos += word
            yield bytes(data[pos : pos + n]).decode("utf-8", "backslashreplace")
            pos += n

    def _offsets(self) -> Sequence[int]:
        """Relative position of each string (made once, on the first random access)."""
        if self._index is None:
            index, pos, word = array("q"), 0, self._word
            data = self._source.view(self._start, self._end - self._start)
            scan = warm_scan(self._count, 1024) if (self._order, word) == ("little", 8) else None
            if scan is not None:
                self._index = scan.string_starts(data, self._count)
                return self._index
            for _ in range(self._count):
                index.append(pos)
                pos += word + int.from_bytes(data[pos : pos + word], self._order)  # type: ignore[arg-type]
            self._index = index
        return self._index

    def __iter__(self) -> Iterator[Any]:
        if self._type == STRING:
            return self._strings(self._start, self._count)
        return iter(self._children if self._type == ARRAY else self._numbers(0, self._count))

    def _numbers(self, lo: int, hi: int) -> list[Any]:
        _, code, nbytes = SCALARS[self._type]
        raw = self._source.view(self._start + lo * nbytes, (hi - lo) * nbytes)
        sign = "<" if self._order == "little" else ">"
        values = list(struct.unpack(f"{sign}{hi - lo}{code}", raw))
        return [v != 0 for v in values] if self._type == BOOL else values

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            lo, hi, step = key.indices(self._count)
            if step != 1:
                return [self[i] for i in range(lo, hi, step)]
            hi = max(lo, hi)
            if self._type == STRING:
                if lo >= self._count or lo == hi:
                    return []
                if lo == 0:
                    start = self._start
                elif self._index is None and lo == max(self._count - ENDS, 0):
                    start = self._tail
                else:
                    start = self._start + int(self._offsets()[lo])
                return list(self._strings(start, hi - lo))
            return self._children[lo:hi] if self._type == ARRAY else self._numbers(lo, hi)
        i = key.__index__()
        i = i + self._count if i < 0 else i
        if not 0 <= i < self._count:
            raise IndexError(f"index {key} is out of range for {self._count} elements")
        return self[i : i + 1][0]

    def raw(self) -> memoryview | None:
        """The elements as the file holds them, where a little-endian file of version 3 would hold the same."""
        if self._order != "little" or (self._word != 8 and self._type in (STRING, ARRAY)):
            return None
        return self._source.view(self._start, self._end - self._start)

    def tolist(self) -> list[Any]:
        """All elements as Python values."""
        return [v.tolist() if isinstance(v, Array) else v for v in self]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple, Array)):
            return len(self) == len(other) and self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        import numpy as np

        if self._type in (STRING, ARRAY):
            return np.array(self.tolist(), dtype=dtype or object)
        raw = self._source.view(self._start, self._end - self._start)
        values = np.frombuffer(raw, ("<" if self._order == "little" else ">") + _NUMPY[self._type])
        if self._type == BOOL:
            values = values != 0
        return np.array(values, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<GGUF array of {self._count} {self.element_type}>"


class Metadata(Mapping[str, "Any"]):
    """Key-value pairs of a GGUF file, in file order.

    Attributes
    ----------
    types
        Key -> type: ``"UINT32"``, ``"STRING"``, ``"ARRAY[STRING]"``, …
    """

    def __init__(self, cursor: Cursor, count: int, findings: list[Finding]) -> None:
        self.types: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        file = cursor.source.name
        if count > MAX_KEYS:
            raise ModelFileError(file, f"declares {count} keys, more than the limit of {MAX_KEYS}", "the metadata")
        for i in range(count):
            key = self._key(cursor, i, findings)
            if key in self._values:
                raise ModelFileError(file, "stands twice in the metadata (duplicate key)", f"key {quote(key)}")
            kind = cursor.u32(f"the type of key {quote(key)}")
            if kind not in NAMES:
                raise ModelFileError(file, f"has unknown value type {kind}", f"key {quote(key)}")
            value = _value(cursor, kind, f"key {quote(key)}", findings)
            if kind == BOOL and value not in (0, 1):
                findings.append(Finding("warning", "odd-bool", f"key {quote(key)} is a BOOL of value {value}"))
            self._values[key] = value != 0 if kind == BOOL else value
            self.types[key] = f"ARRAY[{value.element_type}]" if isinstance(value, Array) else NAMES[kind]

    @staticmethod
    def _key(cursor: Cursor, i: int, findings: list[Finding]) -> str:
        raw = cursor.string(f"metadata key {i}", MAX_KEY)
        if not raw:
            raise ModelFileError(cursor.source.name, "is empty", f"metadata key {i}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            key = raw.decode("utf-8", "backslashreplace")
            findings.append(Finding("warning", "bad-utf8", f"key {quote(key)} is not UTF-8"))
            return key

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return value.text() if isinstance(value, LongString) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<GGUF metadata, {len(self)} keys>"


class LongString:
    """A string of a mebibyte or more, which a sparse file can declare for nothing: decoded when it is read."""

    def __init__(self, cursor: Cursor, nbytes: int, what: str) -> None:
        self._source, self._start, self._nbytes = cursor.source, cursor.position, nbytes
        cursor.seek(self._start + nbytes, what)

    def text(self) -> str:
        """The whole of it."""
        return self._source.read_at(self._start, self._nbytes).decode("utf-8", "backslashreplace")


def _string(cursor: Cursor, what: str, findings: list[Finding]) -> str | LongString:
    n = cursor.length(what)
    if n > MAX_STRING:
        raise ModelFileError(cursor.source.name, f"declares a string of {n} bytes, more than 1 GiB", what)
    if n >= _LONG:
        return LongString(cursor, n, what)
    raw = cursor.take(n, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        text = f"{what} is not UTF-8; its odd bytes are shown, and converted, as escapes"
        findings.append(Finding("warning", "bad-utf8", text))
        return raw.decode("utf-8", "backslashreplace")


def _value(cursor: Cursor, kind: int, what: str, findings: list[Finding]) -> Any:
    if kind == STRING:
        return _string(cursor, what, findings)
    if kind == ARRAY:
        return Array(cursor, what)
    _, code, nbytes = SCALARS[kind]
    return struct.unpack(cursor.sign + code, cursor.take(nbytes, what))[0]

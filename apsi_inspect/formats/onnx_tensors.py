"""ONNX's TensorProto: where the values of a tensor are, from its fields alone (`docs/formats.md`, 5.2 and 5.4).

Contract: shape, data type and the number of stored bytes agree, or it is a ModelFileError that names the tensor. Raw
and external data are ranges of files; typed fields whose bytes are the values are too; only varints are decoded on
reading. A path to external data stays inside the model's folder. `tests/test_onnx.py` compares with onnx.
"""

from __future__ import annotations

import os
import posixpath
from math import prod
from typing import NamedTuple

from ..encodings import ENCODINGS
from ..errors import ModelFileError, TruncatedFileError, quote
from ..source import FileSource
from .base import MAX_NDIM, is_remote, open_beside
from .onnx_varints import VarintSource, count_varints
from .protobuf import BYTES, VARINT, Wire, signed
from .relaid import HeldSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..encodings import Encoding
    from ..source import ByteSource

# data type -> (its name, our encoding, the typed field, values of that field per element)
FLOATS, INT32S, INT64S, DOUBLES, UINT64S = 4, 5, 7, 10, 11
STRING = 8
DATA_TYPES: dict[int, tuple[str, str, int, int]] = {
    1: ("FLOAT", "F32", FLOATS, 1),
    2: ("UINT8", "U8", INT32S, 1),
    3: ("INT8", "I8", INT32S, 1),
    4: ("UINT16", "U16", INT32S, 1),
    5: ("INT16", "I16", INT32S, 1),
    6: ("INT32", "I32", INT32S, 1),
    7: ("INT64", "I64", INT64S, 1),
    9: ("BOOL", "BOOL", INT32S, 1),
    10: ("FLOAT16", "F16", INT32S, 1),
    11: ("DOUBLE", "F64", DOUBLES, 1),
    12: ("UINT32", "U32", UINT64S, 1),
    13: ("UINT64", "U64", UINT64S, 1),
    14: ("COMPLEX64", "C64", FLOATS, 2),
    15: ("COMPLEX128", "C128", DOUBLES, 2),
    16: ("BFLOAT16", "BF16", INT32S, 1),
    17: ("FLOAT8E4M3FN", "F8_E4M3", INT32S, 1),
    18: ("FLOAT8E4M3FNUZ", "F8_E4M3FNUZ", INT32S, 1),
    19: ("FLOAT8E5M2", "F8_E5M2", INT32S, 1),
    20: ("FLOAT8E5M2FNUZ", "F8_E5M2FNUZ", INT32S, 1),
    21: ("UINT4", "U4", INT32S, 1),
    22: ("INT4", "I4", INT32S, 1),
    23: ("FLOAT4E2M1", "F4", INT32S, 1),
    24: ("FLOAT8E8M0", "F8_E8M0", INT32S, 1),
    25: ("UINT2", "U2", INT32S, 1),
    26: ("INT2", "I2", INT32S, 1),
    27: ("FLOAT6E2M3", "F6_E2M3", INT32S, 1),
    28: ("FLOAT6E3M2", "F6_E3M2", INT32S, 1),
}
_TYPED = {
    FLOATS: "float_data",
    INT32S: "int32_data",
    INT64S: "int64_data",
    DOUBLES: "double_data",
    UINT64S: "uint64_data",
}
_FIXED = {FLOATS: 4, DOUBLES: 8}
MAX_BYTES = 1 << 60


class Proto(NamedTuple):
    """The fields of a TensorProto; `typed`: field -> ranges of packed runs, `loose`: field -> values written singly."""

    name: str
    dims: tuple[int, ...]
    kind: int
    raw: tuple[int, int] | None
    typed: dict[int, list[tuple[int, int]]]
    loose: dict[int, bytearray]
    external: dict[str, str] | None
    strings: int


class Stored(NamedTuple):
    """Where a tensor's bytes are: `file` counts the model's files, `view` lays them out where they do not lie so."""

    encoding: Encoding
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: int
    view: ByteSource | None


def parse(wire: Wire, begin: int, end: int) -> Proto:
    """The fields of a TensorProto in bytes [begin, end)."""
    name, kind, raw, place, strings = "", 0, None, 0, 0
    dims: list[int] = []
    typed: dict[int, list[tuple[int, int]]] = {}
    loose: dict[int, bytearray] = {}
    external: dict[str, str] = {}
    segment = False
    for number, wiretype, a, z in wire.fields(begin, end):
        if number == 1:
            dims += [a] if wiretype == VARINT else wire.packed(a, z)
        elif number == 2 and wiretype == VARINT:
            kind = a
        elif number == 3:
            segment = True
        elif number in _TYPED:
            if wiretype == BYTES:
                typed.setdefault(number, []).append((a, z))
            else:
                value = a.to_bytes(8, "little") if wiretype == VARINT else wire.read(a, z)
                loose.setdefault(number, bytearray()).extend(value)
        elif number == 6:
            strings += 1
        elif number == 8 and wiretype == BYTES:
            name = wire.text(a, z)
        elif number == 9 and wiretype == BYTES:
            raw = a, z
        elif number == 13 and wiretype == BYTES:
            key, value_ = entry(wire, a, z)
            external[key] = value_
        elif number == 14 and wiretype == VARINT:
            place = a
    if segment:
        raise ModelFileError(wire.source.name, "is a segment of a larger tensor, which is not read", _where(name))
    return Proto(name, tuple(map(signed, dims)), kind, raw, typed, loose, external if place == 1 else None, strings)


def entry(wire: Wire, begin: int, end: int) -> tuple[str, str]:
    """A StringStringEntryProto."""
    key = value = ""
    for number, wiretype, a, z in wire.fields(begin, end):
        if wiretype == BYTES and number in (1, 2):
            text = wire.text(a, z, 1 << 26)
            key, value = (text, value) if number == 1 else (key, text)
    return key, value


def _where(name: str) -> str:
    return f"tensor {quote(name)}"


class Files:
    """The model's file, and the files of external data that its tensors name."""

    def __init__(self, source: ByteSource) -> None:
        self.sources: list[ByteSource] = [source]
        self._numbers: dict[str, int] = {}
        self.folder = os.path.dirname(source.name)

    @property
    def model(self) -> ByteSource:
        """The model itself."""
        return self.sources[0]

    def close(self) -> None:
        """Close the files of external data."""
        for source in self.sources[1:]:
            source.close()

    def number(self, location: str, name: str) -> int:
        """The number of a file of external data; it is opened where it has not been yet."""
        if location not in self._numbers:
            path = self._checked(location, name)
            try:
                source = open_beside(self.model, path) if is_remote(self.model) else FileSource(path, keep_open=False)
            except FileNotFoundError:
                raise self._fail(name, location, "is missing", "download it to the same folder") from None
            except (OSError, ModelFileError) as exc:
                reason = exc.reason if isinstance(exc, ModelFileError) else exc.strerror or str(exc)
                raise self._fail(name, location, f"cannot be read: {reason}") from None
            self._numbers[location] = len(self.sources)
            self.sources.append(source)
        return self._numbers[location]

    def _fail(self, name: str, location: str, reason: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(self.model.name, f"its external data {quote(location)} {reason}", _where(name), hint)

    def _checked(self, location: str, name: str) -> str:
        """The path of external data; it must stay in the model's folder, also through links."""
        plain = posixpath.normpath(location)
        outside = plain.startswith(("/", "..")) and (plain[:1] == "/" or plain.split("/")[0] == "..")
        if not location or outside or any(c in location for c in "\\\0") or "://" in location or location[1:2] == ":":
            raise self._fail(name, location, "is a path outside of the model's folder, which is not allowed (unsafe)")
        if plain == ".":
            raise self._fail(name, location, "is a directory")
        if is_remote(self.model):
            return plain
        path = os.path.join(self.folder, *plain.split("/"))
        real = os.path.realpath(path)
        homes = (os.path.realpath(self.folder or "."), os.path.dirname(os.path.realpath(self.model.name)))
        if not any(os.path.commonpath([home, real]) == home for home in homes):
            raise self._fail(name, location, "is a link to outside of the model's folder, which is not allowed")
        return real


def locate(proto: Proto, files: Files, name: str) -> Stored:
    """Where the bytes of a tensor are.

    Raises
    ------
    ModelFileError
        Shape, data type and stored bytes do not fit together, or the external data cannot be used.
    """
    file = files.model.name
    known = DATA_TYPES.get(proto.kind)
    if known is None:
        raise ModelFileError(file, f"has data type {proto.kind}, which is not known", _where(name))
    if len(proto.dims) > MAX_NDIM or any(d < 0 for d in proto.dims):
        raise ModelFileError(file, f"has dimensions {list(proto.dims)[:8]}: none is negative, at most 64", _where(name))
    encoding, numel = ENCODINGS[known[1]], prod(proto.dims)
    nbytes = -(-numel * encoding.block_bytes // encoding.block_size)  # the last byte is padded, the last block is not
    if nbytes > MAX_BYTES:
        raise ModelFileError(file, f"has {numel} elements, which no file can hold", _where(name))
    if proto.external is not None:
        number, offset = _external(proto.external, files, nbytes, name)
        return Stored(encoding, proto.dims, offset, nbytes, number, None)
    if proto.raw is not None:
        begin, end = proto.raw
        if end - begin != nbytes:
            raise _mismatch(file, name, f"raw_data of {end - begin} bytes", proto.dims, known[0], nbytes)
        return Stored(encoding, proto.dims, begin, nbytes, 0, None)
    return _typed(proto, files, encoding, known, nbytes, name)


def _mismatch(file: str, name: str, have: str, dims: tuple[int, ...], kind: str, nbytes: int) -> ModelFileError:
    shape = " × ".join(map(str, dims)) or "scalar"
    return ModelFileError(file, f"has {have}; {shape} of {kind} take {nbytes} bytes (size mismatch)", _where(name))


def _external(entries: dict[str, str], files: Files, nbytes: int, name: str) -> tuple[int, int]:
    """Number of the file, and offset."""
    numbers = {}
    for key, default in (("offset", 0), ("length", nbytes)):
        text = entries.get(key, "") or str(default)
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ModelFileError(
                files.model.name, f"its external data has {key} {quote(text, 40)}, not a number from 0 on", _where(name)
            )
        numbers[key] = int(text)
    if numbers["length"] != nbytes:
        raise ModelFileError(
            files.model.name,
            f"its external data has a length of {numbers['length']} bytes, its shape and type take {nbytes} (mismatch)",
            _where(name),
        )
    location = entries.get("location", "")
    number = files.number(location, name)
    size = files.sources[number].size
    if numbers["offset"] + nbytes > size:
        raise TruncatedFileError(
            files.model.name,
            f"bytes {numbers['offset']} to {numbers['offset'] + nbytes} of {quote(location)} are needed, it has {size}",
            _where(name),
            "the file of external data is truncated or another one",
        )
    return number, numbers["offset"]


def _typed(
    proto: Proto, files: Files, encoding: Encoding, known: tuple[str, str, int, int], nbytes: int, name: str
) -> Stored:
    """Values in a typed field: a range where the bytes are the values, else a source that makes them."""
    kind, _, field, per = known
    file = files.model.name
    runs, loose = proto.typed.get(field, []), bytes(proto.loose.get(field, b""))
    numel = prod(proto.dims)
    width = _FIXED.get(field)
    if width is not None:
        have = sum(z - a for a, z in runs) + len(loose)
        if have != nbytes:
            raise _mismatch(file, name, f"{have // width} values in {_TYPED[field]}", proto.dims, kind, nbytes)
        if len(runs) == 1 and not loose:
            return Stored(encoding, proto.dims, runs[0][0], nbytes, 0, None)
        data = b"".join(files.model.read_at(a, z - a) for a, z in runs) + loose
        at = runs[0][0] if runs else 0
        return Stored(encoding, proto.dims, at, nbytes, 0, HeldSource(file, at, data) if data else None)
    values = len(loose) // 8 + sum(count_varints(files.model, a, z) for a, z in runs)
    bits = encoding.bpw
    wanted = nbytes if bits in (2, 4) else numel * per
    if values != wanted:
        raise _mismatch(file, name, f"{values} values in {_TYPED[field]}", proto.dims, kind, nbytes)
    at = runs[0][0] if runs else 0
    if not numel:
        return Stored(encoding, proto.dims, at, 0, 0, None)
    return Stored(encoding, proto.dims, at, nbytes, 0, VarintSource(files.model, at, nbytes, runs, loose, int(bits)))

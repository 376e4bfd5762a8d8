"""safetensors: an 8-byte length, a JSON table of tensors, the data (`docs/formats.md`, section 1).

`parse_header` is the checked parser, stricter than the reference only where the specification is (duplicate keys).
It checks whole columns at once at the speed of C, and looks for the culprit only where a check fails. In a process that
has Numba loaded already, `kernels.scan` may return the same columns; a differential test runs both over all cases.
"""

from __future__ import annotations

import re
from itertools import accumulate, chain
from math import prod
from operator import mul, sub
from typing import NamedTuple

from ..encodings import ENCODINGS, Encoding
from ..errors import ModelFileError, TruncatedFileError, brief, quote
from ..model import Columns, ModelFile
from .base import MAX_NDIM, Format, PausedGC, first_duplicate, load_json, warm_scan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from ..source import ByteSource

MAX_HEADER = 100_000_000
SMALL = 1 << 22  # bytes of a header that is parsed in one piece
# In the order of the reference's table; the writer sorts by it.
DTYPES: dict[str, Encoding] = {
    name: ENCODINGS[name]
    for name in (
        "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
        "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
    ).split()
}
_CODES = {name: i for i, name in enumerate(DTYPES)}
_BYTES = {name: e.block_bytes for name, e in DTYPES.items()}
_ENCODINGS = tuple(DTYPES.values())
_FIELDS = ("dtype", "shape", "data_offsets")
_MINUS_ZERO = re.compile(r"[\[,:][ \t\r\n]*-0(?![0-9.eE])")  # a cheap look before a second parse


class Header(NamedTuple):
    """A parsed header: `metadata` is None where the file has none; `length` is that of the JSON text."""

    columns: Columns
    metadata: dict[str, str] | None
    length: int
    size: int


def sniff(head: bytes, size: int) -> bool:
    """An 8-byte length that fits, then a JSON object (white space before it is tolerated, as the reference does)."""
    if len(head) < 9:
        return False
    return 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER and head[8:].lstrip(b" \t\r\n")[:1] == b"{"


def parse_header(source: ByteSource) -> Header:
    """Read and check the header.

    Raises
    ------
    ModelFileError
        Anything in it that the format does not allow, with the tensor and the reason.
    """
    text = read_text(source)
    header = _fast_scan(text, source)
    return header if header is not None else _parse(text, source)


def read_text(source: ByteSource) -> bytes:
    """The JSON text of the header."""
    if source.size < 8:
        raise TruncatedFileError(source.name, f"has {source.size} bytes, too small for a safetensors header")
    length = int.from_bytes(source.read_at(0, 8), "little")
    if length > MAX_HEADER:
        raise ModelFileError(
            source.name,
            f"header length {length} is larger than the {MAX_HEADER} bytes that safetensors allows",
            hint="not a safetensors file, or a damaged one",
        )
    if 8 + length > source.size:
        raise TruncatedFileError(source.name, f"header of {length} bytes, but the file has {source.size} bytes")
    return source.read_at(8, length)


def _fast_scan(text: bytes, source: ByteSource) -> Header | None:
    """The Numba scan, only where Numba is in the process already; None on anything unusual."""
    scan = warm_scan(len(text), 65_536)
    if scan is None:
        return None
    blocks = [(n, e.block_size, e.block_bytes) for n, e in DTYPES.items()]
    found = scan.safetensors_header(text, 8 + len(text), source.size, blocks)
    if found is None:
        return None
    names, place, (codes, dims, starts, offsets, sizes) = found
    metadata = None
    if place is not None:
        part = text[slice(*place)]
        if b"\\u" in part:
            return None
        try:
            pairs = load_json(part.decode("utf-8"), source.name, "header", object_pairs_hook=tuple)
            metadata, _ = _split_metadata((("__metadata__", pairs),), source.name)
        except (ModelFileError, UnicodeDecodeError):
            return None
    columns = _by_name(Columns(names, _ENCODINGS, codes, dims, starts, offsets, sizes))
    return Header(columns, metadata, len(text), source.size)


def _parse(text: bytes, source: ByteSource) -> Header:
    with PausedGC():
        metadata, names, dtypes, shapes, spans = _table(text, source.name)
        columns = _by_name(_check(names, dtypes, shapes, spans, 8 + len(text), source))
    return Header(columns, metadata, len(text), source.size)


def _table(text: bytes, file: str) -> tuple[Any, ...]:
    """Metadata, names, dtypes, shapes, spans: of all pieces of a large header."""
    if len(text) < SMALL:
        return _piece(text, file)
    from .pieces import pieces

    tables = [_piece(piece, file) for piece in pieces(text, file)]
    if len(tables) == 1:
        return tables[0]
    metadata = [table[0] for table in tables if table[0] is not None]
    if len(metadata) > 1:
        raise ModelFileError(file, "stands twice in the header (duplicate key)", "__metadata__")
    columns = [list(chain.from_iterable(table[k] for table in tables)) for k in range(1, 5)]
    _refuse_duplicates(columns[0], file)
    return (metadata[0] if metadata else None, *columns)


def _piece(text: bytes, file: str) -> tuple[Any, ...]:
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ModelFileError(file, f"header is not UTF-8 (byte {exc.start} of the header)") from None
    if "-" in decoded and "-0" in decoded and _MINUS_ZERO.search(decoded):
        load_json(decoded, file, "header", parse_int=_refuse_minus_zero)
    return _usual(decoded, file) or _by_pairs(decoded, file)


def _refuse_minus_zero(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is not an integer that safetensors takes")
    return int(digits)


def _refuse_duplicates(names: Sequence[str], file: str) -> None:
    if len(set(names)) != len(names):
        raise ModelFileError(file, "stands twice in the header (duplicate key)", f"tensor {_q(first_duplicate(names))}")


def _by_name(columns: Columns) -> Columns:
    """Empty tensors at one place stand by name (docs/apsim-format.md, 1), whatever their order in the header."""
    if 0 not in columns.sizes:
        return columns
    keys = list(zip(columns.offsets, columns.sizes, columns.names, strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if order == list(range(len(keys))):
        return columns
    shapes = [columns.shape(i) for i in order]
    return columns._replace(
        names=[columns.names[i] for i in order],
        codes=[columns.codes[i] for i in order],
        dims=list(chain.from_iterable(shapes)),
        starts=list(accumulate(map(len, shapes), initial=0)),
        offsets=[columns.offsets[i] for i in order],
        sizes=[columns.sizes[i] for i in order],
    )


def _usual(decoded: str, file: str) -> tuple[Any, ...] | None:
    """Metadata, names, dtypes, shapes, spans, by way of dicts; None unless it is certain that no key stands twice.

    A key is followed by a colon. So if there are no more colons outside the strings of the result than it has keys, no
    key was lost. (A string written with escapes might hold a colon that the text does not: not here.)
    """
    table = load_json(decoded, file, "header")
    if not isinstance(table, dict) or "\\u" in decoded:
        return None
    try:
        colons = decoded.count(":") - "".join(table).count(":")
        metadata: dict[str, str] | None = table.pop("__metadata__", None)
        if metadata is not None:
            colons -= 1 + len(metadata) + "".join(chain(metadata, metadata.values())).count(":")
        bodies = list(table.values())
        dtypes, shapes, spans = ([body[field] for body in bodies] for field in _FIELDS)
        usual = colons == len(table) + sum(map(len, bodies))
    except (AttributeError, KeyError, TypeError):
        return None
    return (metadata, list(table), dtypes, shapes, spans) if usual else None


def _by_pairs(decoded: str, file: str) -> tuple[Any, ...]:
    """The same with every key in sight: objects come as tuples of pairs, arrays as lists."""
    pairs = load_json(decoded, file, "header", object_pairs_hook=tuple)
    if not isinstance(pairs, tuple):
        raise ModelFileError(file, "header is not a JSON object")
    if "\\u" in decoded:
        _refuse_surrogates(pairs, file)
    metadata, entries = _split_metadata(pairs, file)
    names = [name for name, _ in entries]
    _refuse_duplicates(names, file)
    rows = [_entry(name, body, file) for name, body in entries]
    return metadata, names, *([row[k] for row in rows] for k in range(3))


def _q(name: object) -> str:
    return quote(name) if isinstance(name, str) else f"'{brief(name)}'"


def _refuse_surrogates(pairs: Any, file: str) -> None:
    """JSON can spell half of a surrogate pair; no UTF-8 text can hold it."""
    stack = [pairs]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            if not node.isascii() and any("\ud800" <= c <= "\udfff" for c in node):
                raise ModelFileError(file, f"header holds a lone surrogate in {_q(node)}")
        elif isinstance(node, (tuple, list)):
            stack.extend(node)


def _split_metadata(pairs: tuple[Any, ...], file: str) -> tuple[dict[str, str] | None, list[Any]]:
    found = [value for key, value in pairs if key == "__metadata__"]
    if not found:
        return None, list(pairs)
    if len(found) > 1:
        raise ModelFileError(file, "stands twice in the header (duplicate key)", "__metadata__")
    entries = [pair for pair in pairs if pair[0] != "__metadata__"]
    if found[0] is None:
        return None, entries
    if not isinstance(found[0], tuple):
        raise ModelFileError(file, "is not an object of strings", "__metadata__")
    metadata: dict[str, str] = {}
    for key, value in found[0]:
        if not isinstance(value, str):
            raise ModelFileError(
                file, f"value of {_q(key)} is {_json_type(value)}, a string was expected", "__metadata__"
            )
        if key in metadata:
            raise ModelFileError(file, f"duplicate key {_q(key)}", "__metadata__")
        metadata[key] = value
    return metadata, entries


def _json_type(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return "a number"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "an object"


def _entry(name: str, body: Any, file: str) -> tuple[Any, Any, Any]:
    """One entry field by field, in any order, unknown fields ignored as the reference does."""
    where = f"tensor {_q(name)}"
    if not isinstance(body, tuple):
        raise ModelFileError(file, f"header entry is {_json_type(body)}, an object was expected", where)
    fields: dict[str, Any] = {}
    for key, value in body:
        if key in fields:
            raise ModelFileError(file, f"field {_q(key)} stands twice (duplicate key)", where)
        fields[key] = value
    for key in _FIELDS:
        if key not in fields:
            raise ModelFileError(file, f"has no {key!r} in the header", where)
    return fields["dtype"], fields["shape"], fields["data_offsets"]


def _check(
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    spans: Sequence[Any],
    start: int,
    source: ByteSource,
) -> Columns:
    """All rules of the table at once; `_culprit` names what broke one."""
    space = source.size - start
    try:
        codes = list(map(_CODES.__getitem__, dtypes))
        if names and (set(map(type, shapes)) != {list} or set(map(type, spans)) != {list}):
            raise ValueError
        dims = list(chain.from_iterable(shapes))
        places = list(chain.from_iterable(spans))
        begins, ends = places[::2], places[1::2]
        if not {*map(type, dims), *map(type, places)} <= {int} or not {*map(len, spans)} <= {2}:
            raise ValueError
        if begins != [0, *ends[:-1]][: len(begins)]:
            order = sorted(range(len(names)), key=lambda i: (begins[i], ends[i]))
            if order == list(range(len(names))):
                raise ValueError
            # a header in another order than the data: sort, check again
            a, b, c, d = ([column[i] for i in order] for column in (names, dtypes, shapes, spans))
            return _check(a, b, c, d, start, source)
        sizes = list(map(sub, ends, begins))
        ranks = list(map(len, shapes))
        largest = max(dims, default=0)
        if max(ranks, default=0) > MAX_NDIM or largest >> 64:  # before any product: hostile numbers are slow
            raise ValueError
        blocks = list(map(prod, shapes))
        units = [(e.block_size, e.block_bytes) for e in _ENCODINGS]
        if any(units[c][0] != 1 for c in set(codes)):
            packed = [divmod(n, units[c][0]) for n, c in zip(blocks, codes, strict=True)]
            if any(rest for _, rest in packed):
                raise ValueError
            blocks = [n for n, _ in packed]
        expected = list(map(mul, blocks, map(_BYTES.__getitem__, dtypes)))
        if expected != sizes or (ends[-1] if ends else 0) != space or (dims and min(dims) < 0):
            raise ValueError
        if largest > 0xFFFF:
            _check_overflow(names, shapes, codes, source.name)
    except (KeyError, TypeError, ValueError):
        _culprit(names, dtypes, shapes, spans, space, source)
    starts = list(accumulate(ranks, initial=0))
    return Columns(names, _ENCODINGS, codes, dims, starts, list(map(start.__add__, begins)), sizes)


def _check_overflow(names: Sequence[str], shapes: Sequence[list[int]], codes: list[int], file: str) -> None:
    for name, shape, code in zip(names, shapes, codes, strict=True):
        if len(shape) > MAX_NDIM:
            raise ModelFileError(file, f"has {len(shape)} dimensions, more than {MAX_NDIM}", f"tensor {_q(name)}")
        numel, bits = 1, 8 * _ENCODINGS[code].block_bytes // _ENCODINGS[code].block_size
        for dim in shape:
            numel *= dim
            if numel >> 64 or dim >> 63:
                raise ModelFileError(file, f"shape {brief(shape)} overflows 64 bits of elements", f"tensor {_q(name)}")
        if numel * bits >> 64:
            raise ModelFileError(file, f"shape {brief(shape)} overflows 64 bits of size", f"tensor {_q(name)}")


def _is_dim(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _culprit(
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    spans: Sequence[Any],
    space: int,
    source: ByteSource,
) -> NoReturn:
    """Some rule is broken: find the first tensor that breaks one, and say which."""
    file = source.name
    for name, dtype, shape, span in zip(names, dtypes, shapes, spans, strict=True):
        where = f"tensor {_q(name)}"
        if not isinstance(dtype, str) or dtype not in DTYPES:
            word = f"unknown dtype {quote(dtype)}" if isinstance(dtype, str) else f"dtype is {_json_type(dtype)}"
            near = dtype.upper() if isinstance(dtype, str) and dtype.upper() in DTYPES else None
            raise ModelFileError(file, word, where, f"did you mean {near}?" if near else "known: " + " ".join(DTYPES))
        if not isinstance(shape, list) or not all(map(_is_dim, shape)):
            raise ModelFileError(file, f"shape {brief(shape)} is not a list of non-negative integers", where)
        if not (isinstance(span, list) and len(span) == 2 and all(map(_is_dim, span))):
            raise ModelFileError(file, f"data_offsets {brief(span)} is not a pair of non-negative integers", where)
        begin, end = span
        if end < begin:
            raise ModelFileError(file, f"data_offsets end at {end} before they begin at {begin}", where)
    order = sorted(range(len(names)), key=lambda i: spans[i])
    _check_overflow([names[i] for i in order], [shapes[i] for i in order], [_CODES[dtypes[i]] for i in order], file)
    _check_layout([(names[i], DTYPES[dtypes[i]], shapes[i], *spans[i]) for i in order], space, file)
    raise ModelFileError(file, "header breaks a rule of safetensors")  # pragma: no cover  (every rule is above)


def _check_layout(rows: list[tuple[str, Encoding, list[int], int, int]], space: int, file: str) -> None:
    position, before = 0, "the start of the data"
    for name, encoding, shape, begin, end in rows:
        where = f"tensor {_q(name)}"
        if begin != position:
            what = "overlap" if begin < position else f"leave a hole of {begin - position} bytes after"
            raise ModelFileError(
                file, f"data_offsets begin at {begin} and {what} {before}, which ends at {position}", where
            )
        expected = encoding.nbytes(prod(shape))
        if expected is None:
            raise ModelFileError(
                file,
                f"{prod(shape)} elements of {encoding.name} do not fill whole bytes (shape {brief(shape)})",
                where,
            )
        if expected != end - begin:
            raise ModelFileError(
                file,
                f"shape {brief(shape)} of {encoding.name} needs {expected} bytes, data_offsets give {end - begin}",
                where,
            )
        if end > space:
            raise TruncatedFileError(
                file, f"needs the data bytes {begin} to {end}, but the file has only {space}: it is truncated", where
            )
        position, before = end, where
    if position != space:
        raise ModelFileError(
            file, f"{space - position} extra bytes after the last tensor are not covered by the header"
        )


def model_of(source: ByteSource, header: Header) -> ModelFile:
    """The model that a plain safetensors header describes."""
    return ModelFile(
        source.name,
        "safetensors",
        header.columns,
        [source],
        metadata=header.metadata,
        facts={"header bytes": header.length, "metadata present": header.metadata is not None},
    )


def read(source: ByteSource) -> ModelFile:
    """Open a file as plain safetensors, whatever its metadata says."""
    return model_of(source, parse_header(source))


SAFETENSORS = Format("safetensors", (".safetensors",), sniff, read)

"""GGUF v1, v2 and v3, little- and big-endian, whole or split (`docs/formats.md`, section 2).

The parser takes the limits of ggml's C loader, with exact integer arithmetic, and checks that every tensor lies inside
the file without overlap. It builds no string of an array: a vocabulary of 256 000 tokens is skipped over, and decoded
when it is read (`formats.gguf_metadata`). In a process that has Numba loaded, `kernels.scan` skips and splits faster.
"""

from __future__ import annotations

import os
import re
import struct
from itertools import accumulate, chain, pairwise
from math import prod
from operator import add

from ..encodings import ENCODINGS, Encoding
from ..errors import ModelFileError, TruncatedFileError, UnsupportedFileError, quote
from ..model import Columns, Finding, ModelFile
from ..source import BytesSource
from .base import Format, PausedGC, first_duplicate, join_columns, open_beside, warm_scan
from .gguf_metadata import Cursor, Metadata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from ..source import ByteSource

    _Info: TypeAlias = tuple[str, list[int], int, int]

# ggml's type ids (docs/formats.md, 2.8)
TYPES: dict[int, Encoding] = {
    i: ENCODINGS[name]
    for i, name in enumerate(
        "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
        "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4 Q1_0 Q2_0".split()
    )
    if name != "-"
}
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
MAX_NAME = 63  # bytes; ggml's C loader refuses longer tensor names
MAX_LONGEST_NAME = 65_535  # and longer than this nobody
MAX_SCAN = 1 << 20  # tensors, of which the scan wants the table in one piece
MAX_DIMS = 8  # ggml has 4; a few more are read, with a warning
_SPLIT = re.compile(r"(?s)(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")

# general.file_type (docs/formats.md, 2.6)
FILE_TYPES = dict(
    enumerate(
        "ALL_F32 F16 Q4_0 Q4_1 Q4_1_SOME_F16 Q4_2 Q4_3 Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S "
        "Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 "
        "Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0".split()
    )
)


def sniff(head: bytes, size: int) -> bool:
    """The magic is the same four bytes in both byte orders."""
    return head[:4] == b"GGUF"


def _blocks() -> list[tuple[int, int]]:
    """Elements and bytes of a block by type id, (0, 0) where there is none (for the scan)."""
    return [(TYPES[i].block_size, TYPES[i].block_bytes) if i in TYPES else (0, 0) for i in range(max(TYPES) + 1)]


class _Part:
    """One parsed GGUF file: what `read_one` needs to hand on."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.findings: list[Finding] = []
        cursor = Cursor(source)
        if cursor.take(4, "the magic") != b"GGUF":
            raise ModelFileError(source.name, "does not begin with GGUF", "the magic")
        self.version, self.byte_order = self._version(cursor)
        cursor.set_layout(self.byte_order, 4 if self.version == 1 else 8)
        n_tensors, n_keys = cursor.length("the tensor count"), cursor.length("the key count")
        self._check_counts(cursor, n_tensors, n_keys)
        self.metadata = Metadata(cursor, n_keys, self.findings)
        self.alignment = self._alignment()
        self.infos_start = cursor.position
        self.columns = self._fast_scan(cursor, n_tensors) or self._plainly(cursor, n_tensors)

    def _version(self, cursor: Cursor) -> tuple[int, str]:
        word = cursor.take(4, "the version")
        little, big = int.from_bytes(word, "little"), int.from_bytes(word, "big")
        version, order = (big, "big") if little & 0xFFFF == 0 and little else (little, "little")
        if version not in (1, 2, 3):
            raise UnsupportedFileError(
                self.source.name, f"GGUF version {version}; versions 1, 2 and 3 are known", "the version"
            )
        return version, order

    def _check_counts(self, cursor: Cursor, n_tensors: int, n_keys: int) -> None:
        """The least that so many keys and tensors need must fit: before any loop over a declared count."""
        word = cursor.word
        least = n_keys * (word + 1 + 4 + 1) + n_tensors * (word + 4 + 4 + 8)
        if least > self.source.size - cursor.position:
            raise TruncatedFileError(
                self.source.name,
                f"declares {n_keys} keys and {n_tensors} tensors, more than its {self.source.size} bytes can hold",
                "the counts",
            )

    def _alignment(self) -> int:
        if "general.alignment" not in self.metadata:
            return 32
        value, kind = self.metadata["general.alignment"], self.metadata.types["general.alignment"]
        if kind != "UINT32" or value < 1 or value & (value - 1) or value > 1 << 30:
            found = f"{kind} {value}" if isinstance(value, (int, float)) else kind
            raise ModelFileError(
                self.source.name, f"alignment must be a UINT32 power of two, found {found}", "general.alignment"
            )
        return int(value)

    def _fast_scan(self, cursor: Cursor, n: int) -> Columns | None:
        """The Numba scan, only where Numba is in the process already; None on anything unusual."""
        scan = warm_scan(n, 256) if n <= MAX_SCAN and cursor.usual_layout else None
        if scan is None:
            return None
        start, size = cursor.position, self.source.size
        table = self.source.read_at(start, min(size - start, scan.table_bytes(n)))
        found = scan.gguf_tensors(table, start, size, n, _blocks(), self.alignment)
        if found is None:
            return None
        names, used, columns = found
        return Columns(names, tuple(TYPES[t] for t in used), *columns)

    def _plainly(self, cursor: Cursor, n: int) -> Columns:
        with PausedGC():
            rows = self._infos(cursor, n)
            names, shapes, types, offsets = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
            return self._place(names, shapes, types, offsets, cursor.position)

    def _infos(self, cursor: Cursor, n: int) -> list[_Info]:
        """The tensor table, plainly: name, shape (row-major), type id and relative offset of each tensor."""
        rows: list[_Info] = []
        names: set[str] = set()
        while len(rows) < n:
            known = len(rows)
            self._usual_infos(cursor, n, rows)
            if len(rows) < n:
                rows.append(self._info(cursor, len(rows)))
            names.update([row[0] for row in rows[known:]])
            if len(names) != len(rows):  # at once: a sparse file can declare the empty name any number of times
                twice = first_duplicate(row[0] for row in rows)
                self._bad(str(twice), "stands twice in the tensor table (duplicate)")
        return rows

    def _usual_infos(self, cursor: Cursor, n: int, rows: list[_Info]) -> None:
        """All that stand whole in the cursor's window, in a tight loop, up to one that `_info` has to look at."""
        buf, pos = cursor.window()
        first, word, letter = pos, cursor.word, "Q" if cursor.word == 8 else "I"
        length_of = struct.Struct(cursor.sign + letter).unpack_from
        rank_of = struct.Struct(cursor.sign + "I").unpack_from
        rest_of = [struct.Struct(f"{cursor.sign}{rank}{letter}IQ") for rank in range(5)]
        rests = [(rest.unpack_from, 4 + rest.size) for rest in rest_of]
        try:
            for _ in range(n - len(rows)):
                begin = pos + word
                end = begin + length_of(buf, pos)[0]
                unpack, step = rests[rank_of(buf, end)[0]]
                *shape, type_id, offset = unpack(buf, end + 4)
                if end - begin > MAX_LONGEST_NAME:
                    break
                rows.append((buf[begin:end].decode(), shape[::-1], type_id, offset))
                pos = end + step
        except (struct.error, OverflowError, UnicodeDecodeError, IndexError):
            pass  # the end of the window, or something unusual: `_info` finds out
        cursor.seek(cursor.position + pos - first, "the tensor table")

    def _info(self, cursor: Cursor, i: int) -> _Info:
        """One row of the tensor table, with every check."""
        name, what = f"number {i}", "the tensor table"
        try:
            name = self._name(cursor, i)
            rank = cursor.u32(what)
            if rank > MAX_DIMS:
                self._bad(name, f"has {rank} dimensions, at most {MAX_DIMS} are read")
            shape = cursor.lengths(rank, what)
            return name, list(shape[::-1]), *cursor.type_and_offset(what)
        except TruncatedFileError as exc:
            raise TruncatedFileError(self.source.name, exc.reason, f"tensor {quote(name)}") from None

    def _name(self, cursor: Cursor, i: int) -> str:
        raw = cursor.string(f"the name of tensor {i}", MAX_LONGEST_NAME)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = raw.decode("utf-8", "backslashreplace")
            self.findings.append(Finding("warning", "bad-utf8", f"tensor name {quote(name)} is not UTF-8"))
        return name

    def _place(
        self, names: list[str], shapes: list[list[int]], types: list[int], offsets: list[int], position: int
    ) -> Columns:
        """Check types, sizes and places; make offsets absolute."""
        used = sorted(set(types))
        for t in used:
            if t not in TYPES:
                self._unknown_type(names[types.index(t)], t)
        place = {t: i for i, t in enumerate(used)}
        codes = [place[t] for t in types]
        encodings = tuple(TYPES[t] for t in used)
        begin = position + -position % self.alignment if names else position
        sizes = self._sizes(names, shapes, codes, encodings)
        absolute = [begin + o for o in offsets]
        self._check_places(names, absolute, sizes, begin)
        self._check_names(names, shapes)
        dims, starts = list(chain.from_iterable(shapes)), list(accumulate(map(len, shapes), initial=0))
        return Columns(names, encodings, codes, dims, starts, absolute, sizes)

    def _unknown_type(self, name: str, type_id: int) -> None:
        was = f" ({_REMOVED[type_id]}, removed from ggml)" if type_id in _REMOVED else ""
        raise UnsupportedFileError(
            self.source.name,
            f"has ggml type {type_id}{was}, which is not known",
            f"tensor {quote(name)}",
            "a newer file than this program, or a damaged one" if not was else "make the file anew with a current tool",
        )

    def _sizes(
        self, names: list[str], shapes: list[list[int]], codes: list[int], encodings: tuple[Encoding, ...]
    ) -> list[int]:
        units = [(e.block_size, e.block_bytes) for e in encodings]
        limit = self.source.size
        sizes = [numel // units[c][0] * units[c][1] for numel, c in zip(map(prod, shapes), codes, strict=True)]
        for i, (shape, c) in enumerate(zip(shapes, codes, strict=True)):
            row, block = shape[-1] if shape else 1, units[c][0]
            if row % block:
                self._bad(names[i], f"{encodings[c].name} needs rows of a multiple of {block}, this one has {row}")
            if sizes[i] > limit or (shape and max(shape) >> 63):
                needs = f"shape {tuple(shape)} of {encodings[c].name} needs {sizes[i]} bytes, the file has {limit}"
                self._bad(names[i], needs, True)
        return sizes

    def _bad(self, name: str, reason: str, truncated: bool = False) -> None:
        raise (TruncatedFileError if truncated else ModelFileError)(self.source.name, reason, f"tensor {quote(name)}")

    def _check_places(self, names: list[str], offsets: list[int], sizes: list[int], begin: int) -> None:
        """Every tensor inside the file, none over another; gaps and another order are read with a warning."""
        ends = list(map(add, offsets, sizes))
        packed = offsets == [begin, *(end + (begin - end) % self.alignment for end in ends)][: len(offsets)]
        if not packed:
            self._check_unpacked(names, offsets, sizes, begin)
        if max(ends, default=0) > self.source.size:
            i = next(i for i, end in enumerate(ends) if end > self.source.size)
            self._bad(
                names[i], f"data up to byte {ends[i]} is truncated: the file ends at {self.source.size}", truncated=True
            )

    def _check_unpacked(self, names: list[str], offsets: list[int], sizes: list[int], begin: int) -> None:
        full = [i for i in sorted(range(len(names)), key=lambda i: (offsets[i], sizes[i])) if sizes[i]]
        for i, j in pairwise(full):
            if offsets[i] + sizes[i] > offsets[j]:
                self._bad(names[j], f"overlaps tensor {quote(names[i])} in the data (offset {offsets[j] - begin})")
        odd = [i for i in full if (offsets[i] - begin) % self.alignment]
        if odd:
            self.findings.append(
                Finding(
                    "warning",
                    "misaligned",
                    f"{len(odd)} tensors, {quote(names[odd[0]])} first, are not aligned to {self.alignment} bytes",
                )
            )
        self.findings.append(
            Finding("warning", "layout", "tensors are not packed in table order; llama.cpp will not load this file")
        )

    def _check_names(self, names: list[str], shapes: list[list[int]]) -> None:
        long = [n for n in names if len(n) > MAX_NAME or (not n.isascii() and len(n.encode()) > MAX_NAME)]
        if long:
            self.findings.append(
                Finding(
                    "warning",
                    "long-name",
                    f"{len(long)} tensor names are longer than the {MAX_NAME} bytes (limit 64) that llama.cpp loads, "
                    f"{quote(long[0])} first",
                )
            )
        deep = [i for i, shape in enumerate(shapes) if len(shape) > 4]
        if deep:
            self.findings.append(
                Finding(
                    "warning",
                    "rank",
                    f"{len(deep)} tensors have more than ggml's 4 dimensions, {quote(names[deep[0]])} first",
                )
            )


def read_one(source: ByteSource) -> ModelFile:
    """Open one GGUF file, whether or not it is a part of a split model."""
    part = _Part(source)
    return _model(source.name, [part], part.columns, part.findings)


def _model(path: str, parts: list[_Part], columns: Columns, findings: list[Finding]) -> ModelFile:
    first = parts[0]
    metadata: Any = first.metadata
    if columns.names and "general.architecture" not in metadata:
        findings = [
            *findings,
            Finding("warning", "no-architecture", "general.architecture is missing; llama.cpp will not load this file"),
        ]
    facts: dict[str, Any] = {"version": first.version, "byte order": first.byte_order, "alignment": first.alignment}
    file_type = metadata.get("general.file_type")
    if isinstance(file_type, int):
        facts["file type"] = FILE_TYPES.get(file_type, str(file_type))
    units, skeleton, noticed = _extras(metadata, columns, path)
    return ModelFile(
        path,
        "gguf",
        columns,
        [p.source for p in parts],
        metadata=metadata,
        findings=[*findings, *noticed],
        facts=facts,
        units=units,
        skeleton=skeleton,
        byte_order=first.byte_order,
    )


def _extras(metadata: Any, columns: Columns, path: str) -> tuple[Any, Any, list[Finding]]:
    """What we keep in keys of our own, which few files have."""
    if not any(key.startswith("apsi.") for key in metadata):
        return {}, None, []
    from .gguf_extras import read_extras

    return read_extras(metadata, columns.names, path)


def read(source: ByteSource) -> ModelFile:
    """Open a GGUF file; a part of a split model opens the whole model where all parts are there."""
    part = _Part(source)
    count = part.metadata.get("split.count")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        return _model(source.name, [part], part.columns, part.findings)
    number = part.metadata.get("split.no", 0)
    named = _SPLIT.fullmatch(source.name)
    problem = None
    others: list[ByteSource] = []
    if named is None or isinstance(source, BytesSource):
        problem = "the name is not PREFIX-00001-of-0000N.gguf, so that the other parts cannot be found"
    elif count != int(named[3]):
        problem = f"split.count is {count}, but the name says {int(named[3])}"
    else:
        names = [f"{named[1]}-{i:05d}-of-{named[3]}.gguf" for i in range(1, count + 1)]
        others, missing = _others(source, names)
        if missing:
            shown = ", ".join(quote(n) for n in missing[:3]) + (" …" if len(missing) > 3 else "")
            problem = f"{len(missing)} of {count} parts are missing: {shown}"
    if problem:
        text = f"this is part {number + 1 if isinstance(number, int) else '?'} of {count} of a split model; {problem}"
        return _model(source.name, [part], part.columns, [*part.findings, Finding("error", "incomplete", text)])
    return _read_split(source, part, others)


def _others(source: ByteSource, names: list[str]) -> tuple[list[ByteSource], list[str]]:
    """The parts of a split model in order, and which of them are not there."""
    sources: list[ByteSource] = []
    missing: list[str] = []
    for name in names:
        try:
            sources.append(source if name == source.name else open_beside(source, os.path.basename(name)))
        except FileNotFoundError:
            missing.append(os.path.basename(name))
    return sources, missing


def _read_split(source: ByteSource, part: _Part, sources: list[ByteSource]) -> ModelFile:
    parts, findings = [], []
    for each in sources:
        parts.append(part if each is source else _Part(each))
        findings += parts[-1].findings
    source_of = parts[0].metadata
    for i, p in enumerate(parts):
        number = p.metadata.get("split.no")
        if number != i:
            raise ModelFileError(
                p.source.name, f"split.no is {number}, {i} was expected from the name: parts are in the wrong order"
            )
        if p.byte_order != parts[0].byte_order:
            raise ModelFileError(p.source.name, f"is {p.byte_order}-endian, the first part is not")
    columns = join_columns([p.columns for p in parts])
    twice = first_duplicate(columns.names)
    if twice is not None:
        raise ModelFileError(source.name, "stands in two parts of the split model", f"tensor {quote(twice)}")
    total = source_of.get("split.tensors.count")
    if isinstance(total, int) and total != len(columns.names):
        findings.append(
            Finding(
                "warning",
                "split-count",
                f"split.tensors.count is {total}, the {len(parts)} parts hold {len(columns.names)} tensors",
            )
        )
    if sources[0] is not source:
        findings.append(Finding("note", "split", f"opened all {len(parts)} parts of the split model"))
    return _model(source.name, parts, columns, findings)


GGUF = Format("gguf", (".gguf",), sniff, read)

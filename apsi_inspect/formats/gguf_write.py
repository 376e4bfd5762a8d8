"""The bytes of a GGUF v3 file around its tensors: header, table, padding, and how it is split.

Contract: byte for byte what `gguf.GGUFWriter` writes for the same keys and tensors in the same order. It differs where
that writer leaves something out: empty strings and arrays are written, and every part of a split file states an
alignment other than 32. The tensors' bytes are put at the offsets that `layout` gives, with zeros between.
`tests/test_gguf_write.py` compares both, and opens the files with ggml's C loader.
"""

from __future__ import annotations

import os
import struct
from math import prod
from typing import NamedTuple

from ..encodings import Encoding
from ..errors import ValueRefusedError, quote
from ..model import Finding
from .gguf import MAX_NAME, TYPES
from .gguf_values import Value, pack, string

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Keys = Sequence[tuple[str, Value]]

TYPE_IDS: dict[str, int] = {encoding.name: i for i, encoding in TYPES.items()}
ALIGNMENT = 32
QUANTIZATION_VERSION = 2
MAX_KEY = 65_535
_OWN = ("general.alignment", "split.no", "split.count", "split.tensors.count")


class Spec(NamedTuple):
    """A tensor as a table entry names it."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data; the caller has chosen an encoding that fits the shape."""
        nbytes = self.encoding.nbytes(prod(self.shape))
        if nbytes is None or (self.encoding.is_block and self.shape[-1] % self.encoding.block_size):
            raise ValueRefusedError(f"tensor {quote(self.name)}: {self.shape} does not fit {self.encoding.name} blocks")
        return nbytes


class Layout(NamedTuple):
    """Everything of one file but the tensors' bytes: `header` with its padding, where each tensor starts, the size."""

    header: bytes
    offsets: list[int]
    size: int


def check_alignment(alignment: int) -> None:
    """Refuse what no reader takes."""
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueRefusedError(f"alignment {alignment!r} is not a power of two")


def layout(keys: Keys, tensors: Sequence[Spec], alignment: int = ALIGNMENT) -> Layout:
    """The header of a file, and the places of its tensors.

    Parameters
    ----------
    keys
        Typed metadata in order.
    tensors
        In the order of their data.
    alignment
        As `general.alignment` among the keys says.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    seen: set[str] = set()
    for key, value in keys:
        if not key or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY or key in seen:
            what = "stands twice" if key in seen else "is empty" if not key else f"is longer than {MAX_KEY} bytes"
            raise ValueRefusedError(f"metadata key {quote(key)} {what}")
        seen.add(key)
        head += [string(key), pack(value)]
    relative, position = [], 0
    for t in tensors:
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        head += [string(t.name), dims, struct.pack("<IQ", TYPE_IDS[t.encoding.name], position)]
        relative.append(position)
        position += t.nbytes + -t.nbytes % alignment
    header = b"".join(head)
    header += bytes(-len(header) % alignment)
    return Layout(header, [len(header) + r for r in relative], len(header) + position)


def split(tensors: Sequence[Spec], limit: int | None) -> list[list[int]]:
    """Positions of the tensors of each part: a part is closed before it would exceed `limit` bytes of data."""
    parts: list[list[int]] = [[]]
    size = 0
    for i, t in enumerate(tensors):
        if parts[-1] and limit is not None and size + t.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(i)
        size += t.nbytes
    return parts


def part_names(path: str, count: int) -> list[str]:
    """Names of the parts of a split file: ``model.gguf`` becomes ``model-00001-of-00003.gguf`` …"""
    if count == 1:
        return [path]
    if count > 99_999:
        raise ValueRefusedError(f"{count} parts; at most 99999 can be named: choose a larger size")
    stem, ending = os.path.splitext(path)
    stem = stem if ending.lower() == ".gguf" else path
    return [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def layouts(keys: Keys, tensors: Sequence[Spec], limit: int | None, alignment: int) -> list[tuple[list[int], Layout]]:
    """The parts of a file, most often one: which tensors each holds, and its layout.

    All metadata stands in the first part; each part says which it is.
    """
    parts = split(tensors, limit)
    if len(parts) == 1:
        return [(parts[0], layout(keys, tensors, alignment))]
    if len(parts) > 0xFFFF:
        raise ValueRefusedError(f"{len(parts)} parts; the format counts at most 65535: choose a larger size")
    align = [("general.alignment", Value("UINT32", alignment))] if alignment != ALIGNMENT else []
    out = []
    for number, part in enumerate(parts):
        own = [
            ("split.no", Value("UINT16", number)),
            ("split.count", Value("UINT16", len(parts))),
            ("split.tensors.count", Value("INT32", len(tensors))),
        ]
        head = [*keys, *own] if number == 0 else [*align, *own]
        out.append((part, layout(head, [tensors[i] for i in part], alignment)))
    return out


def without_own(keys: Keys) -> list[tuple[str, Value]]:
    """The keys without those that describe one file's layout: alignment and split."""
    return [(k, v) for k, v in keys if k not in _OWN]


def findings(keys: Keys, tensors: Sequence[Spec]) -> list[Finding]:
    """What llama.cpp would not load of such a file, although other readers do."""
    out = []
    long = [t.name for t in tensors if len(t.name.encode()) > MAX_NAME]
    if long:
        text = f"{len(long)} tensor names are longer than 63 bytes (llama.cpp's limit is 64), {quote(long[0])} first"
        out.append(Finding("warning", "long-name", f"{text}; llama.cpp will not load this file"))
    deep = [t.name for t in tensors if len(t.shape) > 4]
    if deep:
        text = f"{len(deep)} tensors have more than the 4 dimensions that ggml knows, {quote(deep[0])} first"
        out.append(Finding("warning", "rank", f"{text}; llama.cpp will not load this file"))
    nested = [k for k, v in keys if v.kind == "ARRAY" and v.value.element == "ARRAY"]
    if nested:
        text = f"metadata key {quote(nested[0])} is an array of arrays"
        out.append(Finding("warning", "nested-array", f"{text}; llama.cpp will not load this file"))
    if tensors and not any(k == "general.architecture" for k, _ in keys):
        text = "general.architecture is not set; llama.cpp will not load this file"
        out.append(Finding("warning", "no-architecture", text))
    return out

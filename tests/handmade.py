"""Model files put together from bytes by the rules of the formats alone: nothing of the package is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any


def safetensors(
    tensors: Iterable[tuple[str, str, Sequence[int], bytes]],
    metadata: dict[str, str] | None = None,
    *,
    align: int = 8,
) -> bytes:
    """A safetensors file of (name, dtype, shape, bytes), in the order given."""
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position, data = 0, []
    for name, dtype, shape, raw in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(raw)]}
        position += len(raw)
        data.append(raw)
    return from_header(json.dumps(table, ensure_ascii=False, separators=(",", ":")), b"".join(data), align=align)


def from_header(header: str | bytes, data: bytes = b"", *, align: int = 1) -> bytes:
    """A safetensors file of a header text and data."""
    text = header.encode("utf-8") if isinstance(header, str) else header
    text += b" " * (-len(text) % align)
    return struct.pack("<Q", len(text)) + text + data


# GGUF value types (docs/formats.md, 2.2): name -> (id, struct code)
SCALARS = {
    "UINT8": (0, "B"),
    "INT8": (1, "b"),
    "UINT16": (2, "H"),
    "INT16": (3, "h"),
    "UINT32": (4, "I"),
    "INT32": (5, "i"),
    "FLOAT32": (6, "f"),
    "BOOL": (7, "?"),
    "UINT64": (10, "Q"),
    "INT64": (11, "q"),
    "FLOAT64": (12, "d"),
}


def type_id(kind: str) -> int:
    """Id of a value type."""
    return {"STRING": 8, "ARRAY": 9}[kind] if kind not in SCALARS else SCALARS[kind][0]


class Gguf:
    """The pieces of a GGUF file of one version and byte order."""

    def __init__(self, version: int = 3, order: str = "<") -> None:
        self.version, self.order, self.word = version, order, "I" if version == 1 else "Q"

    def pack(self, code: str, *values: Any) -> bytes:
        return struct.pack(self.order + code, *values)

    def string(self, text: str | bytes) -> bytes:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return self.pack(self.word, len(raw)) + raw

    def value(self, kind: str, value: Any) -> bytes:
        """Type id and payload: ``("UINT8", 3)``, ``("STRING", "x")``, ``("ARRAY", ("INT32", [1, 2]))``."""
        return self.pack("I", type_id(kind)) + self.payload(kind, value)

    def payload(self, kind: str, value: Any) -> bytes:
        if kind == "STRING":
            return self.string(value)
        if kind == "ARRAY":
            element, items = value
            head = self.pack("I" + self.word, type_id(element), len(items))
            return head + b"".join(self.payload(element, item) for item in items)
        return self.pack(SCALARS[kind][1], value)

    def info(self, name: str | bytes, dims: Sequence[int], type_id: int, offset: int) -> bytes:
        """A tensor info; `dims` is a row-major shape."""
        stored = self.pack(f"I{len(dims)}{self.word}", len(dims), *reversed(dims))
        return self.string(name) + stored + self.pack("IQ", type_id, offset)

    def file(
        self,
        keys: Iterable[tuple[str, str, Any]] = (),
        tensors: Iterable[tuple[str, Sequence[int], int, bytes]] = (),
        *,
        align: int = 32,
    ) -> bytes:
        """A whole file of (key, type, value) and (name, shape, type id, bytes)."""
        keys, tensors = list(keys), list(tensors)
        head = b"GGUF" + self.pack("I" + self.word * 2, self.version, len(tensors), len(keys))
        head += b"".join(self.string(key) + self.value(kind, value) for key, kind, value in keys)
        data = b""
        for name, shape, type_id, raw in tensors:
            head += self.info(name, shape, type_id, len(data))
            data += raw + bytes(-len(raw) % align)
        return head + (bytes(-len(head) % align) + data if tensors else b"")

"""Types of ONNX's inputs and outputs in words: ``FLOAT n × 3 × 224``, ``sequence of INT64``."""

from __future__ import annotations

from .onnx_tensors import DATA_TYPES, STRING
from .protobuf import BYTES, VARINT, Wire, signed

MAX_DEPTH = 32


def value_info(wire: Wire, begin: int, end: int) -> tuple[str, str]:
    """A ValueInfoProto: name, and type in words."""
    name, text = "", "?"
    for number, kind, a, z in wire.fields(begin, end):
        if kind == BYTES and number == 1:
            name = wire.text(a, z)
        elif kind == BYTES and number == 2:
            text = _type(wire, a, z, 0)
    return name, text


def _type(wire: Wire, begin: int, end: int, depth: int) -> str:
    if depth > MAX_DEPTH:
        return "…"
    words = {1: "", 4: "sequence of ", 5: "map", 8: "sparse ", 9: "optional "}
    for number, kind, a, z in wire.fields(begin, end):
        if kind != BYTES or number not in words:
            continue
        if number in (1, 8):
            return words[number] + _tensor_type(wire, a, z)
        inner = (part for part in wire.fields(a, z) if part[:2] == (1, BYTES))
        return words[number] + next((_type(wire, *part[2:], depth + 1) for part in inner), "")
    return "?"


def _tensor_type(wire: Wire, begin: int, end: int) -> str:
    element, shape = "?", ""
    for number, kind, a, z in wire.fields(begin, end):
        if number == 1 and kind == VARINT:
            element = "STRING" if a == STRING else DATA_TYPES.get(a, (f"type {a}",))[0]
        elif number == 2 and kind == BYTES:
            dims = [_dimension(wire, b, y) for f, k, b, y in wire.fields(a, z) if f == 1 and k == BYTES]
            shape = " " + (" × ".join(dims[:64]) or "scalar")
    return element + shape


def _dimension(wire: Wire, begin: int, end: int) -> str:
    for number, kind, a, z in wire.fields(begin, end):
        if number == 1 and kind == VARINT:
            return str(signed(a))
        if number == 2 and kind == BYTES:
            return wire.text(a, z, 1 << 16)
    return "?"

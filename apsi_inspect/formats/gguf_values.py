"""GGUF metadata values on their way into a file and back: which type a Python value takes, its bytes, its Python form.

The rules (`docs/convert.md`): a known key takes the type that runtimes expect; NumPy scalars and arrays force theirs;
any other int is UINT32 or UINT64, a negative one INT32 or INT64; a float is FLOAT32 where that is exact, else FLOAT64;
lists of ints are INT32, wider only where they must be. Loading gives Python values where the rules lead back to the
same type, NumPy ones elsewhere, so that what was loaded is saved as it was. `tests/test_gguf_write.py` enforces this.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from ..errors import ValueRefusedError, quote
from .gguf_metadata import BOOL, NAMES, SCALARS, Array

# type name -> (id, struct code, NumPy dtype)
CODES: dict[str, tuple[int, str, str]] = {
    "UINT8": (0, "B", "u1"),
    "INT8": (1, "b", "i1"),
    "UINT16": (2, "H", "u2"),
    "INT16": (3, "h", "i2"),
    "UINT32": (4, "I", "u4"),
    "INT32": (5, "i", "i4"),
    "FLOAT32": (6, "f", "f4"),
    "BOOL": (7, "?", "?"),
    "UINT64": (10, "Q", "u8"),
    "INT64": (11, "q", "i8"),
    "FLOAT64": (12, "d", "f8"),
}
IDS: dict[str, int] = {name: i for i, name in NAMES.items()}
_KINDS = {np.dtype(dtype): kind for kind, (_, _, dtype) in CODES.items()}
_PLAIN_LISTS = ("BOOL", "STRING", "INT32", "FLOAT32")


class Items(NamedTuple):
    """The value of an array: its element type, and a list, a one-dimensional NumPy array or the bytes of a file."""

    element: str
    values: Any
    length: int


class Value(NamedTuple):
    """A typed value: `kind` is ``"UINT32"``, ``"STRING"``, …, or ``"ARRAY"`` with `Items` as the value."""

    kind: str
    value: Any


def type_text(value: Value) -> str:
    """``"UINT32"``, ``"ARRAY[STRING]"``, ``"ARRAY[ARRAY[INT32]]"``."""
    if value.kind != "ARRAY":
        return value.kind
    items: Items = value.value
    if items.element != "ARRAY":
        return f"ARRAY[{items.element}]"
    inner = [type_text(Value("ARRAY", v)) for v in items.values]
    return f"ARRAY[{','.join(dict.fromkeys(inner) if len(set(inner)) == 1 else inner) or 'ARRAY'}]"


def infer(value: Any, known: str | None = None, key: str = "") -> Value:
    """The typed form of a Python value.

    Parameters
    ----------
    value
        A bool, int, float, str, bytes, list, tuple, NumPy scalar or array, or an array of an opened GGUF file.
    known
        The type that runtimes expect of the key (`gguf_keys.known_type`).
    key
        For messages.

    Raises
    ------
    ValueRefusedError
        GGUF cannot hold it, or the key is known to be of a type that cannot.
    """
    where = f"metadata key {quote(key)}"
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.generic):
        return _numpy_scalar(value, where)
    if isinstance(value, (list, tuple, bytes, bytearray, np.ndarray, Array)):
        return Value("ARRAY", _items(value, known, where))
    if known is not None and known.startswith("ARRAY"):
        raise ValueRefusedError(f"{where} is {known}, a list was expected, found {type(value).__name__}")
    if known is not None:
        return Value(known, _as(known, value, where))
    if isinstance(value, bool):
        return Value("BOOL", value)
    if isinstance(value, int):
        return Value(_int_kind(value, where), value)
    if isinstance(value, float):
        return Value("FLOAT32" if _fits32(value) else "FLOAT64", value)
    if isinstance(value, str):
        return Value("STRING", _as("STRING", value, where))
    raise ValueRefusedError(f"{where}: GGUF cannot hold a value of type {type(value).__name__}")


def _numpy_scalar(value: np.generic, where: str) -> Value:
    if value.dtype.kind == "U":
        return Value("STRING", _as("STRING", str(value), where))
    kind = _KINDS.get(value.dtype)
    if kind is None and value.dtype.itemsize <= 2 and value.dtype.kind in "fV":  # float16, bfloat16: exact in float32
        kind = "FLOAT32"
    if kind is None:
        raise ValueRefusedError(f"{where}: GGUF cannot hold a value of dtype {value.dtype}")
    return Value(kind, float(value) if kind == "FLOAT32" else value.item())


def _digits(value: Any) -> str:
    """A refused value in a message; Python writes no integer of more than 4300 digits."""
    huge = isinstance(value, int) and value.bit_length() > 4096
    return f"an integer of {value.bit_length()} bits" if huge else str(value)[:40]


def _int_kind(value: int, where: str) -> str:
    for kind, low, high in (
        ("UINT32", 0, 1 << 32),
        ("UINT64", 0, 1 << 64),
        ("INT32", -(1 << 31), 0),
        ("INT64", -(1 << 63), 0),
    ):
        if low <= value < high:
            return kind
    raise ValueRefusedError(f"{where}: {_digits(value)} does not fit 64 bits")


def _fits32(value: float) -> bool:
    try:
        return value != value or struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        return False


def _as(kind: str, value: Any, where: str) -> Any:
    """`value` as a scalar of a type, or refused."""
    if kind == "STRING" and isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueRefusedError(f"{where} holds a lone surrogate, which UTF-8 cannot")
        return value
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "BOOL" and isinstance(value, bool):
        return value
    if kind in ("FLOAT32", "FLOAT64") and (is_int or isinstance(value, float)):
        try:
            struct.pack("<f" if kind == "FLOAT32" else "<d", value)
        except (OverflowError, struct.error):  # the latter of integers that no float64 holds
            raise ValueRefusedError(f"{where} is {kind}; {_digits(value)} is too large for it") from None
        return float(value)
    if kind in CODES and kind[0] in "UI" and is_int:
        try:
            struct.pack("<" + CODES[kind][1], value)
        except struct.error:
            raise ValueRefusedError(f"{where} is {kind}; {_digits(value)} is outside its range") from None
        return value
    raise ValueRefusedError(f"{where} is {kind}; {type(value).__name__} {quote(_digits(value), 40)} is not")


def _items(value: Any, known: str | None, where: str) -> Items:
    if isinstance(value, Array):
        raw = value.raw() if value.element_type != "ARRAY" else None
        if raw is not None:
            return Items(value.element_type, raw, len(value))
        return _typed_items(value.element_type, value, where)
    if isinstance(value, (bytes, bytearray)):
        return Items("UINT8", np.frombuffer(bytes(value), np.uint8), len(value))
    if isinstance(value, np.ndarray):
        return _numpy_items(value, where)
    element = known[6:-1] if known is not None and known.startswith("ARRAY[") else None
    if element is not None:
        return _typed_items(element, value, where)
    if known == "STRING":
        raise ValueRefusedError(f"{where} is STRING, found a list")
    return _typed_items(_element_kind(value, known, where), value, where)


def _typed_items(element: str, values: Any, where: str) -> Items:
    if element == "ARRAY":
        return Items("ARRAY", [_items(v, None, where) for v in values], len(values))
    out = [v.item() if isinstance(v, np.generic) else v for v in values]
    return Items(element, [_as(element, v, where) for v in out], len(out))


def _numpy_items(value: np.ndarray[Any, Any], where: str) -> Items:
    if value.ndim > 1:
        return Items("ARRAY", [_numpy_items(row, where) for row in value], len(value))
    if value.dtype.kind in "UO":
        return _items(value.tolist(), None, where)
    kind = _KINDS.get(value.dtype.newbyteorder("="))
    if kind is None and value.dtype.itemsize <= 2 and value.dtype.kind in "fV":
        kind, value = "FLOAT32", value.astype(np.float32)
    if kind is None:
        raise ValueRefusedError(f"{where}: GGUF cannot hold an array of dtype {value.dtype}")
    return Items(kind, value, len(value))


def _element_kind(values: Any, known: str | None, where: str) -> str:
    """The element type of a plain list."""
    types = set(map(type, values))
    if any(issubclass(t, np.generic) for t in types):
        kinds = {_numpy_scalar(v, where).kind if isinstance(v, np.generic) else "" for v in values}
        if len(kinds) == 1:
            return kinds.pop()
        raise ValueRefusedError(f"{where}: NumPy scalars of several types in one list; give an array")
    if types <= {str}:
        return "STRING"  # the empty list as well
    if types == {bool}:
        return "BOOL"
    if types <= {list, tuple, bytes, np.ndarray, Array}:
        return "ARRAY"
    if types == {int}:
        low, high = min(values), max(values)
        for kind, a, z in (("INT32", 31, 31), ("UINT32", 0, 32), ("INT64", 63, 63), ("UINT64", 0, 64)):
            if (low >= -(1 << a) if a else low >= 0) and high < 1 << z:
                return kind
        raise ValueRefusedError(f"{where}: integers that do not fit 64 bits")
    if types <= {int, float}:
        return "FLOAT32" if known == "FLOAT32" or all(_fits32(float(v)) for v in values) else "FLOAT64"
    shown = ", ".join(sorted(t.__name__ for t in types))
    raise ValueRefusedError(f"{where}: a GGUF array has elements of one type, found {shown}")


def pack(value: Value) -> bytes:
    """The bytes of a value with its type before it, as GGUF v2 and v3 store them, little-endian."""
    return struct.pack("<I", IDS[value.kind]) + _payload(value.kind, value.value)


def string(text: str) -> bytes:
    """A length and UTF-8."""
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _payload(kind: str, value: Any) -> bytes:
    if kind == "STRING":
        return string(value)
    if kind != "ARRAY":
        return struct.pack("<" + CODES[kind][1], value)
    element, values, count = value
    head = struct.pack("<IQ", IDS[element], count)
    if isinstance(values, (bytes, memoryview)):
        return head + bytes(values)
    if element in ("STRING", "ARRAY"):
        return head + b"".join(_payload(element, v) for v in values)
    return head + np.asarray(values, "<" + CODES[element][2]).tobytes()


def python(value: Any, kind: str, known: str | None = None) -> Any:
    """What loading returns for a value of an opened file: Python where `infer` gives the type back, else NumPy.

    Parameters
    ----------
    value
        As `formats.gguf_metadata.Metadata` has it.
    kind
        Its type there, ``"UINT32"`` or ``"ARRAY[INT32]"``.
    known
        As in `infer`.
    """
    if isinstance(value, Array):
        element = value.element_type
        if element == "ARRAY":
            return [python(v, f"ARRAY[{v.element_type}]") for v in value] or np.empty((0, 0), np.int32)
        back = known if known is not None and known.startswith("ARRAY") else None
        plain = element in _PLAIN_LISTS and (len(value) or element == "STRING")
        if plain and back in (None, f"ARRAY[{element}]"):
            return value.tolist()
        return np.asarray(value, dtype=CODES[element][2]) if element in CODES else np.array(value.tolist(), object)
    try:
        same = infer(value, known).kind == kind
    except ValueRefusedError:
        same = False
    if same or kind == "STRING":
        return value
    return np.dtype(CODES[kind][2]).type(value)


assert all(SCALARS[i][0] == name for name, (i, _, _) in CODES.items() if i != BOOL)

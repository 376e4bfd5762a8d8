"""Plain values in a PyTorch pickle that are spelled as calls: bytes, NumPy scalars and dtypes, sets, devices, paths.

Contract: `plain` gives the value of the few calls that make plain values, `container` makes a set or tuple of what a
list stands for, `constant` is the text of a name such as ``torch.float16``; nothing of the file is called, and what is
made here has no effect. `tests/test_torch_plain.py` compares with torch.
"""

from __future__ import annotations

import struct
from collections import deque

from .pickle_globals import CONSTANTS
from .pickle_nodes import Call, Global

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STRUCT = {"F64": "d", "F32": "f", "F16": "e", "BOOL": "?"} | {
    f"{k}{n}": c for n, pair in ((8, "bB"), (16, "hH"), (32, "iI"), (64, "qQ")) for k, c in zip("IU", pair, strict=True)
}
_NUMPY = {"f8": "F64", "f4": "F32", "f2": "F16", "b1": "BOOL", "c8": "C64", "c16": "C128"} | {
    f"{k}{n}": f"{k.upper()}{8 * n}" for k in "iu" for n in (1, 2, 4, 8)
}
_COPIES = ("builtins.bytearray", "builtins.bytes")
_MAX_WRAPS = 8  # bytes of a bytearray of …
_MAX_PATH = 1 << 16  # characters of a path
_CODES = {word: code for code, word in _NUMPY.items()}


def is_int(value: Any) -> bool:
    """A size, an offset or a stride: from 0 on, and of a size that arithmetic cannot be abused with."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def is_number(value: Any) -> bool:
    """A float, or an int that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)


def as_text(value: Any) -> str | None:
    """A key or a name: text, bytes of Python 2, or a number; None for anything else."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else str(value) if is_int(value) else None


def raw_bytes(node: Any) -> bytes | None:
    """Bytes as a pickle spells them: themselves, or text to be encoded as Latin-1 (protocol 2)."""
    call = node
    for _ in range(_MAX_WRAPS):
        if not (isinstance(node, Call) and node.path in _COPIES and len(node.args) == 1) or node.raw is not None:
            break
        node = node.args[0]
    else:
        return None
    raw = node.raw if isinstance(node, Call) else None
    raw = _raw_bytes(node) if raw is None else raw
    for kept in (call, node):
        if isinstance(kept, Call):
            kept.raw = raw
    return raw


def _raw_bytes(node: Any) -> bytes | None:
    if isinstance(node, Call) and node.path == "_codecs.encode" and len(node.args) == 2:
        text, codec = node.args
        return _latin(text) if isinstance(text, str) and codec in ("latin1", "latin-1") else None
    if isinstance(node, Call) and node.path in _COPIES and not node.args:
        return b""
    if isinstance(node, str):  # a string of Python 2
        return _latin(node)
    return node if isinstance(node, bytes) else None


def _latin(text: str) -> bytes | None:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None


def numpy_dtype(node: Any) -> tuple[str, bool] | None:
    """Encoding and whether big-endian, of a pickled `numpy.dtype` of plain numbers."""
    if isinstance(node, Global) and node.module == "numpy" and node.name in _SCALARS:
        return _SCALARS[node.name], False
    if not isinstance(node, Call) or node.path != "numpy.dtype" or not node.args:
        return None
    word = as_text(node.args[0])
    if word is None or word.lstrip("<>=|") not in _NUMPY:
        return None
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else word[:1]
    return _NUMPY[word.lstrip("<>=|")], order in (">", b">")


_SCALARS = {"float16": "F16", "float32": "F32", "float64": "F64", "bool_": "BOOL", "bool": "BOOL"} | {
    f"{k}int{n}": f"{'U' if k else 'I'}{n}" for k in ("", "u") for n in (8, 16, 32, 64)
}


# Calls whose result is given as a list of what they hold, made anew each time.
LISTS = (
    "builtins.set",
    "builtins.frozenset",
    "builtins.list",
    "builtins.tuple",
    "torch.Size",
    "collections.deque",
    "torch.jit._pickle.build_intlist",
    "torch.jit._pickle.build_doublelist",
    "torch.jit._pickle.build_boollist",
    "torch.jit._pickle.build_tensorlist",
)


_MADE: dict[str, type] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.tuple": tuple,
    "torch.Size": tuple,
    "collections.deque": deque,
}


def container(path: str, items: list[Any]) -> Any:
    """A set or tuple of the items that `plain` gave for a call of `path`; a list where a set cannot hold them."""
    try:
        return _MADE[path](items) if path in _MADE else items
    except TypeError:  # what cannot be hashed, such as an array
        return items


def constant(node: Global) -> str | None:
    """``"torch.float16"`` of a name that stands for itself: a dtype, layout, memory format or quantization scheme."""
    return node.path if node.path in CONSTANTS else None


def plain(node: Call) -> tuple[bool, Any]:
    """(True, value) where a call makes a plain value; (False, None) else."""
    path, args = node.path, node.args
    if path in LISTS:
        value = args[0] if args else []
        return (True, [*value, *node.appended]) if isinstance(value, (list, tuple)) else (False, None)
    if path == "torch.jit._pickle.restore_type_tag" and args:
        return True, args[0]
    if path in _RANGES:
        return _range(_RANGES[path], args)
    if path == "torch.serialization._get_layout" and len(args) == 1 and isinstance(args[0], str):
        return True, args[0]
    if path == "torch.device" and args and isinstance(args[0], str):
        index = args[1] if len(args) == 2 else None
        return (True, f"{args[0]}:{index}" if is_int(index) else args[0]) if len(args) <= 2 else (False, None)
    if path.startswith("pathlib."):
        good = all(isinstance(a, str) for a in args) and sum(len(a) + 1 for a in args) <= _MAX_PATH
        return (True, "/".join(args).replace("//", "/")) if good else (False, None)
    if path == "builtins.complex" and len(args) == 2 and all(map(is_number, args)):
        return True, complex(*args)
    if path.endswith("multiarray.scalar") and len(args) == 2 and path.startswith("numpy."):
        return _scalar(args)
    dtype = numpy_dtype(node)
    if dtype is not None:  # as text that `numpy.dtype` takes
        return True, (">" if dtype[1] else "<") + _CODES[dtype[0]]
    raw = raw_bytes(node)
    return (True, raw) if raw is not None else (False, None)


_RANGES: dict[str, type] = {"builtins.slice": slice, "builtins.range": range}


def _range(kind: type, args: tuple[Any, ...]) -> tuple[bool, Any]:
    """A slice or range of whole numbers (of a slice also None)."""
    whole = all((type(a) is int and a.bit_length() < 256) or (a is None and kind is slice) for a in args)
    good = whole and 1 <= len(args) <= 3
    return (True, kind(*args)) if good and (kind is slice or args[2:] != (0,)) else (False, None)


def _scalar(args: tuple[Any, ...]) -> tuple[bool, Any]:
    kind = numpy_dtype(args[0])
    if kind is None or kind[0] not in _STRUCT or (isinstance(args[1], str) and len(args[1]) > 16):
        return False, None
    raw = raw_bytes(args[1])
    if raw is None:
        return False, None
    code = (">" if kind[1] else "<") + _STRUCT[kind[0]]
    return (True, struct.unpack(code, raw)[0]) if len(raw) == struct.calcsize(code) else (False, None)

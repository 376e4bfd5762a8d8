"""The writing half of `tree`: records, lists and tuples to names and the `tree` skeleton (`docs/apsim-format.md`, 3).

Contract: `flatten` refuses what cannot come back as it was, naming its place; `needs_skeleton` says whether the names
alone would rebuild the same tree, key order included. `tests/test_save_load.py` enforces this with random trees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from .errors import ValueRefusedError, quote, visible
from .tree import MAX_DEPTH, from_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Path = tuple[str | int, ...]

MAX_INT = (1 << 53) - 1
MAX_DIGITS = 4096
_PLAIN = (type(None), bool, int, float, str)


class Flat(NamedTuple):
    """A flattened tree.

    Attributes
    ----------
    leaves
        Tensor name -> leaf, depth first; a leaf that stands in several places stands here once.
    paths
        Tensor name -> where the leaf is, for messages.
    skeleton
        The tree with every leaf replaced by its name.
    """

    leaves: dict[str, Any]
    paths: dict[str, str]
    skeleton: Any


def show_path(path: Path) -> str:
    """A place in the tree as text: ``layers[0].W``."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{visible(p, 60)}" for p in path)
    return text.removeprefix(".") if len(text) <= 200 else text[:120].removeprefix(".") + "…" + text[-60:]


def exact_path(path: Path) -> str:
    """A place in the tree with its keys apart: ``["a.b"]`` is not ``["a"]["b"]``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f'["{visible(p, 60)}"]' for p in path)


def flatten(params: Any, identity: Callable[[Any], object] = id) -> Flat:
    """Names, leaves and skeleton of a tree.

    Parameters
    ----------
    params
        A record (any Mapping), list or tuple of such, of leaves, and of None, bool, int, float and str.
    identity
        Leaves of one identity are one tensor (tied weights).

    Raises
    ------
    ValueRefusedError
        Something in the tree cannot be stored as it is; the message says where.
    """
    walk = _Walk(identity)
    if not isinstance(params, (Mapping, list, tuple)):
        raise ValueRefusedError(f"the root is {_kind(params)}, not a record, a list or a tuple: wrap it in a record")
    skeleton = walk.node(params, ())
    return Flat(walk.leaves, walk.paths, skeleton)


def needs_skeleton(skeleton: Any, names: Iterable[str]) -> bool:
    """False where names in this order rebuild the tree exactly."""
    names = list(names)
    if not names:
        return True
    return bool(_skeleton_of(from_names(names, str)) != skeleton)


def _skeleton_of(node: Any) -> Any:
    if isinstance(node, list):
        return [_skeleton_of(child) for child in node]
    if isinstance(node, dict):
        return {"$record": [[key, _skeleton_of(child)] for key, child in node.items()]}
    return node


class _Walk:
    """One depth-first walk over a tree."""

    def __init__(self, identity: Callable[[Any], object]) -> None:
        self.identity = identity
        self.leaves: dict[str, Any] = {}
        self.paths: dict[str, str] = {}
        self.names: dict[object, str] = {}
        self.places: dict[str, Path] = {}

    def node(self, node: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise ValueRefusedError(f"{show_path(path)}: nested deeper than {MAX_DEPTH} (or the tree contains itself)")
        if isinstance(node, Mapping):
            return {"$record": [[self.key(k, path), self.node(v, (*path, k))] for k, v in node.items()]}
        if isinstance(node, list):
            return [self.node(v, (*path, i)) for i, v in enumerate(node)]
        if type(node) is tuple:
            return {"$tuple": [self.node(v, (*path, i)) for i, v in enumerate(node)]}
        if isinstance(node, tuple):
            raise ValueRefusedError(
                f"{show_path(path)}: a named tuple ({_kind(node)}) would come back as a plain one; "
                "make it a record with ._asdict(), or a tuple"
            )
        if type(node) in _PLAIN:
            return {"$literal": mark_scalar(node, show_path(path))}
        return self.leaf(node, path)

    @staticmethod
    def key(key: Any, path: Path) -> str:
        if type(key) is not str:
            where = show_path(path) or "the root"
            raise ValueRefusedError(f"{where}: key {visible(repr(key), 60)} is {_kind(key)}; keys are strings")
        check_text(key, f"{show_path(path) or 'the root'}: a key")
        return key

    def leaf(self, leaf: Any, path: Path) -> str:
        mark = self.identity(leaf)
        if mark in self.names:
            return self.names[mark]
        name = ".".join(map(str, path))
        if name in self.leaves:
            name = ".".join(p.replace("%", "%25").replace(".", "%2E") if isinstance(p, str) else str(p) for p in path)
            if name in self.leaves:
                both = f"{exact_path(self.places[name])} and {exact_path(path)}"
                raise ValueRefusedError(f"{both} would both be stored as {quote(name)}; rename one of them")
        where = show_path(path)
        if name == "__metadata__" or name.endswith("__qscale"):
            raise ValueRefusedError(f"{where}: a tensor cannot be named {quote(name)}, which the format uses itself")
        if name.count(".") >= MAX_DEPTH:
            raise ValueRefusedError(f"{where}: its name has more than {MAX_DEPTH} components")
        self.names[mark], self.leaves[name], self.paths[name], self.places[name] = name, leaf, where, path
        return name


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_text(text: str, what: str) -> None:
    """Refuse what UTF-8 cannot hold."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueRefusedError(f"{what} holds a lone surrogate: {quote(text)}")


def mark_scalar(value: Any, what: str) -> Any:
    """A plain value as JSON: big integers and non-finite floats as markers."""
    if type(value) is int and abs(value) > MAX_INT:
        if abs(value) >= 10**MAX_DIGITS:
            raise ValueRefusedError(f"{what}: an integer of more than {MAX_DIGITS} digits")
        return {"$int": str(value)}
    if type(value) is float and not math.isfinite(value):
        return {"$float": "nan" if value != value else "inf" if value > 0 else "-inf"}
    if type(value) is str:
        check_text(value, what)
    return value


def mark(value: Any, path: Path = ()) -> Any:
    """A user's metadata as JSON (section 2): markers for what JSON cannot say, ``$`` at the start of a key doubled.

    Tuples become lists, NumPy's numbers Python's.

    Raises
    ------
    ValueRefusedError
        A value is none of None, bool, int, float, str, list, Mapping; the message says where.
    """
    where = f"metadata {show_path(path)}".rstrip()
    if len(path) > MAX_DEPTH:
        raise ValueRefusedError(f"{where}: nested deeper than {MAX_DEPTH} (or it contains itself)")
    if isinstance(value, Mapping):
        out = {}
        for k, v in value.items():
            if type(k) is not str:
                raise ValueRefusedError(f"{where}: key {visible(repr(k), 60)} is {_kind(k)}; keys are strings")
            check_text(k, f"{where}: a key")
            out["$" + k if k.startswith("$") else k] = mark(v, (*path, k))
        return out
    if isinstance(value, (list, tuple)):
        return [mark(v, (*path, i)) for i, v in enumerate(value)]
    if type(value) not in _PLAIN and type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if type(value) not in _PLAIN:
        raise ValueRefusedError(
            f"{where}: {_kind(value)} cannot be kept in metadata; write it as text, numbers, lists or records"
        )
    return mark_scalar(value, where)

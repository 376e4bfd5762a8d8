"""Records and lists <-> dotted tensor names, and the `tree` skeleton of .apsim (`docs/apsim-format.md`, section 3).

`record` is a dict whose keys can also be read as attributes. `tests/test_tree.py` enforces the rules of the
specification.
"""

from __future__ import annotations

import re
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_DEPTH = 256  # components of a dotted name, containers around a leaf
MAX_NODES = 100_000  # inner nodes beyond four a name: names that share nothing would make 255 each
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,8}")
_BIG_INT = re.compile(r"-?(0|[1-9][0-9]{0,4095})")
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class record(dict[str, "Any"]):  # noqa: N801  (the user's documentation calls it so)
    """A dict with attribute access: ``r.name`` is ``r["name"]``. Keys that are dict methods need ``r["keys"]``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"record has no key {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"record has no key {name!r}") from None

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(k for k in self if isinstance(k, str) and k.isidentifier())]

    def __repr__(self) -> str:
        try:
            return "record(" + ", ".join(f"{k}={v!r}" for k, v in self.items()) + ")"
        except RecursionError:
            return "record(…)"


class TreeError(ValueError):
    """A `tree` that breaks the rules; the reader adds the file's name."""


def from_names(names: Iterable[str], leaf: Callable[[str], Any]) -> record | list[Any] | None:
    """The tree that the names alone give: siblings 0..n-1 are a list, anything else is a record.

    Parameters
    ----------
    names
        Tensor names in file order.
    leaf
        What stands for a tensor in the tree, from its name.

    Returns
    -------
    record or list
        None where one name is a leaf and also the prefix of another, or where the tree would be absurdly large.
    """
    root: dict[str, Any] = {}
    spare = MAX_NODES
    for name in names:
        node = root
        parts = name.split(".", MAX_DEPTH - 1)
        spare += 4
        for part in parts[:-1]:
            child = node.get(part)
            if child is None:
                child = node[part] = {}
                spare -= 1
            elif not isinstance(child, dict):
                return None
            node = child
        if parts[-1] in node or spare < 0:
            return None
        node[parts[-1]] = _Leaf(name)
    tree: record | list[Any] = _listify(root, leaf)
    return tree


def prefix_conflict(names: Iterable[str]) -> bool:
    """True where one name is a leaf and also the prefix of another; no tree is built."""
    names = list(names)
    if any("\0" in name for name in names):
        return from_names(names, str) is None
    # With the lowest character as separator, whatever begins with "a." stands right after "a".
    ordered = sorted(name.replace(".", "\0") for name in names)
    return any(b.startswith(a) and b[len(a)] == "\0" for a, b in pairwise(ordered))


class _Leaf(str):
    """A leaf of the half-built tree: the tensor's name, told from an inner node by its class."""

    __slots__ = ()


def _listify(node: dict[str, Any], leaf: Callable[[str], Any]) -> Any:
    out = {k: leaf(str(v)) if isinstance(v, _Leaf) else _listify(v, leaf) for k, v in node.items()}
    if out and all(_DECIMAL.fullmatch(k) and int(k) < len(out) for k in out):
        return [out[str(i)] for i in range(len(out))]
    return record(out)


def from_skeleton(node: Any, leaf: Callable[[str], Any]) -> Any:
    """The tree that a `tree` skeleton describes.

    Raises
    ------
    TreeError
        The skeleton breaks a rule of `docs/apsim-format.md`, section 3.
    """
    if isinstance(node, str) or (isinstance(node, dict) and node.keys() == {"$literal"}):
        raise TreeError("the root must be a record, a list or a tuple")
    return _build(node, leaf, 0)


def _build(node: Any, leaf: Callable[[str], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TreeError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(node, str):
        return leaf(node)
    if isinstance(node, list):
        return [_build(child, leaf, depth + 1) for child in node]
    if isinstance(node, dict) and len(node) == 1:
        ((tag, value),) = node.items()
        if tag == "$tuple" and isinstance(value, list):
            return tuple(_build(child, leaf, depth + 1) for child in value)
        if tag == "$literal":
            return literal(value)
        if tag == "$record" and isinstance(value, list):
            return _record(value, leaf, depth)
    raise TreeError(f"{str(node)[:60]!r} is no part of a tree")


def _record(pairs: list[Any], leaf: Callable[[str], Any], depth: int) -> record:
    out = record()
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TreeError("a $record holds [key, child] pairs")
        if pair[0] in out:
            raise TreeError(f"key {pair[0][:60]!r} stands twice in a record")
        out[pair[0]] = _build(pair[1], leaf, depth + 1)
    return out


def literal(value: Any) -> bool | int | float | str | None:
    """The value of a ``$literal``: a plain JSON value, ``{"$int": …}`` or ``{"$float": …}``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((tag, text),) = value.items()
        if tag == "$int" and isinstance(text, str) and _BIG_INT.fullmatch(text):
            return int(text)
        if tag == "$float" and isinstance(text, str) and text in _FLOATS:
            return _FLOATS[text]
    raise TreeError(f"{str(value)[:60]!r} is no literal")


def unmark(value: Any) -> Any:
    """A user's JSON value with the ``$int`` and ``$float`` markers resolved and ``$$`` keys restored (section 2)."""
    if isinstance(value, list):
        return [unmark(v) for v in value]
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value)) in ("$int", "$float"):
            return literal(value)
        if any(k.startswith("$") and not k.startswith("$$") for k in value):
            raise TreeError("a key that begins with one $ is reserved")
        return record((k[1:] if k.startswith("$$") else k, unmark(v)) for k, v in value.items())
    return value

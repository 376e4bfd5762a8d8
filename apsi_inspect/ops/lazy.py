"""Records and lists whose arrays are decoded, or checked, when they are read for the first time.

Contract: they are records and lists in every way, except that a leaf that waits costs nothing until it is read; then it
stays. `tests/test_gguf_write.py` enforces this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from ..formats.base import is_mapped
from ..tree import from_names, from_skeleton, record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..model import ModelFile, Tensor

_VIEWED = ("F16", "F32", "F64", "I8", "I16", "I32", "I64")


class Later:
    """A leaf that is made when it is read; several places may share it."""

    __slots__ = ("make", "value")

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make: Callable[[], Any] | None = make
        self.value: Any = None

    def get(self) -> Any:
        """The leaf."""
        if self.make is not None:
            self.value, self.make = self.make(), None
        return self.value


def _decoded(tensor: Tensor) -> NDArray[Any]:
    values = tensor.numpy()
    if tensor.encoding == "BF16":
        values = values.astype(np.float32)
    values.flags.writeable = False
    return values


def with_unit(values: Any, unit: Any) -> Any:
    """A pint Quantity where there is a unit."""
    if unit is None:
        return values
    from ..units_pint import pint_units

    units, _ = pint_units(unit)
    return units._REGISTRY.Quantity(values, units)


class LazyRecord(record):
    """A record some of whose values are decoded when they are read."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Later):
            value = value.get()
            super().__setitem__(key, value)
        return value

    def __iter__(self) -> Iterator[str]:  # that it is overridden makes dict(r) and {**r} call __getitem__
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (dict.get would not decode)

    def values(self) -> Any:
        return [self[k] for k in self]

    def items(self) -> Any:
        return [(k, self[k]) for k in self]

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            value = self[key]
            del self[key]
            return value
        return super().pop(key, *default)

    def copy(self) -> record:
        return record(self.items())

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None  # type: ignore[assignment]


class LazyList(list[Any]):
    """A list some of whose elements are decoded when they are read."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(len(self)))]
        value = super().__getitem__(key)
        if isinstance(value, Later):
            value = value.get()
            super().__setitem__(key, value)
        return value

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def pop(self, index: SupportsIndex = -1) -> Any:
        value = self[index]
        del self[index]
        return value

    def copy(self) -> list[Any]:
        return list(iter(self))

    def __eq__(self, other: object) -> bool:
        return list(iter(self)) == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(list(iter(self)))


def _maker(tensor: Tensor) -> Callable[[], Any]:
    return lambda: with_unit(_decoded(tensor), tensor.unit)


def lazy_tree(model: ModelFile) -> Any:
    """The tree of a model with arrays for leaves: views at once, the rest when they are read."""
    made: dict[str, Any] = {}

    def leaf(name: str) -> Any:
        if name not in made:
            tensor = model[name]
            plain = tensor.encoding in _VIEWED and tensor.qparams is None and is_mapped(tensor.source)
            made[name] = with_unit(tensor.numpy(), tensor.unit) if plain else Later(_maker(tensor))
        return made[name]

    names = model.columns.names
    tree = from_skeleton(model.skeleton, leaf) if model.skeleton is not None else from_names(names, leaf)
    return lazily(tree if tree is not None else record((n, leaf(n)) for n in names))


def lazily(node: Any) -> Any:
    """The tree in lazy containers, where something in them is `Later`."""
    if isinstance(node, dict):
        pairs = [(k, lazily(v)) for k, v in node.items()]
        return LazyRecord(pairs) if any(isinstance(v, Later) for _, v in pairs) else record(pairs)
    if isinstance(node, list):
        items = [lazily(v) for v in node]
        return LazyList(items) if any(isinstance(v, Later) for v in items) else items
    if isinstance(node, tuple):  # a tuple cannot wait
        return tuple(v.get() if isinstance(v, Later) else lazily(v) for v in node)
    return node


class MetadataRecord(record):
    """GGUF metadata under the file's own keys; a name with underscores finds a dotted key where only one is meant."""

    __slots__ = ()

    def __missing__(self, key: str) -> Any:
        found = list(self._spelled(key))
        if len(found) != 1:
            raise KeyError(key)
        return self[found[0]]

    def _spelled(self, key: str) -> Iterable[str]:
        if not isinstance(key, str) or "." in key:
            return []
        return [k for k in self if "." in k and re.sub(r"[^0-9A-Za-z]", "_", k) == key]

"""The object of a PyTorch pickle, walked once: tensors under dotted names, other values as metadata, what was skipped.

Contract: a walk is bounded in steps, depth and length of names, however the nodes share and contain each other; the
same node is described once. Names: keys joined by dots, as the paths that a Python user would type; of pickled modules
and TorchScript the state dict's names. `tests/test_pickle_attacks.py` enforces the bounds.
"""

from __future__ import annotations

from ..errors import ModelFileError, quote
from .pickle_nodes import Call, Dict, Global, Persistent
from .torch_plain import LISTS, plain
from .torch_values import Absent, Description, Inline, Parts, Strided, TensorError, describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_STEPS = 1_000_000
MAX_AGAIN = 10_000  # visits of containers that have been visited before
MAX_DEPTH = 200
MAX_NAMES = 64 << 20  # characters of all names
MAX_KEY = 4096
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_NOISE = ("training", "_is_full_backward_hook", "_backward_hooks", "_metadata")
SINGLE = "tensor"  # name of the only tensor of a file that has no key


class Walk:
    """The result of a walk over one object.

    Attributes
    ----------
    tensors
        (name, description) in the order of the file.
    metadata
        Plain values by dotted name.
    names
        Identity of a node -> name of the tensor it was listed as.
    absent
        Tensors that could not be listed, in words.
    classes
        Dotted names of classes and functions whose objects were kept as data -> how many.
    cycles
        True where a container contains itself.
    """

    def __init__(self, file: str, root: Any) -> None:
        self.file = file
        self.tensors: list[tuple[str, Strided | Inline]] = []
        self.metadata: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.absent: list[str] = []
        self.classes: dict[str, int] = {}
        self.cycles = False
        self.keep: list[Any] = []  # nodes made on the way stay alive: `names` knows them by identity
        self._taken: set[str] = set()
        self._path: set[int] = set()
        self._visited: set[int] = set()
        self._again = 0
        self._known: dict[int, Description | None] = {}
        self._steps = self._characters = self._joined = 0
        self._visit(root, "", 0)

    def _fail(self, reason: str, name: str) -> ModelFileError:
        return ModelFileError(self.file, reason, f"tensor {quote(name)}" if name else None)

    def _visit(self, node: Any, name: str, depth: int) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ModelFileError(self.file, f"its pickle refers to the same objects over and over: {MAX_STEPS} times")
        self._joined += len(name)  # also of containers, which leave no name behind
        if self._joined > 4 * MAX_NAMES:
            raise ModelFileError(self.file, "the names in its pickle are too long")
        if depth > MAX_DEPTH:
            raise ModelFileError(self.file, f"its pickle is nested deeper than {MAX_DEPTH} (or it contains itself)")
        if isinstance(node, Call):
            self._call(node, name, depth)
        elif isinstance(node, Dict):
            self._inside(node, node.pairs, name, depth)
        elif isinstance(node, (list, tuple)):
            self._list(node, name, depth)
        elif isinstance(node, Global):
            self._note(name, node.path)
        elif isinstance(node, Persistent):
            self._note(name, "a storage" if isinstance(node.pid, tuple) else "a persistent id")
        else:
            self._note(name, _value(node))

    def _note(self, name: str, value: Any) -> None:
        """A value of the metadata."""
        self.metadata[self._fresh(name or "value", self.metadata)] = value

    def _fresh(self, name: str, taken: Any) -> str:
        """A name that is not taken yet."""
        self._characters += len(name)
        if self._characters > MAX_NAMES:
            raise ModelFileError(self.file, "the names in its pickle are too long")
        if name not in taken:
            return name
        n = 2
        while f"{name}~{n}" in taken:
            n += 1
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise ModelFileError(self.file, "the names in its pickle are the same again and again")
        return f"{name}~{n}"

    def _inside(self, node: Any, pairs: list[tuple[Any, Any]], name: str, depth: int) -> None:
        if not self._enter(node):
            return
        for key, value in pairs:
            self._visit(value, _join(name, key_text(key)), depth + 1)
        self._path.discard(id(node))

    def _enter(self, node: Any) -> bool:
        """Whether to go into a container: not into one that we are in already, and not too often into the same ones."""
        if id(node) in self._path:
            self.cycles = True
            return False
        self._again += id(node) in self._visited
        if self._again > MAX_AGAIN:
            raise ModelFileError(self.file, f"its pickle refers to the same objects over and over: {MAX_AGAIN} times")
        self._path.add(id(node))
        self._visited.add(id(node))
        return True

    def _list(self, node: Any, name: str, depth: int) -> None:
        if all(_is_plain(v) for v in node):
            self._steps += len(node) // 16
            self._note(name, [_value(v) for v in node])
            return
        self._inside(node, list(enumerate(node)), name, depth)

    def _call(self, node: Call, name: str, depth: int) -> None:
        found = self._describe(node, name)
        if isinstance(found, (Strided, Inline)):
            self._tensor(node, found, name, depth)
        elif isinstance(found, Parts):
            self._note(name, found.text)
            self._inside(node, list(found.parts), name, depth)
        elif isinstance(found, Absent):
            self._note(name, found.text)
            self.absent.append(f"{quote(name)}: {found.text}")
        else:
            is_plain, value = plain(node)
            if is_plain:
                self._visit(value, name, depth + 1)
                if node.path in LISTS:  # made for this visit: its identity may come again
                    self._visited.discard(id(value))
            else:
                self._object(node, name, depth)

    def _describe(self, node: Call, name: str) -> Description | None:
        if id(node) not in self._known:
            try:
                found = self._known[id(node)] = describe(node)
                self._steps += len(found.data) // 256 if isinstance(found, Inline) else 0
            except TensorError as exc:
                raise self._fail(str(exc), name or SINGLE) from None
        return self._known[id(node)]

    def _tensor(self, node: Call, found: Strided | Inline, name: str, depth: int) -> None:
        name = self._fresh(name or SINGLE, self._taken)
        self._taken.add(name)
        self.names.setdefault(id(node), name)
        if isinstance(found, Strided) and found.quantizer is not None:
            scale, zero, axis = found.quantizer
            if axis is not None:
                scale = self._companion(scale, f"{name}.scale", depth + 1)
                zero = self._companion(zero, f"{name}.zero_point", depth + 1)
            found = found._replace(quantizer=(scale, zero, axis))
        self.tensors.append((name, found))

    def _companion(self, node: Any, name: str, depth: int) -> str:
        """Per-channel scales and zero points are tensors of their own."""
        if not isinstance(node, Call) or not isinstance(self._describe(node, name), Strided):
            raise self._fail("is no tensor, per-channel quantization needs one", name)
        self._visit(node, name, depth)
        return self.names[id(node)]

    def _object(self, node: Call, name: str, depth: int) -> None:
        """An object of a class that we do not know: its state is data."""
        path = node.path or "the result of a call"
        self.classes[path] = self.classes.get(path, 0) + 1
        state = node.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Dict):  # (dict, slots)
            state = state[1] if state[0] is None else state[0]
        pairs = list(state.pairs) if isinstance(state, Dict) else []
        if any(k in _MODULE_PARTS for k, _ in pairs if isinstance(k, str)):
            self._module(node, pairs, name, depth)
            return
        pairs = [(k, v) for k, v in pairs if k not in _NOISE] if path.startswith("__torch__") else pairs
        pairs += node.items + list(enumerate(node.appended))
        if not pairs:
            if not path.startswith("__torch__"):
                self._note(name, f"<{path}>")
            return
        self._inside(node, pairs, name, depth)

    def _module(self, node: Call, pairs: list[tuple[Any, Any]], name: str, depth: int) -> None:
        """A pickled `torch.nn.Module`: the names of its state dict."""
        if not self._enter(node):
            return
        for key, value in pairs:
            if key in _MODULE_PARTS and isinstance(value, Dict):
                for inner, child in value.pairs:
                    if child is not None:
                        self._visit(child, _join(name, key_text(inner)), depth + 1)
            elif isinstance(key, str) and not key.startswith("_") and key not in _NOISE and _is_plain(value):
                self._visit(value, _join(name, key), depth + 1)
        self._path.discard(id(node))


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def key_text(key: Any) -> str:
    """A key of a dict as a part of a name."""
    if isinstance(key, str):
        text = key[:MAX_KEY]
        return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    if isinstance(key, (bool, float)) or key is None:
        return repr(key)
    if isinstance(key, int):
        return str(key) if key.bit_length() < 4096 else "(a huge integer)"
    if isinstance(key, bytes):
        return key[:MAX_KEY].decode("utf-8", "replace")
    if isinstance(key, tuple) and len(key) <= 16 and all(isinstance(k, (str, int)) for k in key):
        return "(" + ", ".join(key_text(k) for k in key) + ")"
    return key.path if isinstance(key, Global) else f"({type(key).__name__.lower()})"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes, slice, range))


def _value(value: Any) -> Any:
    """A plain value as JSON has it."""
    if isinstance(value, (slice, range)):
        return repr(value)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, int) and value.bit_length() > 4096:
        return f"<integer of {value.bit_length()} bits>"
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode("utf-8")
    return value

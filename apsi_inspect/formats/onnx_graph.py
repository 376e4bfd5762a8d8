"""An ONNX model walked once: every tensor in it, wherever it hides, and what the graph is made of.

Contract: initializers, Constant nodes and other attributes, of the main graph, of subgraphs to any depth, of functions
and of training graphs. A name that occurs in several scopes is given with its scope the second time. Only fields that
describe are read (`protobuf.py`). `tests/test_onnx.py` compares the list with onnx.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ModelFileError
from .onnx_tensors import STRING, Proto, entry, parse
from .onnx_types import value_info
from .protobuf import BYTES, FIXED32, VARINT, Wire, signed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_DEPTH = 32
_OWN = ("", "ai.onnx")  # the domain of ONNX itself
MANY = 16  # numbers in a list attribute from which on it is listed as a tensor


class Found(NamedTuple):
    """A tensor: the name it is listed under, and its fields."""

    name: str
    proto: Proto


class Quantized(NamedTuple):
    """A node that reads codes with a scale: names as listed."""

    codes: str
    scale: str
    zero_point: str | None
    axis: int | None
    block: int | None


class Node(NamedTuple):
    """What is kept of a node."""

    inputs: list[str]
    outputs: list[str]
    name: str
    kind: str
    domain: str
    numbers: dict[str, int]


class Scope:
    """Names that a graph sees: its own and those of the graphs around it."""

    def __init__(self, label: str, outer: Scope | None = None) -> None:
        self.label, self.outer = label, outer
        self.names: dict[str, str] = {}

    def find(self, name: str) -> str | None:
        """The listed name of a tensor."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


# operator -> for each quantized input: positions of codes, scale, zero point; the axis of its scales, or None
_QUANTIZED = {
    "DequantizeLinear": ((0, 1, 2, 1),),
    "QLinearConv": ((3, 4, 5, 0),),
    "QLinearMatMul": ((0, 1, 2, -1), (3, 4, 5, -1)),
}


class Graph:
    """The result of a walk.

    Attributes
    ----------
    tensors
        Every tensor of numbers, in the order of the file.
    texts
        Tensors of strings, in words.
    operators
        Operator (with its domain where that is not ONNX's own) -> how many nodes.
    quantized
        Tensors of codes with their scales.
    inputs, outputs
        (name, type) of the main graph.
    opsets, metadata, facts
        Of the model.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.tensors: list[Found] = []
        self.texts: dict[str, str] = {}
        self.operators: dict[str, int] = {}
        self.quantized: list[Quantized] = []
        self.inputs: list[tuple[str, str]] = []
        self.outputs: list[tuple[str, str]] = []
        self.opsets: dict[str, int] = {}
        self.metadata: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.duplicates: list[str] = []
        self.subgraphs = self.constants = self.functions = self.sparse = 0
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}  # of a name that comes again: the number to try next
        self._model()

    def _model(self) -> None:
        wire = self.wire
        words = {2: "producer", 3: "producer version", 4: "domain", 6: "doc"}
        seen_graph = False
        later: list[tuple[int, int, int]] = []
        for number, kind, a, z in wire.fields(0, wire.source.size):
            if number == 1 and kind == VARINT:
                self.facts["ir version"] = signed(a)
            elif number in words and kind == BYTES:
                self.facts[words[number]] = wire.text(a, z)
            elif number == 5 and kind == VARINT and a:
                self.facts["model version"] = signed(a)
            elif number == 8 and kind == BYTES:
                self._opset(a, z)
            elif number == 14 and kind == BYTES:
                key, value = entry(wire, a, z)
                self.metadata[key] = value
            elif number in (7, 20, 25) and kind == BYTES:
                seen_graph = seen_graph or number == 7
                later.append((number, a, z))
        if not seen_graph:
            raise ModelFileError(wire.source.name, "is not an ONNX model: it has no graph")
        for number, a, z in sorted(later, key=lambda part: part[0] != 7):
            self._part(number, a, z)

    def _opset(self, begin: int, end: int) -> None:
        domain, version = "", 0
        for number, kind, a, z in self.wire.fields(begin, end):
            if number == 1 and kind == BYTES:
                domain = self.wire.text(a, z)
            elif number == 2 and kind == VARINT:
                version = signed(a)
        self.opsets[domain or "ai.onnx"] = version

    def _part(self, number: int, begin: int, end: int) -> None:
        """The graph, training information, or a local function."""
        if number == 7:
            self._graph(begin, end, Scope(""), 0)
        elif number == 25:
            self._function(begin, end)
        else:
            for field, kind, a, z in self.wire.fields(begin, end):
                if field in (1, 2) and kind == BYTES:
                    self._graph(a, z, Scope("training" if field == 1 else "algorithm"), 1)

    def _function(self, begin: int, end: int) -> None:
        self.functions += 1
        scope = Scope(f"function {self.functions}")
        fields = list(self.wire.fields(begin, end))
        for number, kind, a, z in fields:
            if number == 1 and kind == BYTES:
                scope.label = self.wire.text(a, z)
        for number, kind, a, z in fields:
            if number == 7 and kind == BYTES:
                self._node(a, z, scope, 1)

    def _graph(self, begin: int, end: int, scope: Scope, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self.wire.fail(f"graphs nested deeper than {MAX_DEPTH}", begin)
        wire = self.wire
        nodes: list[tuple[int, int]] = []
        for number, kind, a, z in wire.fields(begin, end):
            if kind != BYTES:
                continue
            if number == 1:
                nodes.append((a, z))
            elif number == 2 and not depth:
                self.facts["graph"] = wire.text(a, z)
            elif number == 5:
                self._add(parse(wire, a, z), scope, "initializer")
            elif number == 15:
                self._sparse(a, z, scope, "sparse initializer")
            elif number in (11, 12) and not depth:
                (self.inputs if number == 11 else self.outputs).append(value_info(wire, a, z))
        for a, z in nodes:
            self._node(a, z, scope, depth)

    def _add(self, proto: Proto, scope: Scope, fallback: str) -> str:
        """List a tensor; its name is known in its scope."""
        name = listed = proto.name or fallback
        if name in scope.names:
            self.duplicates.append(name)
        if listed in self._taken:
            base = listed = f"{scope.label}/{name}" if scope.label else name
            n = self._next.get(base, 2)
            while listed in self._taken:
                listed, n = f"{base}~{n}", n + 1
            self._next[base] = n
        self._taken.add(listed)
        if proto.name:
            scope.names.setdefault(proto.name, listed)
        if proto.kind == STRING:
            shape = " × ".join(map(str, proto.dims)) or "scalar"
            self.texts[listed] = f"STRING {shape}, {proto.strings} texts"
        else:
            self.tensors.append(Found(listed, proto))
        return listed

    def _sparse(self, begin: int, end: int, scope: Scope, fallback: str) -> None:
        """A sparse tensor: its values and indices are listed."""
        values = indices = None
        dims: list[int] = []
        for number, kind, a, z in self.wire.fields(begin, end):
            if number in (1, 2) and kind == BYTES:
                proto = parse(self.wire, a, z)
                values, indices = (proto, indices) if number == 1 else (values, proto)
            elif number == 3:
                dims += [signed(a)] if kind == VARINT else map(signed, self.wire.packed(a, z))
        name = (values.name if values else "") or fallback
        self.sparse += 1
        self.texts[name] = f"sparse {' × '.join(map(str, dims))}; its values and indices are listed"
        for part, found in (("values", values), ("indices", indices)):
            if found is not None:
                self._add(found._replace(name=f"{name}.{part}"), scope, part)

    def _node(self, begin: int, end: int, scope: Scope, depth: int) -> None:
        """A node: most are only counted, and nothing of them but the operator is read."""
        wire = self.wire
        named: list[tuple[int, int, int]] = []
        attributes: list[tuple[int, int]] = []
        operator = domain = ""
        for number, kind, a, z in wire.fields(begin, end):
            if kind != BYTES:
                continue
            if number == 4:
                operator = wire.text(a, z)
            elif number < 4:
                named.append((number, a, z))
            elif number == 5:
                attributes.append((a, z))
            elif number == 7:
                domain = wire.text(a, z)
        own = domain in _OWN
        label = operator if own else f"{domain}.{operator}"
        self.operators[label] = self.operators.get(label, 0) + 1
        if not attributes and not (own and operator in _QUANTIZED):  # most nodes
            return
        inputs, outputs, names = ([wire.text(a, z) for field, a, z in named if field == n] for n in (1, 2, 3))
        node = Node(inputs, outputs, names[-1] if names else "", operator, domain, {})
        for a, z in attributes:
            self._attribute(a, z, node, scope, depth)
        if own and operator in _QUANTIZED:
            self.quantized += _quantized(node, scope)

    def _attribute(self, begin: int, end: int, node: Node, scope: Scope, depth: int) -> None:
        """An attribute: its name first, as fields may come in any order."""
        wire = self.wire
        fields = list(wire.fields(begin, end))
        name = next((wire.text(a, z) for number, kind, a, z in fields if number == 1 and kind == BYTES), "")
        constant = node.kind == "Constant" and node.domain in _OWN
        self.constants += constant
        own = node.outputs[0] if constant and node.outputs else ""
        path = own or f"{node.name or (node.outputs[0] if node.outputs else node.kind)}.{name}"
        numbers: dict[int, bytearray] = {}
        for number, kind, a, z in fields:
            if number == 3 and kind == VARINT:
                node.numbers[name] = signed(a)
            if number in (5, 10) and kind == BYTES:
                self._add(parse(wire, a, z)._replace(name=path), scope, path)
            elif number in (22, 23) and kind == BYTES:
                self._sparse(a, z, scope, path)
            elif number in (6, 11) and kind == BYTES:
                self.subgraphs += 1
                label = f"{scope.label}/{path}" if scope.label else path
                self._graph(a, z, Scope(label, scope), depth + 1)
            elif number in (2, 3, 7, 8) and (constant or number > 3):
                numbers.setdefault(number, bytearray()).extend(_number(wire, number, kind, a, z))
        for number, data in numbers.items():
            self._list(number, bytes(data), path, scope, constant)

    def _list(self, number: int, data: bytes, path: str, scope: Scope, constant: bool) -> None:
        """Numbers of a Constant (value_float …), or a long list attribute (a tree ensemble's)."""
        kind, width, field = (1, 4, 4) if number in (2, 7) else (7, 8, 7)
        count = len(data) // width
        if not constant and count < MANY:
            return
        dims = () if number in (2, 3) else (count,)
        self._add(Proto(path, dims, kind, None, {}, {field: bytearray(data)}, None, 0), scope, path)


def _number(wire: Wire, number: int, kind: int, a: int, z: int) -> bytes:
    """A float or integer of an attribute, or a packed list of them, as bytes."""
    if number in (2, 7):
        if kind == FIXED32 or (kind == BYTES and (z - a) % 4 == 0):
            return wire.read(a, z)
        raise wire.fail("an attribute with floats of another kind", a)
    if kind == VARINT:
        return a.to_bytes(8, "little")
    return b"".join(v.to_bytes(8, "little") for v in wire.packed(a, z, 1 << 24))


def _quantized(node: Node, scope: Scope) -> Iterator[Quantized]:
    """The tensors that a quantizing operator reads, where codes and scale are tensors of the file."""
    for at, scale_at, zero_at, axis in _QUANTIZED[node.kind]:
        names = [node.inputs[i] if i < len(node.inputs) else "" for i in (at, scale_at, zero_at)]
        codes, scale, zero = (scope.find(n) if n else None for n in names)
        if codes is not None and scale is not None and (zero is not None or not names[2]):
            block = node.numbers.get("block_size", 0) or None
            yield Quantized(codes, scale, zero, node.numbers.get("axis", axis), block)

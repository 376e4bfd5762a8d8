"""ONNX models: the graph's description, and its tensors without reading them (`docs/formats.md`, section 5).

Contract: no package is needed and no tensor is read; time goes with the number of nodes and tensors (a model of 1.2 GB:
0.15 s and 37 MB, against 5.2 s and 2.4 GB of ``onnx.load`` without external data, which copies every weight). Codes
that a DequantizeLinear or QLinear node reads are one logical tensor with scale and zero point (`Tensor.affine`).
`tests/test_onnx.py` compares with onnx.
"""

from __future__ import annotations

from math import prod

from ..encodings.affine import Affine
from ..errors import ModelFileError, quote
from ..model import Columns, Finding, ModelFile
from .base import Format
from .onnx_graph import Graph
from .onnx_tensors import Files, locate
from .protobuf import BYTES, VARINT, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..encodings import Encoding
    from ..source import ByteSource

_FIELDS = {1: VARINT, 2: BYTES, 3: BYTES, 4: BYTES, 5: VARINT, 6: BYTES, 7: BYTES, 8: BYTES}
_FIELDS |= {14: BYTES, 20: BYTES, 25: BYTES, 26: BYTES}
# Operator domains that onnx or onnxruntime bring along.
_OWN_DOMAINS = frozenset(
    (
        "ai.onnx ai.onnx.ml ai.onnx.training ai.onnx.preview.training com.microsoft com.microsoft.nchwc "
        "com.microsoft.experimental org.pytorch.aten"
    ).split()
)


def sniff(head: bytes, size: int) -> bool:
    """Fields of a ModelProto from the first byte on, up to a graph; there is no magic number."""
    from ..source import BytesSource

    seen: set[int] = set()
    try:
        for number, kind, a, z in Wire(BytesSource(head)).fields(0, size):
            if _FIELDS.get(number, kind) != kind or (number == 1 and not 0 < a < 1000):
                return False
            seen.add(number)
            if z >= len(head):  # it goes on beyond the head
                break
    except ModelFileError:
        if len(head) == size:
            return False
    return {1, 7} <= seen or {1, 8} <= seen or {7, 8} <= seen


def read(source: ByteSource) -> ModelFile:
    """Open an ONNX model."""
    graph = Graph(Wire(source))
    files = Files(source)
    try:
        return _model(source, graph, files)
    except BaseException:
        files.close()
        raise


def _model(source: ByteSource, graph: Graph, files: Files) -> ModelFile:
    names: list[str] = []
    used: dict[str, int] = {}
    encodings: list[Encoding] = []
    codes, starts, offsets, sizes, numbers = [], [0], [], [], []
    dims: list[int] = []
    views: dict[str, ByteSource] = {}
    for found in graph.tensors:
        stored = locate(found.proto, files, found.name)
        names.append(found.name)
        if stored.encoding.name not in used:
            used[stored.encoding.name] = len(encodings)
            encodings.append(stored.encoding)
        codes.append(used[stored.encoding.name])
        dims += stored.shape
        starts.append(len(dims))
        offsets.append(stored.offset)
        sizes.append(stored.nbytes)
        numbers.append(stored.file)
        if stored.view is not None:
            views[found.name] = stored.view
    several = len(files.sources) > 1
    columns = Columns(names, encodings, codes, dims, starts, offsets, sizes, numbers if several else None)
    shapes = {name: columns.shape(i) for i, name in enumerate(names)}
    return ModelFile(
        source.name,
        "onnx",
        columns,
        files.sources,
        metadata={**graph.metadata, **graph.texts},
        findings=_findings(graph),
        facts=_facts(graph, files),
        views=views,
        affine=_affine(graph, shapes),
    )


def _affine(graph: Graph, shapes: dict[str, tuple[int, ...]]) -> dict[str, Affine]:
    """Scale and zero point of the tensors of codes; only where their shapes fit."""
    out: dict[str, Affine] = {}
    for q in graph.quantized:
        if q.codes in out or q.codes not in shapes or q.scale not in shapes:
            continue
        shape, scale = shapes[q.codes], shapes[q.scale]
        if q.zero_point is not None and shapes.get(q.zero_point) != scale:
            continue
        if prod(scale) == 1 and q.block is None:
            out[q.codes] = Affine(q.scale, q.zero_point)
            continue
        axis = q.axis if q.axis is None or q.axis >= 0 else q.axis + len(shape)
        if axis is None or not 0 <= axis < len(shape):
            continue
        if q.block is None:
            fits = scale == (shape[axis],)
        else:
            fits = scale == (*shape[:axis], -(-shape[axis] // q.block), *shape[axis + 1 :])
        if fits:
            out[q.codes] = Affine(q.scale, q.zero_point, axis, q.block)
    return out


def _findings(graph: Graph) -> list[Finding]:
    out = []
    if graph.duplicates:
        text = f"{len(graph.duplicates)} names stand twice in a graph, {quote(graph.duplicates[0])} first"
        out.append(Finding("warning", "duplicate-name", text))
    if graph.texts:
        text = f"{len(graph.texts)} tensors are strings or sparse; the metadata says what they are"
        out.append(Finding("note", "no-numbers", text))
    return out


def _facts(graph: Graph, files: Files) -> dict[str, Any]:
    """What the graph is, under fixed keys."""
    facts: dict[str, Any] = {k: v for k, v in graph.facts.items() if v not in ("", None)}
    facts["opsets"] = ", ".join(f"{domain} {version}" for domain, version in graph.opsets.items()) or "none"
    facts["nodes"] = sum(graph.operators.values())
    top = sorted(graph.operators.items(), key=lambda item: (-item[1], item[0]))
    facts["operators"] = ", ".join(f"{name} ×{n}" for name, n in top[:12]) + (" …" if len(top) > 12 else "")
    facts["inputs"] = _values(graph.inputs, {f.name for f in graph.tensors})
    facts["outputs"] = _values(graph.outputs, set())
    counts = {"subgraphs": graph.subgraphs, "constants": graph.constants, "functions": graph.functions}
    facts |= {k: n for k, n in (counts | {"sparse tensors": graph.sparse}).items() if n}
    if len(files.sources) > 1:
        facts["external data"] = f"{len(files.sources) - 1} files"
    foreign = sorted({d for d in graph.opsets if d not in _OWN_DOMAINS})
    if foreign and not graph.functions:
        facts["foreign domains"] = ", ".join(foreign)
    return facts


def _values(values: list[tuple[str, str]], weights: set[str]) -> str:
    """Inputs or outputs; before IR 4 the initializers stand among the inputs."""
    real = [f"{name}: {kind}" for name, kind in values if name not in weights]
    return "; ".join(real[:16]) + (" …" if len(real) > 16 else "")


ONNX = Format("onnx", (".onnx", ".ort", ".pb"), sniff, read)

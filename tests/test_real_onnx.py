"""Real ONNX files that packages carry: surrogate models of scikit-learn, and the light models of onnx itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError


def folder_of(package: str, *inside: str) -> Path:
    """A folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*inside)


SURROGATES = sorted(folder_of("surfaces_onnx_files").glob("*.onnx"))
LIGHT = sorted(folder_of("onnx", "backend", "test", "data", "light").glob("*.onnx"))
each = pytest.mark.parametrize("path", [*SURROGATES, *LIGHT], ids=lambda p: p.stem)


def test_they_are_there() -> None:
    assert len(SURROGATES) == 4
    assert len(LIGHT) >= 9


def walk(graph: Any) -> Any:
    """Every node and initializer of a graph and of the graphs in it."""
    yield from ((None, t) for t in graph.initializer)
    for node in graph.node:
        yield node, None
        for a in node.attribute:
            for inner in (a.g, *a.graphs):
                yield from walk(inner)


@each
def test_as_onnx_reads_it(path: Path) -> None:
    """Every initializer bit for bit, the graph's nodes, inputs, outputs, opsets."""
    official = onnx.load(path)
    parts = list(walk(official.graph))
    with ai.open(path) as model:
        assert model.format == "onnx"
        for tensor in (t for _, t in parts if t is not None):
            expected = numpy_helper.to_array(tensor)
            if expected.dtype == object:
                continue
            found = model[tensor.name]
            assert found.shape == expected.shape
            assert bytes(found.raw()) == expected.tobytes()
    loaded = ai.onnx_model(path)
    assert sum(loaded.graph.operators.values()) == sum(n is not None for n, _ in parts)
    weights = {t.name for t in official.graph.initializer}
    assert list(loaded.graph.inputs) == [i.name for i in official.graph.input if i.name not in weights]
    assert list(loaded.graph.outputs) == [o.name for o in official.graph.output]
    assert loaded.graph.opsets == {o.domain or "ai.onnx": o.version for o in official.opset_import}
    assert loaded.graph.ir_version == official.ir_version


@each
def test_what_a_wrong_input_is_told(path: Path) -> None:
    loaded = ai.onnx_model(path)
    name, kind = next(iter(loaded.graph.inputs.items()))
    with pytest.raises(ValueRefusedError, match="was expected, found"):
        loaded(**{**{n: np.zeros(1, "f4") for n in loaded.graph.inputs}, name: np.zeros((1,) * 9, "f4")})
    with pytest.raises(ValueRefusedError, match="is missing"):
        loaded()
    assert kind.split()[0] in ("FLOAT", "DOUBLE", "INT64")


@pytest.mark.parametrize("path", SURROGATES, ids=lambda p: p.stem)
def test_running(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results as onnx's evaluator by itself."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    official = onnx.load(path)
    (wanted,) = official.graph.input
    size = wanted.type.tensor_type.shape.dim[1].dim_value
    x = np.random.default_rng(0).uniform(1, 5, (3, size)).astype("f4")
    expected = ReferenceEvaluator(official).run(None, {wanted.name: x})
    found = ai.onnx_model(path)(x)
    found = [found] if len(expected) == 1 else list(found.values())
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))

"""`onnx_model`: parameters, metadata, graph, running; against onnx's evaluator and onnxruntime where it is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import apsi_inspect
from apsi_inspect.errors import MissingPackageError, UnknownFormatError, ValueRefusedError

from . import handmade


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """y = x @ w + b, and the sum of y; w is quantized."""
    rng = np.random.default_rng(0)
    tensors = {
        "w_q": rng.integers(-127, 127, (3, 4)).astype(np.int8), "w_s": np.float32([0.1, 0.2, 0.3, 0.4]),
        "layer.0.bias": rng.standard_normal(4).astype(np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["w_q", "w_s"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "layer.0.bias"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    outputs = [helper.make_tensor_value_info("y", 1, ["n", 4]), helper.make_tensor_value_info("total", 1, [])]
    weights = [numpy_helper.from_array(v, k) for k, v in tensors.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "tiny", [x], outputs, weights),
        opset_imports=[helper.make_opsetid("", 19)], ir_version=9, producer_name="tests",
    )  # fmt: skip
    helper.set_model_props(model, {"author": "someone"})
    onnx.save_model(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_what_it_holds(path: Path) -> None:
    m = apsi_inspect.onnx_model(path)
    w = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
    assert list(m.params) == ["w_q", "layer.0.bias"]
    assert np.array_equal(m.params.w_q, w * np.float32([0.1, 0.2, 0.3, 0.4]))
    assert not m.params["layer.0.bias"].flags.writeable
    assert m.metadata.author == "someone"
    g = m.graph
    assert (g.name, g.nodes, g.ir_version, g.producer) == ("tiny", 4, 9, "tests")
    assert (g.inputs, g.outputs) == ({"x": "FLOAT n × 3"}, {"y": "FLOAT n × 4", "total": "FLOAT scalar"})
    assert g.operators == {"DequantizeLinear": 1, "MatMul": 1, "Add": 1, "ReduceSum": 1}
    assert g.opsets == {"ai.onnx": 19}
    assert repr(m).startswith("<OnnxModel 'm.onnx'")
    assert "tiny" in str(m)


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx"])
def test_running(runtime: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra: onnx)")
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    x = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    y, total = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})
    m = apsi_inspect.onnx_model(path)
    for outputs in (m(x), m(x=x), m(np.asfortranarray(x))):
        assert list(outputs) == ["y", "total"]
        assert np.allclose(outputs.y, y, rtol=1e-5)
        assert np.allclose(outputs.total, total, rtol=1e-5)


def test_one_output_comes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    a = helper.make_tensor_value_info("a", TensorProto.FLOAT, [2])
    b = helper.make_tensor_value_info("b", TensorProto.FLOAT, [2])
    graph = helper.make_graph([helper.make_node("Neg", ["a"], ["b"])], "g", [a], [b])
    onnx.save_model(helper.make_model(graph, ir_version=8), tmp_path / "m.onnx")
    assert apsi_inspect.onnx_model(tmp_path / "m.onnx")(np.float32([1, -2])).tolist() == [-1, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "word"),
    [((), {}, "'x' .*is missing"), ((1, 2), {}, "2 inputs"), ((), {"z": 1}, "no input"), ((1,), {"x": 1}, "twice")],
)
def test_wrong_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], word: str, path: Path) -> None:
    with pytest.raises(ValueRefusedError, match=word):
        apsi_inspect.onnx_model(path)(*args, **kwargs)


def test_without_a_runtime(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    m = apsi_inspect.onnx_model(path)
    with pytest.raises(MissingPackageError, match=r"apsi-inspect\[onnx\]"):
        m(np.zeros((1, 3), np.float32))


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(handmade.safetensors([("w", "F32", [1], bytes(4))]))
    with pytest.raises(UnknownFormatError, match="is safetensors"):
        apsi_inspect.onnx_model(tmp_path / "m.safetensors")

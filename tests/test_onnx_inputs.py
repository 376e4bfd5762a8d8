"""Inputs of an ONNX model: what is wrong with them is said by us, before a runtime sees them, and in its place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError


@pytest.fixture(params=["onnxruntime", "onnx"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra: onnx)")
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    return str(request.param)


def model(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> ai.OnnxModel:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opset = [helper.make_opsetid("", 19)]
    onnx.save_model(helper.make_model(graph, opset_imports=opset, ir_version=9), folder / "m.onnx")
    return ai.onnx_model(folder / "m.onnx")


@pytest.fixture
def product(tmp_path: Path) -> ai.OnnxModel:
    """y = x @ w."""
    info = helper.make_tensor_value_info
    return model(
        tmp_path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [info("x", TensorProto.FLOAT, ["n", 3]), info("w", TensorProto.FLOAT, ["k", 2])],
        [info("y", TensorProto.FLOAT, ["n", 2])],
    )


X, W = np.arange(6, dtype="f4").reshape(2, 3), np.ones((3, 2), "f4")
WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((X,), {}, r"input 'w' \(FLOAT k × 2\) is missing"),
    ((X, W, W), {}, r"3 inputs are given, the model has 2: 'x' \(FLOAT n × 3\), 'w' \(FLOAT k × 2\)"),
    ((X,), {"weight": W}, r"'weight' is no input of the model, .*inputs: 'x' .*, 'w' "),
    ((X,), {"x": X}, "given twice"),
    ((X.astype("f8"), W), {}, r"input 'x': FLOAT n × 3 was expected, found float64 2 × 3; .*astype\('float32'\)"),
    ((X, W.astype("i4")), {}, r"input 'w': FLOAT k × 2 was expected, found int32 3 × 2"),
    ((X[0], W), {}, r"input 'x': FLOAT n × 3 was expected, found float32 3$"),
    ((np.float32(1), W), {}, r"input 'x': .*found float32 scalar"),
    ((X.T, W), {}, r"input 'x': FLOAT n × 3 was expected, found float32 3 × 2$"),
    (("text", W), {}, r"input 'x': FLOAT n × 3 was expected, found str is no array"),
    (([[1, 2, 3], [4]], W), {}, r"input 'x': .*list is no array"),
    ((None, W), {}, r"input 'x': "),
    ((X, np.ones((4, 2), "f4")), {}, r"cannot run the model on these inputs \('x' \(2, 3\), 'w' \(4, 2\)\)"),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), WRONG, ids=[m[:40] for _, _, m in WRONG])
def test_refused(args: Any, kwargs: Any, message: str, product: ai.OnnxModel, runtime: str) -> None:
    with pytest.raises(ValueRefusedError, match=message) as caught:
        product(*args, **kwargs)
    assert str(caught.value).isprintable()


def test_taken(product: ai.OnnxModel, runtime: str) -> None:
    """Any memory layout, a list of the declared type, any size where the graph has a name."""
    for x, w in ((X, W), (np.asfortranarray(X), W[::1]), (X.tolist(), W.tolist()), (X[:0], W), (X.astype(">f4"), W)):
        assert np.array_equal(product(x, w), np.asarray(x, "f4") @ np.asarray(w, "f4"))


def test_bfloat16_and_text(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    m = model(
        tmp_path,
        [helper.make_node("Identity", ["b"], ["c"]), helper.make_node("Identity", ["s"], ["t"])],
        [info("b", TensorProto.BFLOAT16, [2]), info("s", TensorProto.STRING, [1])],
        [info("c", TensorProto.BFLOAT16, [2]), info("t", TensorProto.STRING, [1])],
    )
    with pytest.raises(ValueRefusedError, match=r"input 'b': BFLOAT16 2 was expected, found float32 2"):
        m(np.zeros(2, "f4"), ["x"])
    with pytest.raises(ValueRefusedError, match=r"input 's': STRING 1 was expected, found float64 1"):
        m(np.zeros(2, ml_dtypes.bfloat16), np.zeros(1))

"""Codes with scale and zero point: ONNX's QDQ against onnx's own evaluator (torch's are in `test_torch.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import apsi_inspect
from apsi_inspect.ops.convert import convert
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.read import stream

KINDS = {
    "int8": np.int8, "uint8": np.uint8, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4, "int16": np.int16,
    "fp8": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
SCALES = {
    # name: shape of the scale, axis, block_size
    "tensor": ((), 1, 0),
    "rows": ((6,), 0, 0),
    "columns": ((10,), 1, 0),
    "negative axis": ((10,), -1, 0),
    "blocks": ((6, 3), 1, 4),
    "blocks of rows": ((2, 10), 0, 3),
}


def qdq(path: Path, kind: str, how: str, zero: bool = True) -> Any:
    """A model that dequantizes one weight; returns what onnx makes of it."""
    rng = np.random.default_rng(len(kind) + len(how))
    shape, axis, block = SCALES[how]
    dtype = KINDS[kind]
    low, high = (0, 15) if kind == "uint4" else (-8, 7) if kind == "int4" else (0, 100)
    codes = rng.integers(low, high, (6, 10), endpoint=True).astype(dtype)
    scale = rng.uniform(0.01, 1, shape).astype(np.float32)
    tensors = [numpy_helper.from_array(codes, "w_quantized"), numpy_helper.from_array(scale, "w_scale")]
    inputs = ["w_quantized", "w_scale"]
    if zero:
        values = np.zeros(shape) if kind == "fp8" else rng.integers(max(low, 0), min(high, 7), shape)
        tensors.append(numpy_helper.from_array(np.asarray(values).astype(dtype), "w_zero_point"))
        inputs.append("w_zero_point")
    more = {"axis": axis} | ({"block_size": block} if block else {})
    node = helper.make_node("DequantizeLinear", inputs, ["y"], **more)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 10])
    graph = helper.make_graph([node], "g", [], [out], initializer=tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save_model(model, path)
    return ReferenceEvaluator(model).run(None, {})[0]


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, how: str, zero: bool, tmp_path: Path) -> None:
    expected = qdq(tmp_path / "m.onnx", kind, how, zero)
    with open_model(tmp_path / "m.onnx") as model:
        t = model["w_quantized"]
        assert t.dtype == np.float32
        assert t.numpy().tobytes() == expected.tobytes()
        assert np.array_equal(np.concatenate(list(stream(t, 7))), expected.reshape(-1))
        assert np.array_equal(t[2:4, 1:], expected[2:4, 1:])
        assert np.array_equal(t.numpy(out=np.empty_like(expected)), expected)
        assert t.affine is not None
        assert t.affine.axis == (None if how == "tensor" else SCALES[how][1] % 2)
        assert t.affine.scale.name == "w_scale"
        assert model.table.parameters == 60  # scales and zero points are not parameters of their own
        assert "w_scale" in str(t)


def test_a_source_for_the_rest(tmp_path: Path) -> None:
    expected = qdq(tmp_path / "m.onnx", "int8", "rows")
    table = apsi_inspect.stats(tmp_path / "m.onnx", "w_quantized")
    assert table.frame["max"][0] == expected.max()
    for ending in ("gguf", "safetensors"):
        report = convert(tmp_path / "m.onnx", tmp_path / f"m.{ending}")
        assert [t.name for t in report.tensors] == ["w_quantized"]
        with open_model(tmp_path / f"m.{ending}") as model:
            assert list(model) == ["w_quantized"]
            assert np.array_equal(model["w_quantized"].numpy(), expected)


def test_operators_of_the_other_style(tmp_path: Path) -> None:
    codes = np.arange(24, dtype=np.int8).reshape(2, 3, 2, 2)
    tensors = {
        "xs": np.float32(0.5), "xz": np.uint8(1), "w": codes, "ws": np.float32([0.5, 2]), "wz": np.int8([0, 0]),
        "ys": np.float32(1), "yz": np.uint8(0),
    }  # fmt: skip
    node = helper.make_node("QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 3, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.UINT8, None)
    weights = [numpy_helper.from_array(np.asarray(v), k) for k, v in tensors.items()]
    onnx.save_model(helper.make_model(helper.make_graph([node], "g", [x], [y], weights)), tmp_path / "m.onnx")
    with open_model(tmp_path / "m.onnx") as model:
        assert np.array_equal(model["w"].numpy(), codes * np.float32([0.5, 2]).reshape(2, 1, 1, 1))
        assert set(model.affine) == {"w"}


def test_scales_that_do_not_fit_are_left_alone(tmp_path: Path) -> None:
    tensors = {"w": np.zeros((4, 6), np.int8), "s": np.ones(5, np.float32)}
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["y"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(v, k) for k, v in tensors.items()]
    onnx.save_model(helper.make_model(helper.make_graph([node], "g", [], [y], weights)), tmp_path / "m.onnx")
    with open_model(tmp_path / "m.onnx") as model:
        assert model["w"].affine is None
        assert model["w"].numpy().dtype == np.int8

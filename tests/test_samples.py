"""The samples open with independent readers and are what they say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

import apsi_inspect as ai
from apsi_inspect import samples


def test_bundled_files_are_the_published_ones() -> None:
    """First 16 hex digits of the SHA-256 of the files in fracast 0.1.0 on PyPI."""
    digests = {"fracast.safetensors": "678f123f3d1f91", "fracast-int8.safetensors": "77beb5e5f17cf775"}
    for name, digest in digests.items():
        found = hashlib.sha256(Path(samples.path(name)).read_bytes()).hexdigest()
        assert digest in found[:16]


def test_real_samples_equal_safetensors() -> None:
    for name in samples.REAL:
        m = ai.open(samples.path(name))
        with safe_open(samples.path(name), "numpy") as f:
            assert set(f.keys()) == set(m)
            assert f.metadata() == dict(m.metadata)
            for key in f.keys():
                assert np.array_equal(np.asarray(m[key]), f.get_tensor(key))


def test_generated_samples_are_the_same_every_time(tmp_path: Path) -> None:
    first, second = samples.write(tmp_path / "a"), samples.write(tmp_path / "b")
    assert [Path(p).read_bytes() for p in first] == [Path(p).read_bytes() for p in second]
    assert [Path(p).name for p in first] == samples.names()


def test_tiny_llama_equals_gguf(tmp_path: Path) -> None:
    (path,) = samples.write(tmp_path, ["tiny-llama.gguf"])
    reader, m = gguf.GGUFReader(path), ai.open(path)
    assert [t.name for t in reader.tensors] == list(m)
    for t in reader.tensors:
        values = np.asarray(m[t.name])
        assert m[t.name].encoding == t.tensor_type.name
        assert np.array_equal(gguf.quants.dequantize(t.data, t.tensor_type).reshape(values.shape), values)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            got = m.metadata[key]
            assert field.contents() == (got.tolist() if hasattr(got, "tolist") else got)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ai.ValueRefusedError, match="no sample 'nope'"):
        samples.write(tmp_path, ["nope"])
    with pytest.raises(ai.ValueRefusedError, match="no bundled sample"):
        samples.path("tiny-llama.gguf")


def test_the_checkpoint_equals_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra torch is not installed")
    (path,) = samples.write(tmp_path, ["tiny-checkpoint.pt"])
    theirs = torch.load(path, weights_only=False)
    assert (theirs["epoch"], theirs["args"].batch, theirs["optimizer"]["lr"]) == (3, 32, 0.001)
    ours = ai.torch_load(path)
    for name, value in theirs["model"].items():
        assert np.array_equal(ours["model"][name], value.numpy())
    assert np.array_equal(theirs["model"]["decoder.weight"], theirs["model"]["encoder.weight"].T)


def test_the_network_is_one_that_onnx_runs(tmp_path: Path) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    (path,) = samples.write(tmp_path, ["tiny-network.onnx"])
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    first, scale, zero, second = (onnx.numpy_helper.to_array(t) for t in proto.graph.initializer)
    x = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    weight = (first.astype(np.int32) - zero.astype(np.int32)).astype(np.float32) * scale
    wanted = np.maximum(x @ weight, 0) @ second
    (found,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    m = ai.open(path)
    assert np.array_equal(np.asarray(m["first.weight_q"]), weight)
    assert np.array_equal(np.asarray(m["second.weight"]), second)


def test_the_oscillator_is_a_safetensors_file_with_units(tmp_path: Path) -> None:
    (path,) = samples.write(tmp_path, ["oscillator.apsim"])
    with safe_open(path, "numpy") as f:
        assert f.get_tensor("oscillator.stiffness") == 40.0
        assert np.array_equal(f.get_tensor("series.time"), np.arange(200) / 100)
    m = ai.open(path)
    assert {n: str(u) for n, u in m.units.items()} == {
        "oscillator.mass": "kg",
        "oscillator.stiffness": "N/m",
        "oscillator.damping": "kg/s",
        "oscillator.temperature": "degC",
        "series.time": "s",
        "series.position": "mm",
    }
    assert ai.verify(path).status == "intact"

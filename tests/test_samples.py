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

"""`model_info` and its kin: the facts, as JSON, equal to independent readers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from safetensors import safe_open

import apsi_inspect as ai


def test_safetensors_facts() -> None:
    path = ai.samples.path("fracast-int8.safetensors")
    info = ai.safetensors_info(path)
    with safe_open(path, "numpy") as f:
        assert {t.name: (t.encoding, t.shape) for t in info.tensors} == {
            k: (f.get_slice(k).get_dtype(), f.get_slice(k).get_shape()) for k in f.keys()
        }
        assert info.metadata == f.metadata()
    assert info.file_size == Path(path).stat().st_size
    assert info.parameters == 85_001


def test_gguf_facts(tmp_path: Path) -> None:
    (path,) = ai.samples.write(tmp_path, ["tiny-llama.gguf"])
    info, reader = ai.gguf_info(path), gguf.GGUFReader(path)
    assert [t.name for t in info.tensors] == sorted(t.name for t in reader.tensors)
    assert info.nbytes == sum(int(t.n_bytes) for t in reader.tensors)
    assert info.parameters == sum(int(t.n_elements) for t in reader.tensors)
    assert info.architecture == "llama"
    tokens = info.metadata["tokenizer.ggml.tokens"]
    assert (tokens.type, tokens.count, tokens.first[:2], tokens["last"][-1]) == (
        "STRING",
        320,
        ["<unk>", "<s>"],
        "▁tok60",
    )


def test_every_fact_is_json(data: Path, tmp_path: Path) -> None:
    paths = [*(data / "golden").glob("*.apsim"), data / "golden" / "sharded" / "model.apsim.index.json"]
    for path in [*paths, *ai.samples.write(tmp_path)]:
        info = ai.model_info(path)
        assert json.loads(json.dumps(info, allow_nan=False)) == info
        assert info.schema_version == 1


def test_units_and_scales_are_in_the_rows(data: Path) -> None:
    rows = {t.name: t for t in ai.model_info(data / "golden" / "units.apsim").tensors}
    assert (rows["height"].unit, rows["temp"].unit, rows["plain"].unit) == ("km", "degC", "")
    rows = {t.name: t for t in ai.model_info(data / "golden" / "qtensors.apsim").tensors}
    assert (rows["int4.blk"].encoding, rows["int4.blk"].shape, rows["int4.blk"].axis) == ("int4", [3, 70], 1)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (path,) = ai.samples.write(tmp_path, ["tiny-llama.gguf"])
    with pytest.raises(ai.ModelFileError, match="is gguf, safetensors was expected"):
        ai.safetensors_info(path)
    with pytest.raises(ai.ModelFileError, match="is safetensors, gguf was expected"):
        ai.gguf_info(ai.samples.path("fracast.safetensors"))


def test_an_opened_model_will_do(tmp_path: Path) -> None:
    (path,) = ai.samples.write(tmp_path, ["tiny-llama.gguf"])
    with ai.open(path) as model:
        assert ai.model_info(model) == ai.gguf_info(model) == ai.model_info(path)
        with pytest.raises(ai.ModelFileError, match="is gguf, safetensors was expected"):
            ai.safetensors_info(model)
    # closed: what the header said still stands, arrays are counted
    closed = ai.model_info(model)
    assert closed["tensors"] == ai.model_info(path)["tensors"]
    assert closed["metadata"]["tokenizer.ggml.tokens"] == {"type": "STRING", "count": 320, "first": [], "last": []}

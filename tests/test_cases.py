"""The bank of inputs that broke other tools: each opens, warns or is refused as `data/cases/cases.json` says."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apsi_inspect.errors import ApsiError
from apsi_inspect.model import ModelFile
from apsi_inspect.ops.open import open as open_model

from . import handmade

FOLDER = Path(__file__).parent / "data" / "cases"
CASES = {c["id"]: c for c in json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))["cases"]}
STORED = [c for c in CASES.values() if not c.get("generated") and c["action"] != "convert"]
HOSTILE = [c for c in STORED if c["limits"]["max_rss_mb"] <= 250]
# The bank calls ONNX's data types by ONNX's names.
ONNX_WORDS = {"FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "INT4": "I4", "UINT4": "U4", "INT64": "I64"}
ids = pytest.mark.parametrize("case", STORED, ids=lambda c: c["id"])


def outcome(path: Path) -> tuple[str, str, ModelFile | None]:
    """What happened: opens, opens-with-warning or rejects; the text that says so; the model."""
    try:
        model = open_model(path)
    except ApsiError as exc:
        return "rejects", str(exc), None
    warnings = [f.message for f in model.findings if f.severity != "note"]
    return ("opens-with-warning" if warnings else "opens"), "\n".join(warnings), model


def missing(text: str, wanted: list[list[str]]) -> list[list[str]]:
    """The groups of words of which none is in the text."""
    return [words for words in wanted if not any(w.lower() in text.lower() for w in words)]


@ids
def test_outcome(case: dict[str, Any]) -> None:
    start = time.process_time()
    got, text, model = outcome(FOLDER / case["entry"])
    assert time.process_time() - start < min(3.0, case["limits"]["max_seconds"])
    assert got in case["accept"], text
    expect = case["expect"]
    if got == "rejects":
        assert any(Path(name).name in text for name in case["files"])
        assert not missing(text, expect.get("error_mentions", []))
    if got == "opens-with-warning":
        assert not missing(text, expect.get("warn_mentions", expect.get("error_mentions", [])))
    if model is not None:
        with model:
            check_tensors(model, expect)
            check_metadata(model, expect)


def check_tensors(model: ModelFile, expect: dict[str, Any]) -> None:
    for name, wanted in (expect.get("tensors", {}) | expect.get("tensors_by_path", {})).items():
        tensor = model[name]
        assert tensor.encoding == ONNX_WORDS.get(wanted["dtype"], wanted["dtype"])
        assert list(tensor.shape) in (wanted["shape"], wanted.get("shape_or"))
        raw = bytes(tensor.raw())
        assert len(raw) == tensor.nbytes == wanted.get("nbytes", tensor.nbytes)
        if wanted.get("sha256_raw"):
            assert hashlib.sha256(raw).hexdigest() == wanted["sha256_raw"]
        values = np.asarray(tensor)
        assert values.shape == tensor.shape
        if wanted.get("sha256_f32"):
            assert digest_f32(values) == wanted["sha256_f32"]
        if "values" in wanted:
            assert values.reshape(-1).tolist() == np.ravel(wanted["values"]).tolist()
    if expect.get("tensors") == {} and "metadata" in expect:
        assert len(model) == 0


def digest_f32(values: np.ndarray[Any, Any]) -> str:
    """SHA-256 of little-endian float32 in C order, every NaN made 0x7fc00000."""
    with np.errstate(all="ignore"):
        x = np.array(values, dtype="<f4", order="C")
    x.view("<u4")[np.isnan(x)] = 0x7FC00000
    return hashlib.sha256(x.tobytes()).hexdigest()


def check_metadata(model: ModelFile, expect: dict[str, Any]) -> None:
    for key, value in expect.get("metadata", {}).items():
        assert model.metadata[key] == value
    assert model.facts.get("alignment") == expect.get("alignment", model.facts.get("alignment"))
    assert model.facts.get("byte order") == expect.get("byte_order", model.facts.get("byte order"))
    assert model.facts.get("version") == expect.get("version", model.facts.get("version"))


@pytest.mark.parametrize("case", HOSTILE, ids=lambda c: c["id"])
def test_memory_of_hostile_cases(case: dict[str, Any], measured: Callable[..., tuple[str, float]]) -> None:
    code = "try:\n    open_model(sys.argv[1])\nexcept ApsiError as exc:\n    print(type(exc).__name__)"
    printed, grew = measured(code, FOLDER / case["entry"], seconds=30)
    assert printed.endswith("Error") or case["accept"] != ["rejects"]
    assert grew < 50


@ids
def test_one_line_errors(case: dict[str, Any]) -> None:
    """A message is one line of modest length, free of control characters and addresses of objects."""
    got, text, _ = outcome(FOLDER / case["entry"])
    if got == "rejects":
        assert len(text) < 700
        assert text.isprintable()
        assert "object at 0x" not in text


def test_300_shards(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    weight_map = {}
    for i in range(1, 301):
        shard = f"model-{i:05d}-of-00300.safetensors"
        (tmp_path / shard).write_bytes(handmade.safetensors([(f"t{i}", "F32", [2], np.float32([i, -i]).tobytes())]))
        weight_map[f"t{i}"] = shard
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 2400}, "weight_map": weight_map}))
    got, text, model = outcome(index)
    assert got == "opens", text
    assert model is not None
    assert len(model) == CASES["sh-300"]["expect"]["n_tensors"]
    assert [np.asarray(model[f"t{i}"]).tolist() for i in (1, 150, 300)] == [[1, -1], [150, -150], [300, -300]]
    code = "m = open_model(sys.argv[1]); print(sum(int.from_bytes(t.raw()[:1], 'little') for t in m.values()))"
    printed, _ = measured(code, index, limit_files=64)
    assert int(printed) == sum(np.float32(i).tobytes()[0] for i in range(1, 301))


def test_link_out_of_the_folder(tmp_path: Path) -> None:
    """Links on disk are the user's own choice and are followed (model caches are made of them)."""
    case = FOLDER / "shards" / "sh-link-out"
    (tmp_path / "model").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / "model" / name).write_bytes((case / "model" / name).read_bytes())
    (tmp_path / "model" / "model-00002-of-00002.safetensors").symlink_to(case / "secret" / "model.safetensors")
    got, text, model = outcome(tmp_path / "model" / "model.safetensors.index.json")
    assert got == "opens", text
    assert model is not None
    assert model["head.weight"].shape == (2, 4)


def test_big_vocabulary(tmp_path: Path) -> None:
    g, n = handmade.Gguf(), 150_000
    keys = [
        ("general.architecture", "STRING", "llama"),
        ("tokenizer.ggml.tokens", "ARRAY", ("STRING", [f"tok{i}" for i in range(n)])),
        ("tokenizer.ggml.scores", "ARRAY", ("FLOAT32", [float(-i) for i in range(n)])),
        ("tokenizer.ggml.token_type", "ARRAY", ("INT32", [1] * n)),
        ("tokenizer.ggml.merges", "ARRAY", ("STRING", [f"a{i} b" for i in range(n)])),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(g.file(keys, [("blk.0.w", [2, 32], 0, bytes(256))]))
    start = time.process_time()
    model = open_model(path)
    assert time.process_time() - start < 2
    for key, length in CASES["gg-big-vocab"]["expect"]["metadata_len"].items():
        assert len(model.metadata[key]) == length
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert (tokens[0], tokens[-1], tokens[77_777]) == ("tok0", "tok149999", "tok77777")
    assert model.metadata["tokenizer.ggml.merges"][-2:] == ["a149998 b", "a149999 b"]
    assert model.metadata["tokenizer.ggml.scores"][-1] == -149_999.0


def test_cut_everywhere(tmp_path: Path) -> None:
    whole = (FOLDER / "gguf/gg-v3/model.gguf").read_bytes()
    for n in range(0, len(whole), 7):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:n])
        assert outcome(path)[0] == "rejects", n

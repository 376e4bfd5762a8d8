"""Sharded checkpoints by their index: the reference's layout and that of .apsim, whole, mixed up and hostile."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from safetensors.numpy import save_file

from apsi_inspect.errors import ModelFileError, UnknownFormatError, UnsupportedFileError
from apsi_inspect.ops.open import open as open_model

INDEX = "model.safetensors.index.json"
GOLDEN = Path(__file__).parent / "data" / "golden" / "sharded"


def write(folder: Path, shards: list[dict[str, Any]], **change: Any) -> Path:
    """Shards of arrays by the reference writer, and an index made by hand."""
    weight_map, total = {}, 0
    for i, arrays in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(arrays, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
        total += sum(x.nbytes for x in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map} | change
    path = folder / INDEX
    path.write_text(json.dumps(index, indent=2))
    return path


def arrays(*names: str) -> dict[str, Any]:
    return {name: np.full((2, 2), i, np.float32) for i, name in enumerate(names)}


def test_whole(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("b", "a"), arrays("c"), arrays("d", "e")])
    model = open_model(path)
    assert list(model) == ["a", "b", "c", "d", "e"]
    assert model.format == "safetensors"
    assert not model.findings
    assert dict(model.metadata) == {"format": "pt"}
    assert model.files == [str(tmp_path / f"model-{i:05d}-of-00003.safetensors") for i in (1, 2, 3)]
    assert [t.info.file for t in model.values()] == [0, 0, 1, 2, 2]
    np.testing.assert_array_equal(np.asarray(model["e"]), np.full((2, 2), 1, np.float32))
    assert model.file_size == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert list(open_model(tmp_path)) == list(model)


def test_one_shard_alone_is_said(tmp_path: Path) -> None:
    write(tmp_path, [arrays("a"), arrays("b")])
    model = open_model(tmp_path / "model-00002-of-00002.safetensors")
    assert list(model) == ["b"]
    assert [f.code for f in model.findings] == ["one-shard"]


@pytest.mark.parametrize(
    ("metadata", "warns"),
    [({}, False), (None, False), ({"total_size": 64.0}, False), ({"total_size": 64}, False), ({"total_size": 63}, True),
     ({"total_size": "64"}, False), ({"total_size": True}, False), ({"total_size": 1e300}, True), ([], False),
     ({"total_size": 64, "total_parameters": 16, "lm_head": "embed"}, False)],
)  # fmt: skip
def test_total_size(tmp_path: Path, metadata: Any, warns: bool) -> None:
    model = open_model(write(tmp_path, [arrays("a", "b"), arrays("c", "d")], metadata=metadata))
    assert [f.code for f in model.findings] == ["total-size"] * warns


def test_tensor_that_the_index_lacks(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a"), arrays("b", "extra")])
    index = json.loads(path.read_text())
    del index["weight_map"]["extra"]
    path.write_text(json.dumps(index))
    model = open_model(path)
    (finding,) = (f for f in model.findings if f.code == "not-in-index")
    assert "'extra'" in finding.message


def edit(path: Path, **weights: Any) -> None:
    index = json.loads(path.read_text())
    index["weight_map"] |= weights
    path.write_text(json.dumps(index))


def test_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a"), arrays("b")])
    edit(path, ghost="model-00001-of-00002.safetensors")
    with pytest.raises(ModelFileError, match=r"'ghost'.*model-00001.*no shard has it"):
        open_model(path)


def test_tensor_in_another_shard(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a", "x"), arrays("b")])
    edit(path, a="model-00002-of-00002.safetensors")
    with pytest.raises(ModelFileError, match=r"'a'.*model-00002.*it is in 'model-00001"):
        open_model(path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a", "both"), arrays("b", "both")])
    with pytest.raises(ModelFileError, match=r"'both'.*twice"):
        open_model(path)


def test_missing_shard_says_which(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a"), arrays("b")])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002.safetensors.*missing"):
        open_model(path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "C:x", "x\0.safetensors", "x\n", "\u202e",
     "x" * 256,
     1, None, [], {"a": 1}, True],
    ids=lambda v: repr(v)[:20],
)  # fmt: skip
def test_unsafe_shard_names(tmp_path: Path, shard: Any) -> None:
    path = write(tmp_path, [arrays("a")])
    edit(path, a=shard)
    with pytest.raises(ModelFileError, match=r"'a'.*plain name") as info:
        open_model(path)
    assert str(info.value).isprintable()


@pytest.mark.parametrize("kind", ["folder", "pipe", "gguf", "index", "empty"])
def test_shard_that_is_no_shard(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, [arrays("a")])
    edit(path, a="x")
    shard = tmp_path / "x"
    if kind == "folder":
        shard.mkdir()
    elif kind == "pipe":
        os.mkfifo(shard)
    else:
        shard.write_bytes({"gguf": b"GGUF" + bytes(100), "index": path.read_bytes(), "empty": b""}[kind])
    with pytest.raises(ModelFileError):
        open_model(path)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "null", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": "x"}',
     '{"weight_map": {"a": "b", "a": "c"}}',
     '{"weight_map": {}, "weight_map": {}}', '{"weight_map": {"a": "b"}', '{"weight_map": {"a": NaN}}',
     '{"weight_map": {"\\ud800": "b"}}', "[" * 100_000, '{"a":' * 100_000,
     '{"weight_map": {}, "metadata": {"x": 1e999}}'],
    ids=lambda t: t[:30],
)  # fmt: skip
def test_broken_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / INDEX
    path.write_text(text)
    with pytest.raises(ModelFileError) as info:
        open_model(path)
    assert INDEX in str(info.value)


def test_other_json_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnknownFormatError, match="no weight_map"):
        open_model(tmp_path / "config.json")


def test_byte_order_mark_and_encoding(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a")])
    text = path.read_text()
    latin = text.replace('"a"', '"ÿ"').encode("latin-1")
    for raw, match in ((b"\xef\xbb\xbf" + text.encode(), "byte order mark"), (latin, "UTF-8")):
        path.write_bytes(raw)
        with pytest.raises(ModelFileError, match=match):
            open_model(path)


def test_shards_replaced_after_opening(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays("a"), arrays("b")])
    model = open_model(path)
    save_file(arrays("b"), tmp_path / "model-00002-of-00002.safetensors", {"changed": "yes"})
    with pytest.raises(ModelFileError, match="changed on disk"):
        np.asarray(model["b"])
    np.asarray(model["a"])


def test_no_descriptor_is_held(tmp_path: Path) -> None:
    path = write(tmp_path, [arrays(f"t{i}") for i in range(40)])
    before = len(os.listdir("/proc/self/fd"))
    models = [open_model(path) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    for model in models:
        for tensor in model.values():
            tensor.raw()
        model.close()
    del tensor, model, models
    assert len(os.listdir("/proc/self/fd")) == before


def test_huge_hostile_index(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    path = tmp_path / INDEX
    for unit in ("[],", "0,", '"ab",', "{},"):
        path.write_text('{"weight_map": {}, "x": [' + unit * 8_000_000 + "0]}")
        code = """
import time
t = time.process_time()
try:
    open_model(sys.argv[1]); print("opens")
except ApsiError as exc:
    print(str(exc)[-300:])
print(time.process_time() - t)
"""
        printed, grew = measured(code, path)
        assert "opens" not in printed
        assert float(printed.splitlines()[-1]) < 8
        assert grew < 200


# --- .apsim


def golden(tmp_path: Path) -> Path:
    for p in GOLDEN.iterdir():
        (tmp_path / p.name).write_bytes(p.read_bytes())
    return tmp_path / "model.apsim.index.json"


def change_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_golden_checkpoint(tmp_path: Path) -> None:
    model = open_model(golden(tmp_path))
    assert not model.findings
    assert model.format == "apsim"
    assert {n: (t.encoding, t.shape, t.info.file) for n, t in model.items()} == {
        "layers.0.W": ("F32", (4, 3), 0), "layers.0.b": ("F32", (4,), 0),
        "layers.1.W": ("F32", (4, 3), 1), "layers.2.W": ("int4", (4, 3), 2),
    }  # fmt: skip
    assert str(model["layers.0.b"].unit) == "m/s"
    assert model.facts["shards"] == 3
    assert model.facts["signature"].startswith("present, not checked")
    tree = model.tree()
    assert [sorted(layer) for layer in tree["layers"]] == [["W", "b"], ["W"], ["W"]]  # type: ignore[call-overload]
    assert list(open_model(tmp_path)) == list(model)


def test_golden_shard_alone(tmp_path: Path) -> None:
    golden(tmp_path)
    model = open_model(tmp_path / "model-00002-of-00003.apsim")
    assert [f.code for f in model.findings] == ["one-shard"]
    assert "2 of 3" in model.findings[0].message


def test_index_digest_of_the_golden_file_is_what_the_specification_says(tmp_path: Path) -> None:
    metadata = json.loads(golden(tmp_path).read_text())["metadata"]
    covered = {k: v for k, v in metadata.items() if k not in ("index_sha256", "signature")}
    assert hashlib.sha256(rfc8785.dumps(covered)).hexdigest() == metadata["index_sha256"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda i: i["metadata"].update(version="2"), "version"),
        (lambda i: i["metadata"].update(version=1), "version"),
        (lambda i: i["metadata"].pop("shards"), "shards"),
        (lambda i: i["metadata"].update(shards=[]), "shards"),
        (lambda i: i["metadata"]["shards"].pop(), "not in metadata.shards"),
        (lambda i: i["metadata"]["shards"].reverse(), "shard '3/3'.*1/3"),
        (lambda i: i["metadata"]["shards"].append(i["metadata"]["shards"][0]), "twice"),
        (lambda i: i["metadata"]["shards"][0].update(file="../x"), "plain file name"),
        (lambda i: i["metadata"]["shards"][0].update(sha256="0" * 64), "sha256 differs"),
        (lambda i: i["metadata"]["shards"][0].update(meta_sha256="0" * 64), "meta_sha256 differs"),
        (lambda i: i["metadata"]["shards"][0].update(sha256="0" * 63), "no shard"),
        (lambda i: i["metadata"]["shards"][0].update(sha256="A" * 64), "no shard"),
        (lambda i: i["metadata"].pop("index_sha256"), "index_sha256"),
        (lambda i: i["metadata"].update(total_size=0), "total_size"),
        (lambda i: i["metadata"].update(total_size=float(i["metadata"]["total_size"])), "total_size"),
        (lambda i: i["weight_map"].pop("layers.0.W"), "not in the weight_map"),
        (lambda i: i["weight_map"].pop("layers.2.W__qscale"), "not in the weight_map"),
        (lambda i: i["weight_map"].update(ghost="model-00001-of-00003.apsim"), "'ghost'"),
        (lambda i: i["metadata"].update(tree="[]"), "tree"),
        (lambda i: i["metadata"].update(tree={}), "tree"),
        (lambda i: i["metadata"].update(metadata='{"$x": 1}'), "reserved"),
        (lambda i: i["metadata"]["signature"].update(more=1), "signature"),
        (lambda i: i["metadata"]["signature"]["kdf"].update(n=2), "signature"),
        (lambda i: i["metadata"].update(signature="x"), "signature"),
    ],
)
def test_apsim_index_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str) -> None:
    path = golden(tmp_path)
    change_index(path, change)
    with pytest.raises(ModelFileError, match=match) as info:
        open_model(path)
    assert isinstance(info.value, UnsupportedFileError) == (match == "version")


def test_apsim_shard_that_is_plain_safetensors(tmp_path: Path) -> None:
    path = golden(tmp_path)
    save_file(arrays("layers.1.W"), tmp_path / "model-00002-of-00003.apsim")
    with pytest.raises(ModelFileError, match=r"not \.apsim"):
        open_model(path)

"""Metadata, units and tree from every container through every other and back (the table in docs/convert.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

import apsi_inspect as ai
from apsi_inspect import record
from apsi_inspect.errors import ModelFileError
from apsi_inspect.ops.targets import CONTAINERS

from . import handmade
from .test_gguf_write import EVERY_TYPE, kinds

W = np.arange(64, dtype=np.float32).reshape(2, 32)
OF_THE_FILE = {"general.alignment", "general.file_type", "general.quantization_version"}
RECORD = record(
    name="tiny", n=3, big=2**70, small=-0.0, nan=float("nan"), inf=float("-inf"), flag=True, none=None,
    deep=record(a=[1, [2.5, "x"], record(b=None)]), empty=record(), **{"$dollar": 1, "llama_context_length": 4096},
)  # fmt: skip
STRINGS = {
    "format": "pt", "general.name": "x", "llama.context_length": "4096", "json": '{"a": 1}', "empty": "", "ü": "☃",
}  # fmt: skip


def chain(tmp_path: Path, first: Path, *through: str) -> Path:
    """Convert along containers; the last file."""
    path = first
    for i, container in enumerate(through):
        path = Path(ai.convert(path, tmp_path / f"step{i}.{container}", durable=False).path)
    return path


def gguf_facts(path: Path) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Keys in order, their types, their contents, without what describes the file."""
    reader = gguf.GGUFReader(path)
    fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.") and f.name not in OF_THE_FILE]
    types = {k: v for k, v in kinds(path).items() if k not in OF_THE_FILE}
    model = ai.open(path)
    values = {f.name: repr(model.metadata[f.name][:]) if f.types[0] == 9 else f.contents() for f in fields}
    return [f.name for f in fields], types, values


@pytest.mark.parametrize("through", [c for c in CONTAINERS.values() if c != "gguf"])
@pytest.mark.parametrize("twice", [False, True])
def test_gguf_keys_come_back(tmp_path: Path, through: str, twice: bool) -> None:
    metadata = {
        **EVERY_TYPE, "x.nan": np.float32("nan"), "x.inf": np.float64("inf"),
        "x.nans": np.array([np.nan, 1], np.float32),
        "x.u64s": np.array([2**64 - 1, 0], np.uint64), "x.none": [], "x.void": np.zeros(0, np.int16), "x.s": "",
        "x.deep": [[["a"]], [[], ["b", "c"]]], "x.mixed": [[1], ["a"]], "tokenizer.ggml.tokens": ["a", "b"],
    }  # fmt: skip
    first = tmp_path / "first.gguf"
    ai.save_gguf(first, {"a": W, "b": W[0]}, metadata, dtype="f16", architecture="llama")
    way = [through, "gguf", through, "gguf"] if twice else [through, "gguf"]
    last = chain(tmp_path, first, *way)
    keys, types, values = gguf_facts(first)
    assert repr((keys, types, values)) == repr(gguf_facts(last))
    assert kinds(last)["general.file_type"] == "UINT32"


@pytest.mark.parametrize("through", [c for c in CONTAINERS.values() if c != "apsim"])
def test_a_record_comes_back(tmp_path: Path, through: str) -> None:
    first = tmp_path / "first.apsim"
    ai.save_model(first, record(w=W), RECORD)
    last = chain(tmp_path, first, through, "apsim")
    assert repr(dict(ai.open(last).metadata)) == repr(dict(ai.open(first).metadata))
    assert list(ai.open(last).metadata) == list(RECORD)


@pytest.mark.parametrize("through", [c for c in CONTAINERS.values() if c != "safetensors"])
@pytest.mark.parametrize("strings", [STRINGS, {}, None])
def test_strings_come_back(tmp_path: Path, through: str, strings: dict[str, str] | None) -> None:
    first = tmp_path / "first.safetensors"
    first.write_bytes(handmade.safetensors([("w", "F32", (2, 32), W.tobytes())], strings))
    last = chain(tmp_path, first, through, "safetensors")
    with safe_open(last, "np") as f:
        assert (f.metadata() or None) == (strings or None)


def test_known_keys_of_a_record_are_keys_of_the_gguf(tmp_path: Path) -> None:
    """What a runtime looks for is there; on the way back it does not stand twice."""
    first = tmp_path / "first.apsim"
    metadata = record(general_architecture="llama", llama_context_length=4096, note="x", bad=None)
    ai.save_model(first, record(w=W), metadata)
    report = ai.convert(first, tmp_path / "m.gguf")
    found = kinds(tmp_path / "m.gguf")
    assert {k: v for k, v in found.items() if k not in OF_THE_FILE} == {
        "general.architecture": "STRING", "llama.context_length": "UINT32", "apsi.metadata": "STRING",
    }  # fmt: skip
    assert {k.key for k in report.keys} >= {"llama.context_length", "apsi.metadata"}
    last = chain(tmp_path, tmp_path / "m.gguf", "apsim")
    assert dict(ai.open(last).metadata) == dict(ai.open(first).metadata)
    named = ai.convert(first, tmp_path / "n.gguf", architecture="gemma")
    assert ai.open(named.path).metadata["general.architecture"] == "gemma"


def test_a_key_set_in_between_is_kept(tmp_path: Path) -> None:
    """A converted GGUF that somebody gave another key: both come along."""
    first = tmp_path / "first.safetensors"
    first.write_bytes(handmade.safetensors([("w", "F32", (2, 32), W.tobytes())], {"format": "pt"}))
    ai.convert(first, tmp_path / "m.gguf")
    loaded = ai.load_gguf(tmp_path / "m.gguf")
    ai.save_gguf(tmp_path / "n.gguf", loaded.params, {**loaded.metadata, "x.y": np.uint8(3)}, dtype=None)
    last = chain(tmp_path, tmp_path / "n.gguf", "safetensors")
    with safe_open(last, "np") as f:
        found = f.metadata()
    assert found == {"format": "pt", "x.y": "3", "gguf.types": '{"x.y":"UINT8"}'}
    again = chain(tmp_path, last, "apsim", "gguf")
    assert kinds(again)["x.y"] == "UINT8"


@pytest.mark.parametrize("reader", CONTAINERS.values())
@pytest.mark.parametrize("writer", CONTAINERS.values())
def test_units_and_tree_come_back(tmp_path: Path, reader: str, writer: str) -> None:
    import pint

    u = pint.get_application_registry()
    first = tmp_path / "first.apsim"
    params = record(z=(u.Quantity(W, "degC"), [W + 1]), a=record({"x.y": u.Quantity(W + 2, "km")}), n=3, none=None)
    ai.save_model(first, params)
    last = chain(tmp_path, first, reader, writer, "apsim")
    a, b = ai.open(first), ai.open(last)
    assert {n: str(x) for n, x in a.units.items()} == {n: str(x) for n, x in b.units.items()}
    assert a.units == b.units
    assert repr(shape_of(a.tree())) == repr(shape_of(b.tree()))
    back = ai.load_model(last)
    assert str(back.z[0].units) == "degree_Celsius"
    assert np.array_equal(back.a["x.y"].magnitude, W + 2)


def shape_of(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: shape_of(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(shape_of(v) for v in node)
    return getattr(node, "name", node)


def test_quantized_tensors_keep_their_unit(tmp_path: Path) -> None:
    import pint

    u = pint.get_application_registry()
    first = tmp_path / "first.gguf"
    ai.save_gguf(first, record(w=u.Quantity(W, "m")), dtype="q8_0")
    last = chain(tmp_path, first, "apsim")
    model = ai.open(last)
    assert model["w"].encoding == "int8"
    assert str(model["w"].unit) == "m"
    assert str(ai.load_model(last).w.unit) == "m"


def test_what_describes_a_gguf_file_stays_with_it(tmp_path: Path) -> None:
    first = tmp_path / "first.gguf"
    ai.save_gguf(first, {"w": W}, {"general.file_type": 15}, dtype=None, alignment=64, architecture="x")
    assert ai.open(first).metadata["general.file_type"] == 15
    report = ai.convert(first, tmp_path / "m.safetensors")
    assert {k.key for k in report.keys if k.action == "dropped"} == {"general.file_type", "general.alignment"}
    kept = ai.convert(first, tmp_path / "n.gguf")
    assert Path(kept.path).read_bytes() == first.read_bytes()
    again = ai.convert(first, tmp_path / "o.gguf", "q8_0", alignment=32)
    model = ai.open(again.path)
    assert model.metadata["general.file_type"] == 7
    assert model.facts["alignment"] == 32
    assert any(f.code == "file-type" for f in again.findings)


@pytest.mark.parametrize(
    "strings",
    [
        {"gguf.types": "{"}, {"gguf.types": '{"a": "NONSENSE"}', "a": "1"},
        {"gguf.types": '{"a": "UINT8"}', "a": "300"}, {"apsi.keys": "3"},
        {"gguf.types": '{"a": "UINT8"}', "a": '"x"'}, {"gguf.types": "[]"}, {"apsi.json": "{}"}, {"apsi.units": "3"},
        {"apsi.json": '["a"]', "a": "{"}, {"apsi.units": '{"w": [1]}'},
        {"apsi.tree": '{"$record": [["a", "zz"]]}'},
        {"gguf.types": '{"a": "ARRAY[UINT8]"}', "a": "3"},
    ],
)  # fmt: skip
def test_broken_carriers_are_refused(tmp_path: Path, strings: dict[str, str]) -> None:
    first = tmp_path / "first.safetensors"
    first.write_bytes(handmade.safetensors([("w", "F32", (2, 32), W.tobytes())], strings))
    with pytest.raises(ModelFileError) as caught:
        ai.convert(first, tmp_path / "o.gguf")
    assert "metadata" in str(caught.value) or "tree" in str(caught.value) or "unit" in str(caught.value)
    assert json.dumps(strings)


def test_a_real_model_through_all_containers(tmp_path: Path) -> None:
    src = Path(ai.samples.path("fracast.safetensors"))
    last = chain(tmp_path, src, "gguf", "apsim", "gguf", "safetensors")
    with safe_open(src, "np") as a, safe_open(last, "np") as b:
        assert a.metadata() == b.metadata()
        assert set(a.keys()) == set(b.keys())
        assert all(np.array_equal(a.get_tensor(n), b.get_tensor(n)) for n in a.keys())

"""Reading .apsim: the files of an independent writer, and every rule of sections 1 to 7 that a header can break."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from apsi_inspect.encodings.scaled import QParams
from apsi_inspect.errors import ModelFileError, UnknownFormatError, UnsupportedFileError
from apsi_inspect.model import ModelFile
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.open import open_source
from apsi_inspect.source import BytesSource
from apsi_inspect.units import Unit

from . import handmade

GOLDEN = Path(__file__).parent / "data" / "golden"
H = "0" * 64


def test_every_golden_file_is_plain_safetensors_and_opens() -> None:
    files = sorted(GOLDEN.glob("*.apsim"))
    assert len(files) == 12
    for path in files:
        model = open_model(path)
        assert model.format == "apsim"
        assert not model.findings
        with safe_open(path, "np") as reference:
            stored = {n for n in reference.keys() if not n.endswith("__qscale")}
            assert set(model) == stored
            order = [n for n in reference.offset_keys() if n in stored]
            assert [n for n in model if model[n].nbytes] == [n for n in order if model[n].nbytes]


@pytest.mark.parametrize("name", ["dtypes", "base_profile"])
def test_every_dtype(name: str) -> None:
    model, raw = open_model(GOLDEN / f"{name}.apsim"), np.load(GOLDEN / "dtypes.npz")
    assert set(model) == set(raw)
    for key, tensor in model.items():
        assert bytes(tensor.raw()) == raw[key].tobytes()
        assert np.asarray(tensor).shape == tensor.shape


def test_base_profile_metadata() -> None:
    model = open_model(GOLDEN / "base_profile.apsim")
    assert list(model.metadata.items()) == [("arch", "mlp"), ("step", 12001), ("note", "naïve ☃")]
    assert (model.facts["digests"], model.facts["signature"]) == ("present, not checked", "none")


def test_units() -> None:
    model = open_model(GOLDEN / "units.apsim")
    zero = (0,) * 7
    assert model.units == {
        "angle": Unit(zero, symbol="rad"),
        "energy": Unit((2, 1, -2, 0, 0, 0, 0), symbol="J"),
        "height": Unit((1, *zero[1:]), 1000.0, 0.0, "km"),
        "mass": Unit((0, 1, 0, 0, 0, 0, 0), symbol="kg"),
        "noise": Unit((2, 1, "-5/2", -1, 0, 0, 0)),
        "temp": Unit((0, 0, 0, 0, 1, 0, 0), 1.0, 273.15, "degC"),
    }
    assert model["plain"].unit is None
    assert model["height"].unit == model.units["height"]


def test_quantized_tensors_are_one_with_their_scales() -> None:
    model, values = open_model(GOLDEN / "qtensors.apsim"), np.load(GOLDEN / "qtensors.npz")
    expected = {k: values[k] for k in values if not k.endswith("::source")}
    assert set(model) == set(expected)
    with safe_open(GOLDEN / "qtensors.apsim", "np") as reference:
        keys = set(reference.keys())
        for name, tensor in model.items():
            assert tensor.encoding == name.split(".")[0]
            assert tensor.shape == expected[name].shape
            q = tensor.qparams
            assert q is not None
            scale = f"{name}__qscale"
            assert (q.scale_shape is None) == (scale not in keys)
            if q.scale_shape is not None:
                assert list(q.scale_shape) == reference.get_slice(scale).get_shape()
                assert q.scale_nbytes == 4 * int(np.prod(q.scale_shape))
            assert tensor.nbytes == len(tensor.raw()) + q.scale_nbytes


def named(x: Any) -> Any:
    """A tree with the tensors' names for the tensors."""
    if isinstance(x, dict):
        return {k: named(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(named, x))
    return x.name if hasattr(x, "qparams") else x


def test_tree() -> None:
    tree = open_model(GOLDEN / "tree.apsim").tree()
    assert named(tree) == {
        "layers": [{"W": "layers.0.W", "b": "layers.0.b"}, {"W": "layers.1.W", "b": "layers.0.b"}],
        "a": {"b": "a.b"}, "a.b": "a%2Eb", "rec": {"0": "rec.0"}, "t": ("t.0", "t.1"), "none": None, "lr": 0.1,
        "n": 12345678901234567890, "inf": float("-inf"), "name": "mlp", "empty": [], "void": {},
    }  # fmt: skip
    assert list(tree)[:4] == ["layers", "a", "a.b", "rec"]
    assert tree["layers"][0]["b"] is tree["layers"][1]["b"]  # type: ignore[call-overload]


def test_tree_from_names_and_list_root() -> None:
    assert named(open_model(GOLDEN / "tree_from_names.apsim").tree()) == {
        "layers": [{"W": "layers.0.W", "b": "layers.0.b"}, {"W": "layers.1.W"}]
    }
    tree: Any = open_model(GOLDEN / "list_root_tied.apsim").tree()
    assert named(tree) == [{"W": "0.W"}, {"W": "0.W"}]
    assert tree[0]["W"] is tree[1]["W"]


def test_names_and_no_tensors_and_degenerate() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    assert {composed, decomposed, 'q"uote', "back\\slash", "tab\there", "z😀"} < set(open_model(GOLDEN / "names.apsim"))
    empty = open_model(GOLDEN / "no_tensors.apsim")
    assert len(empty) == 0
    assert empty.tree() == {}
    assert empty.metadata["$odd"] == 1
    assert empty.metadata["best"] == float("inf")
    assert empty.metadata["n"] == 2**53 + 1
    model = open_model(GOLDEN / "degenerate.apsim")
    shapes = {"e.ax": (0, 4), "e.one": (0,), "e.row": (3, 0), "s.f8": (), "s.i4": ()}
    assert {n: t.shape for n, t in model.items()} == shapes


BAD = json.loads((GOLDEN / "bad" / "expected.json").read_text())
REFUSALS = {
    "meta_digest_dropped.apsim": "unit_symbols.*meta_sha256", "meta_digest_renamed.apsim": "meta_sha256",
    "signer_added.apsim": "signature", "version_2.apsim": "version", "scale_missing.apsim": "not there",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    expected = BAD[name]
    start = time.process_time()
    if expected.startswith("refused"):
        with pytest.raises(ModelFileError, match=REFUSALS[name]):
            open_model(GOLDEN / "bad" / name)
    else:  # digests are not checked on opening
        model = open_model(GOLDEN / "bad" / name)
        assert bool(model.findings) == ("warning" in expected)
    assert time.process_time() - start < 2


# --- headers put together by hand


def header(tensors: dict[str, tuple[str, list[int], int]] | None = None, **metadata: Any) -> bytes:
    """An .apsim file: tensors name -> (dtype, shape, bytes); metadata as JSON texts, the required keys filled in."""
    rows = [(n, d, s, bytes(b)) for n, (d, s, b) in (tensors or {"w": ("F32", [2], 8)}).items()]
    texts = {"format": "apsi-model", "version": "1", "apsi": "test/1", "sha256": H, "meta_sha256": H}
    texts |= {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    return handmade.safetensors(rows, {k: v for k, v in texts.items() if v != "-"})


def opened(blob: bytes) -> ModelFile:
    return open_source(BytesSource(blob, "m.apsim"))


def test_the_smallest() -> None:
    assert opened(header()).facts["writer"] == "test/1"
    assert not opened(header(meta_sha256="-")).findings
    assert opened(header(unknown="kept")).format == "apsim"


Q = {"format": "int4", "shape": [3, 5], "axis": 1, "packing": "nibble", "scale_shape": [3, 1], "unit": None}
QT = {"w": ("U8", [3, 3], 9), "w__qscale": ("F32", [3, 1], 12)}
ZERO = [0] * 7
SIGNATURE = {"alg": "HMAC-SHA256", "key_id": "0" * 16, "kdf": None, "mac": H}


def without(d: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in d.items() if k != key}


REFUSED: dict[str, tuple[bytes, str]] = {
    "no apsi": (header(apsi="-"), "'apsi'"),
    "no sha256": (header(sha256="-"), "'sha256'"),
    "no version": (header(version="-"), "version"),
    "version 1.0": (header(version="1.0"), "version"),
    "version ' 1'": (header(version=" 1"), "version"),
    "sha256 in upper case": (header(sha256="A" * 64), "sha256"),
    "sha256 too short": (header(sha256="0" * 63), "sha256"),
    "sha256 with a line break": (header(sha256=H + "\n"), "sha256"),
    "meta_sha256 too long": (header(meta_sha256=H + "0"), "meta_sha256"),
    "unknown key without meta_sha256": (header(meta_sha256="-", other="x"), "'other'.*meta_sha256"),
    "shard 0/2": (header(shard="0/2"), "shard"),
    "shard 3/2": (header(shard="3/2"), "shard"),
    "shard 1": (header(shard="1"), "shard"),
    "shard 01/2": (header(shard="01/2"), "shard"),
    "dimension 2^53": (header({"w": ("F32", [0, 2**53], 0)}), "2\\^53"),
    "257 components": (header({"a." * 256 + "w": ("F32", [2], 8)}), "256 components"),
    "units is null": (header(units="null"), "units"),
    "units is a list": (header(units=[]), "units"),
    "units is no JSON": (header(units="{"), "units"),
    "units twice": (header(units='{"w":[0,0,0,0,0,0,0],"w":[0,0,0,0,0,0,0]}'), "units.*duplicate"),
    "units of an unknown tensor": (header(units={"x": ZERO}), "'x'"),
    "a unit that is none": (header(units={"w": [0] * 6}), "'w'.*seven"),
    "units of a quantized tensor": (header(QT, qtensors={"w": Q}, units={"w": ZERO}), "'w'.*quantized"),
    "units of scales": (header(QT, qtensors={"w": Q}, units={"w__qscale": ZERO}), "w__qscale"),
    "symbol without unit": (header(unit_symbols={"w": "m"}), "'w'.*no unit"),
    "symbol of an unknown tensor": (header(unit_symbols={"x": "m"}), "'x'"),
    "deep JSON": (header(metadata="[" * 300 + "]" * 300), "nested"),
    "very deep JSON": (header(metadata="[" * 100_000), "nested"),
    "NaN": (header(metadata='{"a":NaN}'), "NaN"),
    "number beyond float64": (header(metadata='{"a":1e999}'), "float64"),
    "integer beyond float64": (header(metadata='{"a":' + "9" * 400 + "}"), "float64"),
    "lone surrogate": (header(metadata='{"a":"\\ud800"}'), "surrogate"),
    "lone surrogate in a key": (header(metadata='{"\\udfff":1}'), "surrogate"),
    "reserved key": (header(metadata='{"$x":1}'), "reserved"),
    "tree is null": (header(tree="null"), "tree"),
    "tree is a leaf": (header(tree='"w"'), "root"),
    "tree lacks a tensor": (header(tree=[]), "'w'"),
    "tree names another": (header(tree=["w", "x"]), "'x'"),
    "tree names scales": (header(QT, qtensors={"w": Q}, tree=["w", "w__qscale"]), "w__qscale"),
    "tree is an object": (header(tree={"a": "w"}), "tree"),
    "key twice in a record": (header(tree={"$record": [["a", "w"], ["a", "w"]]}), "twice"),
    "codes missing": (header(without(QT, "w"), qtensors={"w": Q}), "'w'.*not there"),
    "scales missing": (header(without(QT, "w__qscale"), qtensors={"w": Q}), "w__qscale.*not there"),
    "codes of another dtype": (header(QT | {"w": ("I8", [3, 3], 9)}, qtensors={"w": Q}), "'w'.*I8.*U8"),
    "codes of another shape": (header(QT | {"w": ("U8", [9], 9)}, qtensors={"w": Q}), "'w'.*\\[9\\].*\\[3, 3\\]"),
    "scales of another dtype": (header(QT | {"w__qscale": ("F16", [3, 1], 6)}, qtensors={"w": Q}), "F16"),
    "scales of another shape": (header(QT | {"w__qscale": ("F32", [3], 12)}, qtensors={"w": Q}), "w__qscale"),
    "chunks of one chunk": (header(chunks={"size": 8388608, "sha256": [H], "root": H}), "chunks"),
    "chunks is null": (header(chunks="null"), "chunks"),
    "signature is null": (header(signature="null"), "signature"),
    "signature without mac": (header(signature=without(SIGNATURE, "mac")), "signature"),
    "signature with more": (header(signature=SIGNATURE | {"signer": "me"}), "signature"),
    "signature of another algorithm": (header(signature=SIGNATURE | {"alg": "none"}), "signature"),
    "signature in upper case": (header(signature=SIGNATURE | {"mac": "A" * 64}), "signature"),
    "scrypt that is cheap": (
        header(signature=SIGNATURE | {"kdf": {"name": "scrypt", "n": 2, "r": 8, "p": 1, "salt": "0" * 32}}),
        "signature",
    ),
    "scrypt with true": (
        header(signature=SIGNATURE | {"kdf": {"name": "scrypt", "n": 32768, "r": 8, "p": True, "salt": "0" * 32}}),
        "signature",
    ),
}  # fmt: skip
for _field, _value in {
    "format": "int3",
    "axis": 2,
    "packing": "none",
    "scale_shape": [3],
    "unit": [1],
    "shape": [3, -5],
    "block": 0,
}.items():
    REFUSED[f"qtensors with {_field} {_value}"] = (header(QT, qtensors={"w": Q | {_field: _value}}), "'w'")
for _field in Q:
    REFUSED[f"qtensors without {_field}"] = (header(QT, qtensors={"w": without(Q, _field)}), "'w'")
    REFUSED[f"qtensors with {_field} true"] = (header(QT, qtensors={"w": Q | {_field: True}}), "'w'")
REFUSED |= {
    "qtensors with one more field": (header(QT, qtensors={"w": Q | {"zero": 0}}), "'w'"),
    "negative axis": (header(QT, qtensors={"w": Q | {"axis": -1}}), "'w'"),
    "blocks without block": (header(QT, qtensors={"w": Q | {"scale_shape": [3, 2]}}), "'w'.*scale_shape"),
    "block and scale_shape differ": (header(QT, qtensors={"w": Q | {"block": 2}}), "'w'.*scale_shape"),
    "axis null with many scales": (header(QT, qtensors={"w": Q | {"axis": None}}), "'w'"),
    "entry is a list": (header(QT, qtensors={"w": [1]}), "'w'"),
    "entry is null": (header(QT, qtensors={"w": None}), "'w'"),
    "bf16 with scales": (
        header({"w": ("BF16", [2], 4)}, qtensors={"w": Q | {"format": "bf16", "shape": [2], "packing": "none"}}), "'w'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    blob, match = REFUSED[why]
    with pytest.raises(ModelFileError, match=match) as info:
        opened(blob)
    assert str(info.value).startswith("m.apsim: ")
    assert isinstance(info.value, UnsupportedFileError) == ("version" in why)


def quantized(fmt: str, shape: list[int], stored: Any, scales: list[int] | None, **more: Any) -> ModelFile:
    width = {"BF16": 2}.get(stored[0], 1)
    packing = "nibble" if fmt in ("int4", "fp4") else "bits6" if fmt.startswith("fp6") else "none"
    entry = {"format": fmt, "shape": shape, "axis": None, "packing": packing, "scale_shape": scales, "unit": None}
    entry |= more
    tensors = {"w": (*stored, width * int(np.prod(stored[1])))}
    if scales is not None:
        tensors["w__qscale"] = ("F32", scales, 4 * int(np.prod(scales)))
    return opened(header(tensors, qtensors={"w": entry}))


@pytest.mark.parametrize(
    ("fmt", "shape", "stored", "scales", "more"),
    [
        ("int8", [4, 6], ("I8", [4, 6]), [], {}),
        ("int8", [4, 6], ("I8", [4, 6]), [4, 1], {"axis": 1}),
        ("int8", [4, 6], ("I8", [4, 6]), [1, 6], {"axis": 0}),
        ("int8", [4, 6], ("I8", [4, 6]), [4, 2], {"axis": 1, "block": 4}),
        ("int8", [4, 6], ("I8", [4, 6]), [4, 1], {"axis": 1, "block": 6}),
        ("fp8", [], ("F8_E4M3", []), [], {}),
        ("fp8_e5m2", [0, 3], ("F8_E5M2", [0, 3]), [0, 3], {"axis": 0}),
        ("int4", [3, 5], ("U8", [3, 3]), [3, 1], {"axis": 1}),
        ("int4", [], ("U8", [1]), [], {}),
        ("fp4", [0], ("U8", [0]), [0], {"axis": 0}),
        ("fp6", [2, 5], ("U8", [2, 6]), [2, 1], {"axis": 1}),
        ("fp6_e3m2", [], ("U8", [3]), [], {}),
        ("bf16", [2, 3], ("BF16", [2, 3]), None, {}),
    ],
)
def test_quantized_shapes(fmt: str, shape: list[int], stored: Any, scales: Any, more: dict[str, Any]) -> None:
    model = quantized(fmt, shape, stored, scales, **more)
    tensor = model["w"]
    assert (tensor.encoding, list(tensor.shape), len(model)) == (fmt, shape, 1)
    q = tensor.qparams
    assert isinstance(q, QParams)
    assert (q.axis, q.block) == (more.get("axis"), more.get("block"))
    assert q.scale_shape == (None if scales is None else tuple(scales))


def test_the_unit_of_a_quantized_tensor_stands_in_its_entry() -> None:
    model = opened(header(QT, qtensors={"w": Q | {"unit": [1, *ZERO[1:]]}}, unit_symbols={"w": "m"}))
    assert model["w"].unit == Unit((1, 0, 0, 0, 0, 0, 0), symbol="m")


def test_empty_tensors_stand_by_name() -> None:
    """Table order is that of the data, then of names, never that of the keys (section 1)."""
    model = opened(header({"z": ("F32", [0], 0), "a": ("U8", [0], 0), "w": ("U8", [1], 1)}))
    assert list(model) == ["a", "z", "w"]


@pytest.mark.parametrize("symbol", ["m**9**9**9", "<script>", "x" * 200, "\u202em", 3, None], ids=ascii)
def test_a_bad_symbol_is_a_warning(symbol: Any) -> None:
    model = opened(header(units={"w": [1, *ZERO[1:]]}, unit_symbols={"w": symbol}))
    assert [f.code for f in model.findings] == ["unit-symbol"]
    assert model["w"].unit == Unit((1, 0, 0, 0, 0, 0, 0))
    assert model.findings[0].message.isprintable()


def test_leaf_and_prefix_is_a_flat_record_with_a_warning() -> None:
    model = opened(header({"a": ("U8", [1], 1), "a.b": ("U8", [1], 1)}))
    assert [f.code for f in model.findings] == ["flat-names"]
    assert named(model.tree()) == {"a": "a", "a.b": "a.b"}


def test_stray_scales_are_a_warning() -> None:
    model = opened(header({"w": ("U8", [1], 1), "x__qscale": ("F32", [], 4)}))
    assert [f.code for f in model.findings] == ["stray-scale"]


def test_one_shard_alone_is_said() -> None:
    model = opened(header(shard="2/3"))
    assert [f.code for f in model.findings] == ["one-shard"]
    assert model.facts["shard"] == "2/3"


def test_user_metadata_of_any_json() -> None:
    for value in ({"a": 1, "b": [None, True, {"c": "x"}]}, {}, {"z": 1, "a": 2}):
        found = opened(header(metadata=value)).metadata
        assert found == value
        assert list(found) == list(value)
    assert opened(header(metadata={"$$a": 1, "n": {"$int": str(2**70)}, "f": {"$float": "-inf"}})).metadata == {
        "$a": 1, "n": 2**70, "f": float("-inf"),
    }  # fmt: skip


CHUNK = 8_388_608


@pytest.mark.parametrize(
    ("nbytes", "chunks", "good"),
    [
        (CHUNK + 1, {"size": CHUNK, "sha256": [H, H], "root": H}, True),
        (2 * CHUNK, {"size": CHUNK, "sha256": [H, H], "root": H}, True),
        (2 * CHUNK + 1, {"size": CHUNK, "sha256": [H, H], "root": H}, False),
        (CHUNK + 1, {"size": CHUNK, "sha256": [H], "root": H}, False),
        (CHUNK + 1, {"size": CHUNK, "sha256": [H, H, H], "root": H}, False),
        (CHUNK + 1, {"size": CHUNK // 2, "sha256": [H, H, H], "root": H}, False),
        (CHUNK + 1, {"size": CHUNK, "sha256": [H, H]}, False),
        (CHUNK + 1, {"size": CHUNK, "sha256": [H, H], "root": H, "more": 1}, False),
        (CHUNK + 1, {"size": CHUNK, "sha256": [H, "A" * 64], "root": H}, False),
        (CHUNK, {"size": CHUNK, "sha256": [H], "root": H}, False),
        (CHUNK + 1, None, True),
    ],
)
def test_form_of_chunks(nbytes: int, chunks: Any, good: bool) -> None:
    blob = header({"w": ("U8", [nbytes], nbytes)}, **({} if chunks is None else {"chunks": chunks}))
    if good:
        assert opened(blob).facts["chunks"] == (2 if chunks else 0)
    else:
        with pytest.raises(ModelFileError, match="chunks"):
            opened(blob)


def test_a_plain_file_named_apsim_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.apsim"
    path.write_bytes(handmade.safetensors([("w", "U8", [1], b"\0")]))
    model = open_model(path)
    assert model.format == "safetensors"
    assert "not-apsim" in {f.code for f in model.findings}
    with pytest.raises(UnknownFormatError, match="open it as safetensors"):
        open_model(path, "apsim")
    assert open_model(path, "safetensors").format == "safetensors"


def test_an_apsim_file_under_another_name_or_format(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.gguf", "model", "model.bin"):
        path = tmp_path / name
        path.write_bytes((GOLDEN / "units.apsim").read_bytes())
        model = open_model(path)
        assert model.format == "apsim"
        assert bool(model.findings) == (name != "model.safetensors")
    plain = open_model(GOLDEN / "qtensors.apsim", "safetensors")
    assert plain.format == "safetensors"
    assert "int8.row__qscale" in plain


def test_hostile_inner_texts(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    """Texts of 9 MB that JSON would turn into a quarter of a gigabyte."""
    path = tmp_path / "m.apsim"
    for key, unit in (("metadata", "[],"), ("tree", '"w",')):
        path.write_bytes(header(**{key: "[" + unit * (9_000_000 // len(unit)) + "0]"}))
        code = "try:\n    open_model(sys.argv[1]); print('opens')\nexcept ApsiError as exc:\n    print(str(exc)[-99:])"
        printed, grew = measured(code, path)
        assert "opens" not in printed, key
        assert grew < 120, key

"""Writing GGUF: byte for byte as `gguf.GGUFWriter`, opened by its reader and by ggml's C loader, and loaded back."""

from __future__ import annotations

import inspect
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import apsi_inspect as ai
from apsi_inspect import record, samples
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.formats import gguf_keys
from apsi_inspect.formats.gguf_values import infer
from apsi_inspect.ops.gguf_keys_of import typed_keys
from apsi_inspect.ops.targets import menu_of

from . import ggml_oracle
from .gguf_oracle import add_quantized, c_loader, reference

RNG = np.random.default_rng(6)
W = RNG.standard_normal((6, 256)).astype(np.float32)
TYPES = {t.name: int(t) for t in gguf.GGUFValueType}


def kinds(path: Path) -> dict[str, str]:
    """Key -> type, as the `gguf` package reads them."""
    fields = gguf.GGUFReader(path).fields.values()
    return {f.name: "ARRAY[" * (len(f.types) - 1) + f.types[-1].name for f in fields if not f.name.startswith("GGUF.")}


# --- bytes ------------------------------------------------------------------------------------------------------------


def every_type(w: gguf.GGUFWriter) -> None:
    for kind, value in SCALARS.items():
        getattr(w, f"add_{kind.lower()}")(f"x.{kind.lower()}", value)
    w.add_array("x.ints", [1, -2, 3])
    w.add_array("x.floats", [0.5, -1.25])
    w.add_array("x.bools", [True, False])
    w.add_array("x.strings", ["a", "ünï ☃", ""])
    w.add_array("x.nested", [[1, 2], [3]])
    w.add_key_value("x.bytes", b"\x00\xff", gguf.GGUFValueType.ARRAY)
    w.add_context_length(4096)
    w.add_rope_freq_base(10000.0)


SCALARS: dict[str, Any] = {
    "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1, "INT32": -(2**31),
    "FLOAT32": 0.1, "UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT64": 0.1, "BOOL": True, "STRING": "naïve ☃",
}  # fmt: skip
NUMPY = {
    "UINT8": np.uint8, "INT8": np.int8, "UINT16": np.uint16, "INT16": np.int16, "UINT32": np.uint32, "INT32": np.int32,
    "FLOAT32": np.float32, "UINT64": np.uint64, "INT64": np.int64, "FLOAT64": np.float64, "BOOL": np.bool_,
    "STRING": str,
}  # fmt: skip
EVERY_TYPE = {
    **{f"x.{kind.lower()}": NUMPY[kind](value) for kind, value in SCALARS.items()},
    "x.ints": [1, -2, 3],
    "x.floats": [0.5, -1.25],
    "x.bools": [True, False],
    "x.strings": ["a", "ünï ☃", ""],
    "x.nested": [[1, 2], [3]],
    "x.bytes": b"\x00\xff",
    "llama_context_length": 4096,
    "llama.rope.freq_base": 10000,
}
TENSORS = {
    "f32": W,
    "f16": W.astype(np.float16),
    "f64": W[:1].astype(np.float64),
    "i8": np.arange(-4, 3, dtype=np.int8),
    "i16": np.arange(6, dtype=np.int16).reshape(1, 2, 3),
    "i32": np.array(7, np.int32),
    "i64": np.arange(3, dtype=np.int64),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("alignment", [32, 8, 256])
def test_the_bytes_are_those_of_the_reference_writer(tmp_path: Path, alignment: int) -> None:
    def fill(w: gguf.GGUFWriter) -> None:
        every_type(w)
        w.add_file_type(0)
        if alignment != 32:
            w.add_custom_alignment(alignment)
        for name, x in TENSORS.items():
            w.add_tensor(name, x)

    (expected,) = reference(tmp_path / "theirs.gguf", fill)
    metadata = {**EVERY_TYPE, "general.file_type": 0, **({"general.alignment": alignment} if alignment != 32 else {})}
    ai.save_gguf(tmp_path / "ours.gguf", TENSORS, metadata, dtype=None, architecture="llama")
    assert (tmp_path / "ours.gguf").read_bytes() == expected


FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37,
    "MXFP4": 38,
}  # fmt: skip


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_quantized_files_are_those_of_the_reference_writer(tmp_path: Path, kind: str) -> None:
    def fill(w: gguf.GGUFWriter) -> None:
        w.add_file_type(FILE_TYPES[kind])
        if kind not in ("F32", "F16", "BF16"):
            w.add_quantization_version(2)
        add_quantized(w, "a.weight", W, kind)
        w.add_tensor("a.bias", W[0])
        add_quantized(w, "b", W.reshape(2, 3, 256)[:, :2], kind)

    (expected,) = reference(tmp_path / "theirs.gguf", fill)
    params = {"a": {"weight": W, "bias": W[0]}, "b": W.reshape(2, 3, 256)[:, :2]}
    ai.save_gguf(tmp_path / "ours.gguf", params, dtype=kind.lower(), architecture="llama")
    assert (tmp_path / "ours.gguf").read_bytes() == expected


def test_split_files_are_those_of_the_reference_writer(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full((i + 1, 100), i, np.float32) for i in range(7)}

    def fill(w: gguf.GGUFWriter) -> None:
        w.add_context_length(8)
        w.add_file_type(0)
        for name, x in tensors.items():
            w.add_tensor(name, x)

    (tmp_path / "theirs").mkdir()
    expected = reference(tmp_path / "theirs" / "m.gguf", fill, split_max_size=3000)
    report = ai.save_gguf(
        tmp_path / "m.gguf", tensors, {"llama_context_length": 8}, dtype="f32", architecture="llama", shard=3000
    )
    assert len(report.files) == len(expected) > 2
    assert [Path(f).read_bytes() for f in report.files] == expected
    assert [Path(f).name for f in report.files] == [p.name for p in sorted((tmp_path / "theirs").iterdir())]
    back = ai.load_gguf(report.path)
    assert all(np.array_equal(back.params[n], x) for n, x in tensors.items())
    assert all(found is not None for found in c_loader(*report.files))


def test_parts_of_another_alignment_state_it(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(33, i, np.float32) for i in range(4)}
    report = ai.save_gguf(tmp_path / "m.gguf", tensors, dtype="f32", architecture="llama", shard=150, alignment=128)
    for found in c_loader(*report.files):
        assert found is not None
        assert "general.alignment" in found["keys"]


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20).filter(
    lambda s: not s.startswith(("general.", "split."))
)
values = st.one_of(
    st.integers(0, 2**32 - 1), st.booleans(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=30),
    st.floats(width=32, allow_nan=False), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=5),
)  # fmt: skip
arrays = st.sampled_from([np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64]).flatmap(
    lambda dtype: st.lists(st.integers(0, 4), max_size=4).map(lambda shape: np.ones(shape, dtype))
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, values, max_size=6), st.dictionaries(names, arrays, max_size=5))
def test_any_content_gives_the_bytes_of_the_reference_writer(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any], tensors: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    add = {int: "uint32", bool: "bool", str: "string", float: "float32", list: "array"}

    def fill(w: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            getattr(w, f"add_{add[type(value)]}")("k." + key, value)
        w.add_file_type(0)
        for name, x in tensors.items():
            w.add_tensor(name, x)

    (expected,) = reference(folder / "theirs.gguf", fill)
    ai.save_gguf(
        folder / "ours.gguf", tensors, {**{"k." + k: v for k, v in keys.items()}, "general.file_type": 0},
        dtype=None, architecture="llama",
    )  # fmt: skip
    ours = (folder / "ours.gguf").read_bytes()
    tree = b"apsi.tree"  # names that do not rebuild the tree (a record "0", a dot in a key) bring one key more
    if tree not in ours and not any(x.dtype == np.float16 for x in tensors.values()):
        assert ours == expected


# --- other readers ----------------------------------------------------------------------------------------------------


def test_the_c_loader_takes_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = {k: v for k, v in EVERY_TYPE.items() if k != "x.nested"} | {"x.empty": [], "x.none": ""}
    tensors = {n: x for n, x in TENSORS.items() if x.ndim <= 4} | {"w": W + 1}
    ai.save_gguf(path, tensors, metadata, dtype="q6_k", architecture="llama")
    (found,) = c_loader(path)
    assert found is not None
    model = ai.open(path)
    sizes = {n: t.nbytes for n, t in model.items()}
    assert {n: size for n, (_, _, size) in found["tensors"].items()} == sizes
    assert found["tensors"]["w"][0] == ggml_oracle.TYPE_IDS["Q6_K"]
    assert found["keys"]["llama.context_length"] == TYPES["UINT32"]
    assert found["keys"]["x.empty"] == TYPES["ARRAY"]


@pytest.mark.parametrize("dtype", [m for m in menu_of("gguf") if m not in ("F32", "F16", "BF16", "F64")])
def test_real_weights_are_encoded_as_ggml_does(tmp_path: Path, dtype: str) -> None:
    """Every tensor of a real model, cut to whole blocks, against ggml's C code; the C loader opens the file."""
    source = ai.open(samples.path("fracast.safetensors"))
    params = {}
    for name, t in source.items():
        x = t.numpy()
        whole = x.size // 256 * 256
        if whole:
            params[name] = np.concatenate([x.reshape(-1)[:whole], W[0]]).reshape(-1, 256)
    path = tmp_path / "m.gguf"
    ai.save_gguf(path, params, dtype=dtype.lower(), architecture="x")
    model = ai.open(path)
    assert len(model) > 10
    for name, x in params.items():
        assert bytes(model[name].raw()) == ggml_oracle.reference(dtype, x).tobytes(), name
    (found,) = c_loader(path)
    assert found is not None


def test_the_reference_reader_sees_equal_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    ai.save_gguf(path, {**TENSORS, "q": W + 1}, EVERY_TYPE, dtype=None, tensor_types=["q=q8_0"], architecture="llama")
    reader = gguf.GGUFReader(path)
    found = {t.name: t for t in reader.tensors}
    for name, x in TENSORS.items():
        assert np.array_equal(found[name].data.reshape(x.shape), x), name
    assert np.array_equal(found["q"].data, gguf.quants.quantize(W + 1, gguf.GGMLQuantizationType.Q8_0))
    assert reader.fields["x.strings"].contents() == EVERY_TYPE["x.strings"]
    assert reader.fields["x.uint64"].contents() == 2**64 - 1


# --- keys -------------------------------------------------------------------------------------------------------------


def written_by_the_reference() -> dict[str, set[str]]:
    """Key -> types, of every method of the reference writer that adds one."""
    out: dict[str, set[str]] = {}
    writer = gguf.GGUFWriter(None, "ARCH")

    def note(key: str, value: Any, kind: gguf.GGUFValueType, sub_type: Any = None) -> None:
        name = kind.name if kind != gguf.GGUFValueType.ARRAY else f"ARRAY[{gguf.GGUFValueType.get_type(value[0]).name}]"
        out.setdefault(key, set()).add(name)

    writer.add_key_value = note  # type: ignore[method-assign]
    typed = {"add_" + k.lower() for k in TYPES}
    for name, method in inspect.getmembers(gguf.GGUFWriter, inspect.isfunction):
        if not name.startswith("add_") or name in typed or name in ("add_key_value", "add_tensor", "add_tensor_info"):
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        for arguments in itertools.product(*(examples(str(p.annotation)) for p in parameters)):
            if name == "add_custom_alignment":
                arguments = (64,)
            if name != "add_shard_kv_data":
                getattr(writer, name)(*arguments)
    return out


def examples(annotation: str) -> list[Any]:
    """Values that a parameter of the reference writer takes."""
    lists = {"Sequence[int]": [1], "Sequence[float]": [1.5], "Sequence[str]": ["a"], "Sequence[bool]": [True]}
    out: list[Any] = [v for k, v in lists.items() if k in annotation]
    enums = {"RopeScalingType": gguf.RopeScalingType.LINEAR, "PoolingType": gguf.PoolingType.MEAN,
             "ExpertGatingFuncType": gguf.ExpertGatingFuncType.SOFTMAX}  # fmt: skip
    out += [v for k, v in enums.items() if k in annotation]
    if "Mapping" in annotation:
        out.append([{"name": "tool", "template": "y"}])
    for word, value in (("int", 3), ("float", 0.5), ("bool", True), ("str", "s")):
        bare = annotation.replace(f"Sequence[{word}]", "").replace("Mapping[str, str]", "")
        if word in bare.replace("Type", "").split("[")[0] or f"| {word}" in bare or bare == word:
            out.append(value)
    return out or [b"ab"]


def test_known_keys_have_the_types_of_the_reference_writer() -> None:
    seen = 0
    for key, types in written_by_the_reference().items():
        plain = key.replace("ARCH.", "llama.", 1)
        known = gguf_keys.known_type(plain)
        if plain in ("llama.s_feat_in", "llama.s_feat_out", "tokenizer.ggml.precompiled_charsmap"):
            continue  # named by its argument; bytes, which it tells from a list by their class
        scalars = {t for t in types if not t.startswith("ARRAY")}
        assert known in (scalars or types), key
        seen += 1
    assert seen > 150


def test_every_key_the_reference_names_is_known() -> None:
    for group in vars(gguf.constants.Keys).values():
        for template in vars(group).values() if inspect.isclass(group) else ():
            if not isinstance(template, str) or "." not in template or template.startswith("apsi_inspect"):
                continue
            key = template.format(arch="llama", id=0, name="tool", dense="dense_2") if "{" in template else template
            if "__" not in key and key != group.__module__:
                assert gguf_keys.known_type(key) is not None, key


@pytest.mark.parametrize("architecture", [None, "llama", "nomic-bert", "gemma3n"])
def test_known_keys_spelt_with_underscores_stay_apart(architecture: str | None) -> None:
    keys = [k for k in gguf_keys.KEYS if "{i}" not in k and "{n}" not in k]
    mine = [k.replace("{a}", architecture or "") for k in keys if k.startswith("{a}") == (architecture is not None)]
    flat = {k.replace(".", "_").replace("-", "_"): k for k in mine}
    assert len(flat) == len(mine)
    for written, key in flat.items():
        assert gguf_keys.resolve(written, architecture) == key


@pytest.mark.parametrize(
    ("metadata", "architecture", "expected"),
    [
        ({"llama_context_length": 4096}, "llama", {"llama.context_length": "UINT32"}),
        ({"llama.context_length": 4096}, "llama", {"llama.context_length": "UINT32"}),
        ({"llama": {"context_length": 1, "attention": {"head_count": 2}}}, None,
         {"llama.context_length": "UINT32", "llama.attention.head_count": "UINT32"}),
        ({"llama_context_length": 4096}, None, {"llama.context_length": "UINT32"}),
        ({"general_architecture": "nomic-bert", "nomic_bert_context_length": 1}, None,
         {"nomic-bert.context_length": "UINT32"}),
        ({"general_base_model_0_name": "x"}, "llama", {"general.base_model.0.name": "STRING"}),
        ({"tokenizer_chat_template_tool_use": "x"}, "llama", {"tokenizer.chat_template.tool_use": "STRING"}),
        ({"llama_rope_freq_base": 10000}, "llama", {"llama.rope.freq_base": "FLOAT32"}),
        ({"llama_attention_head_count": [4, 8]}, "llama", {"llama.attention.head_count": "ARRAY[INT32]"}),
        ({"tokenizer_ggml_token_type": [1, 2]}, "llama", {"tokenizer.ggml.token_type": "ARRAY[INT32]"}),
        ({"tokenizer_ggml_scores": [1, 2]}, "llama", {"tokenizer.ggml.scores": "ARRAY[FLOAT32]"}),
        ({"note": 1, "llama.my_own": -1}, "llama", {"note": "UINT32", "llama.my_own": "INT32"}),
        ({"llama.context_length": np.int32(1)}, "llama", {"llama.context_length": "INT32"}),
        ({"a": 2**32, "b": -(2**31) - 1, "c": 0.1, "d": 0.5}, None,
         {"a": "UINT64", "b": "INT64", "c": "FLOAT64", "d": "FLOAT32"}),
        ({"a": np.zeros(2, np.uint16), "b": [1, 2**31], "c": [-1, 2**31], "d": [0.1]}, None,
         {"a": "ARRAY[UINT16]", "b": "ARRAY[UINT32]", "c": "ARRAY[INT64]", "d": "ARRAY[FLOAT64]"}),
    ],
)  # fmt: skip
def test_keys_and_types(tmp_path: Path, metadata: Any, architecture: str | None, expected: dict[str, str]) -> None:
    from apsi_inspect.formats.gguf_values import type_text

    found = {k: type_text(v) for k, v in typed_keys(metadata, architecture).keys}
    assert {k: found[k] for k in expected} == expected
    assert set(found) - set(expected) <= {"general.architecture"}


@pytest.mark.parametrize(
    ("metadata", "architecture", "word"),
    [
        ({"llama_contxt_length": 1}, "llama", "llama_context_length"),
        ({"gemma_context_length": 1}, "llama", "gemma.context_length"),
        ({"general_nmae": "x"}, None, "general_name"),
        ({"llama.context_length": 1, "llama_context_length": 2}, "llama", "twice"),
        ({"llama.context_length": 1, "gemma.context_length": 2}, None, "architecture="),
        ({"llama.context_length": -1}, "llama", "UINT32"),
        ({"llama.context_length": 1.5}, "llama", "UINT32"),
        ({"llama.context_length": True}, "llama", "UINT32"),
        ({"general.name": 3}, "llama", "STRING"),
        ({"llama.rope.dimension_sections": 3}, "llama", "ARRAY"),
        ({"general.alignment": 24}, "llama", "power of two"),
        ({"a": 2**64}, None, "64 bits"),
        ({"a": None}, None, "NoneType"),
        ({"a": [1, "x"]}, None, "one type"),
        ({"a": 1j}, None, "complex"),
        ({"a": "\ud800"}, None, "surrogate"),
        ({"": 1}, None, "empty"),
        ({1: 1}, None, "strings"),
        ({"general.architecture": "a"}, "b", "architecture"),
    ],
)
def test_refused_metadata(tmp_path: Path, metadata: Any, architecture: str | None, word: str) -> None:
    with pytest.raises(ValueRefusedError) as caught:
        ai.save_gguf(tmp_path / "m.gguf", {"w": W}, metadata, architecture=architecture)
    assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# --- loading ----------------------------------------------------------------------------------------------------------


def test_metadata_is_saved_again_as_it_was(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    extra = {"x.e1": [], "x.e2": np.zeros(0, np.int8), "x.deep": [[["a"]], []], "x.f": [np.float64(0.5)], "x.s": ""}
    ai.save_gguf(first, {"w": W}, {**EVERY_TYPE, **extra}, architecture="llama")
    back = ai.load_gguf(first)
    ai.save_gguf(second, back.params, back.metadata)
    assert second.read_bytes() == first.read_bytes()
    for kind, value in SCALARS.items():
        found = back.metadata[f"x.{kind.lower()}"]
        assert found == (struct.unpack("<f", struct.pack("<f", value))[0] if kind == "FLOAT32" else value)
        plain = infer(value if kind != "FLOAT32" else 0.5).kind == kind
        assert isinstance(found, (bool, int, float, str)) if plain else isinstance(found, NUMPY[kind]), kind
    assert back.metadata.llama_context_length == 4096
    with pytest.raises(KeyError):
        back.metadata["llama_context_lengths"]


def test_loading_maps_and_decodes_late(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    params = record(layers=[record(w=W, b=W[0]), record(w=W[::-1], b=W[1])], k=np.arange(4), h=W.astype(np.float16))
    ai.save_gguf(path, params, dtype="q8_0", architecture="x", tensor_types={"h": "f16"})
    back = ai.load_gguf(path).params
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    decoded = gguf.quants.dequantize(gguf.quants.quantize(W, q8_0), q8_0)
    assert "Later" in type(dict.__getitem__(back.layers[0], "w")).__name__  # nothing decoded so far
    assert type(back.layers[0].w) is np.ndarray
    assert np.array_equal(back.layers[0].w, decoded)
    assert back.layers[0].w is back.layers[0]["w"]
    assert not back.h.flags.owndata
    assert not back.h.flags.writeable
    assert [back.h.dtype, back.k.dtype, back.layers[1].b.dtype] == [np.float16, np.int64, np.float32]
    for turn in (dict(back.layers[1]), {**back.layers[1]}, back.layers[1].copy(), record(back.layers[1].items())):
        assert type(turn["w"]) is np.ndarray
    raw = ai.load_gguf(path, decode=False).params
    assert raw.layers[0].w.encoding == "Q8_0"
    assert np.array_equal(np.asarray(raw.layers[0].w), decoded)


@pytest.mark.parametrize(
    "params",
    [
        [W, W[0]],
        record(b=W, a=W),
        (W, [W[0]], record()),
        record(a=record({"x.y": W}), n=3, t=True, none=None, s="x"),
        record({"1": W, "0": W[0]}),
        {},
    ],
)
def test_trees_come_back(tmp_path: Path, params: Any) -> None:
    path = tmp_path / "m.gguf"
    ai.save_gguf(path, params, dtype=None)
    assert shape_of(ai.load_gguf(path).params) == shape_of(params)


def shape_of(node: Any) -> Any:
    if isinstance(node, dict):
        return [(k, shape_of(v)) for k, v in node.items()]
    if isinstance(node, (list, tuple)):
        return (type(node) is tuple, [shape_of(v) for v in node])
    return node.tobytes() if isinstance(node, np.ndarray) else node


def test_units_come_back(tmp_path: Path) -> None:
    import pint

    u = pint.get_application_registry()
    path = tmp_path / "m.gguf"
    params = record(t=u.Quantity(W, "degC"), d=u.Quantity(W[0], "km"), e=u.Quantity(np.float32(2), "J"), p=W)
    ai.save_gguf(path, params, dtype="q8_0", architecture="x")
    text = gguf.GGUFReader(path).fields["apsi.units.d"].contents()
    unit = {"dim": [1, 0, 0, 0, 0, 0, 0], "scale": "1000.0", "offset": "0.0"}
    assert json.loads(text) == {"unit": unit, "symbol": "km"}
    assert json.loads(gguf.GGUFReader(path).fields["apsi.units.e"].contents()) == {
        "unit": [2, 1, -2, 0, 0, 0, 0], "symbol": "J",
    }  # fmt: skip
    back = ai.load_gguf(path).params
    assert [str(back[n].units) for n in "dte"] == ["kilometer", "degree_Celsius", "joule"]
    assert np.array_equal(back.d.magnitude, W[0])
    assert isinstance(back.p, np.ndarray)
    assert {n: str(unit) for n, unit in ai.open(path).units.items()} == {"t": "degC", "d": "km", "e": "J"}


def test_a_bad_unit_or_tree_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    bad = {"apsi.units.w": "{", "apsi.units.v": '{"unit": [1,0,0,0,0,0,0]}', "apsi.tree": '{"$record": [["a", "zz"]]}'}

    def fill(w: gguf.GGUFWriter) -> None:
        for key, value in bad.items():
            w.add_string(key, value)
        w.add_tensor("w", W)

    reference(path, fill)
    model = ai.open(path)
    assert [f.code for f in model.findings] == ["apsi-key"] * 3
    assert not model.units
    assert np.array_equal(model.tree()["w"], W)


# --- what is not as asked ---------------------------------------------------------------------------------------------


def test_fallbacks_are_reported(tmp_path: Path) -> None:
    params = {
        "odd": np.ones((3, 33), np.float32), "norm": np.ones(64, np.float16), "q": W, "i": np.arange(3, dtype=np.int32),
        "u8": np.arange(3, dtype=np.uint8), "flag": np.array([True, False]), "u32": np.array([2**32 - 1], np.uint32),
    }  # fmt: skip
    report = ai.save_gguf(tmp_path / "m.gguf", params, dtype="q4_0", architecture="x")
    found = {t.name: (t.after, t.action, bool(t.reason)) for t in report.tensors}
    assert found == {
        "odd": ("F16", "re-encoded", True), "norm": ("F32", "expanded", True), "q": ("Q4_0", "re-encoded", False),
        "i": ("I32", "kept", False), "u8": ("I16", "expanded", True), "flag": ("I8", "expanded", True),
        "u32": ("I64", "expanded", True),
    }  # fmt: skip
    back = ai.load_gguf(tmp_path / "m.gguf").params
    for name in ("i", "u8", "flag", "u32"):
        assert np.array_equal(back[name], params[name])
    assert "33" in str(report)
    assert "odd" in report._repr_html_()


@pytest.mark.parametrize(
    ("x", "dtype", "words"),
    [
        (np.full((2, 256), np.nan, np.float32), "q8_0", ["w", "not finite"]),
        (np.full((2, 256), np.inf, np.float32), "q4_k", ["w", "not finite"]),
        (np.full((2, 256), 1e9, np.float32), "q8_0", ["w", "float16 scale"]),
        (np.full((2, 256), 1e9, np.float32), "q4_k", ["w", "float16 scale"]),
        (np.array([2**63], np.uint64), "f16", ["w", "fit"]),
        (np.array([1j]), "f16", ["w", "C128"]),
    ],
)
def test_values_that_cannot_be_stored_are_refused(tmp_path: Path, x: Any, dtype: str, words: list[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ValueRefusedError) as caught:
        ai.save_gguf(path, {"ok": W, "w": x}, dtype=dtype, architecture="x")
    assert all(word in str(caught.value) for word in words), caught.value
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_values_that_become_infinite_are_said(tmp_path: Path) -> None:
    report = ai.save_gguf(tmp_path / "m.gguf", {"w": np.full((2, 2), 1e6)}, architecture="x")
    (finding,) = [f for f in report.findings if f.code == "overflow"]
    assert "tensor 'w': 4 values" in finding.message


@pytest.mark.parametrize("dtype", ["q4_k_m", "int8", "", "f8_e4m3", "iq2_xs", 16])
def test_unknown_dtypes_are_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueRefusedError, match="dtype"):
        ai.save_gguf(tmp_path / "m.gguf", {"w": W}, dtype=dtype)


def test_what_llama_cpp_would_not_load_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    report = ai.save_gguf(path, {"n" * 70: W, "deep": np.ones((1, 1, 1, 1, 2), np.float32)}, {"x.n": [[1]]})
    assert {f.code for f in report.findings} == {"long-name", "rank", "nested-array", "no-architecture"}
    assert "n" * 70 in ai.open(path)
    assert c_loader(path) == [None]


@pytest.mark.parametrize("known", [None, "INT32", "FLOAT32", "BOOL"])
def test_integers_of_thousands_of_digits(known: str | None) -> None:
    with pytest.raises(ValueRefusedError, match="integer of 16610 bits"):  # 5000 · log2(10) = 16609.6
        infer(10**5000, known)

"""`compare` against NumPy in float64, ggml's quantizers, gguf's writer, torch and onnx."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.ops.compare import compare
from apsi_inspect.ops.comparison import COLUMNS, Comparison
from apsi_inspect.ops.roundings import TYPICAL
from apsi_inspect.parts import to_html, to_text

from .ggml_oracle import library

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
X = RNG.standard_normal((96, 512)).astype(np.float32)


def saved(path: Path, metadata: dict[str, str] | None = None, **tensors: Array) -> Path:
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path, metadata)
    return path


def gguf_file(path: Path, tensors: dict[str, tuple[Array, int | None]], arch: str = "llama", **keys: int) -> Path:
    """Arrays, or bytes of blocks with their type."""
    w = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        w.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    for name, (array, kind) in tensors.items():
        w.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType(kind))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def only(c: Comparison) -> Any:
    (t,) = c.tensors
    return t


def test_measures_are_those_of_numpy(tmp_path: Path) -> None:
    y = (X + 1e-3 * RNG.standard_normal(X.shape)).astype(np.float32)
    y[17, 200] = 9
    c = compare(saved(tmp_path / "a.safetensors", w=X), saved(tmp_path / "b.safetensors", w=y))
    t = only(c)
    x64, y64 = X.astype(np.float64), y.astype(np.float64)
    error = x64 - y64
    assert t.verdict == "changed"
    assert (c.verdict, c.same) == ("different", False)
    assert t.max_at == (17, 200)
    assert t.at == (X[17, 200], 9)
    assert t.differ == np.count_nonzero(X != y)
    row = c.frame.iloc[0]
    assert row.mse == pytest.approx((error**2).mean(), rel=1e-6)
    assert row.rel_l2 == pytest.approx(np.linalg.norm(error) / np.linalg.norm(x64), rel=1e-6)
    assert row.max_abs_error == pytest.approx(abs(error).max(), rel=1e-6)
    assert row.sqnr_db == pytest.approx(10 * np.log10((x64**2).sum() / (error**2).sum()), rel=1e-6)
    assert row.cosine == pytest.approx((x64 * y64).sum() / np.linalg.norm(x64) / np.linalg.norm(y64), rel=1e-6)


def test_one_value_is_found(tmp_path: Path) -> None:
    y = X.copy()
    y[3, 7] = np.nextafter(y[3, 7], np.float32(9))
    t = only(compare(saved(tmp_path / "a.safetensors", w=X), saved(tmp_path / "b.safetensors", w=y)))
    assert (t.verdict, t.differ, t.max_at) == ("changed", 1, (3, 7))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(tmp_path: Path, special: float) -> None:
    x = X.copy()
    x[0, :3] = special
    y = x.copy()
    a = saved(tmp_path / "a.safetensors", w=x, n=np.zeros(3, np.float32))
    assert compare(a, saved(tmp_path / "b.safetensors", w=y, n=np.zeros(3, np.float32))).verdict == "identical"
    wide = saved(tmp_path / "c.safetensors", w=y.astype(np.float64), n=-np.zeros(3, np.float32))
    c = compare(a, wide)
    assert c.verdict == "identical"
    assert [t.note for t in c.tensors] == ["3 zeros differ in sign", ""]
    assert not any(t.same_bytes for t in c.tensors)
    y[0, 1] = 1
    t = compare(a, saved(tmp_path / "d.safetensors", w=y)).of("changed")[0]
    assert (t.differ, t.sums.nonfinite) == (1, 1)
    assert "1 not finite on one side" in t.note


INTEGERS = ["int8", "uint8", "int16", "int32", "int64", "uint64", "bool"]


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_are_compared_as_integers(tmp_path: Path, kind: str) -> None:
    top = 1 if kind == "bool" else np.iinfo(kind).max
    x = np.full((4, 5), top, kind)
    y = x.copy()
    y[2, 2] = top - 1  # 2^63 - 1 and 2^63 - 2 are one float64
    a, b = saved(tmp_path / "a.safetensors", i=x), saved(tmp_path / "b.safetensors", i=y)
    assert only(compare(a, a)).same_bytes
    t = only(compare(a, b))
    assert (t.verdict, t.differ) == ("changed", 1)


def test_complex_values_and_nothing(tmp_path: Path) -> None:
    z = (X[:4, :8] + 1j * X[:4, 8:16]).astype(np.complex64)
    w = z.copy()
    w[1, 1] += 1j
    none = np.zeros((0, 4), np.float32)
    a = saved(tmp_path / "a.safetensors", z=z, none=none, scalar=np.float32(3))
    c = compare(a, saved(tmp_path / "b.safetensors", z=w, none=none, scalar=np.float32(3)))
    assert [t.verdict for t in c.tensors] == ["identical", "identical", "changed"]
    assert c.tensors[2].metric("max_abs_error") == pytest.approx(1)


GGUF_TYPES = ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q2_k", "q3_k", "q4_k", "q6_k", "iq4_nl", "mxfp4"]


@pytest.mark.parametrize("dtype", GGUF_TYPES)
def test_what_convert_writes_is_exactly_rounded(tmp_path: Path, dtype: str) -> None:
    a = saved(tmp_path / "a.safetensors", w=X)
    ai.convert(a, tmp_path / "b.gguf", dtype)
    there, back = compare(a, tmp_path / "b.gguf"), compare(tmp_path / "b.gguf", a)
    t = only(there)
    assert (there.verdict, t.verdict, t.rounded, t.ratio) == ("rounded", "quantization noise", "b", 1)
    assert (only(back).verdict, only(back).rounded) == ("quantization noise", "a")
    values = np.asarray(ai.open(tmp_path / "b.gguf")["w"], np.float64)
    assert t.metric("mse") == pytest.approx(((values - X) ** 2).mean(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8", "fp8_e5m2", "fp6", "fp4", "bf16"])
@pytest.mark.parametrize("block", [None, 64, "axis"])
def test_formats_of_apsim(tmp_path: Path, dtype: str, block: Any) -> None:
    a = saved(tmp_path / "a.safetensors", w=X)
    ai.convert(a, tmp_path / "b.apsim", dtype, block=block)
    c = compare(a, tmp_path / "b.apsim")
    assert (c.verdict, only(c).rounded) == ("rounded", "b")
    same = compare(tmp_path / "b.apsim", tmp_path / "b.apsim")
    assert same.verdict == "identical"


def test_scales_along_other_axes(tmp_path: Path) -> None:
    """Pieces of one tensor do not fit those of the other: one of them is decoded as a whole."""
    x = RNG.standard_normal((700, 800)).astype(np.float32)
    rows, columns = (ai.quantize(x, "int8", axis=axis) for axis in (1, 0))
    ai.save_model(tmp_path / "rows.apsim", ai.record(w=rows))
    ai.save_model(tmp_path / "columns.apsim", ai.record(w=columns))
    a = saved(tmp_path / "a.safetensors", w=x)
    for name in ("rows", "columns"):
        assert only(compare(a, tmp_path / f"{name}.apsim")).rounded == "b"
    t = only(compare(tmp_path / "rows.apsim", tmp_path / "columns.apsim"))
    error = rows.dequantize().astype(np.float64) - columns.dequantize()
    assert t.verdict == "quantization noise"
    assert t.metric("mse") == pytest.approx((error**2).mean(), rel=1e-6)


def with_imatrix(name: str, x: Array) -> tuple[Array, int]:
    """ggml's quantizer with an importance matrix: the bytes, and the type."""
    kind = int(gguf.GGMLQuantizationType[name])
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    weights = np.exp(RNG.standard_normal(x.shape[1])).astype(np.float32)
    out = np.empty((len(x), x.shape[1] // size * nbytes), np.uint8)
    library().ggml_quantize_init(kind)
    library().ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, len(x), x.shape[1], weights.ctypes.data)
    return out, kind


def student(shape: tuple[int, int]) -> Array:
    return RNG.standard_t(3, shape).astype(np.float32)


@pytest.mark.parametrize("values", [lambda s: RNG.standard_normal(s).astype(np.float32), student], ids=["normal", "t3"])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", *TYPICAL])
def test_other_quantizers_are_noise_and_edits_are_not(
    tmp_path: Path, name: str, values: Callable[[tuple[int, int]], Array]
) -> None:
    x = values((64, 1024))
    a = saved(tmp_path / "a.safetensors", w=x)
    t = only(compare(a, gguf_file(tmp_path / "b.gguf", {"w": with_imatrix(name, x)})))
    assert t.verdict == "quantization noise"
    assert t.rounded == ""
    assert (t.ratio is None) == (name in TYPICAL)
    y = x.copy()
    y[:16] *= -1  # a quarter of the rows
    c = compare(a, gguf_file(tmp_path / "c.gguf", {"w": with_imatrix(name, y)}))
    assert only(c).verdict == "changed"


def test_one_edited_value_among_blocks(tmp_path: Path) -> None:
    y = X.copy()
    y[40, 40] += 3
    blocks = gguf.quantize(y, gguf.GGMLQuantizationType.Q8_0)
    a, b = saved(tmp_path / "a.safetensors", w=X), gguf_file(tmp_path / "b.gguf", {"w": (blocks, 8)})
    t = only(compare(a, b))
    assert (t.verdict, t.max_at) == ("changed", (40, 40))
    assert "times the error of rounding" in t.note
    exact = gguf_file(tmp_path / "c.gguf", {"w": (gguf.quantize(X, gguf.GGMLQuantizationType.Q8_0), 8)})
    assert only(compare(a, exact)).rounded == "b"
    assert only(compare(exact, b)).verdict == "changed"  # equal encodings: no rounding between them


def test_floats_that_were_cut_off(tmp_path: Path) -> None:
    cut = (X.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(ml_dtypes.bfloat16)
    t = only(compare(saved(tmp_path / "a.safetensors", w=X), saved(tmp_path / "b.safetensors", w=cut)))
    assert (t.verdict, t.rounded) == ("quantization noise", "")
    assert 1.5 < t.ratio < 2.1


def test_two_roundings_of_one_original(tmp_path: Path) -> None:
    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)
    a, b = (gguf_file(tmp_path / f"{k}.gguf", {"w": (gguf.quantize(X, k), int(k))}) for k in kinds)
    assert only(compare(a, b)).verdict == only(compare(b, a)).verdict == "quantization noise"


# The formula of `LlamaModel.permute` in llama.cpp's conversion/llama.py
def permute(w: Array, n_head: int) -> Array:
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def llama(seed: int = 1) -> tuple[dict[str, Array], dict[str, Array]]:
    """A tiny Llama in both forms: 4 heads and 2 key-value heads of 8 rows, 2 blocks."""
    r = np.random.default_rng(seed)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    shapes = {"self_attn.q_proj.weight": (32, 64), "self_attn.k_proj.weight": (16, 64), "self_attn.k_proj.bias": (16,),
              "self_attn.v_proj.weight": (16, 64), "mlp.down_proj.weight": (64, 96)}  # fmt: skip
    hf = {f"model.layers.{i}.{n}": r.standard_normal(s).astype(np.float32) for i in (0, 1) for n, s in shapes.items()}
    hf["model.embed_tokens.weight"] = hf["lm_head.weight"] = r.standard_normal((50, 64)).astype(np.float32)
    heads = {"q_proj": 4, "k_proj": 2}
    g = {}
    for name, w in hf.items():
        n = next((n for key, n in heads.items() if key in name), 0)
        if name != "lm_head.weight":
            g[str(table.get_name(name, (".weight", ".bias")))] = np.ascontiguousarray(permute(w, n) if n else w)
    return hf, g


HEADS = {"attention__head_count": 4, "attention__head_count_kv": 2}


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0], ids=["f32", "q8_0"])
def test_rows_of_llama_are_permuted(tmp_path: Path, kind: Any) -> None:
    hf, g = llama()
    a = saved(tmp_path / "a.safetensors", **hf)
    blocks = {n: (gguf.quantize(w, kind), int(kind)) if kind and w.ndim == 2 else (w, None) for n, w in g.items()}
    b = gguf_file(tmp_path / "b.gguf", blocks, **HEADS)
    for c in (compare(a, b), compare(b, a)):
        assert c.verdict == ("rounded" if kind else "identical")
        assert not c.of("missing")
        permuted = [t for t in c.tensors if "permuted" in t.note]
        assert len(permuted) == 6
        assert all(t.rounded or t.verdict == "identical" for t in c.tensors)
    assert {t.how for t in c.tensors} == {"map", "tied"}


def test_rows_that_are_not_permuted_are_seen(tmp_path: Path) -> None:
    """Some writers leave the rows alone: what fits better is taken, and said."""
    hf, g = llama()
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    plain = {
        n: (hf[h], None) for h in hf if h != "lm_head.weight" for n in [str(table.get_name(h, (".weight", ".bias")))]
    }
    c = compare(saved(tmp_path / "a.safetensors", **hf), gguf_file(tmp_path / "b.gguf", plain, **HEADS))
    assert c.verdict == "identical"
    assert not any("permuted" in t.note for t in c.tensors)
    changed = {n: (w, None) for n, w in g.items()}
    changed["blk.0.attn_q.weight"] = (g["blk.0.attn_q.weight"] * np.float32(1.01), None)
    c = compare(tmp_path / "a.safetensors", gguf_file(tmp_path / "c.gguf", changed, **HEADS))
    (t,) = c.of("changed")
    assert "permuted" in t.note
    assert t.metric("rel_l2") == pytest.approx(0.01, rel=1e-3)


def test_a_real_output_matrix_is_missed(tmp_path: Path) -> None:
    hf, g = llama()
    hf["lm_head.weight"] = hf["lm_head.weight"] + 1
    b = gguf_file(tmp_path / "b.gguf", {n: (w, None) for n, w in g.items()}, **HEADS)
    c = compare(saved(tmp_path / "a.safetensors", **hf), b)
    (t,) = c.of("missing")
    assert (t.a, t.b, t.note) == ("lm_head.weight", None, "only in A, and not the embedding of B")
    assert c.reason == "of 12 tensors 1 missing in B"


def test_norms_of_gemma_and_matrices_of_gpt2(tmp_path: Path) -> None:
    norm, wide = X[0, :64].copy(), X[:24, :8].copy()
    a = saved(tmp_path / "a.safetensors", **{"model.norm.weight": norm})
    c = compare(a, gguf_file(tmp_path / "b.gguf", {"output_norm.weight": (norm + 1, None)}, "gemma2"))
    assert (only(c).verdict, only(c).note) == ("identical", "1 added")
    a = saved(tmp_path / "c.safetensors", **{"h.0.mlp.c_fc.weight": wide})
    b = gguf_file(tmp_path / "d.gguf", {"blk.0.ffn_up.weight": (np.ascontiguousarray(wide.T), None)}, "gpt2")
    t = only(compare(a, b))
    assert (t.verdict, t.shape_a, t.shape_b, t.note) == ("shape differs", (24, 8), (8, 24), "transposed in GGUF")


def test_shapes(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.safetensors", w=X[:4], conv=X[:4].reshape(4, 512, 1))
    b = saved(tmp_path / "b.safetensors", w=X[:4].T, conv=X[:4])
    c = compare(a, b)
    conv, w = c.tensors
    assert (conv.verdict, w.verdict) == ("identical", "shape differs")
    assert "dimensions of 1 left out" in conv.note
    assert (w.shape_a, w.shape_b, w.sums) == ((4, 512), (512, 4), None)


def test_pytorch_and_onnx(tmp_path: Path) -> None:
    w = torch.tensor(X[:16])
    torch.save({"w": w, "b": w[0].bfloat16()}, tmp_path / "a.pt")
    bias = w[0].bfloat16().float().numpy()
    a = saved(tmp_path / "a.safetensors", w=X[:16], b=bias)
    assert compare(tmp_path / "a.pt", a).verdict == "identical"
    tensors = [numpy_helper.from_array(X[:16], "w"), numpy_helper.from_array(bias, "b")]
    graph = helper.make_graph([], "g", [], [], initializer=tensors)
    onnx.save_model(helper.make_model(graph, ir_version=10), tmp_path / "a.onnx")
    c = compare(tmp_path / "a.onnx", tmp_path / "a.pt")
    assert (c.a.format, c.b.format, c.verdict) == ("onnx", "pytorch", "identical")


def test_quantized_codes_of_pytorch_and_onnx(tmp_path: Path) -> None:
    x = X[:16, :64]
    scale = (abs(x).max(1) / 127).astype(np.float32)
    q = torch.quantize_per_channel(
        torch.tensor(x), torch.tensor(scale), torch.zeros(16, dtype=torch.int64), 0, torch.qint8
    )
    torch.save({"w": q}, tmp_path / "q.pt")
    a = saved(tmp_path / "a.safetensors", w=x)
    t = only(compare(a, tmp_path / "q.pt"))
    error = q.dequantize().numpy().astype(np.float64) - x
    assert t.verdict == "quantization noise"
    assert t.metric("mse") == pytest.approx((error**2).mean(), rel=1e-6)
    codes = np.clip(np.rint(x / scale[:, None]), -128, 127).astype(np.int8)
    tensors = [numpy_helper.from_array(v, n) for n, v in {"w": codes, "s": scale, "z": np.zeros(16, np.int8)}.items()]
    node = helper.make_node("DequantizeLinear", ["w", "s", "z"], ["y"], axis=0)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 64])
    onnx.save_model(
        helper.make_model(helper.make_graph([node], "g", [], [out], initializer=tensors)), tmp_path / "q.onnx"
    )
    assert only(compare(a, tmp_path / "q.onnx")).rounded == "b"
    codes[3, 3] ^= 64
    tensors[0] = numpy_helper.from_array(codes, "w")
    onnx.save_model(
        helper.make_model(helper.make_graph([node], "g", [], [out], initializer=tensors)), tmp_path / "e.onnx"
    )
    assert only(compare(a, tmp_path / "e.onnx")).verdict == "changed"


@pytest.mark.parametrize("scales", [(), (16,), (16, 1), (16, 4)], ids=str)
def test_scales_beside_codes(tmp_path: Path, scales: tuple[int, ...]) -> None:
    x = X[:16, :64]
    groups = x.reshape(16, -1, 16) if scales == (16, 4) else x.reshape(16, 1, 64)
    s = (abs(groups).max(2, keepdims=True) / 127) if scales else np.full((16, 1, 1), abs(x).max() / 127)
    codes = np.rint(groups / s.astype(np.float32)).astype(np.int8).reshape(16, 64)
    stored = (s.reshape(scales) if scales else s[0, 0, 0]).astype(np.float32)
    tensors = {"w.qweight": codes, "w.scale": np.asarray(stored)}
    c = compare(saved(tmp_path / "a.safetensors", w=x), saved(tmp_path / "b.safetensors", **tensors))
    assert (only(c).verdict, only(c).rounded, only(c).how) == ("quantization noise", "b", "codes")


def test_the_shipped_pair() -> None:
    c = compare(ai.samples.path("fracast.safetensors"), ai.samples.path("fracast-int8.safetensors"))
    assert c.counts == {"identical": 27, "quantization noise": 20, "changed": 0, "shape differs": 0, "missing": 0}
    assert [d.key for d in c.metadata] == ["quantization"]


def test_metadata_and_units(tmp_path: Path) -> None:
    gguf_file(tmp_path / "a.gguf", {"w": (X, None)}, context_length=77, block_count=2)
    ai.convert(tmp_path / "a.gguf", tmp_path / "b.safetensors")
    assert compare(tmp_path / "a.gguf", tmp_path / "b.safetensors").metadata == ()  # typed keys as text: the same
    gguf_file(tmp_path / "c.gguf", {"w": (X, None)}, context_length=78, head_count=3)
    c = compare(tmp_path / "a.gguf", tmp_path / "c.gguf")
    assert [tuple(d) for d in c.metadata] == [
        ("llama.context_length", "77", "78"), ("llama.block_count", "2", None), ("llama.head_count", None, "3"),
    ]  # fmt: skip
    assert c.verdict == "identical"
    import pint

    u = pint.UnitRegistry()
    for name, unit in (("m", u.metre), ("km", u.kilometre)):
        ai.save_model(tmp_path / f"{name}.apsim", ai.record(w=X * unit))
    c = compare(tmp_path / "m.apsim", tmp_path / "km.apsim")
    assert (c.verdict, only(c).note) == ("different", "unit m is km")
    assert [tuple(d) for d in c.units] == [("w", "m", "km")]
    plain = compare(tmp_path / "m.apsim", saved(tmp_path / "plain.safetensors", w=X))
    assert plain.verdict == "identical"
    assert plain.units[0].b is None


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_an_executor_gives_the_same(tmp_path: Path, pool: Any) -> None:
    hf, g = llama()
    blocks = {n: (gguf.quantize(w, 2), 2) if w.ndim == 2 else (w, None) for n, w in g.items()}
    a, b = saved(tmp_path / "a.safetensors", **hf), gguf_file(tmp_path / "b.gguf", blocks, **HEADS)
    with pool(2) as executor:
        for one, two in ((a, b), tuple(ai.samples.path(f"fracast{x}.safetensors") for x in ("", "-int8"))):
            assert compare(one, two, executor=executor).to_dict() == compare(one, two).to_dict()


def test_trees_in_memory(tmp_path: Path) -> None:
    """Arrays and QTensors against the file that was saved from them, and from torch."""
    small = X[:8].astype(ml_dtypes.bfloat16)
    params = ai.record(
        layers=[ai.record(w=ai.quantize(X, "int4", axis=-1, block=32), b=X[0])],
        flags=np.array([True, False]), half=small, int4=X[0].astype(ml_dtypes.int4), scalar=np.float32(2), t=X[:, ::2],
    )  # fmt: skip
    ai.save_model(tmp_path / "a.apsim", ai.record((k, v) for k, v in params.items() if k != "int4"))
    c = compare(params, tmp_path / "a.apsim")
    assert [t.name for t in c.tensors if t.verdict != "identical"] == ["int4"]
    assert c.a.format == "in memory"
    tuned = ai.record(params, scalar=np.float32(3), int4=params.int4)
    assert [t.name for t in compare(params, tuned).of("changed")] == ["scalar"]
    state = {"layers.0.b": torch.tensor(X[0]), "half": torch.tensor(small.astype(np.float32)).bfloat16()}
    assert {t.verdict for t in compare(state, params, tensors="[hl]*[bf]").tensors} == {"identical"}
    for nothing in ({}, 3, {"x": object()}):
        with pytest.raises(ValueRefusedError):
            compare(params, nothing)
    with ProcessPoolExecutor(1) as pool, pytest.raises(ValueRefusedError, match="in memory"):
        compare(params, tuned, executor=pool)


def test_a_selection(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.safetensors", w=X, v=X, u=X)
    b = saved(tmp_path / "b.safetensors", w=X, v=X + 1)
    with ai.open(a) as one, ai.open(b) as two:
        assert [t.name for t in compare(one, two, tensors="[uw]").tensors] == ["u", "w"]
        assert np.asarray(one["w"]).shape == X.shape  # still open
    with pytest.raises(ValueRefusedError, match="no tensor matches 'nope'"):
        compare(a, b, tensors="nope")
    with pytest.raises(FileNotFoundError):
        compare(a, tmp_path / "nothing.gguf")


def test_memory_is_bounded(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    code = "from apsi_inspect.ops.compare import compare\nprint(compare(*sys.argv[1:], progress=False).verdict)"
    grew = {}
    for times in (3, 700):  # 138 MB of float32
        big = np.tile(X, (times, 1))
        a, b = saved(tmp_path / "a.safetensors", w=big), saved(tmp_path / "b.safetensors", w=big.astype(np.float16))
        out, grew[times] = measured(code, a, b)
        assert out == "rounded"
    assert grew[700] < grew[3] + 40
    out, same = measured(code, a, a)
    assert out == "identical"
    assert same < grew[3] + 40


def test_text_and_html_say_the_same(tmp_path: Path) -> None:
    y = X.copy()
    y[3, 7] = 9
    a = saved(tmp_path / "a.safetensors", {"k": "1"}, one=X, two=X, gone=X, shape=X, half=X)
    b = saved(tmp_path / "b.safetensors", {"k": "<b>"}, one=X, two=y, shape=X[1:], half=X.astype(np.float16))
    c = compare(a, b)
    text, html = to_text(c._parts()), to_html(c._parts())
    for fact in (
        "different",
        "two",
        "[3, 7]",
        "gone",
        "only in A",
        "95 × 512",
        "F32 → F16",
        "exactly",
        "a.safetensors",
    ):
        assert fact in text, fact
        assert fact in html, fact
    assert "Of 5 tensors 1 changed, 1 shape differs, 1 missing in B." in text
    assert "<b>" not in html
    assert " one " not in text.partition("Changed")[2]  # identical: only counted
    assert repr(c).startswith("<Comparison ")


def test_it_is_frozen_and_a_document(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.safetensors", w=X, none=X[:0], zero=0 * X)
    c = compare(a, saved(tmp_path / "b.safetensors", w=X * 2, none=X[:0], zero=X))
    with pytest.raises(AttributeError):
        c.notes = ()
    document = json.loads(json.dumps(c.to_dict(), allow_nan=False))
    assert (document["schema_version"], document["verdict"], document["same"]) == (1, "different", False)
    assert list(document["tensors"][0]) == list(c.frame.columns) == list(COLUMNS)
    assert document["tensors"][2]["sqnr_db"] is None  # of nothing but zeros
    assert c.frame["verdict"].tolist() == ["identical", "changed", "changed"]
    nothing = saved(tmp_path / "c.safetensors", other=X)
    assert compare(a, nothing).reason == "of 4 tensors 1 missing in A, 3 missing in B"

"""`quant_error` against ggml's own quantizers and decoders, ml_dtypes and the .apsim rules, in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import apsi_inspect as ai
from apsi_inspect.cli import main
from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.round_trip import CLIP, decoder, encoder
from apsi_inspect.kernels import error as k
from apsi_inspect.kernels._jit import vectors_pay
from apsi_inspect.ops.error import FORMATS, parse_format, quant_error
from apsi_inspect.ops.error_table import COLUMNS, TOTALS
from apsi_inspect.ops.trials import FUSED, Piece, trial_of

from .ggml_oracle import families, reference
from .html_page import Page
from .oracles import c_decode

MEASURES = ("mse", "rmse", "rel_l2", "max_abs_error", "sqnr_db", "cosine")
RNG = np.random.default_rng(11)

# The bytes of codes in a block, and what they are when all codes are the lowest, the next, the last but one, the last
NIBBLES = (0x00, 0x11, 0xEE, 0xFF)
FLOATS = (0xFF, 0xEE, 0x66, 0x77)
HIGH = (0x00, 0x00, 0xFF, 0xFF)
PAIRS = (0x00, 0x55, 0xAA, 0xFF)
ENDS: dict[str, tuple[tuple[slice, tuple[int, int, int, int]], ...]] = {
    "Q8_0": ((slice(2, 34), (0x81, 0x82, 0x7E, 0x7F)),),
    "Q4_0": ((slice(2, 18), NIBBLES),),
    "Q4_1": ((slice(4, 20), NIBBLES),),
    "Q5_0": ((slice(2, 6), HIGH), (slice(6, 22), NIBBLES)),
    "Q5_1": ((slice(4, 8), HIGH), (slice(8, 24), NIBBLES)),
    "Q2_K": ((slice(16, 80), PAIRS),),
    "Q3_K": ((slice(0, 32), HIGH), (slice(32, 96), PAIRS)),
    "Q4_K": ((slice(16, 144), NIBBLES),),
    "Q5_K": ((slice(16, 48), HIGH), (slice(48, 176), NIBBLES)),
    "Q6_K": ((slice(0, 128), NIBBLES), (slice(128, 192), HIGH)),
    "IQ4_NL": ((slice(2, 18), NIBBLES),),
    "IQ4_XS": ((slice(8, 136), NIBBLES),),
    "TQ1_0": ((slice(0, 48), (0x00, 0x80, 0x80, 0xFF)), (slice(48, 52), (0x00, 0x7F, 0x7F, 0xFF))),
    "TQ2_0": ((slice(0, 64), (0x00, 0x55, 0x55, 0xAA)),),
    "MXFP4": ((slice(1, 17), FLOATS),),
    "NVFP4": ((slice(4, 36), FLOATS),),
    "Q1_0": ((slice(2, 18), (0x00, 0xFF, 0x00, 0xFF)),),
    "Q2_0": ((slice(2, 18), PAIRS),),
}


def expected(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Every measure by its definition."""
    a, b = x.astype("f8").reshape(-1), y.astype("f8").reshape(-1)
    e = a - b
    mse = (e * e).mean()
    return {
        "mse": mse,
        "rmse": np.sqrt(mse),
        "rel_l2": np.linalg.norm(e) / np.linalg.norm(a),
        "max_abs_error": np.abs(e).max(),
        "sqnr_db": 10 * np.log10((a * a).sum() / (e * e).sum()) if e.any() else np.inf,
        "cosine": a @ b / (np.linalg.norm(a) * np.linalg.norm(b)),
    }


def by_ggml(name: str, x: np.ndarray) -> tuple[np.ndarray, int]:
    """Values after ggml's quantizer and decoder, and how many lie beyond the grid of their block."""
    blocks = reference(name, x.reshape(-1, 256))
    y = c_decode(name, blocks, x.size)
    ends = []
    for i in range(4):
        other = blocks.copy()
        for where, codes in ENDS[name]:
            other[:, where] = codes[i]
        ends.append(c_decode(name, other, x.size).astype("f8"))
    first = ends[0] + (ends[0] - ends[1]) / 2
    last = ends[3] + (ends[3] - ends[2]) / 2
    v = x.astype("f8").reshape(-1)
    return y, int(((v < np.minimum(first, last)) | (v > np.maximum(first, last))).sum())


def check(row: Any, x: np.ndarray, y: np.ndarray, clipped: int) -> None:
    for name, value in expected(x, y).items():
        assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-300), name
    e = np.abs(x.astype("f8").reshape(-1) - y.reshape(-1))
    assert e[row["max_at"]] == pytest.approx(e.max(), rel=1e-6)
    assert row["zeroed"] == ((x.reshape(-1) != 0) & (y.reshape(-1) == 0)).sum() / x.size
    assert row["clipped"] == clipped / x.size


def weights_like(rows: int, columns: int) -> np.ndarray:
    x = RNG.standard_t(4, (rows, columns)) * 0.02 * np.exp2(RNG.uniform(-3, 3, (rows, 1)))
    x[:, ::7] = 0
    return x.astype("f4")


@pytest.mark.parametrize("name", sorted(ENDS))
def test_block_formats_equal_ggml(name: str) -> None:
    x = weights_like(700, 512)  # more than a segment, and a rest
    row = quant_error(x, name.lower()).frame.iloc[0]
    check(row, x, *by_ggml(name, x))
    e = ENCODINGS[name]
    assert (row["bpw"], row["nbytes"], row["note"]) == (e.bpw, x.size // e.block_size * e.block_bytes, "")


def test_every_block_format_that_is_written_is_tried() -> None:
    assert set(ENDS) == set(CLIP) == {e.name for e in ENCODINGS.values() if e.is_block and e.encode}


@pytest.mark.parametrize("name", sorted(ENDS))
def test_odd_values_equal_ggml(name: str) -> None:
    for family, x in families(6, seed=2).items():
        with np.errstate(all="ignore"):
            y, _ = by_ggml(name, x)
            good = np.isfinite(y).all()
            row = quant_error(x, name).frame.iloc[0]
            if not good:
                assert np.isnan(row["mse"]), family
                assert "not finite" in row["note"]
                continue
            a, b = x.astype("f8").reshape(-1), y.astype("f8")
            assert row["mse"] == pytest.approx(((a - b) ** 2).mean(), rel=1e-6), family
            assert row["max_abs_error"] == pytest.approx(np.abs(a - b).max(), rel=1e-6), family
            assert row["zeroed"] == ((a != 0) & (b == 0)).mean(), family


@pytest.mark.parametrize("more", [2048, 2048 + 96, 64, -32])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.skipif(not vectors_pay(), reason="the CPU runs the plain loops")
def test_one_pass_gives_the_bits_of_three(name: str, more: int) -> None:
    encoding = ENCODINGS[name]
    into, back, size = encoder(encoding), decoder(encoding), encoding.block_size
    for family, x in families(16, seed=3).items():
        piece = Piece(np.tile(x.reshape(-1), 20)[: k.SEGMENT + more])
        given = piece.values
        segments = 1 + (more > 0)
        rows = np.zeros((segments, k.COLUMNS))
        trial_of(encoding, 256, False)(piece, rows)
        raw = np.zeros(given.size // size * encoding.block_bytes, np.uint8)
        y = np.zeros(given.size, np.float32)
        into(given, raw, 0, given.size // size)
        back(raw, y, 0, given.size // size)
        y.flags.writeable = False
        apart = np.zeros((segments, k.COLUMNS))
        k.pair_sums(given, y, apart)
        rows[:, k.CLIPPED] = 0
        assert np.array_equal(rows, apart, equal_nan=True), family


SMALL = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f8_e4m3": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2, "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "f4": ml_dtypes.float4_e2m1fn, "f6_e2m3": ml_dtypes.float6_e2m3fn,
    "f6_e3m2": ml_dtypes.float6_e3m2fn,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_floats_equal_ml_dtypes(name: str) -> None:
    x = (weights_like(300, 500) * 20).astype("f4")
    top = float(ml_dtypes.finfo(SMALL[name]).max)
    x = np.clip(x, -top, top).astype("f4")
    row = quant_error(x, name).frame.iloc[0]
    check(row, x, x.astype(SMALL[name]).astype("f4"), 0)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_beyond_the_range_of_small_floats(name: str) -> None:
    grid = (
        np.unique(np.arange(256, dtype=np.uint8).view(SMALL[name]).astype("f8"))
        if name[0] == "f" and name[1] in "468"
        else None
    )
    top = float(ml_dtypes.finfo(SMALL[name]).max)
    if grid is None or name == "f16":
        step = 32.0 if name == "f16" else 2.0**120
    else:
        step = top - grid[np.isfinite(grid) & (grid < top)].max()
    inside, beyond = np.float32(top + step / 2), np.nextafter(np.float32(top + step / 2), np.float32(np.inf))
    x = np.zeros((4, 8), "f4")
    x[1, 1], x[2, 2], x[3, 3] = inside, beyond, -beyond
    table = quant_error(x, name)
    sums = table.rows[0].sums
    assert sums is not None
    assert sums.clipped == 2
    saturates = name in ("f4", "f6_e2m3", "f6_e3m2")
    assert (sums.nonfinite == 0) == saturates
    assert np.isnan(table.frame["mse"][0]) != saturates
    assert ("not finite" in table.frame["note"][0]) != saturates


SCALED = {
    "int8": (127, None), "int4": (7, 32), "fp8": (448, None), "fp8_e5m2": (57344, None), "fp6": (7.5, 32),
    "fp6_e3m2": (28, 32), "fp4": (6, 32),
}  # fmt: skip
_SCALED_FLOATS = {
    "fp8": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "fp6": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn, "fp4": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def by_apsim(x: np.ndarray, fmt: str) -> np.ndarray:
    """docs/apsim-format.md, section 5, row by row and block by block."""
    top, block = SCALED[fmt]
    out = np.empty_like(x)
    step = block or x.shape[1]
    for i in range(0, x.shape[1], step):
        part = x[:, i : i + step]
        scale = (np.abs(part).max(axis=1, keepdims=True) / np.float32(top)).astype("f4")
        q = part / np.where(scale == 0, np.float32(1), scale)
        q = np.clip(q, -top, top).astype("f4")
        codes = np.rint(q) if fmt.startswith("int") else q.astype(_SCALED_FLOATS[fmt]).astype("f4")
        out[:, i : i + step] = codes * scale
    return out


@pytest.mark.parametrize("columns", [96, 100])
@pytest.mark.parametrize("fmt", sorted(SCALED))
def test_scaled_formats_equal_the_specification(fmt: str, columns: int) -> None:
    x = weights_like(900, columns)
    row = quant_error(x, fmt).frame.iloc[0]
    check(row, x, by_apsim(x, fmt), 0)
    q = ai.quantize(x, fmt)
    assert row["nbytes"] == q.nbytes
    assert quant_error(q, "f32").rows[0].nbytes == 4 * x.size


def test_float64_is_compared_as_it_is() -> None:
    x = RNG.normal(0, 1, (64, 256))
    y, clipped = by_ggml("Q8_0", x.astype("f4"))
    check(quant_error(x, "q8_0").frame.iloc[0], x, y, clipped)
    check(quant_error(x, "f32").frame.iloc[0], x, x.astype("f4"), 0)
    check(quant_error(x, "f16").frame.iloc[0], x, x.astype("f2"), 0)


def test_what_a_format_cannot_take_says_what_convert_would_do(tmp_path: Path) -> None:
    tree = {
        "w": weights_like(4, 256), "odd": weights_like(4, 100), "norm": np.ones(256, "f4"), "ids": np.arange(4),
        "half": weights_like(4, 256).astype("f2"),
    }  # fmt: skip
    save_file(tree, tmp_path / "m.safetensors")
    frame = quant_error(tmp_path / "m.safetensors", ["q4_k", "int8", "f16"]).frame.set_index(["name", "format"])
    assert frame.loc[("w", "q4_k"), "note"] == ""
    odd = frame.loc[("odd", "q4_k")]
    assert odd["note"] == "convert stores it in f16: rows of 100 are no multiple of the 256 of Q4_K"
    assert np.isnan(odd["mse"])
    assert (odd["bpw"], odd["nbytes"], odd["max_at"]) == (16, 800, -1)
    assert frame.loc[("odd", "int8"), "note"] == ""
    assert frame.loc[("norm", "q4_k"), "note"] == "convert keeps it as f32: it is 1-D; runtimes need those in F32"
    assert "only matrices are quantized" in frame.loc[("norm", "int8"), "note"]
    assert frame.loc[("ids", "q4_k"), "note"] == "convert keeps it as i64: it is no float but I64"
    half = frame.loc[("half", "f16")]
    assert (half["mse"], half["sqnr_db"], half["note"]) == (0, np.inf, "is stored in f16")
    totals = quant_error(tmp_path / "m.safetensors", ["q4_k"]).totals.iloc[0]
    floats = [tree[n].reshape(-1).astype("f8") for n in ("w", "odd", "norm", "half")]
    as_stored = [
        by_ggml("Q4_K", tree["w"])[0].reshape(-1), tree["odd"].reshape(-1).astype("f2"), floats[2],
        by_ggml("Q4_K", tree["half"].astype("f4"))[0].reshape(-1),
    ]  # fmt: skip
    for measure, value in expected(np.concatenate(floats), np.concatenate(as_stored)).items():
        assert totals[measure] == pytest.approx(value, rel=1e-6), measure
    assert (totals["tensors"], totals["numel"], totals["covered"]) == (2, 2704, 2048 / 2708)
    assert totals["note"] == "3 tensors not in it, counted as stored"
    report = ai.convert(tmp_path / "m.safetensors", tmp_path / "m.gguf", dtype="q4_k")
    assert totals["nbytes"] == sum(t.nbytes for t in report.tensors)


def test_totals_are_over_all_elements() -> None:
    tree = {"a": weights_like(64, 256), "b": weights_like(8, 512) * 3, "c": np.zeros((2, 256), "f4")}
    table = quant_error(tree, ["q4_0", "q8_0"])
    assert list(table.frame.columns) == list(COLUMNS)
    assert list(table.totals.columns) == list(TOTALS)
    x = np.concatenate([v.reshape(-1, 256) for v in tree.values()])
    y, clipped = by_ggml("Q4_0", x)
    total = table.totals.iloc[0]
    for name, value in expected(x, y).items():
        assert total[name] == pytest.approx(value, rel=1e-6)
    assert total["clipped"] == clipped / x.size
    assert total["worst"] == "b"
    assert total["bpw"] == 4.5


@pytest.mark.parametrize("name", ["tiny-llama.gguf", "quantized.apsim"])
def test_any_encoding_is_decoded_first(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "quantized.apsim":
        wanted = (("int8", -1), ("int4", 0), ("fp6", 1), ("fp8", None), ("fp4", -1))
        tree = {fmt: ai.quantize(weights_like(40, 96), fmt, axis) for fmt, axis in wanted}
        tree |= {f"across {n}": ai.quantize(weights_like(70, n), "int8", 0, 16) for n in (64, 96)}
        tree["large"] = ai.quantize(weights_like(6000, 96), "int8", 0, 32)
        ai.save_model(path, tree)
    else:
        ai.samples.write(tmp_path, [name])
    with ai.open(path) as m:
        frame = quant_error(m, ["q8_0", "bf16"]).frame
        done = 0
        for _, row in frame.iterrows():
            t = m[row["name"]]
            if t.info.encoding.kind not in ("block", "scaled") or row["note"]:
                continue
            x = np.asarray(t)
            y = x.astype(ml_dtypes.bfloat16).astype("f4") if row["format"] == "bf16" else None
            if y is None:
                raw = gguf.quants.quantize(x.reshape(-1, 32), gguf.GGMLQuantizationType.Q8_0)
                y = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).reshape(x.shape)
            for measure, value in expected(x, y).items():
                assert row[measure] == pytest.approx(value, rel=1e-6), (row["name"], measure)
            done += 1
        assert done >= 8


def test_already_stored_and_exact_formats(tmp_path: Path) -> None:
    x = weights_like(8, 256)
    ai.save_gguf(tmp_path / "m.gguf", {"w": x}, dtype="q8_0")
    frame = quant_error(tmp_path / "m.gguf", ["q8_0", "int8", "f32", "q4_0"]).frame.set_index("format")
    assert frame.loc["q8_0", "note"] == "is stored in q8_0"
    assert (frame["mse"][["q8_0", "int8", "f32"]] == 0).all()
    assert frame.loc["q4_0", "mse"] > 0
    assert frame.loc["int8", "nbytes"] == x.size + 4 * x.size // 32


def test_values_that_are_not_finite() -> None:
    x = weights_like(4, 256)
    x[1, 3], x[2, 5] = np.nan, np.inf
    table = quant_error({"w": x, "v": weights_like(4, 256)}, ["q8_0", "q4_k", "int8", "f16", "f8_e4m3"])
    frame = table.frame.set_index(["name", "format"])
    for fmt in ("q8_0", "q4_k", "int8"):
        row = frame.loc[("w", fmt)]
        assert row["note"] == f"2 values not finite, or too large for {fmt}"
        assert all(np.isnan(row[m]) for m in MEASURES)
    good = np.isfinite(x)
    assert frame.loc[("w", "f16"), "mse"] * x.size == pytest.approx(
        ((x[good].astype("f8") - x[good].astype("f2")) ** 2).sum(), rel=1e-6
    )
    assert "1 value not finite, or too large for f8_e4m3" in frame.loc[("w", "f8_e4m3"), "note"]
    assert not np.isnan(table.totals["mse"]).any()
    assert table.totals["note"][0] == "1 tensor left out of the error: not finite, or too large for q8_0"
    large = quant_error({"w": np.full((2, 32), 1e38, "f4"), "v": np.ones((2, 32), "f4")}, ["q8_0", "f16"]).totals
    assert [*large["note"]] == [
        f"1 tensor left out of the error: not finite, or too large for {f}" for f in ("q8_0", "f16")
    ]
    assert [*large["numel"]] == [64, 64]


@pytest.mark.parametrize("fmt", ["q8_0", "int8", "f16"])
def test_totals_of_a_sample_count_every_tensor_by_its_size(fmt: str) -> None:
    tree = {"a": RNG.normal(0, 1, (1000, 1024)).astype("f4"), "b": RNG.normal(0, 100, (4, 1024)).astype("f4")}
    table = quant_error(tree, fmt, sample=4096, weights={n: np.linspace(0.5, 2, 1024) for n in tree})
    frame, total = table.frame, table.totals.iloc[0]
    for measure in ("mse", "zeroed", "clipped", "weighted_mse"):
        assert total[measure] == pytest.approx(np.average(frame[measure], weights=frame["numel"]), rel=1e-12), measure
    signal = frame["numel"] * frame["mse"] * 10 ** (frame["sqnr_db"] / 10)
    assert total["sqnr_db"] == pytest.approx(10 * np.log10(signal.sum() / (frame["numel"] * frame["mse"]).sum()))
    assert total["numel"] == 1004 * 1024
    assert total["mse"] == pytest.approx(quant_error(tree, fmt).totals["mse"][0], rel=0.1)


def test_size_and_error_are_of_the_same_tensors(tmp_path: Path) -> None:
    tree = {"w": weights_like(64, 256), "odd": weights_like(64, 288), "norm": np.ones(256, "f4"), "ids": np.arange(9)}
    save_file(tree, tmp_path / "m.safetensors")
    total = quant_error(tmp_path / "m.safetensors", ["q4_k", "q8_0", "f16"]).totals.set_index("format")
    names = ("w", "odd", "norm")
    for fmt in ("q4_k", "q8_0"):
        ai.convert(tmp_path / "m.safetensors", tmp_path / f"{fmt}.gguf", dtype=fmt)
        read = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{fmt}.gguf").tensors}
        y = np.concatenate([gguf.quants.dequantize(read[n].data, read[n].tensor_type).reshape(-1) for n in names])
        x = np.concatenate([tree[n].reshape(-1) for n in names])
        assert total.loc[fmt, "mse"] == pytest.approx(expected(x, y)["mse"], rel=1e-6)
        assert total.loc[fmt, "nbytes"] == sum(int(t.n_bytes) for t in read.values())
    assert total.loc["f16", "note"] == "1 tensor not in it, counted as stored"
    text = str(quant_error(tmp_path / "m.safetensors", ["q4_k", "q8_0"]))
    share = 1000 * 64 * 256 // (64 * 256 + 64 * 288 + 256 + 9) / 10
    assert f"{share:g} %" in text
    assert "100 %" not in text  # norms do not take q8_0


def test_plain_floats_go_by_the_rules_of_a_gguf_model(tmp_path: Path) -> None:
    ai.save_gguf(tmp_path / "m.gguf", {"w": weights_like(8, 256), "norm": weights_like(1, 256)[0]}, dtype=None)
    for fmt in ("f16", "bf16"):
        frame = quant_error(tmp_path / "m.gguf", fmt).frame.set_index("name")
        report = ai.convert(tmp_path / "m.gguf", tmp_path / f"{fmt}.gguf", dtype=fmt)
        assert dict(frame["nbytes"]) == {t.name: t.nbytes for t in report.tensors}
        assert frame.loc["norm", "note"] == "convert keeps it as f32: it is 1-D; runtimes need those in F32"
        with ai.open(tmp_path / "m.gguf") as m:
            assert quant_error(m, fmt, container="apsim").rows[1].nbytes == 512
            plan = ai.plan(m, bpw=20, formats=[fmt], keep={"norm": fmt}, errors=quant_error(m, fmt))
        assert [r.chosen for r in plan.rows] == [fmt.upper()] * 2


def test_arguments_of_the_wrong_kind_are_named() -> None:
    x = np.ones((2, 32), "f4")
    for match, given in (
        ("tensors is 5", {"tensors": 5}), ("formats is 3", {"formats": 3}),
        ("container is 'zip'", {"container": "zip"}),
    ):  # fmt: skip
        with pytest.raises(ai.ValueRefusedError, match=match):
            quant_error(x, **given)
    for numbers in ([1.0, 2.0], ([1, 2], [3, 4])):
        with pytest.raises(ai.ValueRefusedError, match="of numbers is no tensor"):
            quant_error(numbers)


def test_threads_executors_and_cuts_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": weights_like(3000, 576), "b": weights_like(3, 70000).copy(), "c": weights_like(50, 33).astype("f2")}
    save_file(tree, tmp_path / "m.safetensors")
    formats = ["q8_0", "q4_0", "f16", "int8", "int4"]
    one = quant_error(tmp_path / "m.safetensors", formats)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert quant_error(tmp_path / "m.safetensors", formats).rows == one.rows
    monkeypatch.setattr("apsi_inspect.ops.inputs.PIECE", 1 << 16)
    assert quant_error(tmp_path / "m.safetensors", formats).rows == one.rows
    with ThreadPoolExecutor(3) as pool:
        assert quant_error(tmp_path / "m.safetensors", formats, executor=pool).rows == one.rows
    monkeypatch.setattr("apsi_inspect.ops.error_pieces._PART", 1 << 18)
    assert quant_error(tmp_path / "m.safetensors", formats).rows == one.rows
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert quant_error(tmp_path / "m.safetensors", formats, executor=pool).rows == one.rows
        with pytest.raises(ai.ValueRefusedError, match="in memory"):
            quant_error(tree, formats, executor=pool)


@pytest.mark.parametrize("odd", [0.0, np.inf, 1e-30])
def test_many_segments_at_a_time_give_the_bits_of_one(
    odd: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = weights_like(3001, 352)  # 16 segments and a part, which ends with less than a group
    flat = x.reshape(-1)
    flat[3 * k.SEGMENT : 4 * k.SEGMENT] = 0 if odd != np.inf else flat[: k.SEGMENT]
    flat[5 * k.SEGMENT + 7 : 6 * k.SEGMENT - 5 : 9] = odd
    flat[-3] = 9 if odd == 0 else odd
    save_file({"array": x}, tmp_path / "m.safetensors")
    formats = [f.lower() for f in FUSED]
    one = quant_error(x, formats).rows
    assert quant_error(tmp_path / "m.safetensors", formats).rows == one
    alone = quant_error({"array": x}, [*formats, "f16"]).rows
    assert alone[: len(one)] == one
    for name, value in (("error_pieces._PART", 1 << 16), ("inputs.PIECE", 1 << 16), ("error_pieces._READ", 1)):
        monkeypatch.setattr(f"apsi_inspect.ops.{name}", value)
        assert quant_error(x, formats).rows == one
        assert quant_error(tmp_path / "m.safetensors", formats).rows == one
    if odd != np.inf:
        for row in one:
            y, clipped = by_ggml(row.format.upper(), np.pad(flat, (0, -x.size % 256)))
            y = y[: x.size]
            assert row.sums is not None
            assert row.sums.squares == pytest.approx(((flat.astype("f8") - y) ** 2).sum(), rel=1e-6)
            assert row.sums.max_abs == pytest.approx(np.abs(flat - y)[row.sums.max_at], rel=1e-6)
            assert row.sums.clipped == clipped
    else:
        assert all(row.sums is not None and row.sums.nonfinite > 7000 for row in one)


def test_a_sample_is_whole_rows_and_says_so() -> None:
    x = weights_like(1000, 256)
    table = quant_error(x, ["q4_0", "int8"], sample=25600)
    assert table.sampled == 25600
    rows = x[[i * 10 for i in range(100)]]
    y, _ = by_ggml("Q4_0", rows)
    row = table.frame.iloc[0]
    for name, value in expected(rows, y).items():
        assert row[name] == pytest.approx(value, rel=1e-6)
    at = int(row["max_at"])
    assert at // 256 % 10 == 0
    worst = np.abs(rows.astype("f8").reshape(-1) - y).argmax()
    assert at == worst // 256 * 2560 + worst % 256
    assert row["numel"] == x.size
    assert "sample" in str(table)
    assert quant_error(x, "q4_0", sample=10**9).rows == quant_error(x, "q4_0").rows


@pytest.mark.parametrize("sample", [None, 20000])
def test_weights_of_columns(sample: int | None) -> None:
    x, stack = weights_like(500, 256), weights_like(6 * 40, 64).reshape(6, 40, 64)
    w, v = RNG.random(256).astype("f4"), RNG.random((6, 64)).astype("f4")
    table = quant_error({"x": x, "stack": stack}, "q4_0", sample=sample, weights={"x": w, "stack": v})
    for name, data, weight in (("x", x, np.broadcast_to(w, x.shape)), ("stack", stack, np.repeat(v[:, None], 40, 1))):
        y = by_ggml("Q4_0", data)[0].reshape(data.shape)
        e2 = (data.astype("f8") - y) ** 2
        if sample is not None and name == "x":
            picked = [i * 500 // 78 for i in range(78)]
            e2, weight = e2[picked], weight[picked]
        value = table.frame.set_index("name").loc[name, "weighted_mse"]
        assert value == pytest.approx((weight * e2).sum() / weight.astype("f8").sum(), rel=1e-6)
    assert np.isnan(quant_error(x, "q4_0").frame["weighted_mse"][0])


def test_arrays_tensors_and_trees_are_taken(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = weights_like(4, 256)
    first = quant_error(x, "q4_0").frame.loc[0, "mse"]
    assert quant_error(torch.from_numpy(x), "q4_0").frame.loc[0, "mse"] == first
    assert quant_error([x, {"a": x}], "q4_0").frame["mse"].tolist()[0] == first
    save_file({"w": x}, tmp_path / "m.safetensors")
    with ai.open(tmp_path / "m.safetensors") as m:
        assert quant_error(m["w"], "q4_0").frame.loc[0, "mse"] == first
        assert quant_error(m, "q4_0", "w*").frame.loc[0, "name"] == "w"


def test_real_model_against_gguf() -> None:
    path = ai.samples.path("fracast.safetensors")
    frame = quant_error(path, ["q8_0", "f16"]).frame.set_index(["name", "format"])
    for name, x in load_file(path).items():
        if frame.loc[(name, "q8_0"), "note"]:
            continue
        raw = gguf.quants.quantize(x.astype("f4"), gguf.GGMLQuantizationType.Q8_0)
        y = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        for measure, value in expected(x, y).items():
            assert frame.loc[(name, "q8_0"), measure] == pytest.approx(value, rel=1e-6)


def test_refusals(tmp_path: Path) -> None:
    x = weights_like(2, 256)
    with pytest.raises(ai.ValueRefusedError, match=r"format 'q9' is not known; known: .*q4_k.*int8"):
        quant_error(x, "q9")
    with pytest.raises(ai.ValueRefusedError, match="no tensor matches 'nope'"):
        quant_error({"w": x}, "q4_0", "nope")
    with pytest.raises(ai.ValueRefusedError, match="256 columns"):
        quant_error({"w": x}, "q4_0", weights={"w": np.ones(5)})
    with pytest.raises(ai.ValueRefusedError, match="no tensor here"):
        quant_error({"w": x}, "q4_0", weights={"v": np.ones(256)})
    with pytest.raises(ai.ValueRefusedError, match="sample"):
        quant_error(x, "q4_0", sample=0)
    with pytest.raises(ai.ValueRefusedError, match="no format"):
        quant_error(x, [])
    with pytest.raises(ai.ValueRefusedError, match="neither an array"):
        quant_error(object())
    assert [parse_format(w).word for w in FORMATS] == list(FORMATS)


def test_nothing_to_measure() -> None:
    empty = {"e": np.zeros((0, 32), "f4"), "i": np.arange(3)}
    table = quant_error(empty, "q8_0")
    assert np.isnan(table.frame["mse"]).all()
    assert "q8_0" in str(table)
    assert len(quant_error({}, "q8_0").frame) == 0


@pytest.mark.slow
def test_warm_leaves_nothing_to_compile(tmp_path: Path) -> None:
    code = """
import numpy as np
from numba.core import event
import apsi_inspect.kernels.warm as w
from apsi_inspect.ops.error import quant_error
w.warm()
formats = ["q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs", "mxfp4", "f16", "f8_e4m3", "f4", "f32", "int8", "int4", "fp6"]
x = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(8, 512)
with event.install_recorder("numba:compile") as recorder:
    quant_error({"a": x, "b": x.astype("f8"), "c": x.astype("f2")}, formats, weights={"a": np.ones(512)})
print(len(recorder.buffer))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False,
        cwd=Path(__file__).parents[1], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "0"


def test_text_and_html_say_the_same() -> None:
    tree = {"first<b>": weights_like(64, 256), "norm": np.ones(4, "f4")}
    table = quant_error(tree, ["q8_0", "q4_0"])
    text, page = str(table), Page(table._repr_html_()).text
    for view in (text, page):
        for word in ("q8_0", "q4_0", "first<b>", f"{table.totals['sqnr_db'][1]:.2f}", f"{table.totals['mse'][1]:.4g}"):
            assert word in view
    assert text.index("q8_0") < text.index("first<b>")  # totals first
    assert "<b>" not in table._repr_html_().replace("&lt;b&gt;", "")
    assert repr(table) == "<ErrorTable 'parameters': 2 tensors in q8_0, q4_0>"


def test_json_of_a_table() -> None:
    table = quant_error({"w": weights_like(4, 256), "n": np.ones(4, "f4"), "z": np.zeros((1, 32), "f4")}, "q8_0")
    d = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert [t["name"] for t in d["tensors"]] == ["w", "n", "z"]
    assert (d["tensors"][1]["mse"], d["tensors"][1]["max_at"]) == (None, None)
    assert d["tensors"][2]["sqnr_db"] == "inf"
    assert d["totals"][0]["tensors"] == 2
    nothing = quant_error({"y": np.zeros((0, 32), "f4"), "z": np.zeros((1, 32), "f4")}, "q8_0").totals.iloc[0]
    assert (nothing["worst"], nothing["mse"]) == ("", 0)
    assert d["sampled"] is None


def test_cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ai.samples.path("fracast.safetensors"))
    assert main(["model", "quantize-error", path, "--formats", "q8_0,q4_0", "--tensors", "core.*", "--json"]) == 0
    d = json.loads(capsys.readouterr().out)
    assert d["schema_version"] == 1
    assert (d["file"], d["formats"]) == (path, ["q8_0", "q4_0"])
    table = quant_error(path, ["q8_0", "q4_0"], "core.*")
    assert d["tensors"] == table.to_dict()["tensors"]
    assert main(["model", "quantize-error", path, "--sort", "-mse", "--sample", "1000"]) == 0
    out = capsys.readouterr().out
    assert "sample" in out
    assert "mxfp4" in out
    assert main(["model", "quantize-error", path, "--formats", "q9"]) == 2
    assert "q9" in capsys.readouterr().err
    assert main(["model", "quantize-error", path, "--sort", "nonsense"]) == 2
    assert main(["model", "quantize-error", str(tmp_path / "missing.gguf")]) == 3

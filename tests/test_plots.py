"""Plots: what is drawn compared with NumPy and the `gguf` library; hostile names; no pyplot; readable on any ground."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pandas as pd
import pytest
from gguf.quants import dequantize
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from safetensors.numpy import save_file

import apsi_inspect as ai
from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.notebook import plots
from apsi_inspect.notebook.plots_codes import LAYOUTS, code_range, codes_of, scales_of
from apsi_inspect.notebook.plots_data import code_counts, errors, grid, histogram, rounded, scale_pieces, source_of
from apsi_inspect.notebook.plots_drawing import BLUE, INK, ORANGE
from apsi_inspect.notebook.plots_tables import front, heat

EVIL = "a$\\frac{1}{0}$<b>&\x1b[31m\u202e\"'文.weight"


def steps(figure: Figure) -> list[Any]:
    """Counts and edges of the histograms drawn."""
    return [p.get_data() for p in figure.axes[0].patches if isinstance(p, StepPatch)]


def texts(figure: Figure) -> list[Text]:
    found = [t for t in figure.findobj(Text) if isinstance(t, Text) and t.get_text()]
    return found


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# Block bytes whose scales are 1 and whose minima are 0: what gguf decodes is then the code itself (or its table entry).
ONE = b"\x00\x3c"
UNIT: dict[str, dict[int, bytes]] = {
    "Q4_0": {0: ONE}, "Q4_1": {0: ONE, 2: b"\0\0"}, "Q5_0": {0: ONE}, "Q5_1": {0: ONE, 2: b"\0\0"}, "Q8_0": {0: ONE},
    "Q2_K": {0: b"\x01" * 16, 80: ONE + b"\0\0"}, "Q3_K": {96: b"\x11" * 8 + b"\xaa" * 4, 108: ONE},
    "Q4_K": {0: ONE + b"\0\0" + b"\x01" * 4 + b"\0" * 4 + b"\x01" * 4},
    "Q5_K": {0: ONE + b"\0\0" + b"\x01" * 4 + b"\0" * 4 + b"\x01" * 4}, "Q6_K": {192: b"\x01" * 16 + ONE},
    "IQ4_NL": {0: ONE}, "IQ4_XS": {0: ONE + b"\xaa\xaa" + b"\x11" * 4}, "MXFP4": {0: b"\x7f"}, "TQ2_0": {64: ONE},
}  # fmt: skip
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("name", UNIT)
def test_codes_are_those_that_gguf_decodes(name: str, rng: np.random.Generator) -> None:
    encoding = ENCODINGS[name]
    blocks = rng.integers(0, 256, (40, encoding.block_bytes), np.uint8)
    if name == "TQ2_0":  # a code of 3 is not made
        blocks = (blocks & 0b01010101) | ((blocks & 0b10101010) & ~((blocks & 0b01010101) << 1))
    for at, raw in UNIT[name].items():
        blocks[:, at : at + len(raw)] = np.frombuffer(raw, np.uint8)
    values = dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[name]).reshape(-1)
    codes = codes_of(encoding, blocks.tobytes())
    low, high = code_range(encoding)
    assert low <= codes.min()
    assert codes.max() <= high
    table = {"IQ4_NL": IQ4, "IQ4_XS": IQ4, "MXFP4": E2M1}.get(name)
    meant = codes.astype(float) if table is None else np.asarray(table, float)[codes]
    for got, expected in zip(np.unique(meant, return_counts=True), np.unique(values, return_counts=True), strict=True):
        np.testing.assert_array_equal(got, expected)


# Code bytes that mean 1 everywhere: what gguf decodes is then the scale itself.
ONES: dict[str, list[tuple[int, int, int]]] = {
    "Q4_0": [(2, 18, 0x99)], "Q4_1": [(2, 4, 0), (4, 20, 0x11)], "Q5_0": [(2, 6, 0xFF), (6, 22, 0x11)],
    "Q5_1": [(2, 8, 0), (8, 24, 0x11)], "Q8_0": [(2, 34, 1)], "Q2_K": [(16, 80, 0x55), (82, 84, 0)],
    "Q3_K": [(0, 32, 0xFF), (32, 96, 0x55)], "Q4_K": [(2, 4, 0), (16, 144, 0x11)],
    "Q5_K": [(2, 4, 0), (16, 48, 0), (48, 176, 0x11)], "Q6_K": [(0, 128, 0x11), (128, 192, 0xAA)],
    "IQ4_NL": [(2, 18, 0x88)], "IQ4_XS": [(8, 136, 0x88)], "MXFP4": [(1, 17, 0x22)], "TQ2_0": [(0, 64, 0xAA)],
}  # fmt: skip


@pytest.mark.parametrize("name", ONES)
def test_scales_are_those_that_gguf_uses(name: str, rng: np.random.Generator) -> None:
    encoding = ENCODINGS[name]
    blocks = rng.integers(0, 256, (64, encoding.block_bytes), np.uint8)
    for offset, size, count in encoding.swap:
        if size == 2:
            halves = rng.standard_normal((64, count)).astype("<f2")
            if name != "IQ4_XS":
                blocks[:, offset : offset + 2 * count] = halves.view(np.uint8)
            else:
                blocks[:, offset : offset + 2] = halves[:, :1].copy().view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 150, 64)
    for begin, end, value in ONES[name]:
        blocks[:, begin:end] = value
    values = dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[name]).reshape(64, -1)
    scales = scales_of(encoding, blocks.tobytes()).reshape(64, -1)
    groups = values.reshape(64, scales.shape[1], -1)
    np.testing.assert_array_equal(groups, np.broadcast_to(scales[:, :, None].astype(np.float32), groups.shape))


def test_a_histogram_is_numpys(rng: np.random.Generator) -> None:
    x = rng.standard_normal(1_300_000)
    x[[5, 1_200_000]] = np.nan, np.inf
    good = x[np.isfinite(x)]
    for values in (x, x.astype(np.float32)):
        source = source_of(values)
        assert len(source.cuts(1)) > 1
        found = histogram(lambda s=source: (s.read(a, b) for a, b in s.cuts(1)), 50)  # type: ignore[misc]
        wide = values[np.isfinite(values)].astype(np.float64)
        counts, edges = np.histogram(wide, 50)
        np.testing.assert_array_equal(found.counts, counts)
        np.testing.assert_array_equal(found.edges, edges)
        assert (found.n, found.nonfinite) == (good.size, 2)
        assert found.mean == pytest.approx(wide.mean(), abs=1e-12)
        assert found.std == pytest.approx(wide.std(), rel=1e-12)


@pytest.mark.parametrize("word", ["q4_0", "q8_0"])
def test_the_error_drawn_is_that_of_gguf(word: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[word.upper()]
    y = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    error = y.astype(np.float64) - x
    figure = plots.error_histogram(x, word, bins=41)
    m = abs(error).max()
    counts, edges = np.histogram(error, np.linspace(-m, m, 42))
    [drawn] = steps(figure)
    np.testing.assert_array_equal(drawn.values, np.maximum(counts, 0.6))
    np.testing.assert_allclose(drawn.edges, edges, rtol=1e-12)
    rmse = float(np.sqrt((error**2).mean()))
    lines = [line.get_xdata()[0] for line in figure.axes[0].lines]  # type: ignore[index]
    np.testing.assert_allclose(lines, [-rmse, rmse], rtol=1e-6)
    sqnr = 10 * np.log10((x.astype(float) ** 2).sum() / (error**2).sum())
    assert f"RMSE {rmse:.4g}".replace("-", "−") in figure.alt
    assert f"SQNR {sqnr:.2f} dB" in figure.alt


@pytest.mark.parametrize("word", ["int8", "int4", "fp8", "fp6", "fp4", "bf16", "f16"])
def test_pieces_give_what_the_whole_tensor_gives(word: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((900, 1000)).astype(np.float32)
    found, sums = errors(rounded(source_of(x), word), 30)
    whole = x.astype(np.float16) if word == "f16" else np.asarray(ai.quantize(x, word).dequantize())
    error = whole.astype(np.float64) - x
    assert found.n == sums.n == x.size
    assert sums.rmse == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6)
    np.testing.assert_array_equal(found.counts, np.histogram(error, found.edges)[0])
    assert found.high == pytest.approx(error.max(), rel=1e-12)


def test_values_their_approximation_and_the_grid(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    raw = gguf.quants.quantize(x, kind).reshape(-1, 18)
    y = gguf.quants.dequantize(raw.reshape(8, -1), kind)
    figure = plots.value_histogram(x, "q4_0", bins=20)
    ends = min(x.min(), y.min()), max(x.max(), y.max())
    counts, edges = np.histogram(x.astype(np.float64), 20, ends)
    values, approximation = steps(figure)
    np.testing.assert_array_equal(values.values, np.maximum(counts, 0.6))
    np.testing.assert_array_equal(approximation.values, np.maximum(np.histogram(y.astype(float), edges)[0], 0.6))
    assert np.histogram(y.astype(float), edges)[0].sum() == x.size
    levels, what = grid(source_of(x), "Q4_0")
    peaks = abs(x.reshape(-1, 32)).max(axis=1)
    block = int(np.argsort(peaks, kind="stable")[8])
    assert what == f"grid of a typical block (number {block})"
    d = float(raw[block, :2].copy().view("<f2")[0])
    np.testing.assert_array_equal(levels, np.sort(np.float32(d) * np.arange(-8, 8, dtype=np.float32)))
    [marks] = figure.axes[0].lines
    inside = levels[(levels >= edges[0]) & (levels <= edges[-1])]
    np.testing.assert_array_equal(marks.get_xdata(), inside)


def test_grids_of_the_other_formats(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 256)).astype(np.float32)
    source = source_of(x)
    assert grid(source, "F16")[0].size == 0
    assert grid(source, "int4")[0].size == 15
    fp4 = grid(source, "fp4")[0]
    np.testing.assert_allclose(fp4 / fp4.max() * 6, sorted(set(E2M1)), rtol=1e-6)
    for name in ("Q5_0", "Q6_K", "Q4_K", "Q3_K", "IQ4_NL", "MXFP4"):
        most = 2 ** LAYOUTS[name].bits
        assert most // 2 < grid(source, name)[0].size <= most, name


def test_a_fallback_is_said(rng: np.random.Generator) -> None:
    figure = plots.error_histogram(rng.standard_normal((4, 100)).astype(np.float32), "q4_k")
    said = " ".join(t.get_text() for t in texts(figure))
    assert "as F16" in said
    assert "rows of 100 are no multiple of the 256 of Q4_K" in said
    exact = plots.error_histogram(np.ones((4, 256), np.float32), "f32")
    assert "no error" in exact.alt


def test_codes_and_scales_of_files(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((32, 256)).astype(np.float32)
    save_file({"w.weight": x}, tmp_path / "m.safetensors")
    ai.convert(tmp_path / "m.safetensors", tmp_path / "m.gguf", "q8_0")
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0).reshape(-1, 34)
    with ai.open(tmp_path / "m.gguf") as model:
        tensor = model["w.weight"]
        codes, counts = code_counts(tensor)
        expected = np.bincount(raw[:, 2:].view(np.int8).reshape(-1).astype(int) + 128, minlength=256)
        np.testing.assert_array_equal(counts, expected)
        np.testing.assert_array_equal(codes, np.arange(-128, 128))
        scales = raw[:, :2].copy().view("<f2").astype(np.float64).reshape(-1)
        np.testing.assert_array_equal(np.concatenate(list(scale_pieces(tensor))), scales)
        figure = plots.code_utilisation(tensor)
        heights = [p.get_height() for p in figure.axes[0].patches]  # type: ignore[attr-defined]
        np.testing.assert_allclose(heights, 100 * expected / expected.sum())
        share = expected[expected > 0] / expected.sum()
        assert f"entropy {-(share * np.log2(share)).sum():.2f} of 8.00 bits" in figure.alt
        assert f"{int((expected == 0).sum())} of 256 codes unused" in figure.alt
        drawn = steps(plots.scale_distribution(tensor, bins=10))[0]
        logs = np.log10(scales)
        np.testing.assert_array_equal(drawn.values, np.histogram(logs, 10)[0])
        np.testing.assert_allclose(np.log10(drawn.edges), np.histogram(logs, 10)[1])


@pytest.mark.parametrize(("fmt", "many"), [("int8", 255), ("int4", 15), ("fp4", 15), ("fp6", 63), ("fp8", 253)])
def test_codes_of_a_qtensor(fmt: str, many: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 33)).astype(np.float32)  # odd rows: the padding is no code
    q = ai.quantize(x, fmt)
    codes, counts = code_counts(q)
    assert len(codes) == many
    assert counts.sum() == x.size
    own = np.asarray(q.codes).astype(np.float64) + 0.0
    for code, count in zip(codes, counts, strict=True):
        assert count == int((own == code).sum())
    scale = np.concatenate(list(scale_pieces(q)))
    np.testing.assert_array_equal(scale, np.asarray(q.scale, np.float64).reshape(-1))


def table() -> pd.DataFrame:
    rows = [("q2_k", 2.6, 9.0), ("q4_0", 4.5, 20.0), ("q4_k", 4.5, 21.0), ("fp4", 5.0, 19.0), ("f32", 32.0, np.inf)]
    return pd.DataFrame(rows, columns=["format", "bpw", "sqnr_db"])


def test_error_against_size() -> None:
    figure = plots.error_vs_size(table())
    best, others = figure.axes[0].lines
    np.testing.assert_array_equal(best.get_xdata(), [2.6, 4.5, 32.0])
    np.testing.assert_array_equal(best.get_ydata()[:2], [9.0, 21.0])
    np.testing.assert_array_equal(others.get_xdata(), [4.5, 5.0])
    np.testing.assert_array_equal(others.get_ydata(), [20.0, 19.0])
    assert "fp4 5.00 bits, 19.00 dB" in figure.alt
    assert "f32 32.00 bits, ∞ (no error)" in figure.alt
    assert front([("a", 1, 5), ("b", 2, 5), ("c", 3, 6)]) == [0, 2]


def test_figures_of_nothing_say_so() -> None:
    nan, none = np.full((2, 32), np.nan, np.float32), np.zeros((0, 32), np.float32)
    for x, said in ((nan, "no finite values"), (none, "no values")):
        for figure in (plots.value_histogram(x), plots.value_histogram(x, "f16"), plots.error_histogram(x, "f16")):
            assert said in [t.get_text() for t in texts(figure)]
            assert figure.alt.startswith("Histogram of")
            assert figure.alt.endswith(f": {said}" + (", 64 not finite." if x.size else "."))
            assert "nan" not in figure.alt
            assert not steps(figure)
            assert "<img" in figure._repr_html_()
    for report in (ai.quant_error({"w": nan}, "q8_0"), table().iloc[:0]):
        figure = plots.error_vs_size(report)
        assert "no format has figures" in [t.get_text() for t in texts(figure)]
        assert figure.alt.endswith("no format has figures.")
        assert not figure.axes[0].lines


def test_a_format_is_not_beaten_for_what_it_cannot_store(rng: np.random.Generator) -> None:
    odd = rng.standard_normal((64, 288)).astype(np.float32)  # no row of whole blocks of 256: f16 instead
    w = rng.standard_normal((8, 256)).astype(np.float32)
    report = ai.quant_error({"w": w, "odd": odd}, ["q4_k", "q5_0"])
    alone = {row["format"]: row["sqnr_db"] for _, row in report.frame.iterrows() if row["name"] == "w"}
    assert alone["q4_k"] < alone["q5_0"]  # and it is larger, as most is in f16
    [best] = plots.error_vs_size(report).axes[0].lines
    np.testing.assert_allclose(best.get_xdata(), [5.5, (w.size * 4.5 + odd.size * 16) / (w.size + odd.size)])
    assert "over all tensors as converted" in plots.error_vs_size(report).alt


def test_the_map_of_layers() -> None:
    names = [f"blk.{i}.{p}.weight" for i in (0, 1, 10) for p in ("attn_q", "ffn_up")]
    names[-1] = "token_embd.weight"
    frame = pd.DataFrame({"name": names, "format": "q4_k", "sqnr_db": [20.0, 21, 22, 3, 24, 1]})
    found = heat(frame, "q4_k", "sqnr_db")
    assert (found.layers, found.projections) == ([0, 1, 10], ["attn_q", "ffn_up"])
    np.testing.assert_array_equal(found.values, [[20, 22, 24], [21, 3, np.nan]])
    figure = plots.error_heatmap(frame, "q4_k")
    [mesh] = [c for c in figure.axes[0].collections if isinstance(c, QuadMesh)]
    np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan).reshape(2, 3), found.values)
    assert "worst ffn_up of layer 1: 3" in figure.alt
    worse = plots.error_heatmap(frame.rename(columns={"sqnr_db": "rel_l2"}), "q4_k", "rel_l2")
    assert "worst attn_q of layer 10: 24" in worse.alt


def test_the_report_of_quant_error(tmp_path: Path, rng: np.random.Generator) -> None:
    shape = {"attn_q": (8, 64), "ffn_up": (16, 64)}
    save_file({f"blk.{i}.{p}.weight": rng.standard_normal(s).astype(np.float32) for i in range(3)
               for p, s in shape.items()}, tmp_path / "m.safetensors")  # fmt: skip
    report = ai.quant_error(tmp_path / "m.safetensors", ["q4_0", "q8_0", "f32"])
    figure = plots.error_vs_size(report)
    [best] = figure.axes[0].lines
    np.testing.assert_allclose(best.get_xdata(), [4.5, 8.5, 32])
    np.testing.assert_allclose(best.get_ydata()[:2], report.totals["sqnr_db"][:2])
    found = heat(report, "q4_0", "rmse")
    expected = report.frame[report.frame["format"] == "q4_0"]["rmse"].to_numpy().reshape(3, 2).T
    np.testing.assert_array_equal(found.values, expected)
    assert "2 projections by 3 layers" in plots.error_heatmap(report, "q4_0").alt


def every(tmp_path: Path, name: str) -> Iterator[plots.Plot]:
    """Each plot, of tensors of a hostile name."""
    x = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    save_file({name: x}, tmp_path / "m.safetensors")
    ai.convert(tmp_path / "m.safetensors", tmp_path / "m.apsim", "int4", key=None)
    with ai.open(tmp_path / "m.safetensors") as model, ai.open(tmp_path / "m.apsim") as other:
        yield plots.error_histogram(model[name], "q4_k")
        yield plots.value_histogram(model[name], "q4_0")
        yield plots.scale_distribution(other[name])
        yield plots.code_utilisation(other[name])
    frame = pd.DataFrame({"name": [f"blk.0.{name}", f"blk.1.{name}"], "format": EVIL, "sqnr_db": [1.0, 2.0]})
    yield plots.error_heatmap(frame, EVIL)
    yield plots.error_vs_size(pd.DataFrame({"format": [EVIL, "b"], "bpw": [1.0, 2.0], "sqnr_db": [1.0, 2.0]}))


def test_text_from_files_is_shown_literally(tmp_path: Path) -> None:
    for figure in every(tmp_path, EVIL):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            page = figure._repr_html_()
        assert "<b>" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert re.fullmatch(r'<img alt="[^"<>]*" style="[^"]*" src="data:image/png;base64,[A-Za-z0-9+/=]+">', page)
        literal = [t for t in texts(figure) if "frac" in t.get_text()]
        assert literal
        for text in literal:
            assert not text.get_parse_math()
            assert "$" in text.get_text()
        for text in texts(figure):
            assert not set("\x1b\u202e文") & set(text.get_text())


def test_readable_on_light_and_dark(tmp_path: Path) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    for ground in ("#ffffff", "#111111"):  # WCAG 2.1: 4.5 for text where one grey can, 3 for graphics
        assert contrast(INK, ground) > 4.1
        assert min(contrast(BLUE, ground), contrast(ORANGE, ground)) > 3
    for figure in every(tmp_path, "blk.0.w"):
        assert figure.patch.get_alpha() == 0
        assert figure.alt.endswith(".")
        assert any(c.isdigit() for c in figure.alt)
        for ax in figure.axes[:1]:
            assert ax.get_xlabel()
            assert ax.patch.get_alpha() == 0


def test_the_same_picture_each_time(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 64)).astype(np.float32)
    assert plots.figure_html(plots.value_histogram(x)) == plots.figure_html(plots.value_histogram(x))
    assert 'alt="&lt;mine&gt;"' in plots.figure_html(plots.value_histogram(x), "<mine>")


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: plots.error_histogram(np.ones((4, 32), np.float32), "zip"), "zip"),
        (lambda: plots.error_histogram(np.ones((4, 32), np.int32), "q4_0"), "kept as they are"),
        (lambda: plots.error_histogram(np.full((4, 32), np.nan, np.float32), "q4_0"), "not finite"),
        (lambda: plots.value_histogram(np.ones(4, np.complex64)), "complex"),
        (lambda: plots.value_histogram("text"), "no tensor"),
        (lambda: plots.scale_distribution(np.ones(4, np.float32)), "no scales"),
        (lambda: plots.code_utilisation(np.ones(4, np.float32)), "no codes"),
        (lambda: plots.error_heatmap(table(), "q4_k"), "no column 'name'"),
        (lambda: plots.error_heatmap(table(), "q4_k", "beauty"), "beauty"),
        (lambda: plots.error_vs_size(3), "no column"),
    ],
)
def test_refusals_say_what_is_wrong(call: Any, word: str) -> None:
    with pytest.raises(ValueRefusedError, match=word):
        call()


def test_empty_and_constant_tensors_are_drawn() -> None:
    for x in (np.zeros((0, 32), np.float32), np.full((2, 32), 3.0, np.float32), np.array(1.5, np.float32)):
        assert "values" in plots.value_histogram(x).alt
        assert plots.error_histogram(x, "f16")._repr_html_().startswith("<img")


def test_pyplot_is_not_touched_and_matplotlib_loaded_on_use() -> None:
    code = """
import sys
import numpy as np
import apsi_inspect as ai
assert "matplotlib" not in sys.modules
figure = ai.plots.value_histogram(np.arange(64, dtype=np.float32), "q8_0")
assert figure._repr_html_().startswith("<img")
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""`stats` over a model, and the one-line repr of a tensor; expected values from NumPy in float64."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import apsi_inspect as ai
from apsi_inspect.cli import main
from apsi_inspect.notebook.render_stats import fitting_table
from apsi_inspect.ops.survey import COLUMNS
from apsi_inspect.parts import to_text

from .html_page import Page


def test_real_model_equals_numpy() -> None:
    path = ai.samples.path("fracast.safetensors")
    frame = ai.stats(path).frame.set_index("name")
    for name, x in load_file(path).items():
        row, y = frame.loc[name], x.astype(np.float64)
        assert (row["min"], row["max"]) == (x.min(), x.max())
        assert row["mean"] == pytest.approx(y.mean(), rel=1e-6, abs=1e-6 * np.abs(y).max())
        assert row["std"] == pytest.approx(y.std(), rel=1e-6, abs=1e-12)
        assert (row["nan"], row["inf"], row["zeros"]) == (0, 0, (x == 0).sum())
        assert row["median"] == pytest.approx(np.quantile(y, 0.5, method="lower"), rel=1 / 64, abs=1e-9)


def test_every_encoding_of_a_gguf_equals_numpy(tmp_path: Path) -> None:
    (path,) = ai.samples.write(tmp_path, ["tiny-llama.gguf"])
    frame = ai.stats(path, "blk.1.*").frame.set_index("name")
    assert len(frame) == 9
    for t in gguf.GGUFReader(path).tensors:
        if t.name in frame.index:
            x = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            assert (frame.loc[t.name, "min"], frame.loc[t.name, "max"]) == (x.min(), x.max())
            assert frame.loc[t.name, "mean"] == pytest.approx(x.mean(), rel=1e-6, abs=1e-9)
            assert frame.loc[t.name, "zeros"] == (x == 0).sum()


def test_small_floats_integers_and_odd_values(tmp_path: Path) -> None:
    arrays = {
        "bf16": np.array([1, -2, np.nan, np.inf, 0, 0, 3], ml_dtypes.bfloat16),
        "f16": np.array([6e-8, 1, -1, -np.inf], np.float16),
        "f64": np.array([1e300, -1e-310, 0.0]),
        "i64": np.array([2**62, -(2**62), 5]),
        "c64": np.array([1 + 2j], np.complex64),
        "empty": np.empty(0, np.float32),
    }
    save_file(arrays, tmp_path / "m.safetensors")
    frame = ai.stats(tmp_path / "m.safetensors").frame.set_index("name")
    assert frame.loc["bf16", ["min", "max", "nan", "inf", "zeros"]].tolist() == [-2, 3, 1, 1, 2]
    assert frame.loc["f16", ["min", "max", "inf", "subnormals"]].tolist() == [-1, 1, 1, 1]
    assert frame.loc["f64", ["min", "max", "subnormals"]].tolist() == [-1e-310, 1e300, 1]
    assert frame.loc["i64", ["min", "max"]].tolist() == [-(2**62), 2**62]
    assert frame.loc[["c64", "empty"], "mean"].isna().all()


def test_nothing_matches() -> None:
    with pytest.raises(ai.ValueRefusedError, match="no tensor matches 'nope"):
        ai.stats(ai.samples.path("fracast.safetensors"), "nope*")


def test_repr_says_what_the_values_are_like(tmp_path: Path) -> None:
    x = np.concatenate([np.linspace(-1, 1, 999), [0.0]]).astype("f4")
    save_file({"w": x, "one": np.ones((2, 2), "f4"), "bad": np.array([np.nan, 1, 2], "f4")}, tmp_path / "m.safetensors")
    with ai.open(tmp_path / "m.safetensors") as m:
        line = repr(m["w"])
        assert "w: 1000 F32, 3.9 KiB; -1 … 1, mean " in line
        assert "± 0.578" in line
        assert "% zeros" in line
        assert repr(m["one"]) == "<Tensor one: 2 × 2 F32, 16 B; all 1>"
        assert "1 NaN" in repr(m["bad"])
        tensor = m["w"]
    assert repr(tensor) == "<Tensor w: 1000 F32, 3.9 KiB>"  # closed, and no statistics are known


def test_the_view_shows_the_statistics() -> None:
    table = ai.stats(ai.samples.path("fracast.safetensors"), "core.*")
    for view in (str(table), Page(table._repr_html_()).text):
        for column in ("min", "max", "mean", "std", "nan", "inf", "zeros"):
            assert column in view
        assert "offset" not in view
        assert f"{table.frame['std'].iloc[0]:.4g}" in view
    assert max(map(len, str(table).splitlines())) <= 110


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_rows_fit_the_terminal(width: int) -> None:
    frame = ai.stats(ai.samples.path("fracast.safetensors")).frame
    columns = ["name", "encoding", "numel", *COLUMNS]
    lines = to_text(fitting_table(frame, columns, width), width).splitlines()
    assert len(lines) >= 2 + len(frame)
    assert max(map(len, lines)) <= width
    for column in ("name", "min", "max", "mean", "std"):
        assert column in lines[0].split()
    piped = to_text(fitting_table(frame, columns, None)).splitlines()
    assert piped[0].split() == columns


def test_a_model_without_tensors_has_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    table = ai.stats(tmp_path / "empty.safetensors")
    assert len(table) == 0
    assert set(COLUMNS) <= set(table.frame.columns)
    assert "std" in str(table)
    assert main(["model", "stats", str(tmp_path / "empty.safetensors")]) == 0
    assert "std" in capsys.readouterr().out

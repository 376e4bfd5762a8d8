"""TensorTable: the contract of its columns, filters, sums."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect import listing, table

from . import handmade
from .test_listing import model_of


def test_columns_and_dtypes_are_the_contract(tmp_path: Path, data: Path) -> None:
    ai.samples.write(tmp_path, ["tiny-llama.gguf"])
    files = [tmp_path / "tiny-llama.gguf", data / "golden" / "qtensors.apsim", data / "golden" / "no_tensors.apsim"]
    for path in [*files, data / "golden" / "sharded" / "model.apsim.index.json"]:
        frame = ai.open(path).table.frame
        assert {c: str(t) for c, t in frame.dtypes.items()} == table.SCHEMA


def test_columns_equal_the_rows(data: Path, tmp_path: Path) -> None:
    ai.samples.write(tmp_path, ["tiny-llama.gguf"])
    paths = [
        tmp_path / "tiny-llama.gguf",
        *(data / "golden").glob("*.apsim"),
        ai.samples.path("fracast-int8.safetensors"),
    ]
    for path in paths:
        m = ai.open(path)
        frame = m.table.frame
        factors = listing.packing(m)
        for row, (_, got) in zip(listing.rows(m, sort="file"), frame.iterrows(), strict=True):
            same = ("name", "encoding", "shape", "numel", "nbytes", "offset", "file", "unit")
            assert [got[c] for c in same] == [getattr(row, c) for c in same]
            assert got["ndim"] == len(row.shape)
            assert got["axis"] == (-1 if row.axis is None else row.axis)
            assert got["block"] == (-1 if row.axis is None else row.block or 0)
            assert np.isnan(got["bpw"]) if not row.numel else got["bpw"] == pytest.approx(row.bpw)
            assert got["parameters"] == listing.parameters(row, factors)


def test_filter_sort_and_sums(tmp_path: Path) -> None:
    tensors = [(f"blk.{i}.{n}", d, [i + 1, 4]) for i in (0, 1, 10) for n, d in (("q", "F32"), ("k", "F16"))]
    t = model_of(tmp_path, [*tensors, ("out", "F32", [8])]).table
    assert list(t.filter("blk.1.*")) == ["blk.1.q", "blk.1.k"]
    assert list(t.filter(regex=r"\.1\d?\.k$")) == ["blk.1.k", "blk.10.k"]
    assert list(t.filter(encoding="F16").sort(descending=True)) == ["blk.10.k", "blk.1.k", "blk.0.k"]
    assert next(iter(t.filter(encoding=["F16", "F32"]).sort("nbytes", descending=True))) == "blk.10.q"
    assert t.by_block().index.tolist() == ["blk.0", "blk.1", "blk.10", "out"]
    assert t.by_block().loc["blk.10"].tolist() == [2, 88, 44 * 4 + 44 * 2]
    assert t.by_encoding().loc["F16"].tolist() == [3, 56, 112]
    assert (t.parameters, t.nbytes, len(t)) == (56 * 2 + 8, 56 * 6 + 32, 7)
    with pytest.raises(ai.ValueRefusedError, match="regular expression"):
        t.filter(regex="(")
    with pytest.raises(ai.ValueRefusedError, match="no column"):
        t.sort("nope")


def test_tied_and_companion_rows_count_nothing(tmp_path: Path) -> None:
    m = model_of(tmp_path, [("a.qweight", "I8", [4]), ("a.scale", "F32", [1])])
    assert m.table.frame["parameters"].tolist() == [4, 0]


def test_as_csv_and_markdown(tmp_path: Path) -> None:
    header = [("a|b<i>*", "F32", [2, 3], bytes(24)), ('c,"d"\n', "BF16", [4], bytes(8))]
    path = tmp_path / "x.safetensors"
    path.write_bytes(handmade.safetensors(header))
    tensors = ai.open(path).table
    text = tensors.to_csv(tmp_path / "t.csv")
    rows = list(csv.reader((tmp_path / "t.csv").read_text().splitlines(keepends=True)))
    assert (tmp_path / "t.csv").read_text() == text
    assert rows[0] == list(table.SCHEMA)
    assert [r[:3] for r in rows[1:]] == [["a|b<i>*", "F32", "(2, 3)"], ['c,"d"\n', "BF16", "(4,)"]]
    lines = tensors.to_markdown(tmp_path / "t.md").splitlines()
    assert (tmp_path / "t.md").read_text().splitlines() == lines
    assert lines[0].startswith("| name | encoding | shape | ndim |")
    assert lines[1].startswith("| --- | --- | --- | ---: |")
    assert lines[2].startswith(r"| a\|b\<i\>\* | F32 | 2 × 3 | 2 | 6 | 24 | 32 |")
    assert lines[3].startswith(r'| c,"d"\\n | BF16 | 4 |')
    assert len(lines) == 4


def test_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(handmade.safetensors([("a", "F32", [2, 3], bytes(24))]))
    tensors = ai.open(path).table
    with monkeypatch.context() as m:
        m.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ai.MissingPackageError, match="pyarrow"):
            tensors.to_parquet(tmp_path / "t.parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tensors.to_parquet(tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist()[0]["shape"] == [2, 3]

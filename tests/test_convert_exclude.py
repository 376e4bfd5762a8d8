"""Leaving tensors out of a conversion, and refusing one for all its tensors at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import apsi_inspect as ai
from apsi_inspect.cli import main
from apsi_inspect.errors import ValueRefusedError

from .trees import same

W = np.arange(64, dtype="f4").reshape(2, 32)


@pytest.fixture
def complex_file(tmp_path: Path) -> Path:
    """Three tensors that GGUF has no type for, among others."""
    tensors = {"a.w": W, "freqs.1": W.astype("c8"), "b.w": W + 1, "freqs.2": W.astype("c8"), "z": W.astype("c8")}
    safetensors.numpy.save_file(tensors, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


def test_every_tensor_that_cannot_be_held_is_named(complex_file: Path, tmp_path: Path) -> None:
    for dry_run in (True, False):
        with pytest.raises(ValueRefusedError) as caught:
            ai.convert(complex_file, tmp_path / "out.gguf", dry_run=dry_run)
        said = str(caught.value)
        assert said.startswith("3 tensors cannot be stored in gguf (exclude= leaves tensors out): ")
        assert [name in said for name in ("'freqs.1'", "'freqs.2'", "'z'")] == [True] * 3
        assert "a.w" not in said
        assert said.count("gguf cannot hold C64") == 3
    assert os.listdir(tmp_path) == [complex_file.name]


def test_one_tensor_that_cannot_be_held(complex_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueRefusedError, match=r"^tensor 'z': gguf cannot hold C64 \(exclude= leaves it out\)$"):
        ai.convert(complex_file, tmp_path / "out.gguf", exclude="freqs.*")


@pytest.mark.parametrize("ending", ["gguf", "safetensors", "apsim"])
def test_left_out(ending: str, complex_file: Path, tmp_path: Path) -> None:
    out = tmp_path / f"out.{ending}"
    planned = ai.convert(complex_file, out, exclude=["freqs.*", "z"], dry_run=True)
    report = ai.convert(complex_file, out, exclude=["freqs.*", "z"])
    assert planned.size_after == report.size_after == out.stat().st_size
    assert [f.message for f in report.findings if f.code == "excluded"] == [
        "left out as asked: 3 tensors: 'freqs.1', 'freqs.2', 'z'"
    ]
    assert "freqs.2" in str(report)
    with ai.open(out) as model:
        assert sorted(model) == ["a.w", "b.w"]
        assert np.array_equal(np.asarray(model["b.w"]), W + 1)


def test_a_pattern_without_a_match(complex_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueRefusedError, match=r"exclude: 'frequencies\.\*' matches no tensor name"):
        ai.convert(complex_file, tmp_path / "out.gguf", exclude=["z", "frequencies.*"])


TREES: list[tuple[Any, str | list[str], Any]] = [
    ({"l": [{"w": W}, {"w": W + 1, "b": W + 2}], "t": (W,)}, "l.1.b", {"l": [{"w": W}, {"w": W + 1}], "t": (W,)}),
    (
        {"l": [{"w": W}, {"w": W + 1}], "t": (W + 3, W + 4)},
        ["l.0.*", "t.0"],
        {"l": [None, {"w": W + 1}], "t": (None, W + 4)},
    ),
    ({"a": {"b": {"c": W}}, "n": 7, "e": {}, "w": W + 1}, "a.*", {"n": 7, "e": {}, "w": W + 1}),
    ({"a.b": W, "a": {"x": W + 1}}, "a.x", {"a.b": W}),
    ({"a": W}, "*", {}),
]


@pytest.mark.parametrize(("tree", "patterns", "left"), TREES, ids=range(len(TREES)))
def test_the_tree_loses_its_leaves(tree: Any, patterns: Any, left: Any, tmp_path: Path) -> None:
    ai.save_model(tmp_path / "src.apsim", tree)
    ai.convert(tmp_path / "src.apsim", tmp_path / "out.apsim", exclude=patterns)
    loaded = ai.load_model(tmp_path / "out.apsim")
    assert same(left, loaded)


def test_shell(complex_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model", "convert", str(complex_file), str(tmp_path / "out.gguf")]
    assert main(argv) == 2
    assert "3 tensors cannot be stored" in capsys.readouterr().err
    assert main([*argv, "--exclude", "freqs.*", "--exclude", "z", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [t["source"] for t in document["tensors"]] == ["a.w", "b.w"]
    assert [f["code"] for f in document["findings"]].count("excluded") == 1
    assert main([*argv, "--force", "--exclude", "nothing"]) == 2

"""`apsi model compare` as a process: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import apsi_inspect as ai

from .test_cli import run

A, B = ai.samples.path("fracast.safetensors"), ai.samples.path("fracast-int8.safetensors")


def test_rounded_is_good() -> None:
    done = run("model", "compare", A, B)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fracast.safetensors → fracast-int8.safetensors  ✓ rounded" in done.stdout
    assert "20 of 47 tensors differ by rounding alone (in B: I8); the other 27 are identical." in done.stdout
    assert "quantization  none" in done.stdout
    assert "quantization  none" not in run("model", "compare", A, B, "--no-metadata").stdout
    assert run("model", "compare", A, B, "--metadata").returncode == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_json(threads: int) -> None:
    done = run("model", "compare", A, B, "--json", "--threads", threads)
    assert done.stderr == ""
    assert json.loads(done.stdout) == ai.compare(A, B).to_dict()


def test_two_models_without_tensors_are_identical(tmp_path: Path) -> None:
    for name, said in (("a", None), ("b", None), ("c", {"made": "later"})):
        save_file({}, tmp_path / f"{name}.safetensors", said)
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    done = run("model", "compare", a, b, "--metadata")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Neither model has a tensor." in done.stdout
    assert ai.compare(a, c).verdict == "identical"
    assert run("model", "compare", a, c).returncode == 0
    assert run("model", "compare", a, c, "--metadata").returncode == 1


def test_exit_codes(tmp_path: Path) -> None:
    tensors = {k: np.array(v) for k, v in load_file(A).items()}
    tensors["core.in_proj.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "tuned.safetensors")
    done = run("model", "compare", A, tmp_path / "tuned.safetensors", "--tensors", "core.in*")
    assert done.returncode == 1
    assert "[0, 0]" in done.stdout
    assert run("model", "compare", A, A, "--tensors", "nope").returncode == 2
    assert run("model", "compare", A, A, "--threads", 0).returncode == 2
    assert run("model", "compare", A).returncode == 2
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing.gguf", tmp_path / "empty"):
        done = run("model", "compare", A, path)
        assert (done.returncode, done.stdout) == (3, "")
        assert "Traceback" not in done.stderr

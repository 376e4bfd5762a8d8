"""The `apsi` command, as a process: output, exit codes, pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import apsi_inspect as ai

APSI = [sys.executable, "-m", "apsi_inspect"]
REAL = ai.samples.path("fracast-int8.safetensors")


def run(*args: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*APSI, *map(str, args)], capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload,no-any-return]


def test_info_says_what_is_in_a_file() -> None:
    done = run("model", "info", REAL)
    assert (done.returncode, done.stderr) == (0, "")
    for fact in (
        "safetensors",
        "85.0 k",
        "110.6 KiB",
        "67",
        "I8",
        "core.block.dw_weight.qweight",
        "model_name",
        "fracast-0",
    ):
        assert fact in done.stdout
    assert "\x1b" not in done.stdout  # no colour in a pipe


def test_json_is_the_record_of_model_info(data: Path) -> None:
    done = run("model", "info", "--json", REAL)
    assert json.loads(done.stdout) == json.loads(json.dumps(ai.model_info(REAL)))
    several = run("model", "info", "--json", REAL, data / "golden" / "units.apsim")
    assert [d["format"] for d in json.loads(several.stdout)] == ["safetensors", "apsim"]


def test_info_of_an_index(data: Path) -> None:
    done = run("model", "info", data / "golden" / "sharded" / "model.apsim.index.json")
    assert done.returncode == 0
    assert "shards 3" in done.stdout


def test_glob_and_sort() -> None:
    done = run("model", "info", REAL, "--tensors", "core.block.pw.*", "--sort", "-nbytes", "--json")
    assert [t["name"] for t in json.loads(done.stdout)["tensors"]] == [
        "core.block.pw.weight.qweight",
        "core.block.pw.bias",
        "core.block.pw.weight.scale",
    ]
    bad = run("model", "info", REAL, "--sort", "nope")
    assert bad.returncode == 2
    assert "no column 'nope'" in bad.stderr


def test_exit_codes(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "missing.gguf", "No such file"),
        (broken, "broken.gguf"),
        (tmp_path / "empty", "without a model"),
    ):
        done = run("model", "info", path)
        assert done.returncode == 3
        assert done.stdout == ""
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert run("model", "nonsense").returncode == 2
    assert run("--version").stdout.strip() == f"apsi_inspect {ai.__version__}"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a Linux device")
@pytest.mark.parametrize("arguments", [["model", "plan", REAL, "--bpw", "32", "--json"], ["plan", REAL, "--json"]])
def test_output_on_a_full_disk(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*APSI, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (3, "apsi: the output: No space left on device\n")


def test_one_bad_file_does_not_hide_the_good_one(tmp_path: Path) -> None:
    done = run("model", "info", tmp_path / "missing", REAL)
    assert done.returncode == 3
    assert "85.0 k" in done.stdout


@pytest.mark.parametrize(("options", "first"), [(["--json"], "{\n"), ([], "fracast-int8.safetensors  safetensors\n")])
def test_a_closed_pipe_is_no_error(options: list[str], first: str) -> None:
    """The reader goes before anything is written."""
    command = [sys.executable, "-u", "-m", "apsi_inspect", "model", "info", *options, REAL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == first
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_pipe_that_was_never_read_is_no_error(options: list[str]) -> None:
    command = [sys.executable, "-m", "apsi_inspect", "model", "info", *options, REAL]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_of_another_encoding_shows_something() -> None:
    done = subprocess.run(
        [*APSI, "model", "info", REAL],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0
    assert b"fracast-int8.safetensors" in done.stdout


def test_samples_command(tmp_path: Path) -> None:
    done = run("samples", tmp_path / "demo")
    assert done.returncode == 0
    assert sorted(Path(p).name for p in done.stdout.split()) == sorted(ai.samples.names())
    assert all(Path(p).is_file() for p in done.stdout.split())


@pytest.mark.parametrize("args", [["--help"], ["model", "info", REAL]])
def test_what_the_command_imports(args: list[str]) -> None:
    """Neither NumPy nor anything heavier; see also tests/test_layers.py."""
    code = (
        "import sys; from apsi_inspect.cli import main\n"
        f"try: main({args!r})\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'pandas', 'matplotlib', 'ipywidgets', 'IPython', 'pint', 'tqdm', 'gguf'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_stats_of_the_real_model() -> None:
    done = run("model", "stats", REAL, "--tensors", "core.block.pw.*", "--sort=-max", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    tensors = json.loads(done.stdout)["tensors"]
    assert tensors[0]["name"] == "core.block.pw.weight.qweight"
    assert tensors[0]["max"] == 127  # symmetric int8: the largest code of some row
    assert isinstance(tensors[0]["max"], int | float)
    text = run("model", "stats", REAL, "--tensors", "core.norm*")
    assert "core.norm.weight" in text.stdout
    assert run("model", "stats", REAL, "--tensors", "nope*").returncode == 2
    assert run("model", "stats", "missing.gguf").returncode == 3

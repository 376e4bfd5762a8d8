"""`apsi run` as a process: scripts and notebooks under permissions, their arguments, output, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import apsi_inspect as ai

LOAD = "import apsi_inspect as ai\nprint(list(ai.open('in/a.safetensors')))\n"
SAVE = "import apsi_inspect as ai\nai.save_safetensors('out/b.safetensors', {'w': __import__('numpy').zeros(2)})\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    ai.save_safetensors(tmp_path / "in" / "a.safetensors", {"w": np.zeros(2, np.float32)})
    return tmp_path


def apsi(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "apsi_inspect", "run", *words]
    environment = {**os.environ, "HOME": str(here), "IPYTHONDIR": str(here / ".ipython"), "PYTHONUTF8": "1"}
    return subprocess.run(command, cwd=here, capture_output=True, text=True, env=environment)


def script(here: Path, text: str, name: str = "s.py") -> str:
    (here / name).write_text(text)
    return name


def notebook(here: Path, *cells: str, name: str = "n.ipynb") -> str:
    made = [{"cell_type": "code", "source": c, "metadata": {}, "outputs": [], "execution_count": None} for c in cells]
    made.insert(0, {"cell_type": "markdown", "source": "# text", "metadata": {}})
    (here / name).write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return name


@pytest.mark.parametrize("flags", [[], ["--allow-write"], ["--allow-read=out"], ["--allow-write", "--allow-read=out"]])
def test_loading_takes_allow_read(here: Path, flags: list[str]) -> None:
    done = apsi(here, *flags, script(here, LOAD))
    assert done.returncode == 1
    assert "PermissionError" in done.stderr
    assert "--allow-read" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "flags", [["--allow-read"], ["--allow-read=in"], ["--allow-read=out,in"], ["--allow-read=out", "--allow-read=in"],
              ["--allow-fs"], ["--allow-fs=in"], ["--allow-read=in/a.safetensors"]],
)  # fmt: skip
def test_loading_with_it(here: Path, flags: list[str]) -> None:
    done = apsi(here, *flags, script(here, LOAD))
    assert (done.returncode, done.stdout) == (0, "['w']\n"), done.stderr


def test_saving_takes_allow_write(here: Path) -> None:
    name = script(here, SAVE)
    done = apsi(here, "--allow-read", "--allow-write=in", name)
    assert done.returncode == 1
    assert "--allow-write" in done.stderr
    assert os.listdir(here / "out") == []
    assert apsi(here, "--allow-write=out", name).returncode == 0
    assert os.listdir(here / "out") == ["b.safetensors"]


def test_a_bare_flag_takes_no_word(here: Path) -> None:
    """The word after it is the script, and what stands after the script is the script's, whatever it looks like."""
    name = script(here, "import sys\nprint(sys.argv, __name__, __file__)\n")
    done = apsi(here, "--allow-read", name, "--allow-write", "-x", "--help", "b c")
    assert done.returncode == 0
    assert done.stdout == f"{[name, '--allow-write', '-x', '--help', 'b c']} __main__ {name}\n"


def test_modules_beside_the_script_are_found(here: Path) -> None:
    (here / "lib").mkdir()
    script(here, "value = 7\n", "lib/helper.py")
    name = script(here, "import helper\nprint(helper.value)\n", "lib/main.py")
    assert apsi(here, name).stdout == "7\n"


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [("import sys; sys.exit(5)", 5, ""), ("raise SystemExit('no')", 1, "no\n"), ("raise SystemExit", 0, "")],
)
def test_the_exit_code_is_the_scripts(here: Path, text: str, code: int, error: str) -> None:
    done = apsi(here, script(here, text))
    assert (done.returncode, done.stderr) == (code, error)


def test_an_error_looks_like_pythons(here: Path) -> None:
    name = script(here, "def f():\n    return 1 / 0\n\n\nf()\n")
    done = apsi(here, name)
    plain = subprocess.run([sys.executable, name], cwd=here, capture_output=True, text=True)
    assert done.returncode == 1
    ours, theirs = done.stderr, plain.stderr
    assert ours.replace(f"{here}/", "") == theirs.replace(f"{here}/", "")


@pytest.mark.parametrize("words", [["nothing.py"], ["--allow-read=", "s.py"], ["--allow-read=a,,b", "s.py"], []])
def test_usage(here: Path, words: list[str]) -> None:
    script(here, LOAD)
    done = apsi(here, *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "apsi" in done.stderr


def test_a_notebook(here: Path) -> None:
    name = notebook(here, "%load_ext apsi_inspect", "%apsi_info in/a.safetensors", "m = _; print(len(m))")
    done = apsi(here, "--allow-read=in", name)
    assert done.returncode == 0, done.stderr
    assert "a.safetensors" in done.stdout
    assert "1\n" in done.stdout


def test_a_notebook_without_permission(here: Path) -> None:
    name = notebook(here, "print('first')", LOAD, "print('never')")
    done = apsi(here, name)
    assert done.returncode == 1
    assert "first" in done.stdout
    assert "never" not in done.stdout
    assert "--allow-read" in done.stdout + done.stderr
    assert f"{name}: cell 2 failed" in done.stderr


def test_what_is_no_notebook(here: Path) -> None:
    done = apsi(here, script(here, "{}", "x.ipynb"))
    assert done.returncode == 2
    assert "no notebook" in done.stderr

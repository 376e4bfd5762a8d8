"""``%apsi_verify`` in an `InteractiveShell`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import apsi_inspect as ai

SECRET = "six random words make a secret"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "apsi_inspect")
    monkeypatch.chdir(tmp_path)
    ai.save_model("signed one.apsim", {"w": np.arange(100.0)}, sign=SECRET)
    ai.save_model("plain.apsim", {"w": np.arange(100.0)})
    yield shell
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("line", "status", "ok"),
    [
        ("plain.apsim", "intact", True),
        ("signed one.apsim", "intact", True),
        ("'signed one.apsim' --key-env SECRET --full", "authentic", True),
        ("'signed one.apsim' --key-file key.bin", "other-key", False),
        ("'signed one.apsim' --ask-key", "authentic", True),
        ("plain.apsim --key-env SECRET", "unsigned", False),
    ],
)
def test_it_verifies(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, line: str, status: str, ok: bool
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setattr("getpass.getpass", lambda prompt: SECRET)
    Path("key.bin").write_bytes(bytes(range(32)))
    report = shell.run_line_magic("apsi_verify", line)
    assert (report.status, report.ok) == (status, ok)
    assert status in report._repr_html_()
    assert SECRET not in report._repr_html_()


def test_damage_is_a_report(shell: InteractiveShell) -> None:
    raw = bytearray(Path("plain.apsim").read_bytes())
    raw[-1] ^= 1
    Path("plain.apsim").write_bytes(raw)
    assert shell.run_line_magic("apsi_verify", "plain.apsim").status == "damaged"
    assert shell.run_line_magic("apsi_verify", "plain.apsim;") is None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "which file"),
        ("nothing.apsim", "nothing.apsim"),
        ("plain.apsim --key-env NOT_SET_AT_ALL", "NOT_SET_AT_ALL"),
        ("plain.apsim --key-file nokey", "nokey"),
        ("plain.apsim --key-env SECRET --user-key", "--user-key, --key-env"),
    ],
)
def test_errors_are_one_line(shell: InteractiveShell, line: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        shell.run_line_magic("apsi_verify", line)


def test_help(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_line_magic("apsi_verify", "--help") is None
    assert "--ask-key" in capsys.readouterr().out

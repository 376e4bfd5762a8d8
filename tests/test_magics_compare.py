"""``%apsi_compare`` in an `InteractiveShell`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from apsi_inspect import samples


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "apsi_inspect")
    monkeypatch.chdir(tmp_path)
    yield shell
    InteractiveShell.clear_instance()


def test_it_compares_and_returns_the_comparison(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = samples.path("fracast.safetensors"), samples.path("fracast-int8.safetensors")
    c = shell.run_line_magic("apsi_compare", f'"{a}" {b}')
    assert (c.verdict, len(c.tensors), len(c.metadata)) == ("rounded", 47, 1)
    assert "quantization noise" in c._repr_html_()
    some = shell.run_line_magic("apsi_compare", f"{a} {b} --tensors core.* --no-metadata")
    assert 0 < len(some.tensors) < 47
    assert some.metadata == ()
    assert shell.run_line_magic("apsi_compare", f"{a} {b};") is None
    assert shell.run_line_magic("apsi_compare", "--help") is None
    assert "--no-metadata" in capsys.readouterr().out


def test_errors_are_one_line(shell: InteractiveShell) -> None:
    a = samples.path("fracast.safetensors")
    Path("bad.gguf").write_bytes(b"GGUF")
    for words, found in (("nothing.gguf", "nothing.gguf"), ("bad.gguf", "bad.gguf"), (f"{a} --tensors x", "'x'")):
        with pytest.raises(UsageError, match=found):
            shell.run_line_magic("apsi_compare", f"{a} {words}")


def test_a_terminal_shows_it_in_full(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    a = samples.path("fracast.safetensors")
    shell.run_cell(f"%apsi_compare {a} {a}")
    assert "All 47 tensors hold the same values" in capsys.readouterr().out

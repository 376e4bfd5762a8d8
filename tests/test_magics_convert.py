"""``%apsi_convert`` in an `InteractiveShell`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import apsi_inspect as ai
from apsi_inspect import samples


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "apsi_inspect")
    monkeypatch.chdir(tmp_path)
    yield shell
    InteractiveShell.clear_instance()


def test_it_converts_and_returns_the_report(shell: InteractiveShell, tmp_path: Path) -> None:
    src = samples.path("fracast.safetensors")
    line = f'"{src}" "my model.gguf" --dtype q8_0 --tensor-type core.in_proj.weight=f32 --architecture x'
    planned = shell.run_line_magic("apsi_convert", line + " --dry-run")
    assert planned.dry_run
    assert not list(tmp_path.iterdir())
    report = shell.run_line_magic("apsi_convert", line)
    assert report.size_after == planned.size_after == (tmp_path / "my model.gguf").stat().st_size
    assert ai.open("my model.gguf")["core.in_proj.weight"].encoding == "F32"
    assert "Q8_0" in report._repr_html_()


def test_errors_are_one_line(shell: InteractiveShell, tmp_path: Path) -> None:
    src = samples.path("fracast.safetensors")
    Path("there.gguf").write_bytes(b"")
    for line, word in (
        (f"{src} there.gguf", "--force"),
        (f"{src} o.gguf --dtype q9", "q9"),
        ("nothing.gguf o.gguf", "nothing.gguf"),
        (f"{src} o.txt", "ending"),
    ):
        with pytest.raises(UsageError, match=word):
            shell.run_line_magic("apsi_convert", line)
    assert [p.name for p in tmp_path.iterdir()] == ["there.gguf"]

"""The magics in an `InteractiveShell`: quoting, options, completion, the returned object, errors in one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import apsi_inspect as ai
from apsi_inspect import samples
from apsi_inspect.model import ModelFile, Tensor
from apsi_inspect.notebook.magics import one_path, split
from apsi_inspect.notebook.side_by_side import SideBySide


@pytest.fixture(scope="module")
def loaded() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "apsi_inspect")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(loaded: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """A shell in a folder with models, one of them with a space and a quote in its path."""
    folder = tmp_path / "my models"
    folder.mkdir()
    source = samples.path("fracast.safetensors")
    shutil.copy(source, tmp_path / "small.safetensors")
    shutil.copy(samples.path("fracast-int8.safetensors"), tmp_path / "small-int8.safetensors")
    shutil.copy(source, folder / "it's one.safetensors")
    (tmp_path / "notes.txt").write_text("no model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return loaded


def result(shell: InteractiveShell, cell: str) -> Any:
    """What a cell gives; raises what it raised."""
    done = shell.run_cell(cell)
    done.raise_error()
    return done.result


@pytest.mark.parametrize(
    "path",
    [
        "small.safetensors",
        "./small.safetensors",
        "~/small.safetensors",
        '"small.safetensors"',
        '"my models/it\'s one.safetensors"',
        "my\\ models/it\\'s\\ one.safetensors",
        "$where",
        "{where}",
        "'{where}'",
    ],
)
def test_one_file(shell: InteractiveShell, path: str) -> None:
    shell.user_ns["where"] = "small.safetensors"
    model = result(shell, f"%apsi_info {path}")
    assert isinstance(model, ModelFile)
    assert len(model) == 47


def test_path_with_spaces_needs_no_quotes(shell: InteractiveShell) -> None:
    Path("a b  c").mkdir()
    shutil.copy("small.safetensors", "a b.safetensors")
    assert len(result(shell, "%apsi_info a b.safetensors --sort -nbytes")) == 47


def test_assignment(shell: InteractiveShell) -> None:
    result(shell, "m = %apsi_info small.safetensors")
    assert isinstance(shell.user_ns["m"], ModelFile)
    assert "core.block.dw_bias" in shell.user_ns["m"]


def test_options(shell: InteractiveShell) -> None:
    view = result(shell, "%apsi_info small.safetensors --tensors 'core.block.*' --sort -nbytes --metadata --tree")
    assert isinstance(view, ModelFile)
    assert view == view
    assert hash(view) == id(view)
    assert len(ai.stats(view, "core.norm*")) > 0
    # the mapping and its facts
    assert len(view) == 47
    assert isinstance(view["core.block.dw_bias"], Tensor)
    assert view.metadata["model_name"] == "fracast-0"
    assert view.format == "safetensors"
    text = str(view)
    assert "Tensors: 10 of 47 match core.block.*" in text
    assert "Structure" in text
    assert "<details open><summary>Metadata" in view._repr_html_()
    with pytest.raises(AttributeError):
        _ = view.nothing


def test_semicolon_shows_nothing(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    for end in (";", " ;", "; # why"):
        assert result(shell, f"%apsi_info small.safetensors{end}") is None
    assert capsys.readouterr().out == ""
    shell.run_cell("m = %apsi_info small.safetensors;", store_history=True).raise_error()
    assert len(shell.user_ns["m"]) == 47
    shell.run_cell("%apsi_info small.safetensors;", store_history=True).raise_error()
    assert capsys.readouterr().out == ""


def test_comment_is_left_out(shell: InteractiveShell) -> None:
    assert len(result(shell, "%apsi_info small.safetensors  # it's small")) == 47


def test_help_is_shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert result(shell, "%apsi_info --help") is None
    assert "--tensors GLOB" in capsys.readouterr().out
    assert result(shell, "%apsi_convert --help") is None
    assert "--dry-run" in capsys.readouterr().out


def test_json_is_a_plain_record(shell: InteractiveShell) -> None:
    facts = result(shell, "%apsi_info small.safetensors --json --tensors core.norm.weight")
    assert facts["parameters"] == 85_001
    assert [t["name"] for t in facts["tensors"]] == ["core.norm.weight"]


def test_cell_puts_files_side_by_side(shell: InteractiveShell) -> None:
    both = result(shell, "%%apsi_info\nsmall.safetensors\n\n# the int8 twin\n'small-int8.safetensors'\n")
    assert isinstance(both, SideBySide)
    assert [len(m) for m in both] == [47, 67]
    assert "Tensors: 27 names in every file, 0 with a difference; 60 only in some" in str(both)
    one = result(shell, "%%apsi_info --tensors core.*\n~/my models/it's one.safetensors")
    assert isinstance(one, ModelFile)
    facts = result(shell, "%%apsi_info --json\nsmall.safetensors\nsmall-int8.safetensors")
    assert [f["tensor_count"] for f in facts] == [47, 67]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "which file? %apsi_info PATH"),
        ("missing.gguf", "missing.gguf: No such file or directory"),
        ("notes.txt", "notes.txt: not a safetensors, GGUF, .apsim, PyTorch or ONNX file"),
        ("small.safetensors --sort colour", "no column 'colour' to sort by"),
        ("small.safetensors --colour", "unrecognized arguments: --colour"),
        ("small.safetensors small-int8.safetensors", "one PATH in a line"),
        ("'small.safetensors", "No closing quotation"),
    ],
)
def test_errors_are_one_line(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    done = shell.run_cell(f"%apsi_info {line}")
    assert not done.success
    out, err = capsys.readouterr()
    said = (out + err).strip()
    assert said.startswith(f"UsageError: {message}")
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1


def test_text_in_a_terminal(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    result(shell, "%apsi_info small.safetensors")
    assert "Bytes per encoding" in capsys.readouterr().out


def test_help(shell: InteractiveShell) -> None:
    found = shell.object_inspect("%apsi_info")
    for word in ("PATH", "--tensors", "--sort", "--metadata", "--tree", "--json", "Only the header is read"):
        assert word in found["docstring"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("info", ("side by side", "Only the header is read")),
        ("compare", ("A B", "c.frame", "c = %apsi_compare")),
        ("convert", ("SRC DST", "r = %apsi_convert", "q8_0")),
        ("verify", ("r = %apsi_verify", "not authorship", "kept in the")),
    ],
)
def test_question_mark_says_all_of_a_magic(shell: InteractiveShell, name: str, said: tuple[str, ...]) -> None:
    from apsi_inspect.notebook.magics import OPTIONS

    text = shell.object_inspect(f"%apsi_{name}")["docstring"]
    assert [w for w in (*said, *OPTIONS[name]) if w not in text and w != "--help"] == []


def completions(shell: InteractiveShell, line: str) -> set[str]:
    """What a notebook's tab key offers."""
    with provisionalcompleter():
        found = {line[: c.start] + c.text for c in shell.Completer.completions(line, len(line))}
    return {text.partition("%apsi_")[2].partition(" ")[2] for text in found}


@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        ("%apsi_info sm", {"small.safetensors", "small-int8.safetensors"}, {"notes.txt"}),
        ("%apsi_info ", {"my\\ models/", "small.safetensors"}, {"notes.txt"}),
        ("m = %apsi_info my\\ models/it", {"my\\ models/it\\'s\\ one.safetensors"}, set()),
        ("%apsi_info my\\ models/it\\'s", {"my\\ models/it\\'s\\ one.safetensors"}, set()),
        ('%apsi_info "my models/it', {"\"my models/it's one.safetensors"}, set()),
        ("%apsi_info ~/small-", {"~/small-int8.safetensors"}, set()),
        ("%apsi_info f --", {"f --tensors", "f --sort", "f --metadata", "f --tree", "f --json", "f --help"}, set()),
        ("%apsi_info f --sort n", {"f --sort name", "f --sort numel", "f --sort nbytes"}, {"f --sort notes.txt"}),
        ("%apsi_info f --sort -nb", {"f --sort -nbytes"}, set()),
        ("%apsi_compare small.safetensors sm", {"small.safetensors small-int8.safetensors"}, set()),
        ("%apsi_convert a b.gguf --dtype q8", {"a b.gguf --dtype q8_0"}, set()),
        ("%apsi_convert a b.gguf --dtype ", {"a b.gguf --dtype q4_k"}, {"a b.gguf --dtype int4"}),
        ("%apsi_convert a --dtype ", {"a --dtype q4_k", "a --dtype int4"}, {"a --dtype notes.txt"}),
        ("%apsi_verify a --key-file no", {"a --key-file notes.txt"}, set()),
    ],
)
def test_completion(shell: InteractiveShell, line: str, wanted: set[str], unwanted: set[str]) -> None:
    found = completions(shell, line)
    assert wanted <= found
    assert not unwanted & found


def test_completion_after_an_escaped_space(shell: InteractiveShell) -> None:
    Path("m").mkdir()
    for name in ("a b.safetensors", "m/a b.safetensors"):
        shutil.copy("small.safetensors", name)
    for typed in ("a\\ b", "a\\ b.safe", "m/a\\ b"):
        assert completions(shell, f"%apsi_info {typed}") == {typed.partition("b")[0] + "b.safetensors"}


@pytest.mark.parametrize("typed", ["'my models/it", "small.safetensors --tensors b", "nothing", "f --tensors "])
def test_completion_offers_nothing_else(shell: InteractiveShell, typed: str) -> None:
    """Neither a name that the open quote would end, nor names of Python: at most what stands there already."""
    assert completions(shell, f"%apsi_info {typed}") <= {typed}


def test_splitting() -> None:
    assert split("'a b' --sort -nbytes --tensors \"x.*\"") == ["a b", "--sort=-nbytes", "--tensors", "x.*"]
    assert split("blk.0#1 # one") == ["blk.0#1"]
    assert split("a\\ #b '# c' # d;") == ["a #b", "# c"]
    assert split("'a;' b;") == ["a;", "b"]
    assert split("# all of it") == []
    assert one_path([]) == []


def test_options_of_every_magic_are_completed(shell: InteractiveShell) -> None:
    from apsi_inspect.notebook.magics import OPTIONS

    magics = {n for n in shell.magics_manager.magics["line"] if n.startswith("apsi_")}
    assert {f"apsi_{name}" for name in OPTIONS} == magics
    for name, options in OPTIONS.items():
        function = shell.magics_manager.magics["line"][f"apsi_{name}"]
        parser = getattr(function.__self__, f"apsi_{name}").parser
        declared = {o for action in parser._actions for o in action.option_strings if o.startswith("--")}
        assert {*options} - {"--help"} == declared - {"--help"}
        assert {f"x.gguf {o}" for o in options} <= completions(shell, f"%apsi_{name} x.gguf --")

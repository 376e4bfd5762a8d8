"""`audit` finds what scripts and notebooks do with models, and runs none of it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError
from apsi_inspect.notebook.audit_code import FUNCTIONS

SCRIPT = """\
import os
import apsi_inspect as ai
from apsi_inspect import load_model as lm, save_gguf
from pathlib import Path

open("plain.txt")
m = ai.open("a.gguf")
p = lm(path=Path("b.apsim"), key="secret")
save_gguf("c.gguf", p)
ai.save_model("d.apsim", p, sign=True)
ai.save_model(name, p, sign=None)
ai.convert("e.gguf",
           dst=os.path.expanduser("~/f.apsim"), sign=key)
ai.verify("d.apsim")
later = ai.torch_load
later("g.pt")
ai.compare("h.gguf", "i.gguf")
getattr(ai, "load_" + kind)("j")
getattr(ai, "load_gguf")("k")
m.verify()
os.system("apsi model convert a.gguf b.gguf")
subprocess.run(["apsi", "model", "info", path])
__import__("apsi_inspect")
lambda: ai.scan("l.pkl")
"""
# line, name, kind, reads, writes: read off the script above by hand
EXPECTED = [
    (7, "open", "load", ("a.gguf",), ()),
    (8, "load_model", "load", ("b.apsim",), ()),
    (9, "save_gguf", "save", (), ("c.gguf",)),
    (10, "save_model", "sign", (), ("d.apsim",)),
    (11, "save_model", "save", (), ()),
    (12, "convert", "sign", ("e.gguf",), ("~/f.apsim",)),
    (14, "verify", "check", ("d.apsim",), ()),
    (15, "torch_load", "load", (), ()),
    (16, "torch_load", "load", ("g.pt",), ()),
    (17, "compare", "load", ("h.gguf", "i.gguf"), ()),
    (18, "getattr", "dynamic", (), ()),
    (19, "load_gguf", "dynamic", (), ()),
    (21, "apsi model convert", "shell", (), ()),
    (22, "apsi model info", "shell", (), ()),
    (23, "__import__", "dynamic", (), ()),
    (24, "scan", "check", ("l.pkl",), ()),
]


def found(path: Path) -> list[tuple[object, ...]]:
    return [(u.line, u.name, u.kind, u.reads, u.writes) for u in ai.audit(path).uses]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def cells(path: Path, *sources: str | list[str]) -> Path:
    made = [{"cell_type": "markdown", "source": "ai.open('x')"}]
    made += [{"cell_type": "code", "source": s} for s in sources]  # type: ignore[dict-item]
    return written(path, json.dumps({"cells": made, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))


def test_a_script(tmp_path: Path) -> None:
    assert found(written(tmp_path / "s.py", SCRIPT)) == EXPECTED


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from apsi_inspect import *\nload_gguf('a')", "load_gguf"),
        ("import apsi_inspect\napsi_inspect.load_gguf('a')", "load_gguf"),
        ("import apsi_inspect.ops.convert\napsi_inspect.ops.convert.convert('a', 'b')", "convert"),
        ("from apsi_inspect.ops.load import load_model\nload_model('a')", "load_model"),
        ("async def f():\n    import apsi_inspect as q\n    return [q.verify(p) for p in x]", "verify"),
        ("def f(x=ai.open): pass\nimport apsi_inspect as ai", "open"),
        ("import apsi_inspect as ai\nmap(ai.load_model, paths)", "load_model"),
    ],
)
def test_ways_to_name_a_function(tmp_path: Path, text: str, name: str) -> None:
    (use,) = ai.audit(written(tmp_path / "s.py", text)).uses
    assert use.name == name


@pytest.mark.parametrize(
    "text", ["import other as ai\nai.open('x')", "from apsi import load_model\nload_model('x')", "open('a')", ""]
)
def test_what_is_not_ours(tmp_path: Path, text: str) -> None:
    assert found(written(tmp_path / "s.py", text)) == []


def test_a_notebook(tmp_path: Path) -> None:
    path = cells(
        tmp_path / "n.ipynb",
        ["%load_ext apsi_inspect\n", "import apsi_inspect as ai"],
        "m = %apsi_info 'my model.gguf' --tensors 3",
        "%%apsi_info\na.gguf\nb.gguf",
        "!apsi model convert a.gguf b.apsim\nai.save_model('c.apsim', p, key=k)",
        "%apsi_convert a.gguf b.safetensors --dtype f16",
        "%timeit 1",
    )
    uses = ai.audit(path).uses
    assert [(u.cell, u.line, u.name, u.kind) for u in uses] == [
        (1, 1, "%load_ext", "load"),
        (2, 1, "%apsi_info", "load"),
        (3, 1, "%apsi_info", "load"),
        (4, 1, "apsi model convert", "shell"),
        (4, 2, "save_model", "sign"),
        (5, 1, "%apsi_convert", "convert"),
    ]
    assert uses[1].reads == ("my model.gguf",)
    assert uses[2].reads == ("a.gguf", "b.gguf")
    assert (uses[5].reads, uses[5].writes) == (("a.gguf",), ("b.safetensors",))


@pytest.mark.parametrize(
    ("cell", "line", "name"),
    [
        ("%%time\nx = 1\nai.open('a')", 3, "open"),
        ("%%capture out\n%apsi_verify a", 2, "%apsi_verify"),
        ("%time m = ai.open('a')", 1, "open"),
        ("x = 1\n%timeit -n 3 -r 1 ai.open('a')", 2, "open"),
        ("%%time\n%%capture\nai.open('a')", 3, "open"),
        ("!cd x && HOME=. apsi model verify a", 1, "apsi model verify"),
        ("y = !apsi model verify a | head", 1, "apsi model verify"),
        ("%%bash\ncd x\napsi model verify a", 1, "apsi model verify"),
        ("%sx apsi model verify a", 1, "apsi model verify"),
        ("%system python -m apsi_inspect a", 1, "python -m apsi_inspect"),
        ("get_ipython().magic('apsi_info a')", 1, "%apsi_info"),
    ],
)
def test_what_magics_run(tmp_path: Path, cell: str, line: int, name: str) -> None:
    (use,) = ai.audit(cells(tmp_path / "n.ipynb", "import apsi_inspect as ai", cell)).uses
    assert (use.cell, use.line, use.name) == (2, line, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import apsi_inspect as ai\nx = ai\nx.open('a')", "open"),
        ("from apsi_inspect import ops\nops.save.save_model('a', {})", "save_model"),
        ("from apsi_inspect.ops import load\nload.load_model('a')", "load_model"),
        ("import apsi_inspect as ai\nvars(ai)['open']('a')", "vars"),
        ("import apsi_inspect as ai\nai.__dict__['open']('a')", "__dict__"),
    ],
)
def test_ways_around(tmp_path: Path, text: str, name: str) -> None:
    (use,) = ai.audit(written(tmp_path / "s.py", text)).uses
    assert use.name == name


@pytest.mark.parametrize("bad", ["def (", "if 1:\n    %apsi_info z\n  bad", "x = 1\n\\x"])
def test_a_cell_that_is_no_python_hides_no_other(tmp_path: Path, bad: str) -> None:
    path = cells(tmp_path / "n.ipynb", bad, "import apsi_inspect as ai\nai.open('a')")
    for where in (path, tmp_path):
        report = ai.audit(where)
        assert [(u.cell, u.name) for u in report.uses] == [(2, "open")]
        assert len(report.unread) == 1
        assert "cell 1" in report.unread[0]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")
    with pytest.raises(ModelFileError, match="regular"):
        ai.audit(tmp_path / "a.py")
    assert len(ai.audit(tmp_path).unread) == 1


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    written(tmp_path / "deep" / "a.py", "import apsi_inspect as ai\nai.open('x')")
    written(tmp_path / ".ipynb_checkpoints" / "b.py", "import apsi_inspect as ai\nai.open('x')")
    written(tmp_path / "broken.py", "def f(:\n")
    written(tmp_path / "notes.txt", "ai.open('x')")
    (tmp_path / "loop").symlink_to(tmp_path)
    report = ai.audit(tmp_path)
    assert [Path(f).name for f in report.files] == ["a.py"]
    assert [Path(u.file).name for u in report.uses] == ["a.py"]
    assert len(report.unread) == 1
    assert "broken.py" in report.unread[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "def f(:\n"),
        ("a.py", "x = " + "(" * 5000),
        ("a.ipynb", "{"),
        ("a.ipynb", '{"cells": 3}'),
        ("a.ipynb", '{"cells": [{"cell_type": "code", "source": [1]}]}'),
        ("a.ipynb", "[" * 100_000),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ModelFileError, match=name):
        ai.audit(written(tmp_path / name, text))


def test_nothing_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = written(tmp_path / "s.py", f"import apsi_inspect\nopen({str(canary)!r}, 'w')\n")
    cells(tmp_path / "n.ipynb", f"!touch {canary}", f"%%bash\ntouch {canary}")
    ai.audit(tmp_path)
    ai.audit(path)
    assert not canary.exists()


def test_every_function_that_takes_a_path_is_known() -> None:
    """The table of `FUNCTIONS` has each public function with such a parameter, under the parameter's own name."""
    for name in ai.__all__:
        thing = getattr(ai, name)
        if not inspect.isfunction(thing) or name == "audit":
            continue
        parameters = list(inspect.signature(thing).parameters)
        paths = [p for p in parameters[:2] if p in ("path", "src", "dst", "model", "a", "b", "model_or_tensor")]
        assert bool(paths) == (name in FUNCTIONS), name
        if name in FUNCTIONS:
            wanted = {*FUNCTIONS[name].reads, *FUNCTIONS[name].writes}
            assert wanted == {(parameters.index(p), p) for p in paths}, name


def test_the_command(tmp_path: Path) -> None:
    path = written(tmp_path / "s.py", "import apsi_inspect as ai\nai.open('<a>\\x1b[2J.gguf')")
    command = [sys.executable, "-m", "apsi_inspect", "audit", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "s.py:2" in shown.stdout
    assert "\x1b" not in shown.stdout
    document = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
    assert document["schema_version"] == 1
    assert document["uses"][0]["reads"] == ["<a>\x1b[2J.gguf"]
    assert "<a>" not in ai.audit(path)._repr_html_()
    missing = subprocess.run([*command[:-1], str(tmp_path / "no")], capture_output=True, text=True)
    assert missing.returncode == 3
    assert "Traceback" not in missing.stderr

"""Views of every report, plan and table of ours: text and HTML carry the same facts, nothing of a file gets through
unescaped, and ten thousand rows stay small. (Models and tensors: `tests/test_render.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import apsi_inspect as ai
from apsi_inspect.display import Displayable
from apsi_inspect.integrity.check import Damage
from apsi_inspect.model import Finding
from apsi_inspect.notebook.audit import AuditReport
from apsi_inspect.notebook.audit_code import Use
from apsi_inspect.ops.changes import ConversionReport, KeyChange, TensorChange
from apsi_inspect.ops.comparison import Comparison, KeyDifference
from apsi_inspect.ops.error_table import ErrorTable
from apsi_inspect.ops.scan_report import Name, ScanReport
from apsi_inspect.reports import Part, Report

from .html_page import Page, html_words, words

EVIL = "<script>document.title='apsi-xss'</script><img src=x onerror=alert(1)>$x$ \\(y\\) \u202e\u2066\x1b[31m\x07&amp;"
MANY = 10_000
NOUNS = "tensors|names|files|keys|bytes|chunks|uses|findings|entries|formats"


class Files:
    """Small models with names of one kind, in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        rng = np.random.default_rng(7)
        self.folder, self.name = folder, name
        self.tensors = {f"{name}{i}": rng.normal(size=(8, 64)).astype(np.float32) for i in range(3)}
        self.tensors |= {f"{name}one": rng.normal(size=7).astype(np.float32)}
        ai.samples.write(folder, ["tiny-checkpoint.pt", "tiny-network.onnx"])
        save_file(self.tensors, folder / "a.safetensors", {name: name, "chat_template": name})
        other = {k: v.astype(np.float16).astype(np.float32) for k, v in self.tensors.items()}
        other[f"{name}0"] = other[f"{name}0"][:4]
        other[f"{name}1"] = other[f"{name}1"] * np.float32(1.5)
        other[f"{name}new"] = other.pop(f"{name}one")
        save_file(other, folder / "b.safetensors", {name: name + "!", "more": name})

    def path(self, name: str) -> Path:
        return self.folder / name

    def model(self) -> ai.ModelFile:
        return ai.open(self.path("a.safetensors"))

    def signed(self, key: str | None) -> Report:
        ai.save_model(self.path("s.apsim"), self.tensors, metadata={self.name: self.name}, sign="key")
        return ai.verify(self.path("s.apsim"), key)

    def damaged(self) -> Report:
        ai.save_model(self.path("d.apsim"), self.tensors)
        raw = bytearray(self.path("d.apsim").read_bytes())
        raw[-8] ^= 1
        self.path("d.apsim").write_bytes(raw)
        return ai.verify(self.path("d.apsim"))

    def scanned(self) -> ScanReport:
        self.path("x.pkl").write_bytes(b"\x80\x04c" + f"os\n{self.name}\n".encode() + b".")
        return ai.scan(self.path("x.pkl"))

    def audited(self) -> AuditReport:
        lines = [f"m = ai.open({self.name!r})", f"ai.save_model({self.name + '.apsim'!r}, m)", "eval(x)"]
        self.path("use.py").write_text("\n".join(["import apsi_inspect as ai", *lines]), encoding="utf-8")
        self.path("bad.py").write_text(f"({self.name}", encoding="utf-8")
        return ai.audit(self.folder)


VIEWS: dict[str, Callable[[Files], Any]] = {
    "errors": lambda f: ai.quant_error(f.model(), ["q8_0", "q4_k", "int8"]),
    "errors sampled": lambda f: ai.quant_error(f.model(), ["q4_0"], sample=64),
    "plan": lambda f: ai.plan(f.model(), bpw=12),
    "plan not reached": lambda f: ai.plan(f.model(), "1MB", formats=["q8_0", "q4_0"]),
    "comparison": lambda f: ai.compare(f.path("a.safetensors"), f.path("b.safetensors")),
    "comparison of the same": lambda f: ai.compare(f.path("a.safetensors"), f.path("a.safetensors")),
    "hardware": lambda f: ai.hardware_plan(f.model(), layers=2, hidden=64, heads=4, training="adamw"),
    "hardware of a number": lambda f: ai.hardware_plan(parameters="7B", device_memory=["80GB", "24GiB"]),
    "audit": Files.audited,
    "authentic": lambda f: f.signed("key"),
    "other key": lambda f: f.signed("another key"),
    "damaged": Files.damaged,
    "scan": Files.scanned,
    "scan of a model": lambda f: ai.scan(f.path("tiny-checkpoint.pt")),
    "conversion": lambda f: ai.convert(f.path("a.safetensors"), f.path("a.gguf"), dtype="q8_0", dry_run=True),
    "network": lambda f: ai.onnx_model(f.path("tiny-network.onnx")),
    "quantized": lambda f: ai.quantize(f.tensors[f"{f.name}0"], "int4"),
}


def check(shown: Displayable) -> tuple[str, str]:
    """The view's HTML and text, which say the same and hold nothing that does something."""
    html, text = shown._repr_html_(), str(shown)
    assert html_words(html) == words(text)
    page = Page(html)
    assert not page.open
    assert not {"script", "img", "link", "iframe", "svg"} & set(page.tags)
    assert not any(k in ("id", "href", "src", "title") or k.startswith("on") for _, k, _ in page.attributes)
    assert not any("apsi-xss" in v for _, _, v in page.attributes)
    assert not any("apsi-xss" in live for live in page.live)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", text + page.text)
    for piece in page.code_only:  # what MathJax looks at: a delimiter is alone in its element
        assert piece == "$" or "$" not in piece
        assert piece == "\\" or "\\" not in piece
    return html, text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("plain"), "layers.")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("hostile"), EVIL)


@pytest.mark.parametrize("name", VIEWS)
def test_text_and_html_say_the_same(plain: Files, name: str) -> None:
    _, text = check(VIEWS[name](plain))
    assert not re.search(
        r"(?<![\d.,_-])1 (more )?(tensors|names|files|keys|bytes|chunks|uses|findings|entries)\b", text
    )


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_of_a_file_gets_through(hostile: Files, name: str) -> None:
    check(VIEWS[name](hostile))


def many_errors(f: Files, name: str) -> ErrorTable:
    table = ai.quant_error(f.model(), ["q8_0", "q4_0"])
    rows = [r._replace(name=f"{name}{i}") for i in range(MANY) for r in table.rows[:2]]
    return ErrorTable(rows, name, table.formats, None)


def many_in_plan(f: Files, name: str) -> Any:
    from dataclasses import replace

    made = ai.plan(f.model(), bpw=12)
    rows = [
        made.rows[i % 4]._replace(name=f"{name}{i}", reason=f"{name}{i}"[-80:] if i % 2 else "") for i in range(MANY)
    ]
    return replace(made, rows=tuple(rows))


def many_compared(f: Files, name: str) -> Comparison:
    c = ai.compare(f.path("a.safetensors"), f.path("b.safetensors"))
    tensors = [c.tensors[i % len(c.tensors)] for i in range(MANY)]
    tensors = [t._replace(a=t.a and f"{name}{i}", b=t.b and f"{name}{i}") for i, t in enumerate(tensors)]
    keys = tuple(KeyDifference(f"{name}{i}", name, None if i % 2 else name) for i in range(MANY))
    return Comparison(c.a, c.b, tuple(tensors), keys, keys)


def many_uses(f: Files, name: str) -> AuditReport:
    uses = tuple(Use("a.py", None, i, "open", "load", (name,), (name,), "") for i in range(MANY))
    return AuditReport(".", uses, ("a.py",), tuple(f"{i}.py" for i in range(MANY)))


def many_parts(f: Files, name: str) -> Report:
    parts = [Part(f"{name}{i}", "intact", "ok") for i in range(MANY)] + [Part("last", "damaged", "is the worst")]
    damage = tuple(Damage("a", i, i + 1, (name,) * 9) for i in range(MANY))
    return Report(
        "a", "apsim", "damaged", tuple(parts), damage, tuple(Finding("note", "x", str(i)) for i in range(MANY))
    )


def many_names(f: Files, name: str) -> ScanReport:
    names = tuple(Name(f"{name}{i}", 1, "unknown", "a") for i in range(MANY))
    return ScanReport("a", "unknown", tuple(Finding("warning", "x", str(i)) for i in range(MANY)), names, "all", True)


def many_changes(f: Files, name: str) -> ConversionReport:
    tensors = [
        TensorChange(f"{name}{i}", f"{name}{i}.", (2,), "F32", "F16", "re-encoded", str(i), 8, 4) for i in range(MANY)
    ]
    keys = [KeyChange(f"{name}{i}", "dropped", "because") for i in range(MANY)]
    findings = [Finding("note", "x", str(i)) for i in range(MANY)]
    return ConversionReport("a", "b", "gguf", ["b"], 9, 9, tensors, keys, findings)


BIG = [many_errors, many_in_plan, many_compared, many_uses, many_parts, many_names, many_changes]


@pytest.mark.parametrize("many", BIG)
@pytest.mark.parametrize(("name", "limit"), [("model.layers.7.mlp.", 200), (EVIL, 400), ("x" * 100_000, 400)])
def test_ten_thousand_rows_stay_small(plain: Files, many: Callable[..., Displayable], name: str, limit: int) -> None:
    html, text = check(many(plain, name))
    assert len(html.encode()) < limit * 1024
    assert re.search(r"… \d+ more", text)
    if many is many_parts:
        assert "is the worst" in text

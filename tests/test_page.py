"""`report`: a page by itself, with the facts of the views, whatever the file says."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError

from . import handmade

SECRET = "six random words make a secret"


class Page(HTMLParser):
    """Elements, attributes and text of a page; complains where an element is left open."""

    OPEN = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.OPEN:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    ai.samples.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["fracast.safetensors", "tiny-llama.gguf", "oscillator.apsim", "tiny-checkpoint.pt"])
def test_a_page_has_it_all(samples: Path, name: str) -> None:
    path = ai.report(samples / name, samples / "r.html", errors=["q8_0", "q4_0"])
    page = Page(Path(path).read_text())
    heads = [page.words[i] for i, w in enumerate(page.words) if w in ("Model", "Integrity", "Safety", "Values")]
    assert {*heads} == {"Model", "Integrity", "Safety", "Values"}
    assert "Quantization error" in page.text
    m = ai.open(samples / name)
    largest = max(m.values(), key=lambda t: t.nbytes)
    assert largest.name in page.text
    assert f"{largest.stats().std:.4g}" in page.text
    pictures = [a for tag, a in page.tags if tag == "img"]
    assert pictures
    for a in pictures:
        assert str(a["src"]).startswith("data:image/png;base64,")
        assert any(c.isdigit() for c in str(a["alt"]))


def test_nothing_is_loaded_or_run(samples: Path) -> None:
    text = Path(ai.report(samples / "tiny-llama.gguf", samples / "r.html", errors=False)).read_text()
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "form"}
    assert all(not k.startswith("on") for _, attrs in page.tags for k in attrs)
    for _, attrs in page.tags:
        assert all(str(attrs[k]).startswith(("#", "data:")) for k in ("href", "src") if k in attrs)
    assert "http-equiv" in text
    assert "default-src 'none'" in text
    assert "url(" not in text
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert {f"#{i}" for i in ids} == {a["href"] for tag, a in page.tags if tag == "a"}


def test_the_same_every_time(samples: Path) -> None:
    a = Path(ai.report(samples / "fracast.safetensors", samples / "a.html", errors="q4_0")).read_bytes()
    b = Path(ai.report(samples / "fracast.safetensors", samples / "b.html", errors="q4_0")).read_bytes()
    assert a == b


def test_hostile_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "</section><img src=x onerror=alert(1)>", "$x$", "a\u202eb"]
    tensors = [(n, "F32", [64], np.arange(64, dtype="<f4").tobytes()) for n in names]
    path = tmp_path / "<b>&x.safetensors"
    path.write_bytes(handmade.safetensors(tensors, {"k": "<script>alert(2)</script>"}))
    page = Page(Path(ai.report(path, tmp_path / "r.html", errors=["q8_0"])).read_text())
    assert not any(tag == "script" for tag, _ in page.tags)
    assert all(str(a["src"]).startswith("data:") for tag, a in page.tags if tag == "img")
    assert "\u202e" not in page.text
    assert names[0] in page.text


def test_large_models_are_not_read_unasked(tmp_path: Path) -> None:
    shape = [1 << 14, 1 << 15]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 << 29]}}).encode()
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + (4 << 29))
    page = Page(Path(ai.report(path, tmp_path / "r.html")).read_text())
    assert "were not read" in page.text
    assert "were not checked" in page.text
    assert "Quantization error" not in page.text


def test_a_key_stays_out(tmp_path: Path) -> None:
    ai.save_model(tmp_path / "s.apsim", {"w": np.arange(64.0)}, sign=SECRET)
    text = Path(ai.report(tmp_path / "s.apsim", tmp_path / "r.html", key=SECRET, errors=False)).read_text()
    assert "authentic" in text
    assert SECRET not in text


def test_what_is_refused(tmp_path: Path) -> None:
    ai.save_model(tmp_path / "s.apsim", {"w": np.arange(64.0)})
    with pytest.raises(ValueRefusedError, match=r"\.html"):
        ai.report(tmp_path / "s.apsim", tmp_path / "s.apsim")
    with ai.permissions(read=True), pytest.raises(PermissionError):
        ai.report(tmp_path / "s.apsim", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_no_tensors(data: Path, tmp_path: Path) -> None:
    ai.report(data / "golden" / "no_tensors.apsim", tmp_path / "r.html")
    Page((tmp_path / "r.html").read_text())

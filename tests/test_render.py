"""The view of a model: hostile files, the same facts in text and HTML, bounds, what is shown of each format."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apsi_inspect import listing, samples
from apsi_inspect.errors import ApsiError
from apsi_inspect.notebook import render
from apsi_inspect.notebook.render import model_parts, table_parts, tensor_parts, trust
from apsi_inspect.notebook.side_by_side import SideBySide
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.parts import to_html, to_text

from .html_page import Page, html_words, words

FOLDER = Path(__file__).parent / "data" / "cases"
GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = [
    c for c in json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))["cases"] if c["id"].startswith("rn-")
]
STORED = [c for c in CASES if not c.get("generated")]
# what every payload of the cases carries
MARKS = ("document.title", "apsi-xss", "display:none", "127.0.0.1:9", "SIGNATURE VALID")


def write_safetensors(path: Path, shapes: dict[str, list[int]], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file of F32 zeros (a hole behind the header)."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return path


def views(path: Path) -> list[Any]:
    """Every view of a file."""
    model = open_model(path)
    parts = [model_parts(model), model_parts(model, metadata=True, tree=True), model_parts(model, "*", "-nbytes")]
    parts += [table_parts(model.table), SideBySide([model, model])._parts(), *(tensor_parts(t) for t in model.values())]
    return parts


@pytest.mark.parametrize("case", STORED, ids=lambda c: c["id"])
def test_hostile_file(case: dict[str, Any]) -> None:
    expect = case["expect"]
    if case["accept"] == ["rejects"]:
        with pytest.raises(ApsiError) as refused:
            open_model(FOLDER / case["entry"])
        assert "<script" not in refused.value._repr_html_()  # type: ignore[attr-defined]
        return
    parts = views(FOLDER / case["entry"])
    for part in parts:
        html, text = to_html(part), to_text(part)
        page = Page(html)
        assert not set(expect["forbid_tags"]) & set(page.tags)
        assert not set(expect["forbid_attributes"]) & {k for _, k, _ in page.attributes}
        assert not any(k == "id" or k.startswith("on") or k in ("href", "src") for _, k, _ in page.attributes)
        for mark in MARKS:
            assert not any(mark in t for t in page.live)
            assert not any(mark in v for _, _, v in page.attributes)
        for code in expect.get("text_must_not_contain_bytes_hex", ["00", "0d", "1b"]):
            assert chr(int(code, 16)) not in text
            assert chr(int(code, 16)) not in page.text
        assert html_words(html) == words(text)
    whole = Page(to_html(parts[1])).text
    for wanted in expect["must_show_text"]:
        assert wanted in whole
        assert wanted in to_text(parts[1])
    for name in expect.get("tensors", {}):
        assert not re.search("[\u202e\u200b\u2066\u2069]", whole), name


FILES = [*sorted(GOLDEN.glob("*.apsim")), *sorted(GOLDEN.glob("sharded/*.index.json"))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_text_and_html_carry_the_same_facts(path: Path) -> None:
    for part in views(path):
        html = to_html(part)
        assert html_words(html) == words(to_text(part))
        page = Page(html)
        assert not page.open  # every element is closed
        assert not {"script", "img", "link", "iframe", "svg"} & set(page.tags)
        assert not {"id", "href", "src", "title"} & {k for _, k, _ in page.attributes}


def test_rendering_is_the_same_every_time() -> None:
    path = GOLDEN / "units.apsim"
    assert open_model(path)._repr_html_() == open_model(path)._repr_html_()


def test_units_and_quantization_have_their_columns() -> None:
    units = str(open_model(GOLDEN / "units.apsim"))
    assert "degC" in units
    assert "SI = (value + 273.15)" in units
    assert re.search(r"km +m +SI = value × 1000.0", units)
    quantized = str(open_model(GOLDEN / "qtensors.apsim"))
    assert re.search(r"name .*axis +block", quantized)
    assert "axis" not in units


def test_trust_is_said_in_words() -> None:
    words_of = {p.name: to_text(trust(open_model(p))) for p in FILES}
    assert words_of["units.apsim"] == "○ unsigned: digests present, not checked"
    assert words_of["model.apsim.index.json"].startswith("○ not-checked: signature present, not checked (key ")
    assert words_of["signed_secret.apsim"].startswith("○ not-checked: signature present, not checked (key ")


def test_findings_are_shown(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.gguf", {"w": [2]})
    model = open_model(path)
    assert model.findings
    for finding in model.findings:
        assert finding.message in str(model)
        assert finding.severity in str(model)


def layers(n: int) -> dict[str, list[int]]:
    """Ten tensors a layer, as a transformer has them."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
    parts += ("mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm", "self_attn.rotary")
    return {f"model.layers.{i}.{p}.weight": [4, 2] for i in range(n) for p in parts}


def test_ten_thousand_tensors_are_bounded(tmp_path: Path) -> None:
    model = open_model(write_safetensors(tmp_path / "big.safetensors", layers(1000)))
    html, text = model._repr_html_(), str(model)
    assert len(html.encode()) < 200 * 1024
    assert len(text.encode()) < 100_000
    for shown in (Page(html).text, text):
        assert "9900 more tensors not shown" in shown
        assert "Tensors (10000)" in shown
        assert "1000 ×" in shown
    assert "model.layers.0–999" in text
    assert "1000 × 320 B" in text


def test_hostile_ten_thousand_tensors_are_bounded(tmp_path: Path) -> None:
    shapes = {"<&" * 300 + f"{i}." + "\u202e" * 50: [i % 7] for i in range(10_000)}
    metadata = {f"{'k' * 500}{i}": "\u202e<" * 1000 for i in range(1000)}
    model = open_model(write_safetensors(tmp_path / "big.safetensors", shapes, metadata))
    assert len(model._repr_html_().encode()) < 400_000
    assert len(str(model).encode()) < 200_000


def test_long_value_is_shortened(tmp_path: Path) -> None:
    model = open_model(write_safetensors(tmp_path / "m.safetensors", {"w": [2]}, {"config": "x" * 3_000_000}))
    assert len(model._repr_html_().encode()) < 20_000
    assert len(str(model).encode()) < 5_000
    assert len(model.metadata["config"]) == 3_000_000


def test_glob_and_sort_choose_the_rows(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a.0.w": [3], "a.10.w": [9], "a.2.w": [5], "b": [7]})
    model = open_model(path)
    chosen = to_text(model_parts(model, "a.*"))
    assert "Tensors: 3 of 4 match a.*" in chosen
    assert [line.split()[0] for line in chosen.splitlines() if re.match(r"  a\.\d+\.w ", line)] == [
        "a.0.w",
        "a.2.w",
        "a.10.w",
    ]
    largest = to_text(model_parts(model, sort="-nbytes"))
    assert re.findall(r"^  (a\.\d+\.w|b) +F32 +\d+ +\d+ +\d+ B +32.00 ", largest, re.M) == [
        "a.10.w",
        "b",
        "a.2.w",
        "a.0.w",
    ]


def test_chat_template_in_full_on_request(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n" + "x" * 1000 + "<script>\n{% endfor %}"
    path = write_safetensors(tmp_path / "m.safetensors", {"w": [2]}, {"tokenizer.chat_template": template})
    model = open_model(path)
    assert "x" * 1000 not in str(model)
    assert template in Page(to_html(model_parts(model, metadata=True))).text
    assert "  │ {% endfor %}" in to_text(model_parts(model, metadata=True))


def test_side_by_side_counts(tmp_path: Path) -> None:
    a = open_model(
        write_safetensors(tmp_path / "a.safetensors", {"w": [2], "x": [3], "y": [4]}, {"k": "1", "same": "s"})
    )
    b = open_model(
        write_safetensors(tmp_path / "b.safetensors", {"w": [2], "x": [3, 1], "z": [4]}, {"k": "2", "same": "s"})
    )
    text = str(SideBySide([a, b]))
    assert "Tensors: 2 names in every file, 1 with a difference; 2 only in some" in text
    assert re.search(r"^  x +F32 3 +F32 3 × 1$", text, re.M)
    assert re.search(r"^  y +F32 4 +–$", text, re.M)
    assert "Metadata: 2 keys in every file, 1 with a difference; 0 only in some" in text
    assert "all 3 names are in every file and equal" in str(SideBySide([a, a]))


def test_showing_a_model_imports_nothing_heavy() -> None:
    code = (
        "import sys; from apsi_inspect.ops.open import open as o; str(o(sys.argv[1]));"
        "print(*(set(sys.modules) & {'numpy', 'pandas', 'numba', 'matplotlib', 'IPython', 'dataclasses', 'html'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, GOLDEN / "base_profile.apsim"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_a_closed_model_is_still_shown(tmp_path: Path) -> None:
    (path,) = samples.write(tmp_path, ["tiny-llama.gguf"])
    with open_model(path) as model:
        assert "320 strings: [" in str(model)
    assert "(320 strings; the file is closed or has changed)" in str(model)
    assert html_words(model._repr_html_()) == words(str(model))


def test_more_than_many_tensors_are_neither_sorted_nor_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MANY", 399)
    shapes = dict(reversed(layers(40).items()))
    model = open_model(write_safetensors(tmp_path / "big.safetensors", shapes))
    monkeypatch.setattr(listing, "natural_key", None)
    monkeypatch.setattr(render, "rows", counted := Counted(listing.rows))
    text = str(model)
    assert counted.calls == 1
    assert "○ note: 400 tensors: in file order, blocks are not summed or folded" in text
    assert "300 more tensors not shown" in text
    assert "Structure" not in text
    assert re.findall(r"^  (model\S+) ", text, re.M)[:100] == list(shapes)[:100]
    assert "Structure" in to_text(model_parts(model, tree=True))


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*args, **options)


def test_narrow_cells_lose_their_end(tmp_path: Path) -> None:
    metadata = {"general.quite.long.key": "first words matter, " * 20, "k": "v"}
    model = open_model(write_safetensors(tmp_path / "m.safetensors", {"w": [2]}, metadata))
    assert re.search(r"  first words matter[^…]*…$", to_text(model_parts(model), width=60), re.M)
    assert "metadata present" not in str(model)

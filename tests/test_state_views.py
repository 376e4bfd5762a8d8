"""The states below the notebook's views: one tensor, metadata, units, signature, a job; without a browser."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pint
import pytest

import apsi_inspect as ai
from apsi_inspect.notebook.state_job import Cancelled, Job
from apsi_inspect.notebook.state_metadata import CHARACTERS, ITEMS, MetadataState
from apsi_inspect.notebook.state_signature import KEY_FILE, NO_KEY, SECRET, SignatureState
from apsi_inspect.notebook.state_tensor import CELLS, TensorState, first_slice, parse_slice
from apsi_inspect.notebook.state_units import UnitsState, convert
from apsi_inspect.parts import Table, to_html, to_text
from apsi_inspect.units_pint import unit_named

from . import handmade
from .handmade import Gguf
from .html_page import Page

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture
def cube(tmp_path: Path) -> tuple[TensorState, np.ndarray[Any, Any]]:
    values = np.arange(3 * 20 * 40, dtype=np.float32).reshape(3, 20, 40) - 100
    path = tmp_path / "cube.safetensors"
    odd = np.array([1, np.nan, np.inf, 0], "<f4")
    path.write_bytes(
        handmade.safetensors(
            [
                ("cube", "F32", [3, 20, 40], values.tobytes()),
                ("odd", "F32", [4], odd.tobytes()),
                ("one", "F32", [], b"\0\0\x80?"),
            ]
        )
    )
    state = TensorState(ai.open(path))
    state.choose("cube")
    return state, values


def cells(part: Any) -> list[list[str]]:
    assert isinstance(part, Table)
    return [[str(c) for c in row] for row in part.rows]


@pytest.mark.parametrize(
    "text",
    ["0, 0:8, 0:8", "1", "..., 3", "-1, ::5, 3:9:2", "2, 4, 7", ":, 1, 1", "::-1, 0:2, 39:35:-1", "", "0, 5:5", "1,2"],
)
def test_a_slice_shows_what_numpy_gives(cube: tuple[TensorState, np.ndarray[Any, Any]], text: str) -> None:
    state, values = cube
    state.set_slice(text)
    expected = np.asarray(values[eval(f"np.s_[{text}]") if text else ()])
    grid = np.atleast_2d(expected)
    grid = grid[(0,) * (grid.ndim - 2)][:CELLS, :CELLS]
    part = state.slice_parts()
    if not grid.size:
        assert "no values" in to_text(part)
        return
    assert cells(part) == [[f"{v:.4g}" for v in row] for row in grid.tolist()]
    hidden = expected.size - grid.size
    more = part.more.replace(" ", "") if isinstance(part, Table) else ""
    assert (str(hidden) in more) if hidden else not more


@pytest.mark.parametrize(
    "text", ["a", "__import__('os')", "0:1:0", "1.5", "..., ...", "0, 0, 0, 0", "[1, 2]", "1 2", "9" * 30]
)
def test_what_is_no_slice_is_refused(cube: tuple[TensorState, np.ndarray[Any, Any]], text: str) -> None:
    with pytest.raises(ai.ValueRefusedError):
        cube[0].set_slice(text)
    assert cube[0].slice_text == "0, 0:6, 0:6"


def test_an_index_out_of_bounds_is_numpys_error(cube: tuple[TensorState, np.ndarray[Any, Any]]) -> None:
    cube[0].set_slice("7")
    with pytest.raises(IndexError):
        cube[0].slice_parts()


def test_first_slices() -> None:
    assert [first_slice(s) for s in [(), (3,), (100, 4), (2, 3, 100, 4)]] == ["", "0:3", "0:6, 0:4", "0, 0, 0:6, 0:4"]
    assert parse_slice(" 1 , : , ... ") == (1, slice(None), Ellipsis)


def test_statistics_and_histogram_say_what_numpy_says(cube: tuple[TensorState, np.ndarray[Any, Any]]) -> None:
    state, values = cube
    text = to_text(state.stats_parts())
    for word in (f"min {values.min():.4g}", f"max {values.max():.4g}", f"mean {values.mean():.4g}", "Histogram"):
        assert word in text
    state.choose("odd")
    text = to_text(state.stats_parts())
    assert "NaN 1" in text
    assert "+Inf 1" in text
    assert "left out of the histogram" in text
    state.choose("one")
    assert "1" in to_text(state.slice_parts())
    state.choose(None)
    assert not state.cheap
    assert "Choose a tensor" in to_text(state.header_parts())


EVIL = "{% for m in messages %}<script>alert(1)</script><img src=x onerror=alert(2)>\u202e$x^2${% endfor %}\n"


@pytest.fixture
def metadata(tmp_path: Path) -> MetadataState:
    path = tmp_path / "model.gguf"
    pairs = [
        ("general.architecture", "STRING", "llama"),
        ("tokenizer.chat_template", "STRING", EVIL * 100),
        ("tokenizer.ggml.tokens", "ARRAY", ("STRING", [f"<t{i}>" for i in range(1234)])),
        ("llama.rope.freq_base", "FLOAT32", 10000.0),
    ]
    path.write_bytes(Gguf().file(pairs))
    return MetadataState(ai.open(path))


def test_keys_are_found_by_key_and_by_value(metadata: MetadataState) -> None:
    metadata.set_search("LLAMA")
    assert [r.key for r in metadata.page_rows()] == ["general.architecture", "llama.rope.freq_base"]
    metadata.set_search("")
    assert len(metadata.page_rows()) == 4
    with pytest.raises(ai.ValueRefusedError):
        metadata.select("nowhere")


def test_a_long_array_is_shown_a_page_at_a_time(metadata: MetadataState) -> None:
    metadata.select("tokenizer.ggml.tokens")
    assert metadata.items.total == 1234
    metadata.items.go(24)
    text = to_text(metadata.value_parts())
    assert "'<t1200>'" in text
    assert "'<t1233>'" in text
    assert "'<t1199>'" not in text
    assert len(metadata.items.span) == 1234 - 24 * ITEMS


def test_a_chat_template_is_text_and_nothing_else(metadata: MetadataState) -> None:
    metadata.select("tokenizer.chat_template")
    whole = ""
    for page in range(metadata.items.count):
        metadata.items.go(page)
        shown = Page(to_html(metadata.value_parts()))
        assert not {"script", "img"} & set(shown.tags)
        assert all(not k.startswith("on") for _, k, _ in shown.attributes)
        assert "\u202e" not in shown.text
        whole += shown.text
    assert whole.count("alert(1)") >= 98  # two may be cut by the edge of a page
    assert metadata.items.count == -(-len(EVIL * 100) // CHARACTERS)


def test_nested_metadata_is_typed(tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    ai.save_model(
        path, {"w": np.zeros(2, np.float32)}, metadata={"step": 3, "run": {"lr": [0.1, 0.2], "by": "$me"}, "e": []}
    )
    state = MetadataState(ai.open(path))
    state.select("run")
    text = to_text(state.value_parts())
    assert "record" in text
    assert "[0.1, 0.2]" in text
    state.select("e")
    assert "no items" in to_text(state.value_parts())
    state.select("step")
    assert "int" in to_text(state.value_parts())


@pytest.mark.parametrize(
    ("name", "target"),
    [("temp", "degF"), ("temp", "K"), ("height", "mm"), ("energy", "eV"), ("energy", "kg*m**2/s**2")],
)
def test_values_in_another_unit_are_those_of_pint(name: str, target: str) -> None:
    state = UnitsState(ai.open(GOLDEN / "units.apsim"))
    state.select(name)
    state.show_in(target)
    ureg = pint.get_application_registry()
    values = np.ravel(np.asarray(state.model[name])).astype(float)
    expected = ureg.Quantity(values, str(state.unit)).to(target).magnitude
    assert [state.converted(v) for v in values] == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-9)
    text = to_text(state.value_parts())
    assert f"{expected[0]:.4g}" in text
    assert "Nothing is written" in text
    state.show_in("")
    assert state.converted(values[0]) == values[0]


@pytest.mark.parametrize("target", ["kg", "no_such_unit", "m); import os", "dB", "1e3*m", "m**2", "$x$"])
def test_a_unit_that_does_not_fit_is_refused(target: str) -> None:
    state = UnitsState(ai.open(GOLDEN / "units.apsim"))
    state.select("height")
    with pytest.raises(ai.ValueRefusedError):
        state.show_in(target)
    assert state.target is None


def test_every_unit_is_described() -> None:
    state = UnitsState(ai.open(GOLDEN / "units.apsim"))
    assert state.names == ["angle", "energy", "height", "mass", "noise", "temp"]
    for name in state.names:
        state.select(name)
        assert name in to_text(state.unit_parts())
    assert "SI = (value + 273.15)" in to_text(state.unit_parts())
    with pytest.raises(ai.ValueRefusedError):
        state.select("plain")
    assert convert(1.0, unit_named("km"), unit_named("m")) == 1000


def verified(state: SignatureState, kind: str, given: str = "") -> str:
    state.verify(kind, given)
    state.job.wait(30)
    return state.status


@pytest.mark.parametrize("opened", [False, True])
def test_the_states_of_a_signed_file(opened: bool, tmp_path: Path) -> None:
    path = GOLDEN / "signed_secret.apsim"
    state = SignatureState(ai.open(path) if opened else path)
    assert state.status == "not-checked"
    assert verified(state, NO_KEY) == "intact"
    assert verified(state, SECRET, "team secret") == "authentic"
    assert "Signed with this key" in to_text(state.parts())
    assert verified(state, SECRET, "another") == "other-key"
    assert "another key" in to_text(state.parts())
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    assert verified(state, KEY_FILE, str(key)) == "other-key"
    assert verified(SignatureState(GOLDEN / "signed_bytes.apsim"), KEY_FILE, f" {key} ") == "authentic"


def test_a_changed_and_an_unsigned_file(tmp_path: Path) -> None:
    changed = bytearray((GOLDEN / "signed_secret.apsim").read_bytes())
    changed[-1] ^= 1
    path = tmp_path / "changed.apsim"
    path.write_bytes(changed)
    state = SignatureState(path)
    assert verified(state, SECRET, "team secret") == "damaged"
    assert "Do not use it" in to_text(state.parts())
    assert verified(SignatureState(GOLDEN / "units.apsim"), SECRET, "x") == "unsigned"
    assert verified(SignatureState(tmp_path / "missing.apsim"), NO_KEY) == "error"


def test_a_key_that_is_not_given_is_refused() -> None:
    state = SignatureState(GOLDEN / "signed_secret.apsim")
    for kind in (SECRET, KEY_FILE, "magic"):
        with pytest.raises(ai.ValueRefusedError):
            state.verify(kind, "")
    with pytest.raises(FileNotFoundError):
        state.verify(KEY_FILE, "/nowhere/key")
    assert state.job.status == "idle"


def test_nothing_keeps_the_secret() -> None:
    secret = "a-very-particular-secret-91"
    state = SignatureState(GOLDEN / "signed_secret.apsim")
    assert verified(state, SECRET, secret) == "other-key"
    said = [repr(vars(state)), repr(vars(state.job)), to_text(state.parts()), to_html(state.parts())]
    assert state.report is not None
    said.append(json.dumps(state.report.to_dict()))
    assert not any(secret in s for s in said)
    assert secret.encode() not in pickle.dumps(state.report.to_dict())


def test_a_job_reports_cancels_and_says_why_it_failed() -> None:
    seen: list[tuple[str, int]] = []
    job = Job()
    job.changed = lambda: seen.append((job.status, job.done))
    job.start(lambda progress: [progress(i, 4) for i in range(5)] and "result")
    job.wait(10)
    assert (job.status, job.result, job.share) == ("done", "result", 1.0)
    assert seen[0] == ("running", 0)
    assert seen[-1][0] == "done"

    reached = threading.Event()

    def endless(progress: Any) -> None:
        while True:
            progress(1, 2)
            reached.set()
            time.sleep(0.001)

    job.start(endless)
    assert reached.wait(10)
    job.start(lambda progress: "not while one runs")
    job.cancel()
    job.wait(10)
    assert (job.status, job.result) == ("cancelled", None)

    def broken(progress: Any) -> None:
        raise ZeroDivisionError("by\x1b zero")

    job.start(broken)
    job.wait(10)
    assert job.status == "failed"
    assert job.message.startswith("ZeroDivisionError: by")
    assert "\x1b" not in job.message
    assert issubclass(Cancelled, Exception)

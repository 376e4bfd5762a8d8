"""The widgets of the notebook without a browser: they follow their states, name every control, and keep no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import pytest
from ipywidgets.embed import dependency_state, embed_data

import apsi_inspect as ai
from apsi_inspect.notebook.state_signature import SECRET

from . import handmade
from .html_page import Page

GOLDEN = Path(__file__).parent / "data" / "golden"
CONTROLS = (
    ipywidgets.Text, ipywidgets.Password, ipywidgets.Dropdown, ipywidgets.Select, ipywidgets.Button,
    ipywidgets.Checkbox, ipywidgets.ToggleButtons, ipywidgets.FloatProgress, ipywidgets.BoundedFloatText,
)  # fmt: skip
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e"


def below(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from below(child)


@pytest.fixture
def explored(tmp_path: Path) -> Any:
    path = tmp_path / "model.apsim"
    tensors = {"blk": [{"w": np.ones((4, 32), np.float32), EVIL[:30]: np.zeros(3, np.float32)} for _ in range(3)]}
    ai.save_model(path, tensors, metadata={"chat_template": EVIL, EVIL: 1})
    return ai.open(path).explore()


def test_every_control_has_a_description_and_a_tooltip(explored: Any) -> None:
    for index in range(5):
        explored.open_tab(index)
    found = [c for c in below(explored) if isinstance(c, CONTROLS)]
    assert len(found) > 40
    for control in found:
        assert control.description.strip("\u200b "), repr(control)
        assert control.tooltip, repr(control)


def test_what_a_file_says_is_text_and_nothing_else(explored: Any) -> None:
    for index in range(5):
        explored.open_tab(index)
    metadata = explored.views[1]
    for _ in range(2):
        metadata.choice.step(1)
        for widget in below(explored):
            if isinstance(widget, ipywidgets.HTML) and "<style>" not in widget.value[:8]:
                page = Page(widget.value)
                assert not {"script", "img"} & set(page.tags)
                assert not [k for _, k, _ in page.attributes if k.startswith("on")]
                assert "\u202e" not in widget.value
    assert "alert(1)" in metadata.value.widget.value
    assert all("\u202e" not in label for label, _ in explored.browser.choice.list.options)


def test_the_views_are_linked_and_built_when_opened(explored: Any) -> None:
    assert set(explored.views) == {0}
    explored.browser.search.value = "w"
    explored.browser.choice.step(1)
    assert explored.selected == "blk.0.w"
    assert "blk.0.w" in explored.detail.head.widget.value
    assert "Histogram" in explored.detail.stats.widget.value
    explored.tabs.selected_index = 3
    assert explored.views[3].tensors.value == "blk.0.w"
    explored.detail.slice.value = "nonsense"
    assert "neither an integer" in explored.detail.message.widget.value
    explored.detail.slice.value = "0:1, 0:2"
    assert explored.detail.message.widget.value == ""
    explored.browser.choice.step(1)
    assert explored.selected == "blk.1.w"
    assert explored.detail.slice.value == "0:4, 0:6"


def test_the_tree_opens_by_its_button(explored: Any) -> None:
    browser = explored.browser
    browser.view.value = "tree"
    assert browser.choice.list.options[0][0].startswith("▾")  # the lone group
    browser.choice.list.index = 1
    assert browser.toggle.description == "Open group"
    before = len(browser.choice.values)
    browser.toggle.click()
    assert len(browser.choice.values) == before + 2
    assert browser.toggle.description == "Close group"
    assert "group" in explored.detail.head.widget.value


def test_up_and_down_go_over_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    path.write_bytes(handmade.safetensors([(f"t{i}", "U8", [1], b"\0") for i in range(150)]))
    browser = ai.open(path).explore().browser
    for _ in range(101):
        browser.choice.step(1)
    assert browser.state.selected == "t100"
    assert browser.state.pages.page == 1
    browser.choice.step(-1)
    assert browser.state.selected == "t99"
    browser.choice.pager.go(1)
    assert browser.choice.list.index is None
    assert browser.state.selected == "t99"


def test_units(tmp_path: Path) -> None:
    view = ai.units_widget(ai.open(GOLDEN / "units.apsim"))
    view.choose("height")
    view.target.value = "mm"
    assert "Nothing is written" in view.values.widget.value
    view.target.value = "kg"
    assert "the tensor" in view.message.widget.value
    assert "carries a unit" in ai.units_widget(ai.open(GOLDEN / "dtypes.apsim")).children[1].value


def test_the_quantization_lab(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ai.save_safetensors(path, {"a": np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)})
    view = ai.quant_error_widget(ai.open(path))
    for name, box in view.boxes.items():
        box.value = name in ("q8_0", "q4_0")
    view.start.click()
    view.state.job.wait(60)
    assert "All 1 tensor" in view.totals.widget.value
    assert "alt=" in view.scatter.value
    view.choice.step(1)
    view.pick.value = "q8_0"
    assert view.state.picks == {"a": "q8_0"}
    for box in view.boxes.values():
        box.value = False
    view.start.click()
    assert "at least one format" in view.message.widget.value


def state_of(view: Any) -> str:
    """All that a notebook would keep of a view."""
    manager = ipywidgets.Widget.get_manager_state()
    return json.dumps([manager, dependency_state([view]), embed_data([view])], default=str) + repr(list(below(view)))


def test_no_state_ever_has_the_secret() -> None:
    secret = "very-particular-4711"
    view = ai.signature_widget(GOLDEN / "signed_secret.apsim")
    view.kind.value = SECRET
    seen = []
    view.secret.observe(lambda change: seen.append(state_of(view)), "value")
    view.secret.set_state({"value": secret})  # as the browser sends it
    assert view.secret.value == ""
    assert len(seen) > 0
    assert secret not in "".join(seen) + state_of(view)
    view.button.click()
    view.state.job.wait(60)
    assert view.state.status == "other-key"
    assert "another key" in view.badge.widget.value
    assert secret not in state_of(view)
    assert view._secret == ""
    view.secret.set_state({"value": "team secret"})
    view._pressed(None, {"event": "submit"}, None)
    view.state.job.wait(60)
    assert view.state.status == "authentic"
    view.button.click()  # it has been dropped
    assert "type the secret first" in view.message.widget.value


def test_a_secret_is_echoed_to_no_other_page() -> None:
    view = ai.signature_widget(GOLDEN / "signed_secret.apsim")
    assert view.secret.trait_metadata("value", "echo_update") is False
    assert view.secret.continuous_update is False


def test_importing_loads_no_widgets() -> None:
    code = "import sys, apsi_inspect as ai; ai.open(sys.argv[1]); assert 'ipywidgets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(GOLDEN / "units.apsim")], check=True)

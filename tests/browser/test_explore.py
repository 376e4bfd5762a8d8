"""`model.explore()` and the single views in JupyterLab, driven by keyboard and mouse, in a light and a dark page.

Every test ends with the check that the console has no error and that nothing was asked of another machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

import apsi_inspect as ai

from .. import handmade
from .lab import THEMES

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from .lab import Lab, Notebook

pytestmark = [pytest.mark.slow, pytest.mark.browser]
Make = Callable[..., "Notebook"]
SETUP = "import apsi_inspect as ai\nai.samples.write('.')"
EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=2</script>$x$ \u202e"


def themes(one: str) -> list[str]:
    """Both where pictures are taken, else one, to save time."""
    return list(THEMES) if "APSI_SCREENSHOTS" in os.environ else [one]


def tab(view: Locator, name: str) -> None:
    view.get_by_role("tab", name=name).click()


def lines(view: Locator) -> Locator:
    """The lines of the list that can be seen."""
    return view.locator("select[size]:visible option")


@pytest.mark.parametrize("theme", themes("light"))
def test_explore(notebook: Make, theme: str) -> None:
    page = notebook("explore", [SETUP, "m = ai.open('tiny-llama.gguf')", "m.explore()"], theme)
    view, keys = page.view, page.page.keyboard
    # filter and select, by keyboard alone: Enter in the search takes the first, the button Down the next
    view.get_by_label("Search").click()
    keys.type("ATTN_q")
    view.get_by_text("Tensors: 2 of 21 match").wait_for()
    names = [t.split("\u00a0")[0] for t in lines(view).all_inner_texts()]
    assert names
    assert all("attn_q" in n for n in names)
    keys.press("Enter")
    view.get_by_text("Histogram").wait_for()
    view.locator(".h", has_text=names[0]).wait_for()
    for _ in range(8):
        keys.press("Tab")
        if page.page.evaluate("document.activeElement.innerText") == "▼ Down":
            break
    keys.press("Space")
    view.locator(".h", has_text=names[1]).wait_for()
    # a slice that is wrong says so, a good one shows its values
    view.get_by_label("Slice").fill("0, nonsense")
    keys.press("Enter")
    view.get_by_text("is neither an integer nor a slice").wait_for()
    view.get_by_label("Slice").fill("0:2, 0:3")
    keys.press("Enter")
    view.get_by_text("[0:2, 0:3] → 2 × 3").wait_for()
    assert view.get_by_text("is neither").count() == 0
    view.get_by_label("Slice").fill("0:6, 0:6")
    keys.press("Enter")
    view.get_by_text("→ 6 × 6").wait_for()
    page.shot("explore")
    # the tree
    view.get_by_label("Search").fill("")
    view.get_by_role("button", name="Tree").click()
    lines(view).filter(has_text="▸").first.wait_for()
    view.locator("select[size]:visible").select_option(index=0)
    view.get_by_role("button", name="Open group").click()
    lines(view).filter(has_text="▾").first.wait_for()
    # metadata: a long array, page by page
    tab(view, "Metadata")
    view.get_by_text("Keys: ").wait_for()
    view.get_by_label("Search").last.fill("tokens")
    lines(view).filter(has_text="tokenizer.ggml.tokens").first.wait_for()
    view.get_by_label("Search").last.press("Enter")
    view.locator(".h", has_text="tokenizer.ggml.tokens").wait_for()
    page.shot("metadata")


@pytest.mark.parametrize("theme", themes("dark"))
def test_quantization_error(notebook: Make, theme: str) -> None:
    page = notebook("error", [SETUP, "ai.quant_error_widget(ai.open('fracast.safetensors'))"], theme)
    view = page.view
    for word in ("q6_k", "q5_k", "q4_k"):
        view.get_by_label(word, exact=True).uncheck()
    view.get_by_label("Measure").select_option("all values")
    view.get_by_role("button", name="Run", exact=True).click()
    view.get_by_text(re.compile(r"All \d+ tensors")).wait_for()
    picture = view.get_by_role("img").first
    picture.wait_for()
    assert "q8_0" in (picture.get_attribute("alt") or "")
    view.get_by_label("Order").select_option("worst first")
    view.get_by_role("button", name="Down").click()
    view.get_by_label("Store as").select_option("q8_0")
    view.get_by_text("← picked").wait_for()
    view.get_by_label("Bits per weight").fill("8")
    view.get_by_label("Bits per weight").press("Enter")
    view.get_by_role("button", name="Make a plan").click()
    view.get_by_text("Plan for gguf").wait_for()
    view.get_by_role("button", name="Save the plan").click()
    view.get_by_text("saved: plan.json").wait_for()
    plan = json.loads((page.lab.root / "plan.json").read_text())
    assert "Q8_0" in {row["chosen"] for row in plan["rows"]}
    page.page.wait_for_timeout(500)
    page.shot("quant_error")


@pytest.mark.parametrize("theme", themes("light"))
def test_signature(notebook: Make, theme: str) -> None:
    right, wrong = "correct horse 7301", "wrong horse 7302"
    page = notebook("signature", ["import apsi_inspect as ai", "ai.signature_widget('signed.apsim')"], theme, run=False)
    ai.save_model(page.lab.root / "signed.apsim", {"w": np.ones(9, np.float32)}, sign=right)
    page.run_all()
    view = page.view
    view.get_by_text("Nothing has been checked yet.").wait_for()
    view.get_by_role("button", name="Verify").click()
    view.get_by_text("Nobody vouches for them").wait_for()
    view.get_by_label("Check with").select_option("secret")
    field = view.get_by_label("Secret")
    field.fill(wrong)
    field.press("Enter")
    view.get_by_text("Signed, but with another key than this one.").wait_for()
    assert view.get_by_text("✗").count() + view.get_by_text("▲").count() > 0
    assert field.input_value() == ""
    field.fill(right)  # by mouse: leaving the field hands it over, the button checks
    view.get_by_role("button", name="Verify").click()
    view.get_by_text("Signed with this key, and every byte is what was signed.").wait_for()
    view.get_by_text("authentic").first.wait_for()
    assert field.input_value() == ""
    field.fill(right)
    page.page.get_by_text("Idle").last.click()  # the field is left, nothing is verified
    page.page.wait_for_timeout(500)
    saved = page.save()
    text = json.dumps(saved)
    assert "PasswordModel" in text  # the widgets' state is in it
    for secret in (right, wrong):
        assert secret not in text
    assert right.encode() not in b"".join(p.read_bytes() for p in page.lab.root.glob("*.ipynb"))
    page.shot("signature")


def test_units_hostile_text_and_many_tensors(notebook: Make, lab: Lab) -> None:
    tensors = {EVIL[:40]: np.zeros(3, np.float32)}
    ai.save_model(lab.root / "hostile.apsim", tensors, metadata={"chat_template": EVIL, EVIL: [EVIL]})
    many = [(f"model.layers.{i // 10}.experts.{i % 10}.w", "U8", [1], b"\0") for i in range(100_000)]
    (lab.root / "big.safetensors").write_bytes(handmade.safetensors(many))
    explored = "ai.open('hostile.apsim').explore()", "ai.open('big.safetensors').explore()"
    page = notebook("hostile", [SETUP, *explored, "ai.units_widget(ai.open('oscillator.apsim'))"], "dark")
    view = page.page.locator(".apsi-w.apsi-top").nth(0)
    view.get_by_label("Search").press("Enter")
    view.get_by_text("Histogram").wait_for()
    tab(view, "Metadata")
    view.get_by_text("Keys: ").wait_for()
    for index in range(2):
        view.locator("select[size]:visible").select_option(index=index)
        view.locator("pre, td", has_text="onerror").last.wait_for()
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator(".apsi-w img").count() == 0
    big = page.page.locator(".apsi-w.apsi-top").nth(1)
    big.get_by_text("Tensors: 100 000").wait_for()
    big.get_by_label("Search").fill("9999.experts.7")
    big.get_by_text("Tensors: 1 of 100 000 match").wait_for()
    big.get_by_label("Search").press("Enter")
    big.locator(".h", has_text="model.layers.9999.experts.7.w").wait_for()
    units = page.view
    units.get_by_role("button", name="Down").click()
    units.get_by_label("Show in").wait_for()
    units.get_by_text("dimension").first.wait_for()
    page.shot("units")


def test_untrusted_output_reads_well(notebook: Make, lab: Lab) -> None:
    """A notebook from elsewhere: JupyterLab drops the style sheet, and the tables are still tables."""
    (path,) = ai.samples.write(lab.root, ["tiny-llama.gguf"])
    page = notebook("untrusted", ["m"], run=False, html=ai.open(path)._repr_html_()).page
    shown = page.locator(".jp-OutputArea-output")
    shown.get_by_text("blk.0.attn_q.weight", exact=True).first.wait_for()
    assert shown.locator("style, script").count() == 0
    assert shown.get_by_text("GGUF carries neither digests nor a signature").count() == 1
    assert shown.get_by_text("not-checked").first.is_visible()
    row = shown.locator("tr", has_text="blk.0.attn_q.weight").first
    aligned = [c.evaluate("e => getComputedStyle(e).textAlign") for c in row.locator("th, td").all()]
    assert aligned[0] == "left"
    assert aligned[-1] == "right"
    if "APSI_SCREENSHOTS" in os.environ:
        shown.first.screenshot(path=f"{os.environ['APSI_SCREENSHOTS']}/untrusted.png")

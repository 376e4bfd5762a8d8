"""Parts: text and HTML of the same facts, escaped at the leaf, without script, ids or network."""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apsi_inspect.parts import (
    Badge,
    Bars,
    Column,
    Details,
    Line,
    Pre,
    Stack,
    Strip,
    Table,
    Text,
    Tree,
    bar_text,
    cell_width,
    cut,
    to_html,
    to_text,
)

from .html_page import Page, html_words, words


def every_part(text: str) -> Stack:
    """One of each part, with a text from a file in every place that takes one."""
    name = Text(text, "code")
    columns = [Column("name", elastic=True), Column("bytes", "right")]
    return Stack(
        [
            Strip(name, "kind", [("label", name), ("size", "1 KiB")]),
            Badge("not-checked", Line(["about", name])),
            Badge("damaged", text),
            Line([Text("7 ×", "strong"), name, Text(text, "muted")]),
            Stack(
                [Bars([(name, 0.25, ["1 KiB", "25.0 %"])], "Bytes"), Bars([(name, 1.0, ["4 KiB", ""])])], across=True
            ),
            Table(columns, [[name, "12"], [text, "3"]], "Caption", "5 more rows not shown"),
            Tree(columns, [(0, [name, "12"]), (1, [name, "3"])]),
            Details(Line(["Summary", name]), Table(columns, [[name, "1"]])),
            Details("Template", Pre(text + "\nsecond line"), open=True),
        ]
    )


HOSTILE = [
    "<script>document.title='x'</script>",
    '" onmouseover="alert(1)" x="',
    "</td></tr></table></div></details><h1>SIGNATURE VALID</h1>",
    "&lt;b&gt; &amp;",
    "$\\href{javascript:1}{x}$ \\(y\\) $$z$$",
    "a\x00b\tc\rd\x0ce\x7ff\x85g\u2028h\u202ei\u200bj\u2066k\ufeffl",
    "\x1b[31mred\x1b[0m \x1b]8;;http://127.0.0.1\x07link",
    "[bold]rich[/bold] `code` *md* _0_",
    "表形式のモデル ä\u0301 🙂",
    "\ud800 lone surrogate",
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_and_html_say_the_same(text: str) -> None:
    part = every_part(text)
    assert html_words(to_html(part)) == words(to_text(part))


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_nothing_from_a_file_is_live(text: str) -> None:
    plain, page = Page(to_html(every_part("harmless"))), Page(to_html(every_part(text)))
    assert page.tags.count("script") == 0
    # the same elements and attributes as a harmless text gives, but for the spans around $ and \
    assert [t for t in page.tags if t != "span"] == [t for t in plain.tags if t != "span"]
    assert page.attributes == plain.attributes
    assert page.live == plain.live
    assert not any(k == "id" or k.startswith("on") or k in ("href", "src") for _, k, _ in page.attributes)


@pytest.mark.parametrize("text", HOSTILE[:5])
def test_visible_text_is_shown_as_it_is(text: str) -> None:
    assert Page(to_html(Text(text, "code"))).text == text
    assert Page(to_html(Text(text))).text == text
    assert to_text(Text(text)) == text


def test_no_formula_can_start_outside_code() -> None:
    html = to_html(every_part("$a$ \\(b\\)"))
    outside = re.sub(r"<(code|pre|style)>.*?</\1>", "", html, flags=re.DOTALL)
    assert "$" in outside  # muted and plain text carries it too
    assert not re.search(r"(?<!<span>)[$\\]|[$\\](?!</span>)", outside)


@given(st.text())
def test_any_text_is_one_safe_line(text: str) -> None:
    line = to_text(Text(text, "code"))
    assert "\n" not in line
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in line)
    html = to_html(Line([Text(text, "code"), text]))
    html.encode("utf-8")
    assert html.count("<script") == 0


def test_no_line_of_text_starts_with_a_files_words() -> None:
    part = Stack(
        [Table([Column("name")], [[Text("authentic: signed", "code")]]), Pre("authentic: signed\nauthentic: x")]
    )
    assert not any(line.startswith("authentic") for line in to_text(part).splitlines())


def test_elements_say_how_they_stand_without_the_style_sheet() -> None:
    html = to_html(
        Table([Column("name"), Column("size", "right"), Column("note", elastic=True)], [["a", "1", "b"]], "x")
    )
    html = re.sub("<style>.*?</style>", "", html)
    assert '<caption style="text-align:left">x</caption>' in html
    assert (
        '<th scope="col" align="left" style="text-align:left">name</th><th scope="col" align="right">size</th>' in html
    )
    assert '<th scope="row" align="left" style="text-align:left">a</th><td align="right">1</td>' in html


def test_what_comes_from_a_file_is_cut() -> None:
    part = Table([Column("name")], [[Text("a" * 10**6 + "end", "code")]])
    for shown in (to_html(part), to_text(part)):
        assert len(shown) < 10_000
        assert "…" in shown
        assert "aend" in shown
    assert len(to_text(Text("a" * 1000))) == 1000


def test_colour_is_only_added() -> None:
    part = every_part("name")
    colored = to_text(part, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9]*m", "", colored) == to_text(part)
    assert "\x1b" not in to_text(part)


def test_state_is_never_told_by_colour_alone() -> None:
    for state, symbol in (
        ("intact", "✓"),
        ("damaged", "✗"),
        ("warning", "▲"),
        ("not-checked", "○"),
        ("unheard-of", "○"),
    ):
        assert to_text(Badge(state)) == f"{symbol} {state}"
        assert f"{symbol} {state}" in Page(to_html(Badge(state))).text


def test_tables_have_header_cells() -> None:
    page = Page(to_html(Table([Column("name"), Column("bytes", "right")], [["a", "1"], ["b", "22"]], "Cap", "3 more")))
    scopes = [v for tag, k, v in page.attributes if tag == "th" and k == "scope"]
    assert scopes == ["col", "col", "row", "row"]
    assert page.tags.count("caption") == 1


def test_columns_are_aligned() -> None:
    lines = to_text(Table([Column("name"), Column("bytes", "right")], [["表", "1"], ["abcd", "22"]])).splitlines()
    assert lines == ["  name  bytes", "  ────  ─────", "  表        1", "  abcd     22"]
    assert {cell_width(line) for line in lines} == {13}


def test_width_cuts_only_elastic_columns() -> None:
    table = Table([Column("name", elastic=True), Column("value")], [["n" * 100, "v" * 10]])
    lines = to_text(table, width=60).splitlines()
    assert max(map(cell_width, lines)) <= 60
    assert "v" * 10 in lines[2]
    assert "…" in lines[2]
    assert "n" * 100 in to_text(table)


@given(st.text(), st.integers(1, 40))
def test_cut_fits(text: str, width: int) -> None:
    out = cut(text, width)
    assert cell_width(out) <= width
    assert (out == text) == (cell_width(text) <= width)


@pytest.mark.parametrize(("share", "cells"), [(0.0, 0), (1e-9, 1), (0.5, 12), (1.0, 24), (7.0, 24), (-1.0, 0)])
def test_bar_length(share: float, cells: int) -> None:
    assert len(bar_text(share)) == cells


def test_bars_carry_their_numbers() -> None:
    html = to_html(Bars([("Q4_K", 0.25, ["1 KiB", "25.0 %"])], "Bytes"))
    assert 'style="width:25.0%"' in html
    assert "25.0 %" in Page(html).text


def test_colours_come_from_the_page() -> None:
    css = Page(to_html(Text("x"))).live[0]
    assert "http" not in css
    assert "@import" not in css
    assert "url(" not in css
    # text inherits; no solid ground or text colour is set, so light and dark both work
    assert set(re.findall(r"(?<![-\w])color:([^;}]+)", css)) == {"inherit"}
    solid = [v for v in re.findall(r"background:([^;}]+)", css) if not v.startswith(("rgba(", "none"))]
    assert solid == ["#4a86d8"]  # the bar
    assert all(
        rule.strip().startswith(".apsi.apsi.apsi")
        for block in css.split("}")
        for rule in block.split("{")[0].split(",")
        if rule
    )


def test_import_is_light() -> None:
    code = "import sys; before = set(sys.modules); import apsi_inspect.parts; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numpy", "pandas", "numba", "dataclasses", "inspect", "textwrap", "html", "json", "unicodedata"}
    assert not heavy & set(out)

"""The HTML of parts: one function a part, escaping at the leaf. Used through `parts.to_html` only.

No file's text goes into an attribute. The style sheet `parts.css` stands in the output, scoped by one class; without
it (untrusted notebooks drop it) the elements by themselves read well. `tests/test_parts.py` enforces the contract.
"""

from __future__ import annotations

import os
from functools import cache

from .errors import visible
from .parts import LONGEST, SYMBOLS, Badge, Bars, Details, Line, Pre, Stack, Strip, Table, Text, Tree, tone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .parts import Inline, Part

_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
# a formula does not start where its delimiter is an element of its own
_PROSE = _HTML | {ord("$"): "<span>$</span>", ord("\\"): "<span>\\</span>"}
# said in the elements too: a page that drops the style sheet keeps one or the other
_LEFT, _RIGHT = ' align="left" style="text-align:left"', ' align="right"'
_STYLES = {"muted": ('<span class="m">', "</span>"), "strong": ("<strong>", "</strong>"), "": ("", "")}


@cache
def style_sheet() -> str:
    """`parts.css` without comments and line breaks."""
    import re

    with open(os.path.join(os.path.dirname(__file__), "parts.css"), encoding="utf-8") as file:
        css = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    return re.sub(r"\s*([{};,])\s*|(?<=:)\s+", r"\1", " ".join(css.split())).strip()


def page(part: Part) -> str:
    """The part in its ``<div>``, with the style sheet."""
    return f'<div class="apsi"><style>{style_sheet()}</style>{block(part)}</div>'


def escape(text: str) -> str:
    """Text outside of ``<code>`` and ``<pre>``."""
    return visible(text).translate(_PROSE)


def code(text: str) -> str:
    """Text from a file; MathJax leaves ``<code>`` alone."""
    return f"<code>{visible(text, LONGEST).translate(_HTML)}</code>"


def inline(part: Inline) -> str:
    """An inline part."""
    if isinstance(part, str):
        return escape(part)
    if isinstance(part, Text):
        if part.style == "code":
            return code(part.text)
        before, after = _STYLES[part.style]
        return before + escape(part.text) + after
    if isinstance(part, Badge):
        text = inline(part.text)
        head = f'<span class="b {tone(part.state)}">{SYMBOLS[tone(part.state)]} {escape(part.state)}</span>'
        return f'{head}<span class="x">:</span> {text}' if text else head
    return " ".join(map(inline, part.parts))


def block(part: Part) -> str:
    """A part that stands by itself."""
    if isinstance(part, (Text, Badge, Line)):
        return f'<div class="l">{inline(part)}</div>'
    writer: Any = _WRITERS[type(part)]
    html: str = writer(part)
    return html


def _strip(part: Strip) -> str:
    mark = "q" if isinstance(part.kind, Badge) else "k"
    kind = f' <span class="{mark}">{inline(part.kind)}</span>' if part.kind else ""
    chips = "\n".join(f"<div><dt>{escape(k)}</dt> <dd>{inline(v)}</dd></div>" for k, v in part.chips)
    return f'<div class="h"><strong>{inline(part.title)}</strong>{kind}</div><dl>{chips}</dl>'


def _table(part: Table) -> str:
    return _grid(part, [(0, row) for row in part.rows])


def _tree(part: Tree) -> str:
    return _grid(part, part.rows)


def _grid(part: Table | Tree, rows: Sequence[tuple[int, Sequence[Inline]]]) -> str:
    heads = [_RIGHT if c.align == "right" else ' align="left"' if i else _LEFT for i, c in enumerate(part.columns)]
    marks = [_RIGHT if c.align == "right" else ' class="e"' if c.elastic else "" for c in part.columns]
    head = "".join(f'<th scope="col"{m}>{escape(c.label)}</th>' for m, c in zip(heads, part.columns, strict=True))
    head = f"<thead><tr>{head}</tr></thead>" if any(c.label for c in part.columns) else ""
    body = "\n".join(_row(marks, depth, row) for depth, row in rows)
    table = f"<table>{_caption(part.caption)}{head}<tbody>{body}</tbody></table>"
    return f'<div class="t" tabindex="0">{table}</div>{_more(part.more)}'


def _row(marks: Sequence[str], depth: int, row: Sequence[Inline]) -> str:
    pad = f'<span class="i">{"&emsp;" * depth}</span>' if depth else ""
    cells = "".join(f"<td{m}>{inline(c)}</td>" for m, c in zip(marks[1:], row[1:], strict=True))
    mark = marks[0] if marks[0] == _RIGHT else _LEFT
    return f'<tr><th scope="row"{mark}>{pad}{inline(row[0])}</th>{cells}</tr>'


def _bars(part: Bars) -> str:
    rows = []
    for label, share, numbers in part.rows:
        width = f"{100 * min(max(share, 0.0), 1.0):.1f}"
        cells = "".join(f"<td{_RIGHT}>{inline(n)}</td>" for n in numbers)
        bar = f'<td class="g"><div><div style="width:{width}%"></div></div></td>'
        rows.append(f'<tr><th scope="row"{_LEFT}>{inline(label)}</th>{bar}{cells}</tr>')
    table = f'<table class="bars">{_caption(part.caption)}<tbody>{"".join(rows)}</tbody></table>'
    return table + _more(part.more)


def _caption(text: str) -> str:
    return f'<caption style="text-align:left">{escape(text)}</caption>' if text else ""


def _more(text: str) -> str:
    return f'<div class="l m">… {escape(text)}</div>' if text else ""


def _details(part: Details) -> str:
    start = "<details open>" if part.open else "<details>"
    return f"{start}<summary>{inline(part.summary)}</summary>{block(part.body)}</details>"


def _pre(part: Pre) -> str:
    return "<pre>" + "\n".join(visible(line) for line in part.text.split("\n")).translate(_HTML) + "</pre>"


def _stack(part: Stack) -> str:
    inner = "".join(map(block, part.parts))
    return f'<div class="a">{"".join(f"<div>{block(p)}</div>" for p in part.parts)}</div>' if part.across else inner


_WRITERS: dict[type, Any] = {
    Strip: _strip,
    Table: _table,
    Tree: _tree,
    Bars: _bars,
    Details: _details,
    Pre: _pre,
    Stack: _stack,
}

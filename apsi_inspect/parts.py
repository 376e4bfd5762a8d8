"""Parts: a small tree that becomes text or HTML; the only way to either, in a notebook and in a shell.

`to_text` and `to_html` carry the same facts. Every string is escaped where it is written out, whatever its part:
control, bidi and zero-width characters become visible escapes, HTML is escaped, dollar signs and backslashes start no
formula. What comes from a file is `Text(…, "code")`, never stands at the start of a line of text and is cut at 500
characters. The HTML needs no script, no network, no ids, and takes its colours from the page around it. Standard
library only, and light.
`tests/test_parts.py` enforces the contract.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeAlias

    Inline: TypeAlias = "str | Text | Badge | Line"
    Part: TypeAlias = "Text | Badge | Line | Strip | Table | Tree | Bars | Details | Pre | Stack"


class Text(NamedTuple):
    """A run of text; `style` is ``""``, ``"code"`` (anything from a file), ``"muted"`` or ``"strong"``."""

    text: str
    style: str = ""


class Badge(NamedTuple):
    """A state in a word, with a symbol and a colour, and a sentence about it.

    Attributes
    ----------
    state
        A status of the glossary (``"intact"``, ``"damaged"``, ``"not-checked"``, …) or a severity.
    text
        What it is about.
    """

    state: str
    text: Inline = ""


class Line(NamedTuple):
    """Inline parts after one another, a space between them."""

    parts: Sequence[Inline]


class Strip(NamedTuple):
    """The head of a view: a title, what it is, and labelled values."""

    title: Inline
    kind: Inline = ""
    chips: Sequence[tuple[str, Inline]] = ()


class Column(NamedTuple):
    """Head of a table column; `align` is ``"left"`` or ``"right"``; `elastic` ones are cut where the width is short."""

    label: str
    align: str = "left"
    elastic: bool = False


class Table(NamedTuple):
    """Rows under labelled columns; `more` says what is not shown."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Inline]]
    caption: str = ""
    more: str = ""


class Tree(NamedTuple):
    """A table whose rows are indented: each row is (depth, cells)."""

    columns: Sequence[Column]
    rows: Sequence[tuple[int, Sequence[Inline]]]
    caption: str = ""
    more: str = ""


class Bars(NamedTuple):
    """Labelled bars: each row is (label, share of the whole in 0..1, the numbers as text)."""

    rows: Sequence[tuple[Inline, float, Sequence[Inline]]]
    caption: str = ""
    more: str = ""


class Details(NamedTuple):
    """A part that HTML can fold away; text shows it always."""

    summary: Inline
    body: Part
    open: bool = False


class Pre(NamedTuple):
    """Lines of text from a file, as they are."""

    text: str


class Stack(NamedTuple):
    """Parts below one another; `across`: side by side where there is room (in HTML)."""

    parts: Sequence[Part]
    across: bool = False


# state -> tone; the tone has a symbol and a colour, so that nothing is told by colour alone
TONES = {
    "authentic": "good",
    "intact": "good",
    "safe": "good",
    "identical": "good",
    "rounded": "good",
    "quantization noise": "plain",
    "shape differs": "bad",
    "missing": "bad",
    "changed": "bad",
    "different": "bad",
    "unsigned": "plain",
    "not-checked": "plain",
    "note": "plain",
    "warning": "warn",
    "unknown": "warn",
    "incomplete": "warn",
    "other-key": "warn",
    "damaged": "bad",
    "unsafe": "bad",
    "error": "bad",
}
SYMBOLS = {"good": "✓", "plain": "○", "warn": "▲", "bad": "✗"}
_ANSI = {"good": "32", "plain": "2", "warn": "33", "bad": "31", "strong": "1", "muted": "2", "head": "2", "bar": "36"}
_BAR = 24
NARROW = 40  # a narrower cell loses its end, a wider one its middle
LONGEST = 500  # characters of a `Text` from a file: its middle is left out
_EIGHTHS = " ▏▎▍▌▋▊▉"


def tone(state: str) -> str:
    """``"good"``, ``"plain"``, ``"warn"`` or ``"bad"``."""
    return TONES.get(state, "plain")


def to_html(part: Part) -> str:
    """The part as one self-contained ``<div>``."""
    from .parts_html import page

    return page(part)


def to_text(part: Part, width: int | None = None, color: bool = False) -> str:
    """The part as text without a final newline.

    Parameters
    ----------
    width
        Cut elastic table columns so that lines fit; None: nothing is cut.
    color
        Add ANSI colours (for a terminal); without, there is no control character but the newline.
    """
    return "\n".join(line.rstrip() for line in _Writer(width, color).lines(part))


def cell_width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class _Writer:
    """Text of parts; a cell is (plain text, text with colours)."""

    def __init__(self, width: int | None, color: bool) -> None:
        self.width, self.color = width, color

    def paint(self, text: str, style: str) -> str:
        code = _ANSI.get(style)
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and code and text else text

    def inline(self, part: Inline) -> tuple[str, str]:
        if isinstance(part, str):
            plain = visible(part)
            return plain, plain
        if isinstance(part, Text):
            plain = visible(part.text, LONGEST if part.style == "code" else None)
            return plain, self.paint(plain, part.style)
        if isinstance(part, Badge):
            head = f"{SYMBOLS[tone(part.state)]} {visible(part.state)}"
            plain, painted = self.inline(part.text)
            rest = ": " if plain else ""
            return head + rest + plain, self.paint(head, tone(part.state)) + rest + painted
        cells = [self.inline(p) for p in part.parts]
        return " ".join(c[0] for c in cells), " ".join(c[1] for c in cells)

    def lines(self, part: Part) -> Iterable[str]:
        writer: Callable[[Any], Iterable[str]] | None = _WRITERS.get(type(part))
        return [self.inline(part)[1]] if writer is None else writer(self, part)  # type: ignore[arg-type, call-arg]

    def strip(self, part: Strip) -> Iterable[str]:
        title, kind = self.inline(part.title), self.inline(part.kind)
        yield self.paint(title[0], "strong") + (f"  {kind[1]}" if kind[0] else "")
        at = 0
        row: list[str] = []
        for label, value in part.chips:
            plain, painted = self.inline(value)
            size = cell_width(f"{label} {plain}") + 3
            if row and at + size > min(self.width or 100, 120):
                yield "  " + " · ".join(row)
                at, row = 0, []
            at += size
            row.append(f"{self.paint(label, 'muted')} {painted}")
        if row:
            yield "  " + " · ".join(row)

    def table(self, part: Table) -> Iterable[str]:
        return self.grid(part, [(0, row) for row in part.rows])

    def tree(self, part: Tree) -> Iterable[str]:
        return self.grid(part, part.rows)

    def grid(self, part: Table | Tree, rows: Sequence[tuple[int, Sequence[Inline]]]) -> Iterable[str]:
        if part.caption:
            yield self.paint(visible(part.caption), "strong")
        cells = [[self.inline(c) for c in row] for _, row in rows]
        for (depth, _), row in zip(rows, cells, strict=True):
            row[0] = ("  " * depth + row[0][0], "  " * depth + row[0][1])
        widths = self.fit(part.columns, cells)
        head = [(visible(c.label), self.paint(visible(c.label), "head")) for c in part.columns]
        if any(c.label for c in part.columns):
            yield "  " + self.aligned(head, widths, part.columns)
            yield "  " + self.paint("  ".join("─" * w for w in widths), "head")
        for row in cells:
            yield "  " + self.aligned(row, widths, part.columns)
        if part.more:
            yield "  " + self.paint("… " + visible(part.more), "muted")

    def fit(self, columns: Sequence[Column], cells: list[list[tuple[str, str]]]) -> list[int]:
        """Widths of the columns; cells of elastic ones are cut in place where the line is too long."""
        widths = [max([cell_width(c.label), *(cell_width(row[i][0]) for row in cells)]) for i, c in enumerate(columns)]
        excess = 2 * len(widths) + sum(widths) - self.width if self.width else 0
        for i in sorted(range(len(columns)), key=lambda i: -widths[i]):
            if excess > 0 and columns[i].elastic:
                room = max(widths[i] - excess, min(widths[i], 24))
                excess -= widths[i] - room
                widths[i] = room
                shorten = cut if i == 0 or room >= NARROW else cut_end  # names differ at their end
                for row in cells:
                    if cell_width(row[i][0]) > room:
                        row[i] = (shorten(row[i][0], room),) * 2
        return widths

    @staticmethod
    def aligned(row: Sequence[tuple[str, str]], widths: Sequence[int], columns: Sequence[Column]) -> str:
        out = []
        for (plain, painted), width, column in zip(row, widths, columns, strict=True):
            pad = " " * (width - cell_width(plain))
            out.append(pad + painted if column.align == "right" else painted + pad)
        return "  ".join(out)

    def bars(self, part: Bars) -> Iterable[str]:
        if part.caption:
            yield self.paint(visible(part.caption), "strong")
        count = max((len(numbers) for _, _, numbers in part.rows), default=0)
        columns = [Column(""), Column(""), *(Column("", "right") for _ in range(count))]
        cells = []
        for label, share, numbers in part.rows:
            bar = bar_text(share)
            cells.append([self.inline(label), (bar, self.paint(bar, "bar")), *map(self.inline, numbers)])
        widths = self.fit(columns, cells)
        for row in cells:
            yield "  " + self.aligned(row, widths, columns)
        if part.more:
            yield "  " + self.paint("… " + visible(part.more), "muted")

    def details(self, part: Details) -> Iterable[str]:
        yield self.paint(self.inline(part.summary)[0], "strong")
        yield from self.lines(part.body)

    def pre(self, part: Pre) -> Iterable[str]:
        for line in part.text.split("\n"):
            yield "  │ " + visible(line)

    def stack(self, part: Stack) -> Iterable[str]:
        block = False
        for i, child in enumerate(part.parts):
            if i and (block or type(child) in _BLOCKS):
                yield ""
            block = type(child) in _BLOCKS
            yield from self.lines(child)


_BLOCKS = (Table, Tree, Bars, Details, Pre)
_WRITERS: dict[type, Any] = {
    Strip: _Writer.strip,
    Table: _Writer.table,
    Tree: _Writer.tree,
    Bars: _Writer.bars,
    Details: _Writer.details,
    Pre: _Writer.pre,
    Stack: _Writer.stack,
}


def cut(text: str, width: int) -> str:
    """A text in at most `width` columns, its middle replaced by ``…``."""
    keep = len(text)
    out = text
    while cell_width(out) > width and keep > 0:
        keep = min(keep - 1, keep - (cell_width(out) - width) // 2)
        head = keep * 2 // 3
        out = text[:head] + "…" + text[len(text) - (keep - head) :] if keep else "…"
    return out


def cut_end(text: str, width: int) -> str:
    """A text in at most `width` columns, its end replaced by ``…``."""
    out = text
    while cell_width(out) > width and len(out) > 1:
        out = out[: max(len(out) - 1 - (cell_width(out) - width + 1) // 2, 0)] + "…"
    return out


def bar_text(share: float) -> str:
    """A bar of block characters, at most 24 wide; anything above zero is visible."""
    eighths = max(round(min(max(share, 0.0), 1.0) * _BAR * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")

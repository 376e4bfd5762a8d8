"""The metadata of a model to browse: keys that match a text, and one value at a time, typed and paged.

No widget here. A long array is read a page at a time, a long text is cut into pages of characters, and everything comes
out as parts, which escape it: a chat template is shown as text and nothing in it runs. `tests/test_state_views.py`
enforces the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..listing import MetaRow, brief, metadata_rows
from ..parts import Column, Pre, Stack, Strip, Table, Text
from .render_tensors import code, grouped
from .state_pages import Pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model import ModelFile
    from ..parts import Inline, Part

KEYS, ITEMS, CHARACTERS = 100, 50, 4000  # a page of each
_DEEP = 6  # levels of a record that are written out


class MetadataState:
    """The metadata that is looked at.

    Attributes
    ----------
    search
        Part of a key or of a value's text, any case.
    selected
        The chosen key; None: none.
    pages
        Pages of the keys.
    items
        Pages of the chosen value: its items, or pieces of its text.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.rows: list[MetaRow] = metadata_rows(model)
        self.search = ""
        self.shown = self.rows
        self.pages = Pages(KEYS, len(self.rows))
        self.items = Pages(ITEMS)
        self.selected: str | None = None

    def set_search(self, search: str) -> None:
        """Keep the keys that match; back to the first page."""
        self.search = search.strip()
        part = self.search.lower()
        self.shown = [r for r in self.rows if part in r.key.lower() or part in r.text.lower()] if part else self.rows
        self.pages.resize(len(self.shown))

    def page_rows(self) -> list[MetaRow]:
        """The keys of the page."""
        span = self.pages.span
        return self.shown[span.start : span.stop]

    def select(self, key: str | None) -> None:
        """Choose a key; its value from the start.

        Raises
        ------
        ValueRefusedError
            There is no such key.
        """
        if key is not None and key not in self.model.metadata:
            raise ValueRefusedError(f"there is no metadata key {quote(key)}")
        self.selected = key
        value = self._value()
        if isinstance(value, str):
            self.items = Pages(CHARACTERS, len(value))
        else:
            self.items = Pages(ITEMS, len(value) if _is_list(value) or isinstance(value, dict) else 1)

    def _value(self) -> Any:
        return None if self.selected is None else self.model.metadata[self.selected]

    def value_parts(self) -> Part:
        """The chosen value, the page of it that is shown.

        Raises
        ------
        ModelFileError
            The file is closed, or has changed.
        """
        if self.selected is None:
            return Text("Choose a key in the list.", "muted")
        value = self._value()
        row = next(r for r in self.rows if r.key == self.selected)
        chips: list[tuple[str, Inline]] = [("type", Text(row.type, "code"))]
        if isinstance(value, str):
            chips.append(("characters", grouped(len(value))))
        elif _is_list(value) or isinstance(value, dict):
            chips.append(("items", grouped(len(value))))
        return Stack([Strip(code(self.selected), "", chips), self._body(value)])

    def _body(self, value: Any) -> Part:
        span = self.items.span
        if isinstance(value, str):
            return Pre(value[span.start : span.stop]) if value else Text("an empty text", "muted")
        if isinstance(value, dict):
            return _table("key", list(value.items())[span.start : span.stop])
        if _is_list(value):
            items: Sequence[Any] = value[span.start : span.stop]
            return _table("index", [(str(i), v) for i, v in zip(span, items, strict=True)])
        return Pre(brief(value, CHARACTERS))


def _table(label: str, rows: Sequence[tuple[str, Any]]) -> Part:
    if not rows:
        return Text("no items", "muted")
    body: list[list[Inline]] = [[code(k), code(_written(v), 300)] for k, v in rows]
    return Table([Column(label, "right" if label == "index" else "left"), Column("value", elastic=True)], body)


def _written(value: Any, depth: int = 0) -> str:
    """A nested value on one line."""
    if isinstance(value, dict) and depth < _DEEP:
        return "{" + ", ".join(f"{k}: {_written(v, depth + 1)}" for k, v in list(value.items())[:20]) + "}"
    return repr(value) if isinstance(value, str) else brief(value, 300)


def _is_list(value: Any) -> bool:
    return not isinstance(value, str | bytes | dict) and hasattr(value, "__len__") and hasattr(value, "__getitem__")

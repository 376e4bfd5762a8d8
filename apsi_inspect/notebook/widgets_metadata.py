"""The metadata browser: thin widgets over `MetadataState`. `tests/test_widgets.py` drives it without a browser."""

# ipywidgets has no types
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..parts import cut_end
from .render_tensors import grouped
from .state_metadata import MetadataState
from .widgets_base import Choice, Message, Pager, Panel, on_enter, text, top

if TYPE_CHECKING:
    from ..model import ModelFile

ROWS = 18


class MetadataView(w.VBox):
    """Keys to search and select, and the chosen value, typed and paged."""

    def __init__(self, state: MetadataState) -> None:
        self.state = state
        self.search = text("Search", "part of a key or of a value, in any case", layout=w.Layout(width="auto"))
        self.choice = Choice("keys", ROWS, self._chosen, self.draw)
        on_enter(self.search, lambda: self.choice.step(1))
        self.value = Panel()
        self.items = Pager("this value", self._draw_value)
        self.message = Message()
        self.search.observe(self._searched, "value")
        left = w.VBox([self.search, self.choice.widget], layout=w.Layout(**LEFT))
        right = w.VBox([self.message.widget, self.value.widget, self.items.widget], layout=w.Layout(**RIGHT))
        super().__init__([w.HBox([left, right], layout=w.Layout(**SPLIT))])
        self.draw()

    def _searched(self, change: Any) -> None:
        self.state.set_search(change["new"])
        self.draw()

    def draw(self) -> None:
        """Show the page of keys and the chosen value."""
        rows = self.state.page_rows()
        lines = [(r.key, r.type, cut_end(r.text[:60], 22)) for r in rows]
        every, found = len(self.state.rows), f"Keys: {grouped(len(self.state.shown))}"
        title = found + (f" of {grouped(every)} match" if self.state.search else "")
        self.choice.draw(title, lines, [r.key for r in rows], self.state.pages, self.state.selected)
        self._draw_value()

    def _chosen(self, key: str) -> None:
        if self.message.of(lambda: self.state.select(key)):
            self._draw_value()

    def _draw_value(self) -> None:
        self.message.of(lambda: self.value.show(self.state.value_parts()))
        self.items.draw(self.state.items)
        self.items.widget.layout.display = None if self.state.items.count > 1 else "none"


SPLIT = {"flex_flow": "row wrap", "align_items": "flex-start"}
LEFT = {"flex": "1 1 480px", "min_width": "0", "margin": "0 20px 0 0"}
RIGHT = {"flex": "1 1 440px", "min_width": "0"}


def metadata_widget(model: ModelFile) -> MetadataView:
    """A browser of a model's metadata, as a widget.

    Parameters
    ----------
    model
        An opened model.
    """
    view: MetadataView = standing_alone(MetadataView(MetadataState(model)))
    return view


def standing_alone(view: Any) -> Any:
    """A view with its own frame and style sheet."""
    view.children = top(view.children)
    for name in ("apsi-w", "apsi-top"):
        view.add_class(name)
    return view

"""The units view: thin widgets over `UnitsState`. `tests/test_widgets.py` drives it without a browser."""

# ipywidgets has no types
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..parts import Text
from .render_tensors import grouped, shape_text
from .state_units import UnitsState
from .widgets_base import Choice, Message, Panel, text
from .widgets_metadata import LEFT, RIGHT, SPLIT, standing_alone

if TYPE_CHECKING:
    from ..model import ModelFile

ROWS = 12


class UnitsView(w.VBox):
    """The tensors with a unit; of the chosen one dimension, conversion, and values in another unit."""

    def __init__(self, state: UnitsState) -> None:
        self.state = state
        self.choice = Choice("tensors", ROWS, self.choose, self._draw_list)
        self.unit, self.values = Panel(), Panel()
        self.target = text(
            "Show in",
            "another unit of the same dimension, for display only: mm, degF, kg*m**2/s**2",
            placeholder="mm, degF, kg*m**2/s**2",
            continuous_update=False,
        )
        self.target.observe(self._converted, "value")
        self.message = Message()
        if not state.names:
            super().__init__([Panel(Text("No tensor of this file carries a unit.", "muted")).widget])
            return
        left = w.VBox([self.choice.widget], layout=w.Layout(**LEFT))
        right = w.VBox(
            [self.unit.widget, self.target, self.message.widget, self.values.widget], layout=w.Layout(**RIGHT)
        )
        super().__init__([w.HBox([left, right], layout=w.Layout(**SPLIT))])
        self._draw_list()
        self._draw_values()

    def choose(self, name: str | None) -> None:
        """Look at a tensor; one without a unit changes nothing."""
        if name is None or name not in self.state.model.units:
            return
        self.state.select(name)
        if self.state.target is None:
            self.target.value = ""
        self.choice.select(name)
        self._draw_values()

    def _draw_list(self) -> None:
        model, names = self.state.model, self.state.page_names()
        lines = [(n, str(model.units[n]), shape_text(model[n].shape)) for n in names]
        title = f"Tensors with a unit: {grouped(len(self.state.names))}"
        self.choice.draw(title, lines, names, self.state.pages, self.state.selected)

    def _draw_values(self) -> None:
        chosen = self.state.selected is not None
        self.unit.show(self.state.unit_parts())
        self.target.layout.display = None if chosen else "none"
        self.values.show(None)
        if chosen:
            self.message.of(lambda: self.values.show(self.state.value_parts()))

    def _converted(self, change: Any) -> None:
        if self.message.of(lambda: self.state.show_in(change["new"])):
            self._draw_values()


def units_widget(model: ModelFile) -> UnitsView:
    """The physical units of a model's tensors, with conversion for display, as a widget.

    Parameters
    ----------
    model
        An opened model.
    """
    view: UnitsView = standing_alone(UnitsView(UnitsState(model)))
    return view

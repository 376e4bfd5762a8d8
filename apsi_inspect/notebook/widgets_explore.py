"""`model.explore()`: the views of a model side by side in tabs, linked by the tensor that is chosen.

A tab is built when it is first opened, so that a model of 100 000 tensors opens quickly. `tests/test_widgets.py` drives
it without a browser, `tests/browser` in one.
"""

# ipywidgets has no types
# mypy: disable-error-code="misc"

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..listing import human_size
from ..parts import Stack, Strip
from .render import format_text, trust
from .render_tensors import code, grouped, plural
from .state_metadata import MetadataState
from .state_signature import SignatureState
from .state_tensor import TensorState
from .state_tensors import TensorListState
from .state_units import UnitsState
from .widgets_base import Panel
from .widgets_metadata import LEFT, RIGHT, SPLIT, MetadataView, standing_alone
from .widgets_signature import SignatureView
from .widgets_tensors import TensorBrowser, TensorView, group_parts
from .widgets_units import UnitsView

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..model import ModelFile
    from ..parts import Inline


class Explorer(w.VBox):
    """The tabs of a model.

    Attributes
    ----------
    model
        What is looked at.
    views
        The views that have been opened, by their tab's number.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.views: dict[int, Any] = {}
        self._build: list[tuple[str, Callable[[], Any]]] = [
            ("Tensors", self._tensors),
            (f"Metadata ({grouped(len(model.metadata))})", lambda: MetadataView(MetadataState(model))),
            (f"Units ({grouped(len(model.units))})", self._units),
            ("Quantization error", self._error),
            ("Signature", lambda: SignatureView(SignatureState(model))),
        ]
        self.tabs = w.Tab([w.VBox() for _ in self._build], titles=[title for title, _ in self._build])
        self.tabs.observe(lambda c: self.open_tab(c["new"]), "selected_index")
        super().__init__([Panel(_head(model)).widget, self.tabs])
        self.open_tab(0)

    @property
    def selected(self) -> str | None:
        """Name of the chosen tensor."""
        browser: TensorBrowser = self.browser
        return browser.state.selected

    def open_tab(self, index: int | None) -> None:
        """Show a tab, built on first use."""
        if index is None:
            return
        if index not in self.views:
            self.views[index] = self._build[index][1]()
            self.tabs.children[index].children = [self.views[index]]
        self.tabs.selected_index = index

    def _tensors(self) -> Any:
        self.detail = TensorView(TensorState(self.model))
        self.browser = TensorBrowser(TensorListState(self.model), self._chosen)
        return w.HBox(
            [w.VBox([self.browser], layout=w.Layout(**LEFT)), w.VBox([self.detail], layout=w.Layout(**RIGHT))],
            layout=w.Layout(**SPLIT),
        )

    def _units(self) -> UnitsView:
        view = UnitsView(UnitsState(self.model))
        view.choose(self.selected)
        return view

    def _error(self) -> Any:
        from .state_error import QuantErrorState
        from .widgets_error import QuantErrorView

        view = QuantErrorView(QuantErrorState(self.model))
        if self.selected is not None:
            view.tensors.value = self.selected
        return view

    def _chosen(self, name: str | None) -> None:
        self.detail.choose(name)
        if self.browser.group is not None:
            self.detail.head.show(group_parts(self.browser.state, self.browser.group))
        for view in self.views.values():
            if isinstance(view, UnitsView):
                view.choose(name)


def _head(model: ModelFile) -> Stack:
    chips: list[tuple[str, Inline]] = [("format", format_text(model)), ("size", human_size(model.file_size))]
    chips.append(("tensors", grouped(len(model))))
    if model.architecture:
        chips.insert(0, ("architecture", code(model.architecture, 60)))
    if len(model.files) > 1:
        chips.append(("files", plural(len(model.files), "shard")))
    return Stack([Strip(code(os.path.basename(model.path)), "", chips), trust(model)])


def explorer(model: ModelFile) -> Explorer:
    """The views of a model as one widget."""
    view: Explorer = standing_alone(Explorer(model))
    return view

"""The tensor browser and the view of one tensor: thin widgets over `TensorListState` and `TensorState`.

`tests/test_widgets.py` drives them without a browser, `tests/browser` in one.
"""

# ipywidgets has no types
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..listing import human_size
from ..parts import Strip, Text
from .render_tensors import code, grouped, shape_text
from .state_job import Job
from .state_tensor import TensorState
from .state_tensors import ANY, SORTS, TensorListState
from .widgets_base import AUTO, ROW, Choice, Message, Panel, Running, button, checkbox, dropdown, on_enter, text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .state_tensors import Node

ROWS = 18
LIST, TREE = "list", "tree"


class TensorBrowser(w.VBox):
    """Search, filter, sort, a tree; `chosen` is called with the name of a tensor, or None for a group."""

    def __init__(self, state: TensorListState, chosen: Callable[[str | None], None]) -> None:
        self.state, self.chosen = state, chosen
        self.group: Node | None = None
        half = w.Layout(width="auto")
        self.search = text(
            "Search",
            "part of a name in any case, or a glob for the whole name, such as blk.*.attn_q.*",
            placeholder="attn, or blk.*.attn_q.*",
            layout=w.Layout(width="auto", flex="1 1 auto"),
        )
        self.view = w.ToggleButtons(
            options=[("List", LIST), ("Tree", TREE)],
            description="View",
            style=AUTO,
            tooltips=["tensors one below the other", "names as a tree"],
            tooltip="list or tree",
        )
        self.view.style.button_width = "auto"
        self.encoding = dropdown("Encoding", "only tensors of this encoding", state.encodings, layout=half)
        self.sort = dropdown("Sort by", "order of the list", SORTS, layout=half)
        self.descending = checkbox("descending", "largest or last first")
        self.choice = Choice("tensors", ROWS, self._chosen, self.draw, right=(2, 3))
        self.toggle = button("Open group", "open or close the group that is selected in the tree", self._toggle)
        self.choice.row.children = (*self.choice.row.children, self.toggle)
        self.message = Message()
        on_enter(self.search, lambda: self.choice.step(1))
        self.search.observe(lambda c: self._do(lambda: state.set_filter(search=c["new"])), "value")
        self.encoding.observe(lambda c: self._do(lambda: state.set_filter(encoding=c["new"])), "value")
        self.sort.observe(lambda c: self._do(lambda: state.set_sort(c["new"])), "value")
        self.descending.observe(lambda c: self._do(lambda: state.set_sort(descending=c["new"])), "value")
        self.view.observe(lambda c: self._do(lambda: state.show_tree(c["new"] == TREE)), "value")
        super().__init__(
            [
                w.HBox([self.search, self.view], layout=w.Layout(align_items="center")),
                w.HBox([self.encoding, self.sort, self.descending], layout=w.Layout(**ROW)),
                self.choice.widget,
                self.message.widget,
            ]
        )
        self.draw()

    def _do(self, action: Callable[[], None]) -> None:
        if self.message.of(action):
            self.draw()

    def draw(self) -> None:
        """Show the page of the list or of the tree."""
        state = self.state
        filtered = state.search or state.encoding != ANY
        title = f"Tensors: {grouped(state.count)}" + (f" of {grouped(len(state.model))} match" if filtered else "")
        if state.as_tree:
            nodes = state.page_nodes()
            at = self.group.path if self.group is not None else state.selected
            values: list[Any] = [n.path if n.leaf else n for n in nodes]
            selected = next((v for n, v in zip(nodes, values, strict=True) if n.path == at), None)
            self.choice.draw(title, [self._line(n) for n in nodes], values, state.pages)
            self.choice.select(selected)
        else:
            rows = state.page_rows()
            lines = [(r.name, r.encoding, shape_text(r.shape), human_size(r.nbytes)) for r in rows]
            self.choice.draw(title, lines, [r.name for r in rows], state.pages, state.selected)
        self.sort.disabled = self.descending.disabled = state.as_tree
        self._draw_toggle()

    def _line(self, node: Node) -> tuple[str, str, str, str]:
        pad = "  " * node.depth
        if node.leaf:
            info = self.state.model.info(int(node.members[0]))
            return f"{pad}  {node.label}", info.encoding.name, shape_text(info.shape), human_size(info.nbytes)
        size = human_size(self.state.nbytes(node.members))
        count = f"{grouped(len(node.members))} tensor{'s' * (len(node.members) != 1)}"
        return f"{pad}{'▾' if node.opened else '▸'} {node.label}", "", count, size

    def _draw_toggle(self) -> None:
        self.toggle.layout.display = None if self.state.as_tree else "none"
        self.toggle.disabled = self.group is None
        opened = self.group is not None and self.group.path in self.state.opened
        self.toggle.description = "Close group" if opened else "Open group"

    def _chosen(self, value: Any) -> None:
        self.group = None if isinstance(value, str) else value
        self._draw_toggle()
        self.state.select(value if isinstance(value, str) else None)
        self.chosen(self.state.selected)

    def _toggle(self) -> None:
        if self.group is not None:
            self.state.toggle(self.group.path)
            self.draw()


class TensorView(w.VBox):
    """What one tensor is like: header, statistics, histogram, a slice of its values."""

    def __init__(self, state: TensorState) -> None:
        self.state = state
        self.head, self.stats, self.values = Panel(), Panel(), Panel()
        self.measure = button("Compute statistics", "read all values of this tensor", self._measure)
        self.running = Running("Statistics", Job())
        self.slice = text(
            "Slice",
            "integers and slices, one an axis, as in NumPy: 0, 10:20, ::4",
            continuous_update=False,
            layout=w.Layout(width="20em"),
        )
        self.message = Message()
        self.slice.observe(lambda c: self._sliced(c["new"]), "value")
        self._setting = False
        below = w.Layout(flex_flow="row wrap", align_items="flex-start")
        grid = w.VBox([self.slice, self.message.widget, self.values.widget], layout=w.Layout(min_width="0"))
        left = w.VBox([self.measure, self.running.widget, self.stats.widget], layout=w.Layout(min_width="0"))
        self.body = w.VBox([left, grid], layout=below)
        super().__init__([self.head.widget, self.body])
        self.draw()

    def choose(self, name: str | None) -> None:
        """Look at another tensor."""
        self.running.job.cancel()
        self.message.of(lambda: self.state.choose(name))
        self.draw()

    def draw(self) -> None:
        """Show it from the start."""
        state = self.state
        self.head.show(state.header_parts())
        self.body.layout.display = None if state.tensor is not None else "none"
        self._setting = True
        self.slice.value = state.slice_text
        self._setting = False
        self.slice.disabled = state.tensor is None or not state.tensor.ndim
        self.measure.layout.display = None if state.measurable and not state.cheap else "none"
        self.running.watch(Job())
        self.stats.show(None)
        self.values.show(None)
        if state.tensor is None or not self.message.of(self._draw_values):
            return
        if state.cheap:
            self.message.of(self._draw_stats)
        elif not state.measurable:
            self.stats.show(Text("No statistics of complex or absent values.", "muted"))

    def _draw_values(self) -> None:
        if self.state.tensor is not None and self.state.tensor.numel:
            self.values.show(self.state.slice_parts())

    def _draw_stats(self) -> None:
        self.stats.show(self.state.stats_parts())

    def _sliced(self, value: str) -> None:
        if self._setting:
            return

        def show() -> None:
            self.state.set_slice(value)
            self._draw_values()

        self.message.of(show)

    def _measure(self) -> None:
        job = Job()
        tensor = self.state.tensor

        def changed() -> None:
            if self.state.tensor is not tensor:
                return  # another one has been chosen since
            self.running.draw()
            self.measure.layout.display = "none" if job.running or job.status == "done" else None
            if job.status == "done":
                self._draw_stats()
            elif job.status == "failed":
                self.stats.show(Text(job.message, "strong"))

        job.changed = changed
        self.running.watch(job)
        job.start(self.state.stats)


def group_parts(state: TensorListState, node: Node) -> Strip:
    """What a group of the tree holds."""
    chips = [("tensors", grouped(len(node.members))), ("bytes", human_size(state.nbytes(node.members)))]
    return Strip(code(node.path), "group", chips)

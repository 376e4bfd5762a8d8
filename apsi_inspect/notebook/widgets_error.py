"""The quantization lab: thin widgets over `QuantErrorState`. `tests/test_widgets.py` drives it without a browser."""

# ipywidgets has no types
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..ops.error import FORMATS
from ..ops.read import BRIEF
from ..parts import Badge, Text
from .state_error import ORDERS, SAMPLES, QuantErrorState
from .state_job import Job
from .widgets_base import ROW, Choice, Message, Panel, Running, button, checkbox, dropdown, text
from .widgets_metadata import LEFT, RIGHT, SPLIT, standing_alone

if TYPE_CHECKING:
    from ..model import ModelFile

LINES = 14
MORE_FORMATS = ("q5_0", "q4_1", "q3_k", "q2_k", "iq4_xs", "f16", "fp8", "fp4")
LEFT_TO_PLAN = "leave it to the plan"


class QuantErrorView(w.VBox):
    """Formats to try, a run, its totals with the size/error plot, tensor by tensor, and the plan."""

    def __init__(self, state: QuantErrorState) -> None:
        self.state = state
        self._setting = False
        self.boxes = {f: checkbox(f, f"try {f}", f in state.formats) for f in (*FORMATS, *MORE_FORMATS)}
        self.tensors = text("Tensors", "part of a name, or a glob; empty for all", placeholder="all; or attn, blk.0.*")
        self.sample = dropdown("Measure", "how many values of each tensor", list(SAMPLES))
        self.start = button("Run", "measure the error of these formats", self.run, button_style="primary")
        self.running = Running("Measuring", state.job)
        self.message = Message()
        self.totals = Panel()
        self.scatter = w.HTML(tooltip="", layout=w.Layout(flex="1 1 420px", min_width="0", max_width="560px"))
        self.order = dropdown("Order", "order of the tensors", ORDERS)
        self.choice = Choice("measured tensors", LINES, self.choose, self._draw_list, right=range(1, 30), most=24)
        self.tensor = Panel()
        self.pick = dropdown("Store as", "the format that the plan is to keep for this tensor", [LEFT_TO_PLAN])
        self.shown = dropdown("Histogram of", "the format whose errors are drawn", ["–"])
        self.draw_it = button("Draw", "histogram of the errors in this format; reads the tensor", self._histogram)
        self.drawing = Running("Drawing", Job())
        self.histogram = w.HTML(tooltip="", layout=w.Layout(min_width="0", max_width="560px"))
        self.bits = w.BoundedFloatText(
            value=4.5, min=0.1, max=64, step=0.25, description="Bits per weight", tooltip="at most so many, on average",
            style={"description_width": "auto"}, layout=w.Layout(width="180px"),
        )  # fmt: skip
        self.make = button("Make a plan", "the least error within this size; picks stay", self._plan)
        self.file = text("Save as", "path of the plan, a JSON file", value="plan.json")
        self.save = button("Save the plan", "write the plan, for convert(…, plan=…)", self._save)
        self.plan = Panel()
        self.plan_running = Running("Planning", state.plan_job)
        self._wire()
        super().__init__([*self._above(), self._below()])
        self.draw()

    def _wire(self) -> None:
        self.order.observe(lambda c: self._ordered(c["new"]), "value")
        self.pick.observe(lambda c: self._picked(c["new"]), "value")
        self.state.job.changed = self._job_changed
        self.state.plan_job.changed = self._draw_plan

    def _above(self) -> list[Any]:
        title = Panel(Text("Formats to try", "strong")).widget
        self.totals.widget.layout.flex = "1 1 500px"
        self.totals.widget.layout.margin = "2px 20px 2px 0"
        for made in self.boxes.values():
            made.layout.width = "84px"
        return [
            title,
            w.HBox([*self.boxes.values()], layout=w.Layout(**ROW)),
            w.HBox([self.tensors, self.sample, self.start, self.running.widget], layout=w.Layout(**ROW)),
            self.message.widget,
            w.HBox([self.totals.widget, self.scatter], layout=w.Layout(align_items="flex-start", flex_flow="row wrap")),
        ]

    def _below(self) -> Any:
        left = w.VBox([self.order, self.choice.widget], layout=w.Layout(**LEFT))
        left.layout.flex = "1 1 560px"
        drawn = w.HBox([self.shown, self.draw_it, self.drawing.widget], layout=w.Layout(**ROW))
        self.one = w.VBox([self.pick, drawn, self.histogram])
        right = w.VBox([self.tensor.widget, self.one], layout=w.Layout(**RIGHT))
        plan = w.VBox(
            [
                Panel(Text("Plan", "strong")).widget,
                w.HBox([self.bits, self.make, self.plan_running.widget], layout=w.Layout(**ROW)),
                self.plan.widget,
                w.HBox([self.file, self.save], layout=w.Layout(**ROW)),
            ],
            layout=w.Layout(margin="8px 0 0"),
        )
        self.results = w.VBox([w.HBox([left, right], layout=w.Layout(**SPLIT, margin="10px 0 0")), plan])
        return self.results

    def run(self) -> None:
        """Start with what the fields say."""
        if self.state.job.running:
            return

        def start() -> None:
            self.state.set_formats([f for f, box in self.boxes.items() if box.value])
            self.state.tensors, self.state.sample = self.tensors.value, SAMPLES[self.sample.value]
            self.state.run()

        self.message.of(start)

    def _job_changed(self) -> None:
        self.running.draw()
        self.start.disabled = self.state.job.running
        if not self.state.job.running:
            if self.state.table is not None:
                self.bits.value = self.state.middle_bpw()
            self.draw()

    def draw(self) -> None:
        """Show what there is."""
        state = self.state
        if state.job.status == "failed":
            self.message.show(Badge("error", state.job.message))
        self.totals.show(state.totals_parts())
        self.scatter.value = "" if state.table is None or not state.table.rows else scatter_html(state)
        self.results.layout.display = None if state.table is not None else "none"
        self._draw_list()
        self._draw_tensor()
        self._draw_plan()

    def _draw_list(self) -> None:
        lines = self.state.page_lines()
        formats = self.state.table.formats if self.state.table is not None else ()
        title = f"Signal to noise in dB: {', '.join(formats)}"
        self.choice.draw(
            title, [cells for _, cells in lines], [n for n, _ in lines], self.state.pages, self.state.selected
        )

    def _ordered(self, order: str) -> None:
        self.state.set_order(order)
        self._draw_list()

    def choose(self, name: str | None) -> None:
        """Look at one of the measured tensors."""
        if self.message.of(lambda: self.state.select(name)):
            self._draw_tensor()

    def _draw_tensor(self) -> None:
        state = self.state
        self.tensor.show(state.tensor_parts())
        self.one.layout.display = None if state.selected is not None else "none"
        options = state.options()
        self._setting = True
        self.pick.options = [LEFT_TO_PLAN, *options]
        self.pick.value = state.picks.get(state.selected or "", LEFT_TO_PLAN)
        if list(self.shown.options) != options:
            self.shown.options = options or ["–"]
        self._setting = False
        self.histogram.value = ""
        self.draw_it.disabled = not options
        if options and state.selected is not None and state.model[state.selected].numel <= BRIEF:
            self._histogram()

    def _picked(self, value: str) -> None:
        if self._setting:
            return
        self.message.of(lambda: self.state.pick(None if value == LEFT_TO_PLAN else value))
        self.tensor.show(self.state.tensor_parts())
        self._draw_list()
        self._draw_plan()

    def _histogram(self) -> None:
        name, word = self.state.selected, self.shown.value
        if name is None:
            return
        job = Job()

        def changed() -> None:
            self.drawing.draw()
            if self.state.selected != name or job.running:
                return
            self.histogram.value = job.result or ""
            if job.status == "failed":
                self.message.show(Badge("error", job.message))

        job.changed = changed
        self.drawing.watch(job)
        job.start(lambda progress: histogram_html(self.state, name, word))

    def _plan(self) -> None:
        self.message.of(lambda: self.state.make_plan(self.bits.value))

    def _draw_plan(self) -> None:
        self.plan_running.draw()
        self.plan.show(self.state.plan_parts())
        self.make.disabled = self.state.plan_job.running
        self.save.disabled = self.state.plan is None

    def _save(self) -> None:
        saved: list[str] = []
        if self.message.of(lambda: saved.append(self.state.save_plan(self.file.value))):
            self.message.show(Badge("note", f"saved: {saved[0]}"))


def scatter_html(state: QuantErrorState) -> str:
    """Error against size, as an image with an alternative text."""
    from .plots_drawing import figure_html
    from .plots_report import error_vs_size

    return figure_html(error_vs_size(state.table))


def histogram_html(state: QuantErrorState, name: str, word: str) -> str:
    """The errors of one tensor in one format, as an image with an alternative text."""
    from .plots import error_histogram
    from .plots_drawing import figure_html

    return figure_html(error_histogram(state.model[name], word))


def quant_error_widget(model: ModelFile) -> QuantErrorView:
    """The quantization lab of a model, as a widget: try formats, compare errors, pick, plan.

    Parameters
    ----------
    model
        An opened model.
    """
    view: QuantErrorView = standing_alone(QuantErrorView(QuantErrorState(model)))
    return view

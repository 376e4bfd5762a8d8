"""What the widgets of the notebook share: labelled controls, panels of parts, pages, messages, progress.

Contract: every control has a description in words and a tooltip, nothing is told by colour alone, and all HTML comes
from parts, which escape it. The one style sheet takes its colours from the page (JupyterLab's variables, else what is
inherited). `tests/test_widgets.py` enforces this.
"""

# ipywidgets has no types
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..errors import ApsiError, visible
from ..parts import Badge, cell_width, cut, to_html

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..parts import Part
    from .state_job import Job
    from .state_pages import Pages

FAILURES = (ApsiError, OSError, IndexError)  # what a user's input or a file can lead to
NAME = 40  # characters of a cell in a list
_CSS = """
.apsi-w { --apsi-line: var(--jp-border-color2, rgba(128,128,128,.35)); --jp-widgets-dropdown-arrow:
  url("data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E%3Cpath fill='%23888' \
d='M5.2 5.9L9 9.7l3.8-3.8 1.2 1.2-4.9 5-4.9-5z'/%3E%3C/svg%3E"); }
.apsi-w.apsi-top { border: 1px solid var(--apsi-line); border-radius: 8px; padding: 10px 14px 12px; max-width: 1240px;
  margin: 4px 0; overflow: hidden; }
.apsi-w .widget-html, .apsi-w .widget-html-content { line-height: 1.45; height: auto; }
.apsi-w .widget-html { margin: 2px 0; }
.apsi-w .apsi.apsi.apsi { border: 0; padding: 0; margin: 0; max-width: none; }
.apsi-w .apsi.apsi.apsi caption { white-space: nowrap; }
.apsi-w .apsi-boxed { border: 1px solid var(--apsi-line); border-radius: 6px; padding: 8px 12px; }
.apsi-w .widget-select select { border-radius: 4px; padding: 4px;
  font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.apsi-w .widget-select select option { padding: 1px 4px; }
.apsi-w .widget-select { flex-direction: column; align-items: stretch; height: auto; }
.apsi-w .widget-select > label { width: auto; text-align: left; font-size: 12px; opacity: .75; height: auto; }
.apsi-w .widget-select > select { height: auto; flex: 1 1 auto; }
.apsi-w .widget-label { color: inherit; }
.apsi-w .widget-text input, .apsi-w .widget-dropdown select { border-radius: 4px; }
.apsi-w .jupyter-widget-toggle-buttons, .apsi-w .widget-toggle-buttons { width: auto; display: flex;
  flex-flow: row nowrap; align-items: center; margin-left: 12px; }
.apsi-w .jupyter-widget-toggle-buttons > div, .apsi-w .widget-toggle-buttons > div { flex-wrap: nowrap; }
.apsi-w .apsi.apsi.apsi .g > div > div[style="width:0.0%"] { min-width: 0; }
.apsi-w .widget-hbox { column-gap: 8px; }
.apsi-w .apsi.apsi.apsi th, .apsi-w .apsi.apsi.apsi td { padding-right: 11px; }
.apsi-w .jupyter-widget-toggle-buttons > label, .apsi-w .widget-toggle-buttons > label { margin-right: 8px; }
.apsi-w .widget-checkbox label { display: flex; align-items: center; }
.apsi-w .widget-checkbox input[type="checkbox"] { align-self: center; margin: 0 8px 0 0; }
.apsi-w button.jupyter-button { border-radius: 4px; width: auto; padding: 0 12px; }
.apsi-w .jupyter-widget-tab > .lm-TabBar { overflow-x: visible; min-height: 26px; }
.apsi-w .jupyter-widget-tab > .lm-TabBar .lm-TabBar-tab { flex: 0 1 auto; min-width: 0; padding: 0 14px; }
.apsi-w .jupyter-widget-tab > .widget-tab-contents { padding: 12px 0 0; border: 0; background: none;
  border-top: 1px solid var(--apsi-line); }
.apsi-w :focus-visible { outline: 2px solid var(--jp-brand-color1, #2f7ff0); outline-offset: 1px; }
.apsi-w .apsi-count .widget-html-content { white-space: nowrap; font-variant-numeric: tabular-nums; }
"""


def sheet() -> Any:
    """The style sheet, a widget without height."""
    return w.HTML(
        f"<style>{_CSS}</style>", tooltip="", layout=w.Layout(display="block", height="0", margin="0", min_height="0")
    )


def top(children: Sequence[Any]) -> list[Any]:
    """The children of a view that stands by itself, with its style sheet."""
    return [sheet(), *children]


def text(description: str, tooltip: str, **more: Any) -> Any:
    """A line to type in."""
    return w.Text(description=description, tooltip=tooltip, style=AUTO, **more)


def dropdown(description: str, tooltip: str, options: Sequence[Any], **more: Any) -> Any:
    """A choice of a few."""
    return w.Dropdown(description=description, tooltip=tooltip, options=list(options), style=AUTO, **more)


def checkbox(description: str, tooltip: str, value: bool = False) -> Any:
    """A yes or no."""
    layout = w.Layout(width="auto")
    return w.Checkbox(description=description, tooltip=tooltip, value=value, indent=False, layout=layout)


def button(description: str, tooltip: str, action: Callable[[], Any], **more: Any) -> Any:
    """A button; `action` is called on a click, or on Enter or Space where it has the focus."""
    made = w.Button(description=description, tooltip=tooltip, layout=w.Layout(width="auto"), **more)
    made.on_click(lambda _: action())
    return made


def on_enter(field: Any, action: Callable[[], None]) -> None:
    """Call `action` where Enter is pressed in a text field."""
    field.on_msg(lambda _, content, __: action() if content.get("event") == "submit" else None)


AUTO = {"description_width": "auto"}
ROW = {"align_items": "center", "flex_flow": "row wrap"}


class Panel:
    """A part as a widget."""

    def __init__(self, part: Part | None = None, boxed: bool = False) -> None:
        self.widget = w.HTML(tooltip="", layout=w.Layout(width="auto", min_width="0"))
        self.part: Part | None = None
        if boxed:
            self.widget.add_class("apsi-boxed")
        if part is not None:
            self.show(part)

    def show(self, part: Part | None) -> None:
        """Show a part; None: nothing."""
        self.part = part
        self.widget.value = "" if part is None else to_html(part)
        self.widget.layout.display = "none" if part is None else None


class Message(Panel):
    """What went wrong, announced to screen readers; empty while all is well."""

    def __init__(self) -> None:
        super().__init__()
        self.show(None)

    def show(self, part: Part | None) -> None:
        """Show a part; None: nothing."""
        super().show(part)
        if part is not None:
            self.widget.value = f'<div role="status" aria-live="polite">{self.widget.value}</div>'

    def of(self, action: Callable[[], Any]) -> bool:
        """Do something that may fail on the user's input or the file; True where it did not."""
        try:
            action()
        except FAILURES as exc:
            self.show(Badge("error", visible(str(exc), 400)))
            return False
        self.show(None)
        return True


class Pager:
    """Buttons to turn the pages of a list; `turned` is called where another page is to be shown."""

    def __init__(self, what: str, turned: Callable[[], None]) -> None:
        self.turned = turned
        self.pages: Pages | None = None
        self.count = w.HTML(tooltip="", layout=w.Layout(width="auto", margin="0 6px"))
        self.count.add_class("apsi-count")
        self.buttons = [
            button("First", f"first page of {what}", lambda: self.go(-(10**9))),
            button("◀ Page", f"previous page of {what}", lambda: self.go(-1)),
            button("Page ▶", f"next page of {what}", lambda: self.go(1)),
            button("Last", f"last page of {what}", lambda: self.go(10**9)),
        ]
        self.widget = w.HBox([self.count, *self.buttons], layout=w.Layout(**ROW))

    def draw(self, pages: Pages) -> None:
        """Show where the list stands."""
        self.pages = pages
        self.count.value = f"<span>{pages.text}</span>"
        last = pages.count - 1
        for i, made in enumerate(self.buttons):
            made.disabled = pages.page == (0 if i < 2 else last)
            made.layout.display = None if last else "none"

    def go(self, step: int) -> bool:
        """Turn some pages; False where there is no such page."""
        assert self.pages is not None
        before = self.pages.page
        self.pages.go(before + step)
        if self.pages.page == before:
            return False
        self.turned()
        return True


class Running:
    """The progress of a `Job` and a button to cancel it; not there while nothing runs."""

    def __init__(self, what: str, job: Job) -> None:
        self.job = job
        self.bar = w.FloatProgress(value=0, min=0, max=1, description=what, tooltip=f"progress: {what}", style=AUTO)
        self.label = w.HTML(tooltip="", layout=w.Layout(width="auto", min_width="3.5em"))
        self.stop = button("Cancel", f"stop: {what}", self._cancel)
        self.widget = w.HBox([self.bar, self.label, self.stop], layout=w.Layout(align_items="center"))
        self.draw()

    def watch(self, job: Job) -> None:
        """Another job in its place."""
        self.job = job
        self.draw()

    def _cancel(self) -> None:
        self.job.cancel()
        self.stop.disabled = True

    def draw(self) -> None:
        """Show how far it is."""
        self.widget.layout.display = None if self.job.running else "none"
        self.bar.value = self.job.share
        self.label.value = f"<span>{100 * self.job.share:.0f} %</span>"
        self.stop.disabled = not self.job.running


class Choice:
    """A paged list to select from; `chosen` is called with the value of the line.

    JupyterLab keeps the arrow keys for its cells where the focus is in no text field, so a list by itself cannot be
    walked through with them: the buttons Up and Down do it from the keyboard (Space or Enter), over the pages.
    """

    def __init__(
        self,
        what: str,
        rows: int,
        chosen: Callable[[Any], None],
        turned: Callable[[], None],
        right: Sequence[int] = (),
        most: int = NAME,
    ) -> None:
        layout = w.Layout(width="auto", min_width="0")
        self.list = w.Select(
            description=what.capitalize(), tooltip=f"select one of the {what}", rows=rows, layout=layout
        )
        self.list.observe(self._changed, "index")
        self.pager = Pager(what, turned)
        self.up = button("▲ Up", f"select the one above, of the {what}", lambda: self.step(-1))
        self.down = button("▼ Down", f"select the one below, of the {what}", lambda: self.step(1))
        self.row = w.HBox([self.up, self.down, self.pager.widget], layout=w.Layout(**ROW))
        self.widget = w.VBox([self.list, self.row], layout=w.Layout(min_width="0"))
        self.chosen, self.right, self.most = chosen, right, most
        self.values: list[Any] = []
        self._drawing = False

    def draw(
        self, title: str, lines: Sequence[Sequence[str]], values: Sequence[Any], pages: Pages, selected: Any = None
    ) -> None:
        """Show a page: lines of cells that stand for values; the columns of numbers `right` end together."""
        self._drawing = True
        self.values = list(values)
        try:
            self.list.description = title
            self.list.options = [(label, i) for i, label in enumerate(aligned(lines, self.right, self.most))]
        finally:
            self._drawing = False
        self.select(selected)
        self.pager.draw(pages)

    def select(self, value: Any) -> None:
        """Mark the line of a value without calling `chosen`."""
        self._drawing = True
        try:
            self.list.index = self.values.index(value) if value in self.values else None
        finally:
            self._drawing = False
        self.up.disabled = self.down.disabled = not self.values

    def step(self, by: int) -> None:
        """Select the line above or below, on the next page where this one ends."""
        at = -1 if self.list.index is None and by > 0 else self.list.index or 0
        if 0 <= at + by < len(self.values):
            self.list.index = at + by
        elif self.pager.go(by):
            self.list.index = 0 if by > 0 else len(self.values) - 1

    def _changed(self, change: Any) -> None:
        if not self._drawing and change["new"] is not None:
            self.chosen(self.values[change["new"]])


def aligned(lines: Iterable[Sequence[str]], right: Sequence[int] = (), most: int = NAME) -> list[str]:
    """Lines of a list in columns of a fixed width, with spaces that a browser keeps."""
    cells = [[cut(visible(cell), most) for cell in line] for line in lines]
    widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)] if cells else []
    out = []
    for line in cells:
        pads = [" " * (n - cell_width(cell)) for cell, n in zip(line, widths, strict=True)]
        padded = [
            pad + cell if i in right else cell + pad for i, (cell, pad) in enumerate(zip(line, pads, strict=True))
        ]
        out.append("  ".join(padded).rstrip().replace(" ", "\u00a0"))
    return out

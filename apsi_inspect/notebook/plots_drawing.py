"""Drawing that all plots share: a figure with an alternative text, its axes, labels and numbers; text made safe.

Transparent, in greys and two colours that read on light and on dark backgrounds (Okabe and Ito's, blue lightened).
`tests/test_plots.py` covers it with the plots.
"""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from ..errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

INK = "#777777"  # 4.5 : 1 on white and on black
BLUE, ORANGE = "#3b82c4", "#d55e00"
SIZE = (6.0, 3.0)  # inches
SMALL = 8
BASE = 0.6  # where bars begin on a logarithmic axis: one value is seen
# Against what the user may have set; matplotlib's type of it has a name for each key
_STYLE: Any = {
    "text.usetex": False, "font.family": ["DejaVu Sans"], "axes.unicode_minus": True, "figure.autolayout": False,
}  # fmt: skip


class Plot(Figure):
    """A figure with an alternative text.

    Attributes
    ----------
    alt
        What it shows, with its numbers.
    """

    alt: str = ""

    def _repr_html_(self) -> str:  # matplotlib's own is for its interactive backends
        return figure_html(self)


def figure_html(figure: Figure, alt: str | None = None, dpi: int = 144) -> str:
    """The figure as ``<img>`` with its PNG inside and an alternative text."""
    import base64
    import html

    out = io.BytesIO()
    with rc_context(_STYLE):
        figure.savefig(out, format="png", dpi=dpi, transparent=True, metadata={"Software": None})
    text = html.escape(visible(getattr(figure, "alt", "") if alt is None else alt))
    data = base64.b64encode(out.getvalue()).decode()
    width = round(figure.get_figwidth() * 96)
    return f'<img alt="{text}" style="width: {width}px; max-width: 100%" src="data:image/png;base64,{data}">'


def new(title: str, below: str = "", height: float = SIZE[1]) -> tuple[Plot, Axes]:
    with rc_context(_STYLE):
        made = Plot(figsize=(SIZE[0], height), layout="constrained")
        made.patch.set_alpha(0)
        ax = made.add_subplot()
        ax.patch.set_alpha(0)
        ax.set_title(drawable(title), loc="left", fontsize=9.5, color=INK, parse_math=False, pad=16 if below else 6)
        if below:
            ax.text(0, 1.02, drawable(visible(below, 100)), transform=ax.transAxes, fontsize=SMALL, color=INK,
                    va="bottom", parse_math=False)  # fmt: skip
        for side, spine in ax.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(INK)
        ax.tick_params(which="both", colors=INK, labelsize=SMALL)
        ax.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
    return made, ax


def bars(ax: Axes, counts: NDArray[Any], edges: NDArray[Any], label: str | None = None, *, log: bool = True) -> None:
    if log:
        ax.set_yscale("log")
        ax.set_ylim(BASE, max(float(counts.max(initial=1)) * 12, 10))
    else:
        ax.set_ylim(0, max(float(counts.max(initial=1)) * 1.35, 1))
    base = BASE if log else 0
    ax.stairs(np.maximum(counts, base), edges, fill=True, baseline=base, color=BLUE, alpha=0.85, label=label)


def labels(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(drawable(x), color=INK, fontsize=9, parse_math=False)
    ax.set_ylabel(y + (", log scale" if ax.get_yscale() == "log" else ""), color=INK, fontsize=9)


def legend(ax: Axes, where: Any) -> None:
    drawn = ax.legend(loc=where, fontsize=SMALL, frameon=False, labelcolor=INK, borderpad=0, borderaxespad=0.3)
    for text in drawn.get_texts():
        text.set_parse_math(False)


def note(ax: Axes, text: str) -> None:
    """A few numbers in the upper right corner."""
    ax.text(0.99, 0.98, text, transform=ax.transAxes, ha="right", va="top", fontsize=SMALL, color=INK, parse_math=False)


def empty(ax: Axes, text: str) -> None:
    """Why there is nothing to see, in the middle of axes without numbers."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.minorticks_off()
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=9, color=INK, parse_math=False)


def name_of(name: str) -> str:
    return visible(name, 48) or "array"


def unit_of(tensor: Any) -> str:
    unit = getattr(tensor, "unit", None)
    return f" ({visible(str(unit), 24)})" if unit else ""


def g(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


def decibels(value: float) -> str:
    return "∞ (no error)" if value == float("inf") else f"{value:.2f} dB".replace("-", "−")


def drawable(text: str) -> str:
    """Text with every character that the font lacks as an escape."""
    have = _characters()
    return "".join(c if c == "\n" or ord(c) in have else f"\\u{{{ord(c):x}}}" for c in text)


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())

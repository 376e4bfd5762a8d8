"""Plots of values, errors, scales and codes, as matplotlib figures without pyplot: ``apsi_inspect.plots``.

Contract: a `Plot` is a Figure that a notebook shows as an image with an alternative text, which says the numbers. No
state of pyplot is touched and no window opened. Transparent, in greys and two colours that read on light and on dark
backgrounds; nothing is told by colour alone. Text from a file is shown literally: no formula, no control characters.
`tests/test_plots.py` compares what is drawn with NumPy.
"""

from __future__ import annotations

from math import inf, log2
from typing import TYPE_CHECKING, Any

import numpy as np

from .plots_data import (
    code_counts,
    counted,
    errors,
    extremes,
    grid,
    histogram,
    rounded,
    scale_pieces,
    source_of,
    values_of,
)
from .plots_drawing import (
    BASE,
    BLUE,
    INK,
    ORANGE,
    Plot,
    bars,
    decibels,
    empty,
    figure_html,
    g,
    labels,
    legend,
    name_of,
    new,
    note,
    unit_of,
)
from .plots_report import error_heatmap, error_vs_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = [
    "Plot", "code_utilisation", "error_heatmap", "error_histogram", "error_vs_size", "figure_html",
    "scale_distribution", "value_histogram",
]  # fmt: skip

BINS = 81


def error_histogram(tensor: Any, format: str, *, bins: int = BINS) -> Plot:
    """How far the values of a tensor move when it is stored in a format.

    Parameters
    ----------
    tensor
        A tensor of a file, a QTensor or an array.
    format
        As `convert` takes it; where the tensor cannot be stored so, the fallback of `convert` is drawn and said.
    bins
        Number of bins; over the whole range of the error.

    Raises
    ------
    ValueRefusedError
        No such format, or values that have no error in it (integers, NaN, infinities).
    """
    source = source_of(tensor)
    made = rounded(source, format)
    found, sums = errors(made, bins)
    title = f"{name_of(source.name or 'array')} as {made.encoding}"
    figure, ax = new(title, made.reason and f"asked for {format}: {made.reason}")
    what = f"error: stored − value{unit_of(tensor)}", "number of values"
    if not found.n:
        return _without(figure, ax, what, f"the error of {title}", found.nonfinite)
    bars(ax, found.counts, found.edges)
    if sums.rmse:
        for sign in (-1, 1):
            ax.axvline(
                sign * sums.rmse, color=ORANGE, linewidth=1.2, linestyle="--", label="± RMSE" if sign > 0 else None
            )
        legend(ax, "upper left")
    labels(ax, *what)
    said = f"RMSE {g(sums.rmse)}\ngreatest {g(sums.max_abs_error)}\nSQNR {decibels(sums.sqnr_db)}"
    note(ax, said)
    figure.alt = (
        f"Histogram of the error of {title}: {found.n} values, RMSE {g(sums.rmse)}, mean error {g(found.mean)}, "
        f"greatest error {g(sums.max_abs_error)}, SQNR {decibels(sums.sqnr_db)}."
    )
    return figure


def value_histogram(tensor: Any, format: str | None = None, *, bins: int = BINS) -> Plot:
    """The values of a tensor, and with a format what they become and the grid that they are rounded to.

    Parameters
    ----------
    tensor, format, bins
        As `error_histogram`. The grid of a block format differs from block to block: that of a typical block is drawn.
    """
    source = source_of(tensor)
    made = None if format is None else rounded(source, format)
    beyond = (inf, -inf) if made is None else extremes(y for _, y in made.pairs())
    found = histogram(lambda: values_of(source), bins, at_least=beyond)
    title = name_of(source.name) + (f", also as {made.encoding}" if made else f" ({source.encoding.name})")
    figure, ax = new(title, made.reason and f"asked for {format}: {made.reason}" if made else "")
    if not found.n:
        return _without(figure, ax, (f"value{unit_of(tensor)}", "number of values"), title, found.nonfinite)
    bars(ax, found.counts, found.edges, "values")
    more = ""
    if made is not None:
        then = counted(lambda: (y for _, y in made.pairs()), found.edges)
        ax.stairs(
            np.maximum(then, BASE), found.edges, baseline=BASE, color=ORANGE, linewidth=1.1, label=f"as {made.encoding}"
        )
        levels, what = grid(source, made.encoding)
        levels = levels[(levels >= found.edges[0]) & (levels <= found.edges[-1])]
        if levels.size:
            ax.set_ylim(bottom=0.15)  # room below the bars
            ax.plot(levels, np.full(levels.size, 0.3), "|", color=INK, markersize=7, label=what)
            more = f" The {what} has {levels.size} values in this range."
        legend(ax, "upper left")
    labels(ax, f"value{unit_of(tensor)}", "number of values")
    note(ax, f"mean {g(found.mean)}\nstd {g(found.std)}\n{g(found.low)} … {g(found.high)}")
    figure.alt = (
        f"Histogram of {title}: {found.n} values from {g(found.low)} to {g(found.high)}, mean {g(found.mean)}, "
        f"standard deviation {g(found.std)}, {found.nonfinite} not finite.{more}"
    )
    return figure


def scale_distribution(tensor: Any, *, bins: int = BINS) -> Plot:
    """The scales of a quantized tensor: of blocks, or of their parts where these have their own.

    Raises
    ------
    ValueRefusedError
        The tensor has no scales.
    """
    source = source_of(tensor)
    zeros = negative = total = 0
    for piece in scale_pieces(tensor):
        total, zeros, negative = total + piece.size, zeros + int((piece == 0).sum()), negative + int((piece < 0).sum())
    found = histogram(lambda: _logarithms(scale_pieces(tensor)), bins)
    title = f"scales of {name_of(source.name or 'array')} ({source.encoding.name})"
    figure, ax = new(title)
    if found.n:
        bars(ax, found.counts, 10.0**found.edges, log=False)
        ax.set_xscale("log")
        ax.axvline(10**found.mean, color=ORANGE, linewidth=1.2, linestyle="--", label="geometric mean")
        legend(ax, "upper left")
    labels(ax, f"magnitude of the scale{unit_of(tensor)}", "number of scales")
    low, high, mean = (g(10**v) if found.n else "none" for v in (found.low, found.high, found.mean))
    note(ax, f"{total} scales\n{zeros} zero\n{negative} negative")
    figure.alt = (
        f"Histogram of the {title}: {total} scales, {zeros} of them 0, {negative} negative; magnitudes from {low} to "
        f"{high}, geometric mean {mean}."
    )
    return figure


def code_utilisation(tensor: Any) -> Plot:
    """How often each code of a quantized tensor occurs, and which never do.

    Raises
    ------
    ValueRefusedError
        The tensor has no codes, or they are entries of a codebook.
    """
    source = source_of(tensor)
    codes, counts = code_counts(tensor)
    share = 100 * counts / max(int(counts.sum()), 1)
    used = share[share > 0] / 100
    entropy = float(-(used * np.log2(used)).sum()) + 0.0
    unused, bits = int((counts == 0).sum()), log2(len(codes))
    title = f"codes of {name_of(source.name or 'array')} ({source.encoding.name})"
    figure, ax = new(title)
    place = np.arange(len(codes))
    ax.bar(place, share, 0.85 if len(codes) <= 64 else 1.0, color=BLUE)
    ax.axhline(100 / len(codes), color=INK, linewidth=1, linestyle="--", label="even use")
    if unused:
        where = place[counts == 0]
        ax.plot(where, np.zeros(unused), "x", color=ORANGE, markersize=4, label="never used", clip_on=False, zorder=3)
    whole = bool((codes == np.rint(codes)).all()) and not source.encoding.name.startswith("fp")
    at = np.unique(
        np.linspace(0, len(codes) - 1, min(len(codes), 17 if whole and len(codes) <= 64 else 9)).round().astype(int)
    )
    ax.set_xticks(at, [g(codes[i]) for i in at])
    ax.set_ylim(0, float(share.max()) * 1.3 or 1)
    legend(ax, "upper left")
    labels(ax, "code" if whole else "value of the code at scale 1", "share of values (%)")
    note(ax, f"entropy {entropy:.2f} of {bits:.2f} bits\n{unused} of {len(codes)} unused")
    i = int(counts.argmax())
    figure.alt = (
        f"Bars of how often the {title} occur: entropy {entropy:.2f} of {bits:.2f} bits, {unused} of {len(codes)} "
        f"codes unused, most frequent {g(codes[i])} with {share[i]:.2f} %."
    )
    return figure


def _without(figure: Plot, ax: Any, axes: tuple[str, str], what: str, nonfinite: int) -> Plot:
    """A histogram of nothing, which says so."""
    why = "no finite values" if nonfinite else "no values"
    empty(ax, why)
    labels(ax, *axes)
    figure.alt = f"Histogram of {what}: {why}" + (f", {nonfinite} not finite." if nonfinite else ".")
    return figure


def _logarithms(pieces: Iterator[NDArray[np.float64]]) -> Iterator[NDArray[np.float64]]:
    """Decimal logarithms of the magnitudes that are not 0."""
    for piece in pieces:
        size = np.abs(piece[(piece != 0) & np.isfinite(piece)])
        yield np.log10(size)

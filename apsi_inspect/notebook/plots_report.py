"""Plots of a `quant_error` report: error against size, and a map of layers and projections; see `plots`."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ValueRefusedError, visible
from ..listing import plural
from .plots_drawing import BLUE, INK, ORANGE, SIZE, SMALL, Plot, decibels, drawable, empty, g, labels, legend, new
from .plots_tables import Heat, front, heat, totals_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

# metric of quant_error -> (label with its unit, whether more is better)
METRICS = {
    "sqnr_db": ("SQNR (dB)", True), "cosine": ("cosine", True), "mse": ("mean squared error", False),
    "rmse": ("RMSE", False), "rel_l2": ("relative error (L2)", False),
    "max_abs_error": ("greatest absolute error", False), "zeroed": ("values that became 0", False),
    "clipped": ("clipped values", False), "bpw": ("bits per weight", False),
    "weighted_mse": ("weighted mean squared error", False),
}  # fmt: skip

_BITS, _DB = "bits per weight over all tensors, as converted", "SQNR (dB), more is better"


def error_vs_size(errors: Any) -> Plot:
    """Error against size of the formats of a `quant_error` report; no other format beats those on the line in both.

    Both are of all tensors as `convert` stores them: one that cannot have the format counts with the encoding that it
    gets instead.

    Parameters
    ----------
    errors
        The report, or a frame with the columns ``format``, ``bpw`` and ``sqnr_db``, a row a format.
    """
    points = [p for p in totals_of(errors) if isfinite(p[1]) and p[1] > 0 and not np.isnan(p[2])]
    figure, ax = new("error and size of formats")
    if not points:
        empty(ax, "no format has figures")
        labels(ax, _BITS, _DB)
        figure.alt = "Scatter of formats, bits per weight and SQNR: no format has figures."
        return figure
    finite = [db for _, _, db in points if isfinite(db)]
    top = max(finite, default=0.0) + 0.15 * (max(finite, default=1.0) - min(finite, default=0.0) or 1.0)
    shown = [(word, bits, db if isfinite(db) else top) for word, bits, db in points]
    best = front(points)
    line = [shown[i] for i in best]
    others = [p for i, p in enumerate(shown) if i not in best]
    ax.plot([p[1] for p in line], [p[2] for p in line], "D--", color=BLUE, markersize=5, linewidth=1,
            label="best for its size")  # fmt: skip
    if others:
        ax.plot([p[1] for p in others], [p[2] for p in others], "o", color=ORANGE, markersize=5, markerfacecolor="none",
                label="another is better and no larger")  # fmt: skip
    _sizes(ax, [bits for _, bits, _ in points])
    words = [visible(w, 16) + ("" if isfinite(points[i][2]) else " (no error)") for i, (w, _, _) in enumerate(shown)]
    for (_, bits, db), word, (dx, dy, side) in zip(shown, words, _places(ax, shown, words, best), strict=True):
        ax.annotate(drawable(word), (bits, db), (dx, dy), textcoords="offset points", ha=side, fontsize=SMALL,
                    color=INK, parse_math=False, arrowprops=_leader(dx, dy))  # fmt: skip
    legend(ax, "lower right")
    labels(ax, _BITS, _DB)
    said = "; ".join(f"{visible(w, 40)} {bits:.2f} bits, {decibels(db)}" for w, bits, db in points)
    what = f"Scatter of {plural(len(points), 'format')}"
    figure.alt = f"{what}, bits per weight and SQNR over all tensors as converted: {said}."
    return figure


def error_heatmap(errors: Any, format: str, metric: str = "sqnr_db") -> Plot:
    """A metric of one format of a `quant_error` report, by layer and projection.

    Parameters
    ----------
    errors
        The report, or its frame.
    format
        One of its formats.
    metric
        A column: ``"sqnr_db"``, ``"rel_l2"``, ``"max_abs_error"``, …
    """
    if metric not in METRICS:
        raise ValueRefusedError(f"metric {metric!r:.40} is not one of {', '.join(METRICS)}")
    label, more_is_better = METRICS[metric]
    found = heat(errors, format, metric)
    figure, ax = new(f"{label} of {visible(format, 40)}", height=max(SIZE[1], 1.1 + 0.24 * len(found.projections)))
    mesh = _mesh(figure, ax, found, label)
    good = np.isfinite(found.values)
    said = "no finite value"
    if good.any():
        flat = np.where(good, found.values if more_is_better else -found.values, np.inf)
        row, column = np.unravel_index(int(flat.argmin()), flat.shape)
        worst = f"{visible(found.projections[row], 40)} of layer {found.layers[column]}: {g(found.values[row, column])}"
        ax.add_patch(_framed(float(column), float(row)))
        ax.set_xlabel(drawable(f"layer (□ worst: {worst})"), color=INK, fontsize=9, parse_math=False)
        values = found.values[good]
        said = f"from {g(values.min())} to {g(values.max())}, median {g(np.median(values))}, worst {worst}"
    _numbers(ax, mesh, found)
    size = f"{len(found.projections)} projections by {len(found.layers)} layers"
    figure.alt = f"Heat map of {label} of {visible(format, 40)}, {size}: {said}."
    return figure


def _mesh(figure: Plot, ax: Axes, found: Heat, label: str) -> Any:
    """The coloured cells, hatched where there is no value, their axes and their scale."""
    rows, columns = found.values.shape
    values = np.ma.masked_invalid(found.values)
    ax.add_patch(_hatched(columns, rows))
    mesh = ax.pcolormesh(np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5, values, cmap="cividis", zorder=1)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    step = -(-columns // 20)
    ax.set_xticks(range(0, columns, step), [str(n) for n in found.layers[::step]])
    ax.set_yticks(range(rows), [drawable(visible(p, 28)) for p in found.projections], parse_math=False)
    bar = figure.colorbar(mesh, ax=ax, pad=0.02, fraction=0.05)
    bar.set_label(label, color=INK, fontsize=SMALL)
    bar.ax.tick_params(colors=INK, labelsize=SMALL)
    bar.outline.set_visible(False)
    ax.grid(visible=False)
    ax.set_xlabel("layer", color=INK, fontsize=9)
    return mesh


def _hatched(columns: int, rows: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((-0.5, -0.5), columns, rows, hatch="////", fill=False, edgecolor=INK, linewidth=0, zorder=0)


def _framed(column: float, row: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=ORANGE, linewidth=2, zorder=3)


def _numbers(ax: Axes, mesh: Any, found: Heat) -> None:
    """The values in the cells, where there is room."""
    rows, columns = found.values.shape
    if columns > 12 or rows * columns > 200:
        return
    for row in range(rows):
        for column in range(columns):
            value = found.values[row, column]
            if np.isinf(value):  # no error at all
                ax.text(column, row, "∞" if value > 0 else "−∞", ha="center", va="center", fontsize=9, color=INK)
            if isfinite(value):
                red, green, blue, _ = mesh.cmap(mesh.norm(value))
                dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                text = f"{value:.1f}" if 1 <= abs(value) < 1000 else f"{value:.2g}"
                ax.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")


def _sizes(ax: Axes, bits: Sequence[float]) -> None:
    """Bits per weight on a logarithmic axis with plain numbers: formats crowd at the low end."""
    low, high = min(bits, default=1.0), max(bits, default=1.0)
    ax.set_xscale("log")
    ax.set_xlim(low / 1.5, high * 1.4)
    ax.margins(y=0.18)
    marks = [v for v in (1, 1.5, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64) if low / 1.5 <= v <= high * 1.4]
    ax.set_xticks(marks, [f"{v:g}" for v in marks])
    ax.minorticks_off()


def _places(
    ax: Axes, points: Sequence[tuple[str, float, float]], words: Sequence[str], line: Sequence[int]
) -> list[tuple[int, int, str]]:
    """Where each label stands beside its point, in printer's points: the nearest place that is free.

    Free of the points, of the labels before it, and of the line through some of the points.
    """
    (x0, x1), (y0, y1) = np.log(ax.get_xlim()), ax.get_ylim()
    at = [((np.log(x) - x0) / (x1 - x0) * 370, (y - y0) / (y1 - y0) * 150) for _, x, y in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at]
    for a, b in pairwise(line):
        for t in np.linspace(0, 1, 25):
            x, y = (at[a][k] + t * (at[b][k] - at[a][k]) for k in (0, 1))
            taken.append((x - 1, y - 1, x + 1, y + 1))
    out = []
    for (x, y), word in zip(at, words, strict=True):
        boxes = [_box(x, y, 4.8 * len(word), *c) for c in _AROUND]
        cost = [sum(_overlap(b, t) for t in taken) + _outside(b) + 0.01 * i for i, b in enumerate(boxes)]
        best = cost.index(min(cost))
        taken.append(boxes[best])
        out.append(_AROUND[best])
    return out


_AROUND = [
    (round(r * dx), round(r * dy - down), side)
    for r in (7, 16, 27, 40)
    for dx, dy, down, side in (
        (1, 0, 3, "left"), (-1, 0, 3, "right"), (0, 1, 0, "center"), (0, -1, 7, "center"), (0.7, 0.7, 0, "left"),
        (-0.7, 0.7, 0, "right"), (0.7, -0.7, 7, "left"), (-0.7, -0.7, 7, "right"),
    )
]  # fmt: skip


def _leader(dx: int, dy: int) -> dict[str, Any] | None:
    """A thin line to a label that stands far from its point."""
    return {"arrowstyle": "-", "color": INK, "linewidth": 0.5, "shrinkB": 3} if abs(dx) + abs(dy) > 20 else None


def _box(x: float, y: float, wide: float, dx: int, dy: int, side: str) -> tuple[float, float, float, float]:
    left = x + dx - {"left": 0.0, "center": wide / 2, "right": wide}[side]
    return left, y + dy, left + wide, y + dy + 8


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(box: tuple[float, ...]) -> float:
    return 100 * (max(0.0, -box[0]) + max(0.0, box[2] - 375) + max(0.0, -box[1]) + max(0.0, box[3] - 160))

"""Quantization errors: what `print(ai.quant_error(m))`, a notebook and `apsi model quantize-error` show.

The totals of each format come first, then the tensors that suffer most, a column for each format; both are bounded, and
say what they leave out. `tests/test_error.py` enforces it.
"""

from __future__ import annotations

from math import inf, isnan
from typing import TYPE_CHECKING, Any

from ..listing import human_count, human_size
from ..parts import Badge, Column, Stack, Strip, Table, Text, cell_width, to_text
from .render_tensors import code, grouped, more_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..ops.error_table import ErrorRow, ErrorTable
    from ..parts import Inline, Part

WORST = 12  # tensors
MANY_FORMATS = 10  # columns of formats
WIDTH = 140  # characters of a line that a notebook shows without scrolling
_TEXT = ("format", "name", "worst", "note")
# In this order
_DROPPED = ("worst", "cosine", "clipped", "zeroed", "rmse", "covered", "note", "max_abs_error", "mse", "nbytes")


def _number(value: Any) -> str:
    return "–" if isinstance(value, float) and isnan(value) else f"{value:.4g}"


def _decibel(value: float) -> str:
    return "–" if isnan(value) else "exact" if value == inf else f"{value:.2f}"


def _share(value: float) -> str:
    return "–" if isnan(value) else "0" if not value else f"{100 * value:.2g} %"


_SHOWN: dict[str, tuple[str, Callable[[Any], Inline]]] = {
    "name": ("name", code),
    "format": ("format", lambda v: Text(v, "strong")),
    "covered": ("in it", lambda v: "–" if isnan(v) else f"{int(1000 * v) / 10:g} %"),  # 100 is all
    "bpw": ("bpw", lambda v: "–" if isnan(v) else f"{v:.2f}"),
    "nbytes": ("bytes", human_size),
    "sqnr_db": ("SQNR dB", _decibel),
    "rel_l2": ("rel. L2", _number),
    "mse": ("MSE", _number),
    "rmse": ("RMSE", _number),
    "weighted_mse": ("weighted MSE", _number),
    "max_abs_error": ("max error", _number),
    "worst": ("of tensor", code),
    "cosine": ("cosine", lambda v: "–" if isnan(v) else f"{v:.6f}"),
    "zeroed": ("zeroed", _share),
    "clipped": ("clipped", _share),
    "note": ("note", str),
}


def error_parts(
    table: ErrorTable, sort: str | None = None, width: int | None = None, first: Sequence[str] = ("name", "format")
) -> Stack:
    """Totals, then the worst tensors; or with `sort` the rows by a column of the frame (``"-mse"``: descending)."""
    tensors = len({r.name for r in table.rows})
    chips: list[tuple[str, Inline]] = [("tensors", str(tensors)), ("formats", str(len(table.formats)))]
    parts: list[Part] = [Strip(code(table.title), "quantization error", chips)]
    if table.sampled is not None:
        parts.append(Badge("note", f"measured on a sample of about {grouped(table.sampled)} elements of each tensor"))
    parts.append(_fitting(table.total_records(), [c for c in _SHOWN if c != "name"], width, ""))
    parts.append(_worst(table) if sort is None else _sorted(table, sort, width, first))
    return Stack(parts)


def _fitting(records: list[dict[str, Any]], columns: Sequence[str], width: int | None, more: str) -> Table:
    """Those of the columns that say something, and fit."""
    shown = [c for c in columns if _says(c, records)]
    for drop in (None, *_DROPPED):
        shown = [c for c in shown if c != drop]
        heads = [Column(_SHOWN[c][0], "left" if c in _TEXT else "right", c in ("name", "note")) for c in shown]
        made = Table(heads, [[_SHOWN[c][1](r[c]) for c in shown] for r in records], more=more)
        if width is None or all(cell_width(line) <= width for line in to_text(made).splitlines()):
            break
    return made


def _says(column: str, records: list[dict[str, Any]]) -> bool:
    if column in ("note", "worst"):
        return any(r[column] for r in records)
    if column == "covered":
        return any(r[column] < 1 for r in records)
    return column != "weighted_mse" or any(not isnan(r[column]) for r in records)


def _worst(table: ErrorTable) -> Table:
    """The tensors with the least signal to noise in any format; dB for each format."""
    formats = table.formats[:MANY_FORMATS]
    by_name: dict[str, dict[str, ErrorRow]] = {}
    for r in table.rows:
        by_name.setdefault(r.name, {})[r.format] = r

    def least(rows: dict[str, ErrorRow]) -> float:
        return min((r.sums.sqnr_db for r in rows.values() if r.good and r.sums is not None), default=inf)

    order = sorted((n for n, rows in by_name.items() if least(rows) < inf), key=lambda n: least(by_name[n]))
    rows: list[list[Inline]] = []
    for name in order[:WORST]:
        found = by_name[name]
        cells = [found[f].sums for f in formats]
        numel = next(iter(found.values())).numel
        rows.append(
            [code(name), human_count(numel), *("–" if s is None or s.nonfinite else _decibel(s.sqnr_db) for s in cells)]
        )
    heads = [Column("worst tensors", elastic=True), Column("elements", "right"), *(Column(f, "right") for f in formats)]
    left = more_text(len(order), WORST, "tensors", ": .frame has them all")
    return Table(heads, rows, caption="SQNR in dB", more=left)


def _sorted(table: ErrorTable, sort: str, width: int | None, first: Sequence[str]) -> Table:
    key, down = sort.lstrip("-"), sort.startswith("-")
    records = table.records()
    number = [r for r in records if not (isinstance(r[key], float) and isnan(r[key]))]
    rest = [r for r in records if isinstance(r[key], float) and isnan(r[key])]
    order = [*sorted(number, key=lambda r: r[key], reverse=down), *rest]
    columns = [*first, *(c for c in _SHOWN if c not in (*first, "worst", "covered"))]
    return _fitting(order, columns, width, "")

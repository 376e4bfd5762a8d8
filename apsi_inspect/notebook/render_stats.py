"""Statistics of tensors as a table: what `print(ai.stats(m))`, a notebook and `apsi model stats` show.

The columns that say most come first and are kept where there is little room. `tests/test_survey.py` enforces it.
"""

from __future__ import annotations

from ..parts import Column, Table, cell_width, to_text
from .render_tensors import code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

CORE = ("min", "max", "mean", "std", "nan", "inf", "zeros")
_TEXT = ("name", "encoding")


def statistics_table(frame: pd.DataFrame, columns: Sequence[str] = (*_TEXT, *CORE), more: str = "") -> Table:
    """A row per tensor; floats in four significant digits."""
    rows = [
        [code(v) if isinstance(v, str) else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row]
        for row in frame[list(columns)].itertuples(index=False, name=None)
    ]
    heads = [Column(c, "left" if c in _TEXT else "right", c == "name") for c in columns]
    return Table(heads, rows, more=more)


def fitting_table(frame: pd.DataFrame, columns: Sequence[str], width: int | None) -> Table:
    """All `columns` where they fit without cutting a name, else `CORE`, else without counts that are all 0, and so on.

    Parameters
    ----------
    width
        Columns of the terminal; None: a pipe, which gets everything.
    """
    table = statistics_table(frame, columns)
    if width is None or _fits(table, None, width):
        return table
    dull = {c for c in ("nan", "inf", "zeros") if not frame[c].any()}
    core = [*_TEXT, *CORE]
    for leave in (set(), dull, dull | {"zeros"}, dull | {"zeros", "encoding"}):
        zero = f"; {', '.join(c for c in CORE if c in leave & dull)}: all 0" if leave & dull else ""
        shown = [c for c in core if c not in leave]
        table = statistics_table(frame, shown, f"{len(columns) - len(shown)} more columns in a pipe{zero}")
        if _fits(table, width, width):
            break
    return table


def _fits(table: Table, cut_to: int | None, width: int) -> bool:
    return all(cell_width(line) <= width for line in to_text(table._replace(more=""), cut_to).splitlines())

"""What the plots of a `quant_error` report draw: its sums per format, and its metrics by layer and projection.

No matplotlib here. `tests/test_plots.py` works both out from handmade tables.
"""

from __future__ import annotations

import re
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ValueRefusedError
from ..listing import natural_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from numpy.typing import NDArray

_LAYER = re.compile(r"(?<![0-9A-Za-z])[0-9]{1,9}(?![0-9A-Za-z])")


class Heat(NamedTuple):
    """A metric by projection (rows) and layer (columns); NaN where there is no such tensor."""

    values: NDArray[np.float64]
    layers: list[int]
    projections: list[str]


def table_of(errors: Any, attribute: str, columns: Sequence[str]) -> pd.DataFrame:
    """A frame of a `quant_error` report by the name of its attribute, or the frame that was given itself.

    Raises
    ------
    ValueRefusedError
        It lacks one of the columns.
    """
    frame = getattr(errors, attribute, errors)
    missing = [c for c in columns if c not in getattr(frame, "columns", ())]
    if missing:
        raise ValueRefusedError(f"there is no column {missing[0]!r}; the report of quant_error was expected")
    table: pd.DataFrame = frame
    return table


def totals_of(errors: Any) -> list[tuple[str, float, float]]:
    """(format, bits per weight, dB) over all tensors of a `quant_error` report, by ascending size."""
    frame = table_of(errors, "totals", ("format", "bpw", "sqnr_db"))
    rows = zip(frame["format"], frame["bpw"], frame["sqnr_db"], strict=True)
    return sorted(((str(f), float(b), float(d)) for f, b, d in rows), key=lambda r: (r[1], -r[2]))


def front(points: Sequence[tuple[str, float, float]]) -> list[int]:
    """Which points no other beats in both size and error, by ascending size."""
    best, out = -inf, []
    for i, (_, _, db) in enumerate(points):
        if db > best:
            best = db
            out.append(i)
    return out


def heat(errors: Any, format: str, metric: str) -> Heat:
    """A metric of one format by layer and projection; the number in a name is its layer, the rest its projection.

    Tensors without a number (embeddings, output) stand in no layer and are left out, as are those without a value
    (norms and biases, which keep their encoding).

    Raises
    ------
    ValueRefusedError
        No tensor of the report has that format and a layer.
    """
    frame = table_of(errors, "frame", ("name", "format", metric))
    rows = frame[frame["format"] == format]
    if not len(rows):
        known = ", ".join(dict.fromkeys(map(str, frame["format"])))
        raise ValueRefusedError(f"format {format!r:.40} is not in the report; it has {known}")
    cells: dict[tuple[str, int], float] = {}
    for name, value in zip(rows["name"], rows[metric], strict=True):
        found = _LAYER.search(name)
        if found is not None and value == value:
            cells[name[: found.start()] + "N" + name[found.end() :], int(found[0])] = float(value)
    if not cells:
        raise ValueRefusedError(f"no tensor that stands in a layer has a {metric} in {format!r:.40}")
    projections = _short(sorted({p for p, _ in cells}, key=natural_key))
    layers = sorted({n for _, n in cells})
    values = np.full((len(projections), len(layers)), nan)
    where = {n: i for i, n in enumerate(layers)}
    names = {p: i for i, p in enumerate(projections)}
    for (projection, layer), value in cells.items():
        values[names[projection], where[layer]] = value
    return Heat(values, layers, list(projections.values()))


def _short(projections: Sequence[str]) -> dict[str, str]:
    """Each projection without the components that all have in common at both ends (``blk.N`` and ``weight``)."""
    parts = [p.split(".") for p in projections]
    room = min(len(p) for p in parts) - 1
    head = next((i for i in range(room) if len({p[i] for p in parts}) > 1), room)
    last = next((i for i in range(room - head) if len({p[-1 - i] for p in parts}) > 1), room - head)
    if len(projections) < 2:
        head = last = 0
    return {p: ".".join(q[head : len(q) - last]) for p, q in zip(projections, parts, strict=True)}

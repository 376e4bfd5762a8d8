"""`ErrorTable`: what `quant_error` found, a row for each tensor and format, and the totals of each format.

Contract: a row without sums has NaN and says why in `note`. Totals are of the model as `convert` writes it: size and
error take in the same tensors, each as it is stored, so a tensor that cannot have the format counts with the encoding
it gets instead. Each tensor counts by its number of elements, also where only a sample of it was measured.
`tests/test_error.py` enforces this.
"""

from __future__ import annotations

from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from ..display import ErrorDisplay
from ..listing import plural
from .error_sums import ErrorSums

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

MEASURES = ("mse", "rmse", "rel_l2", "max_abs_error", "sqnr_db", "cosine")
COLUMNS = (
    "name", "format", "numel", "mse", "rmse", "rel_l2", "max_abs_error", "max_at", "sqnr_db", "cosine", "zeroed",
    "clipped", "bpw", "nbytes", "weighted_mse", "note",
)  # fmt: skip
TOTALS = (
    "format", "tensors", "covered", "numel", "mse", "rmse", "rel_l2", "max_abs_error", "worst", "sqnr_db", "cosine",
    "zeroed", "clipped", "bpw", "nbytes", "weighted_mse", "note",
)  # fmt: skip


class ErrorRow(NamedTuple):
    """A tensor in a format.

    Attributes
    ----------
    format
        The word that was asked for, as `convert` takes it.
    sums
        None where there is no number.
    nbytes
        What `convert` would store, scales included.
    instead
        Where the tensor cannot have the format: the sums of the encoding that `convert` gives it; None for integers.
    """

    name: str
    format: str
    numel: int
    sums: ErrorSums | None
    nbytes: int
    note: str
    instead: ErrorSums | None = None

    @property
    def good(self) -> bool:
        """Whether there are numbers."""
        return self.sums is not None and not self.sums.nonfinite

    @property
    def stored(self) -> ErrorSums | None:
        """The sums of the whole tensor as `convert` stores it, extrapolated from a sample; None for integers."""
        found = self.instead if self.sums is None else self.sums
        return found and found.times(self.numel / ((found.n + found.nonfinite) or 1))


def _bpw(nbytes: int, numel: int) -> float:
    return 8 * nbytes / numel if numel else nan


def _figures(sums: ErrorSums) -> dict[str, Any]:
    """The columns that follow from sums."""
    return {
        **{m: getattr(sums, m) for m in MEASURES},
        "zeroed": sums.zeroed_share,
        "clipped": sums.clipped_share,
        "weighted_mse": sums.weighted_mse,
    }


_NOTHING = ErrorSums()


class ErrorTable(ErrorDisplay):
    """Quantization errors of tensors in formats.

    Attributes
    ----------
    rows
        `ErrorRow`s, tensor by tensor, with the sums (`ErrorSums`) that everything else follows from.
    title
        What was measured.
    formats
        The formats, in the order asked for.
    sampled
        None where every element was measured, else about how many of each tensor were.
    """

    def __init__(self, rows: Sequence[ErrorRow], title: str, formats: Sequence[str], sampled: int | None) -> None:
        self.rows, self.title = tuple(rows), title
        self.formats, self.sampled = tuple(formats), sampled

    def __repr__(self) -> str:
        tensors = len({r.name for r in self.rows})
        return f"<ErrorTable {self.title!r}: {tensors} tensors in {', '.join(self.formats)}>"

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain dicts, with the columns of `frame`."""
        out = []
        for r in self.rows:
            sums = r.sums if r.sums is not None and r.good else _NOTHING
            found = {
                "name": r.name,
                "format": r.format,
                "numel": r.numel,
                **_figures(sums),
                "max_at": sums.max_at if sums.n else -1,
                "bpw": _bpw(r.nbytes, r.numel),
                "nbytes": r.nbytes,
                "note": r.note,
            }
            out.append({c: found[c] for c in COLUMNS})
        return out

    def total_records(self) -> list[dict[str, Any]]:
        """The totals as plain dicts, with the columns of `totals`."""
        return [self._total(fmt, [r for r in self.rows if r.format == fmt]) for fmt in self.formats]

    @staticmethod
    def _total(fmt: str, rows: list[ErrorRow]) -> dict[str, Any]:
        total, worst, bad = ErrorSums(), "", 0
        for r in rows:
            sums = r.stored
            if sums is None or sums.nonfinite:
                bad += sums is not None
                continue
            if sums.n and sums.max_abs > total.max_abs:
                worst = r.name
            total += sums
        nbytes, elements = sum(r.nbytes for r in rows), sum(r.numel for r in rows)
        taken = [r for r in rows if r.sums is not None]
        notes = [f"{plural(len(rows) - len(taken), 'tensor')} not in it, counted as stored"] * (len(rows) > len(taken))
        notes += [f"{plural(bad, 'tensor')} left out of the error: not finite, or too large for {fmt}"] * bool(bad)
        found = {
            "format": fmt,
            "tensors": sum(r.good for r in taken),
            "covered": sum(r.numel for r in taken) / elements if elements else nan,
            "numel": total.n,
            **_figures(total),
            "worst": worst,
            "bpw": _bpw(nbytes, elements),
            "nbytes": nbytes,
            "note": "; ".join(notes),
        }
        return {c: found[c] for c in TOTALS}

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each tensor and format (a new pandas DataFrame).

        ======================  =====================================================================================
        ``name, format``        tensor, and the format as `convert` takes it
        ``numel``               elements of the tensor
        ``mse, rmse``           mean squared error and its root, in the unit of the values (squared)
        ``rel_l2``              norm of the error over the norm of the values
        ``max_abs_error``       the greatest error, and
        ``max_at``              the flat index of its first place; -1 where there is none
        ``sqnr_db``             signal to quantization noise, dB; infinite where there is no error
        ``cosine``              of the angle between the values before and after
        ``zeroed``              fraction of the elements that become 0 and were not
        ``clipped``             fraction that lies beyond its block's grid by more than half a step
        ``bpw, nbytes``         what `convert` would store, scales included
        ``weighted_mse``        with `weights`: sum of w (x - y)² over sum of w; else NaN
        ``note``                why there is no number, or what `convert` would do instead
        ======================  =====================================================================================
        """
        from ..table import frame_of

        return frame_of([tuple(r.values()) for r in self.records()], COLUMNS)

    @property
    def totals(self) -> pd.DataFrame:
        """A row for each format: size and error of all tensors, each as `convert` would store it (a new DataFrame).

        As `frame`, and:

        ============  ===============================================================================================
        ``tensors``   how many take the format and have figures
        ``covered``   the share of all elements whose tensors take the format; the others count with the error and the
                      size of the encoding that they get instead
        ``numel``     elements that the error is over: all but integers and tensors that `note` leaves out
        ``worst``     the tensor with the greatest error; "" where there is no error
        ============  ===============================================================================================
        """
        from ..table import frame_of

        return frame_of([tuple(r.values()) for r in self.total_records()], TOTALS)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: plain values, None for what is not there, ``"inf"`` where there is no error."""
        return {
            "title": self.title,
            "sampled": self.sampled,
            "formats": list(self.formats),
            "totals": [{c: _plain(v) for c, v in r.items()} for r in self.total_records()],
            "tensors": [
                {c: None if c == "max_at" and v < 0 else _plain(v) for c, v in r.items()} for r in self.records()
            ],
        }


def _plain(value: Any) -> Any:
    if not isinstance(value, float) or isfinite(value):
        return value
    return None if value != value else "inf" if value > 0 else "-inf"

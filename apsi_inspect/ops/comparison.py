"""`Comparison`: how two models differ, frozen; the same facts as text, HTML, JSON and a pandas frame.

Verdicts of a tensor, from good to bad: ``identical`` (the same values; `same_bytes` says whether they are also stored
the same), ``quantization noise`` (what rounding to the coarser encoding explains: `ops.roundings`), ``changed``,
``shape differs``, ``missing``. Of the whole: ``identical``, ``rounded`` (nothing but quantization noise) and
``different``. `tests/test_compare.py` enforces them.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..display import Displayable
from ..errors import visible
from ..listing import plural
from .error_sums import ErrorSums

if TYPE_CHECKING:
    import pandas as pd

    from ..model import Finding

SCHEMA_VERSION = 1
VERDICTS = ("identical", "quantization noise", "changed", "shape differs", "missing")
METRICS = ("mse", "rmse", "rel_l2", "max_abs_error", "sqnr_db", "cosine")
COLUMNS = (
    "a", "b", "how", "shape_a", "shape_b", "encoding_a", "encoding_b", "verdict", "numel", *METRICS, "max_at", "differ",
    "same_bytes", "rounded", "ratio", "note",
)  # fmt: skip


class Compared(NamedTuple):
    """One tensor in both models.

    Attributes
    ----------
    a, b
        Its names; None: missing there.
    how
        How the names were matched: ``"name"``, ``"map"``, ``"prefix"``, ``"tied"``; "" where one is missing.
    verdict
        One of `VERDICTS`.
    note
        What else there is to say, or "".
    sums
        Of the error of b against a; None where values were not compared.
    differ
        Elements that are not equal.
    at
        The values of a and b where they are furthest apart (`sums.max_at`).
    same_bytes
        Stored in the same bytes.
    rounded
        ``"b"``: B is exactly A rounded to its encoding, as our encoder does it; ``"a"``: the other way; "": neither.
    ratio
        Root mean square error, as a multiple of that of our own rounding to the coarser encoding; None: there is none.
    """

    a: str | None
    b: str | None
    how: str
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    encoding_a: str
    encoding_b: str
    verdict: str
    note: str = ""
    sums: ErrorSums | None = None
    differ: int = 0
    at: tuple[float, float] = (0.0, 0.0)
    same_bytes: bool = False
    rounded: str = ""
    ratio: float | None = None

    @property
    def name(self) -> str:
        """Its name in the first model that has it."""
        return self.a if self.a is not None else self.b or ""

    @property
    def numel(self) -> int:
        """Elements."""
        shape = self.shape_a if self.shape_a is not None else self.shape_b
        return prod(shape or ())

    @property
    def max_at(self) -> tuple[int, ...] | None:
        """Index of the greatest error in a's shape (in the GGUF's order of rows where those are permuted)."""
        if self.sums is None or not self.sums.max_abs or self.shape_a is None:
            return None
        flat, out = self.sums.max_at, []
        for n in reversed(self.shape_a):
            flat, i = divmod(flat, n)
            out.append(i)
        return tuple(reversed(out)) if not flat else (self.sums.max_at,)  # complex values are pairs

    def metric(self, name: str) -> float | None:
        """A measure of `ErrorSums`; None where values were not compared."""
        return None if self.sums is None else float(getattr(self.sums, name))


class KeyDifference(NamedTuple):
    """A metadata key whose values differ, as text (long ones abbreviated); None: it is not there."""

    key: str
    a: str | None
    b: str | None


class Side(NamedTuple):
    """One of the two models: path, format, architecture, number of tensors, parameters, bytes of its files."""

    path: str
    format: str
    architecture: str | None
    tensors: int
    parameters: int
    nbytes: int


class Comparison(Displayable):
    """The outcome of `compare`.

    Attributes
    ----------
    a, b
        The models: the original and the other.
    tensors
        A `Compared` for each tensor of either, in natural order of the names.
    metadata
        Keys that differ; they do not count for `same`.
    units
        Units that differ, as ``KeyDifference``; a tensor with two different units is `changed`.
    notes
        What the alignment did.
    """

    __slots__ = ("a", "b", "metadata", "notes", "tensors", "units")

    def __init__(
        self,
        a: Side,
        b: Side,
        tensors: tuple[Compared, ...],
        metadata: tuple[KeyDifference, ...] = (),
        units: tuple[KeyDifference, ...] = (),
        notes: tuple[Finding, ...] = (),
    ) -> None:
        for name, value in (
            ("a", a), ("b", b), ("tensors", tensors), ("metadata", metadata), ("units", units), ("notes", notes),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    a: Side
    b: Side
    tensors: tuple[Compared, ...]
    metadata: tuple[KeyDifference, ...]
    units: tuple[KeyDifference, ...]
    notes: tuple[Finding, ...]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Comparison does not change")

    @property
    def counts(self) -> dict[str, int]:
        """Tensors of each verdict, all of them named."""
        found = Counter(t.verdict for t in self.tensors)
        return {v: found[v] for v in VERDICTS}

    @property
    def verdict(self) -> str:
        """``"identical"``, ``"rounded"`` or ``"different"``."""
        counts = self.counts
        if any(counts[v] for v in VERDICTS[2:]):
            return "different"
        return "rounded" if counts["quantization noise"] else "identical"

    @property
    def same(self) -> bool:
        """Nothing is changed, missing or of another shape: identical, or nothing but rounding."""
        return self.verdict != "different"

    @property
    def reason(self) -> str:
        """One sentence on the whole."""
        counts, n = self.counts, len(self.tensors)
        if not n:
            return "neither model has a tensor"
        if self.verdict == "identical":
            stored = all(t.same_bytes for t in self.tensors)
            head = "the only tensor holds" if n == 1 else f"all {n} tensors hold"
            return f"{head} the same values" + (", stored in the same bytes" if stored else "")
        if self.verdict == "rounded":
            made = sorted({t.encoding_b for t in self.of("quantization noise")})
            same, noise = counts["identical"], counts["quantization noise"]
            rest = f"; the other {f'{same} are' if same > 1 else 'one is'} identical" if same else ""
            word = f"{made[0]} and others" if len(made) > 2 else " and ".join(made)
            head = f"{noise} of {plural(n, 'tensor')} {'differs' if noise == 1 else 'differ'}"
            return f"{head} by rounding alone (in B: {word}){rest}"
        words = [f"{counts[v]} {v}" for v in VERDICTS[2:4] if counts[v]]
        gone = self.of("missing")
        for letter, k in (("A", sum(t.a is None for t in gone)), ("B", sum(t.b is None for t in gone))):
            words += [f"{k} missing in {letter}"] if k else []
        return f"of {plural(n, 'tensor')} " + ", ".join(words)

    def of(self, verdict: str) -> list[Compared]:
        """The tensors of one verdict."""
        return [t for t in self.tensors if t.verdict == verdict]

    def without_metadata(self) -> Comparison:
        """The same without what differs in the metadata."""
        return Comparison(self.a, self.b, self.tensors, (), self.units, self.notes)

    @property
    def frame(self) -> pd.DataFrame:
        """A row per tensor; NaN (or None) where values were not compared.

        Columns: ``a, b`` (names), ``how`` (the names were matched), ``shape_a, shape_b, encoding_a, encoding_b,
        verdict, numel, mse, rmse, rel_l2, max_abs_error, sqnr_db, cosine, max_at`` (index of the greatest error),
        ``differ`` (elements that are not equal), ``same_bytes``, ``rounded`` and ``ratio`` (see `Compared`), ``note``.
        """
        from ..table import frame_of

        rows = [[_column(t, c) for c in COLUMNS] for t in self.tensors]
        return frame_of(rows, COLUMNS).astype(dict.fromkeys((*METRICS, "ratio"), "float64"))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values, with a `schema_version`; an infinite or undefined number is None."""
        return {
            "schema_version": SCHEMA_VERSION,
            "a": self.a._asdict(),
            "b": self.b._asdict(),
            "verdict": self.verdict,
            "reason": self.reason,
            "same": self.same,
            "counts": self.counts,
            "tensors": [{c: _json(_column(t, c)) for c in COLUMNS} for t in self.tensors],
            "metadata": [d._asdict() for d in self.metadata],
            "units": [d._asdict() for d in self.units],
            "notes": [f._asdict() for f in self.notes],
        }

    def __repr__(self) -> str:
        return f"<Comparison {visible(self.a.path)} with {visible(self.b.path)}: {self.verdict}, {self.reason}>"

    def _parts(self) -> Any:
        from .comparison_parts import comparison_parts

        return comparison_parts(self)


def _column(t: Compared, name: str) -> Any:
    return t.metric(name) if name in METRICS else getattr(t, name)


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None  # also NaN, which is below nothing
    return list(value) if isinstance(value, tuple) else value

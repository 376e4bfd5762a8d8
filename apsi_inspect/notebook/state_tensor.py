"""One chosen tensor: what the header says, its statistics, its histogram, and a slice of its values.

No widget here. A slice is read by a small grammar (integers, slices, ``...``), never evaluated; at most `CELLS` rows
and columns are shown, and only their part of the tensor is decoded. `tests/test_state_views.py` enforces the contract.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..ops.read import BRIEF, dtype_of, stream, tensor_stats
from ..ops.stats import compute_stats
from ..parts import Badge, Bars, Column, Stack, Strip, Table, Text
from .render_tensors import grouped, tensor_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ..model import ModelFile, Tensor
    from ..ops.stats import TensorStats
    from ..parts import Inline, Part
    from .state_job import Progress

CELLS = 16  # rows and columns of values shown
SIDE = 6  # of the slice that is shown first
BINS = 16
_INT = r"([+-]?\d{1,18})"
_INDEX = re.compile(rf"\s*(?:(\.\.\.)|{_INT}|{_INT}?\s*:\s*{_INT}?(?:\s*:\s*{_INT}?)?)\s*")


class TensorState:
    """The tensor that is looked at.

    Attributes
    ----------
    tensor
        None: none is chosen.
    slice_text
        What is shown of it, as between the brackets of ``tensor[…]``.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.tensor: Tensor | None = None
        self.slice_text = ""

    def choose(self, name: str | None) -> None:
        """Look at another tensor, from its first values."""
        self.tensor = None if name is None else self.model[name]
        self.slice_text = "" if self.tensor is None else first_slice(self.tensor.shape)

    @property
    def measurable(self) -> bool:
        """Whether statistics are defined for it."""
        return self.tensor is not None and self.tensor.info.encoding.kind != "complex" and self.tensor.numel > 0

    @property
    def cheap(self) -> bool:
        """Whether its statistics are quick enough to be shown unasked, or known already."""
        t = self.tensor
        return t is not None and self.measurable and (t.kept_stats is not None or t.numel <= BRIEF)

    def stats(self, progress: Progress | None = None) -> TensorStats:
        """Its statistics; kept with it. `progress` is called with the elements that were read, and their number."""
        assert self.tensor is not None
        tensor = self.tensor
        if tensor.kept_stats is None and progress is not None:
            pieces = _counted(stream(tensor, widen=True), tensor.numel, progress)
            tensor.kept_stats = compute_stats(pieces, dtype=dtype_of(tensor))
        return tensor_stats(tensor)

    def header_parts(self) -> Part:
        """What the header says."""
        return Text("Choose a tensor in the list.", "muted") if self.tensor is None else tensor_parts(self.tensor)

    def stats_parts(self) -> Part:
        """Statistics and histogram; reads the values."""
        s = self.stats()
        unit = "" if self.tensor is None or self.tensor.unit is None else f" ({self.tensor.unit})"
        q01, median, q99 = s.quantiles([0.01, 0.5, 0.99])
        chips: list[tuple[str, Inline]] = [
            *((k, number(v)) for k, v in (("min", s.min), ("max", s.max), ("mean", s.mean), ("std", s.std))),
            *((k, number(v)) for k, v in (("1 %", q01), ("median", median), ("99 %", q99))),
            ("zeros", f"{100 * s.sparsity:.3g} %"),
            *((k, grouped(n)) for k, n in (("NaN", s.nan), ("+Inf", s.posinf), ("−Inf", s.neginf)) if n),
            *([("subnormal", grouped(s.subnormals))] if s.subnormals else []),
        ]
        parts: list[Part] = [Strip(f"Values{unit}", "", chips)]
        if s.nan or s.posinf or s.neginf:
            parts.append(Badge("warning", "values that are not finite are left out of the histogram"))
        if s.finite:
            parts.append(histogram_bars(s))
        return Stack(parts)

    def set_slice(self, text: str) -> None:
        """Show another part.

        Raises
        ------
        ValueRefusedError
            It is no list of integers and slices, or more of them than the tensor has axes.
        """
        key = parse_slice(text)
        ndim = 0 if self.tensor is None else self.tensor.ndim
        if len([k for k in key if k is not Ellipsis]) > ndim:
            raise ValueRefusedError(f"{quote(text)} has more than the {ndim} axes of the tensor")
        self.slice_text = text.strip()

    def slice_parts(self) -> Part:
        """The values of the slice, at most `CELLS` rows and columns of them.

        Raises
        ------
        IndexError
            An index is out of bounds.
        ModelFileError
            The file is closed, or has changed.
        """
        import numpy as np

        assert self.tensor is not None
        key = parse_slice(self.slice_text)
        values = np.asarray(self.tensor[_bounded(key, self.tensor.shape)])
        whole = tuple(_lengths(key, self.tensor.shape))
        grid = np.atleast_2d(values)
        leading = grid.ndim - 2
        shown = grid[(0,) * leading][:CELLS, :CELLS]
        body: list[list[Inline]] = [[number(v) for v in row] for row in shown.tolist()]
        columns = [Column(str(i), "right") for i in range(shown.shape[1])]
        hidden = int(np.prod(whole, dtype=np.int64)) - shown.size if whole else 0
        more = f"{grouped(hidden)} more values of this slice not shown" if hidden > 0 else ""
        dims = " × ".join(map(str, whole)) or "one value"
        caption = f"[{self.slice_text}] → {dims}" + (f"; the first plane of {leading} more axes" if leading else "")
        if not shown.size:
            return Text(f"{caption}: no values", "muted")
        return Table(columns, [[*row] for row in body], caption, more)


def _counted(pieces: Iterable[NDArray[Any]], total: int, progress: Progress) -> Iterator[NDArray[Any]]:
    done = 0
    for piece in pieces:
        yield piece
        done += piece.size
        progress(done, total)


def number(value: Any) -> str:
    """A value in four significant digits; integers and others as they are."""
    if isinstance(value, bool | int):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float | complex) else str(value)


def histogram_bars(s: TensorStats, bins: int = BINS) -> Bars:
    """The finite values in equal bins, a bar each; the longest bar is the fullest bin."""
    counts, edges = s.histogram(bins)
    top = max(float(counts.max()), 1.0)
    rows: list[tuple[Inline, float, list[Inline]]] = []
    for i, n in enumerate(counts.tolist()):
        share = max(n / top, 0.001) if n else 0.0  # a few are seen, none are not
        rows.append((f"{edges[i]:.3g} … {edges[i + 1]:.3g}", share, [grouped(round(n))]))
    if s.min == s.max:
        rows = [(number(s.min), 1.0, [grouped(s.finite)])]
    return Bars(rows, "Histogram")


def first_slice(shape: tuple[int, ...]) -> str:
    """The first values: ``0, 0:6, 0:6``."""
    ends = [f"0:{min(SIDE, n)}" for n in shape[-2:]]
    return ", ".join(["0"] * (len(shape) - len(ends)) + ends)


def parse_slice(text: str) -> tuple[Any, ...]:
    """The key that a text like ``0, 2:10, ::4`` stands for.

    Raises
    ------
    ValueRefusedError
        Anything but integers, slices and one ``...``, separated by commas; or a step of 0.
    """
    if not text.strip():
        return ()
    out: list[Any] = []
    for item in text.split(","):
        found = _INDEX.fullmatch(item)
        if found is None:
            raise ValueRefusedError(f"{quote(item.strip())} is neither an integer nor a slice (0, 2:10, ::4, ...)")
        dots, index, *ends = found.groups()
        if dots or index:
            out.append(Ellipsis if dots else int(index))
            continue
        start, stop, step = (None if e is None else int(e) for e in ends)
        if step == 0:
            raise ValueRefusedError("the step of a slice is not 0")
        out.append(slice(start, stop, step))
    if sum(k is Ellipsis for k in out) > 1:
        raise ValueRefusedError("a slice has at most one ...")
    return tuple(out)


def _written_out(key: tuple[Any, ...], ndim: int) -> list[Any]:
    """The key with an entry for every axis."""
    at = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
    head, tail = list(key[:at]), list(key[at + 1 :])
    return [*head, *[slice(None)] * (ndim - len(head) - len(tail)), *tail]


def _bounded(key: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The key with its slices cut to what is shown, so that no more is decoded."""
    entries = _written_out(key, len(shape))
    axes = [i for i, k in enumerate(entries) if isinstance(k, slice)]
    for n, i in enumerate(axes):
        picked = range(shape[i])[entries[i]]
        keep = picked[: CELLS if n >= len(axes) - 2 else 1]
        stop = keep.stop if keep.stop >= 0 else None
        entries[i] = slice(keep.start, stop, keep.step) if len(keep) else slice(0, 0)
    return tuple(entries)


def _lengths(key: tuple[Any, ...], shape: tuple[int, ...]) -> list[int]:
    entries = _written_out(key, len(shape))
    return [len(range(n)[k]) for n, k in zip(shape, entries, strict=True) if isinstance(k, slice)]

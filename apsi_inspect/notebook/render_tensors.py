"""Parts of one tensor and of tables of tensors, and the small words that all views share.

`tests/test_render.py` enforces the bounds and the escaping on hostile files.
"""

from __future__ import annotations

import os

from ..errors import ApsiError, visible
from ..listing import Row, human_count, human_size
from ..listing import plural as plural
from ..parts import Column, Line, Stack, Strip, Table, Text, cut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..encodings.affine import Affine
    from ..model import Tensor
    from ..parts import Inline
    from ..qtensor import QTensor
    from ..table import TensorTable

ALL_ROWS = 320  # up to here every tensor is listed,
FIRST_ROWS = 100  # else so many
NAME = 120  # characters of a name


def tensor_parts(tensor: Tensor) -> Stack:
    """What the header says of one tensor, and of a small one what its values are like."""
    info = tensor.info
    chips = [*_size(tensor), *_place(tensor), *_meaning(tensor), *_values(tensor)]
    title = code(info.name) if info.name else Text("no name", "muted")
    return Stack([Strip(title, Text(info.encoding.name, "code"), chips)])


def qtensor_parts(q: QTensor) -> Stack:
    """The same of a quantized tensor in memory, with its error where the source is at hand."""
    tensor, error = q.tensor(), q._error()
    noise: list[tuple[str, Inline]] = [("signal to noise", error)] if error else []
    return Stack([Strip("QTensor", q.format, [*_size(tensor), *_meaning(tensor), *noise, *_values(tensor)])])


def _size(tensor: Tensor) -> list[tuple[str, Inline]]:
    info = tensor.info
    return [
        ("shape", shape_text(info.shape)),
        ("elements", grouped(tensor.numel)),
        ("stored", human_size(info.nbytes)),
        ("bits per weight", f"{tensor.bpw:.2f}"),
        ("values as", "float32" if info.affine else info.encoding.dtype),
    ]


def _place(tensor: Tensor) -> list[tuple[str, Inline]]:
    """Where the bytes stand; nothing of a tensor in memory."""
    if not tensor.source.name:
        return []
    return [("offset", str(tensor.info.offset)), ("file", code(os.path.basename(tensor.source.name)))]


def _meaning(tensor: Tensor) -> list[tuple[str, Inline]]:
    """Unit and scales."""
    info = tensor.info
    chips: list[tuple[str, Inline]] = []
    if info.unit is not None:
        chips.append(("unit", Line([code(str(info.unit)), Text(f"({info.unit.dimension})", "muted")])))
    if info.qparams is not None and info.qparams.scale_shape is not None:  # bf16 has none
        q = info.qparams
        along = "whole tensor" if q.axis is None else f"axis {q.axis}, {block_text(q.block)}"
        chips += [("scales", along), ("packing", q.packing)]
    if info.affine is not None:
        chips += _affine(info.affine)
    return chips


def _affine(affine: Affine) -> list[tuple[str, Inline]]:
    """Where scale and zero point of integer codes come from."""

    def text(value: object) -> Inline:
        return code(str(getattr(value, "name", value)), 60)

    along = "whole tensor" if affine.axis is None else f"axis {affine.axis}"
    if affine.block is not None:
        along += f", {block_text(affine.block)}"
    zero = [("zero point", text(affine.zero_point))] if affine.zero_point is not None else []
    return [("scale", text(affine.scale)), *zero, ("scales", along)]


def _values(tensor: Tensor) -> list[tuple[str, Inline]]:
    """What the values are like, where they are few or have been measured already."""
    from ..formats.base import is_mapped
    from ..ops.read import BRIEF, stats_line

    small = 0 < tensor.numel <= BRIEF and tensor.info.encoding.kind != "complex" and is_mapped(tensor.source)
    if tensor.kept_stats is None and not small:
        return []
    try:
        return [("values", Text(stats_line(tensor.stats()), "code"))]
    except ApsiError:  # closed, or changed on disk: what the header said still stands
        return []


def table_parts(table: TensorTable) -> Stack:
    """Rows of a tensor table, the first of many."""
    frame = table.frame
    chips: list[tuple[str, Inline]] = [("tensors", str(len(frame))), ("parameters", human_count(table.parameters))]
    if table.parameters:
        chips.append(("bits per weight", f"{8 * table.nbytes / table.parameters:.2f}"))
    chips.append(("bytes", human_size(table.nbytes)))
    limit = len(frame) if len(frame) <= ALL_ROWS else FIRST_ROWS
    from .render_stats import CORE, statistics_table

    if frame.columns.isin(CORE).sum() == len(CORE):  # of `ai.stats`
        more = more_text(len(frame), limit, "tensors", ": t.frame has them all")
        return Stack([Strip(code(table.title), "tensor table", chips), statistics_table(frame.head(limit), more=more)])
    columns = [c for c in frame.columns if c in Row._fields]
    listed = []
    for values in frame[columns].head(limit).itertuples(index=False):
        row = Row(**dict(zip(columns, values, strict=True)), role="")
        listed.append(
            row._replace(axis=None if row.axis == -1 else row.axis, block=None if row.block == -1 else row.block)
        )
    cells = tensor_columns(listed)
    body = list(zip(*(c for _, c in cells), strict=True))
    more = more_text(len(frame), limit, "tensors", ": t.frame has them all, t.filter() chooses")
    return Stack([Strip(code(table.title), "tensor table", chips), Table([c for c, _ in cells], body, more=more)])


def code(text: str, limit: int = NAME) -> Text:
    """Text from a file: marked, made visible, its middle cut."""
    return Text(cut(visible(text[: 4 * limit] + text[-limit:] if len(text) > 5 * limit else text), limit), "code")


def shape_text(shape: tuple[int, ...]) -> str:
    """``49152 × 576``; ``scalar`` for no dimensions."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def block_text(block: int | None) -> str:
    return "whole axis" if block is None else f"blocks of {block}"


def percent(part: int, whole: int) -> str:
    if 0 < part < whole / 2000:
        return "< 0.1 %"
    return f"{100 * part / whole:.1f} %" if whole else "–"


def grouped(n: int) -> str:
    return f"{n:,}".replace(",", " ")


def more_text(total: int, shown: int, what: str, how: str = "") -> str:
    left = total - shown
    return f"{left} more {what.removesuffix('s') if left == 1 else what} not shown{how}" if left > 0 else ""


def tensor_columns(listed: Sequence[Row]) -> list[tuple[Column, Sequence[Inline]]]:
    """The columns of the tensor table that say something, with their cells."""
    several = len({r.file for r in listed}) > 1
    quantized = any(r.axis is not None or r.block is not None for r in listed)
    shown: list[tuple[Column, Sequence[Inline], bool]] = [
        (Column("name", elastic=True), [code(r.name) for r in listed], True),
        (Column("encoding"), [code(r.encoding) for r in listed], True),
        (Column("shape"), [shape_text(r.shape) for r in listed], True),
        (Column("elements", "right"), [human_count(r.numel) for r in listed], True),
        (Column("bytes", "right"), [human_size(r.nbytes) for r in listed], True),
        (Column("bpw", "right"), [f"{r.bpw:.2f}" for r in listed], True),
        (Column("unit"), [code(r.unit, 40) if r.unit else "" for r in listed], any(r.unit for r in listed)),
        (Column("axis", "right"), ["" if r.axis is None else str(r.axis) for r in listed], quantized),
        (Column("block", "right"), ["" if r.block is None else str(r.block) for r in listed], quantized),
        (Column("role"), [r.role for r in listed], any(r.role for r in listed)),
        (Column("offset", "right"), [str(r.offset) for r in listed], True),
        (Column("file", elastic=True), [code(r.file, 60) for r in listed], several),
    ]
    return [(column, cells) for column, cells, use in shown if use]

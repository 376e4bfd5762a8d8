"""Parts of a model: what `print(m)`, a notebook and `apsi model info` show.

From the header only: no tensor is read, NumPy is not imported. Bounded: of many tensors, keys or findings the first are
shown, and the number of those that are not. `tests/test_render.py` enforces both, and the escaping on hostile files.
"""

from __future__ import annotations

import os

from ..errors import visible
from ..listing import Row, blocks, choose, folded, human_count, human_size, metadata_rows, ranges, rows, totals
from ..parts import Badge, Bars, Column, Details, Line, Pre, Stack, Strip, Table, Text, Tree, cut
from .render_tensors import (
    ALL_ROWS,
    FIRST_ROWS,
    code,
    grouped,
    more_text,
    percent,
    plural,
    shape_text,
    table_parts,
    tensor_columns,
    tensor_parts,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..listing import Group, Share, Totals
    from ..model import ModelFile
    from ..parts import Inline, Part
    from ..units import Unit

__all__ = ["code", "format_text", "model_parts", "shape_text", "table_parts", "tensor_parts", "trust"]

MANY = 100_000  # of more tensors the names are not sorted, and blocks neither summed nor folded
TREE_ROWS = 150
BLOCK_BARS = 12
METADATA_ROWS = 150
FINDINGS = 12
UNITS = 40
VALUE, TEMPLATE = 300, 6000  # characters
FORMAT_NAMES = {"gguf": "GGUF", "safetensors": "safetensors", "apsim": ".apsim", "pytorch": "PyTorch", "onnx": "ONNX"}


def model_parts(
    model: ModelFile,
    tensors: str | None = None,
    sort: str | None = None,
    metadata: bool = False,
    tree: bool = False,
) -> Stack:
    """What is in a model file.

    Parameters
    ----------
    tensors
        List only tensors whose name matches this glob.
    sort
        Column to list by, ``"-nbytes"`` for descending (see `listing.rows`).
    metadata
        Open the metadata, with the chat template in full.
    tree
        Open the folded tree.
    """
    stored = rows(model, sort="file")
    many = len(stored) > MANY
    listed = stored if many else choose(stored)
    sums = totals(model, listed)
    parts: list[Part] = [_head(model, sums), trust(model), *_findings(model)]
    if many:
        folds_too = "" if tree else " or folded"
        parts.append(Badge("note", f"{grouped(len(stored))} tensors: in file order, blocks are not summed{folds_too}"))
    if listed:
        shares = [] if many else blocks(model, listed)
        several = [_blocks(shares, sums.nbytes)] if 0 < len(shares) < len(listed) else []
        parts.append(Stack([_encodings(sums), *several], across=True))
    if model.units:
        parts.append(_units(model))
    chosen = tensors is not None or sort is not None
    groups = folded(model, listed) if tree or not (chosen or many) else []
    folds = bool(groups) and _lines_of(groups) <= len(listed) // 2
    if tree or folds:
        parts.append(_tree(groups, open=tree or not chosen))
    if listed:
        shown = choose(listed, tensors, "file") if sort is None else choose(stored, tensors, sort)
        parts.append(_tensors(shown, len(listed), tensors, open=chosen or not (folds or tree)))
    if len(model.files) > 1:
        parts.append(_files(model))
    if model.metadata:
        parts.append(_metadata(model, metadata, open=metadata or not listed))
    return Stack([*parts, *_container(model)])


def format_text(model: ModelFile) -> str:
    """``GGUF v3``."""
    name = FORMAT_NAMES.get(model.format, model.format)
    version = model.facts.get("version")
    return f"{name} v{version}" if version else name


def _head(model: ModelFile, sums: Totals) -> Strip:
    name = model.metadata.get("general.name", model.metadata.get("name"))
    chips: list[tuple[str, Inline]] = []
    if model.architecture:
        chips.append(("architecture", code(model.architecture, 60)))
    if isinstance(name, str) and name:
        chips.append(("name", code(name, 60)))
    if sums.parameters:
        chips += [("parameters", human_count(sums.parameters)), ("bits per weight", f"{sums.bpw:.2f}")]
    chips += [("size", human_size(model.file_size)), ("tensors", str(sums.tensors))]
    if len(model.files) > 1:
        chips.append(("shards", str(len(model.files))))
    chips += [(key, str(model.facts[key])) for key in ("file type", "shard") if model.facts.get(key)]
    chips += _language(model)
    if model.byte_order != "little":
        chips.append(("byte order", model.byte_order))
    return Strip(code(os.path.basename(model.path)), format_text(model), chips)


def _language(model: ModelFile) -> list[tuple[str, Inline]]:
    """What people ask first of a language model in GGUF: context length and vocabulary."""
    context = model.metadata.get(f"{model.architecture}.context_length")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    out: list[tuple[str, Inline]] = []
    if isinstance(context, int):
        out.append(("context", grouped(context)))
    if tokens is not None and hasattr(tokens, "__len__"):
        out.append(("vocabulary", grouped(len(tokens))))
    return out


def trust(model: ModelFile) -> Badge:
    """What is known of the file's integrity after opening it: nothing has been checked."""
    digests, signature = model.facts.get("digests"), str(model.facts.get("signature", "none"))
    if digests is None:
        return Badge(
            "not-checked", f"{FORMAT_NAMES.get(model.format, model.format)} carries neither digests nor a signature"
        )
    if signature == "none":
        return Badge("unsigned", f"digests {digests}")
    return Badge("not-checked", f"signature {signature}; digests {digests}")


def _findings(model: ModelFile) -> list[Part]:
    out: list[Part] = [Badge(f.severity, cut(visible(f.message), VALUE)) for f in model.findings[:FINDINGS]]
    more = more_text(len(model.findings), FINDINGS, "findings", ": m.findings has them all")
    return [*out, Text("… " + more, "muted")] if more else out


def _encodings(sums: Totals) -> Bars:
    bars: list[tuple[Inline, float, Sequence[Inline]]] = []
    for s in sums.by_encoding:
        numbers = [human_size(s.nbytes), percent(s.nbytes, sums.nbytes), plural(s.tensors, "tensor")]
        bars.append((code(s.label), s.nbytes / (sums.nbytes or 1), numbers))
    return Bars(bars, "Bytes per encoding")


def _blocks(shares: Sequence[Share], whole: int) -> Bars:
    """Bytes per block; numbered blocks of equal size are one bar."""
    groups = _alike(shares, by_size=True)
    if len(groups) > BLOCK_BARS:
        groups = _alike(shares, by_size=False)
    bars: list[tuple[Inline, float, Sequence[Inline]]] = []
    for label, numbers, members in groups[:BLOCK_BARS]:
        nbytes, largest = sum(s.nbytes for s in members), max(s.nbytes for s in members)
        upto = "" if all(s.nbytes == largest for s in members) else "up to "
        each = f"{len(members)} × {upto}{human_size(largest)}" if len(members) > 1 else ""
        name = code(f"{label}.{numbers}" if numbers else label, 48)
        bars.append((name, nbytes / (whole or 1), [human_size(nbytes), percent(nbytes, whole), each]))
    return Bars(bars, "Bytes per block", more_text(len(groups), BLOCK_BARS, "blocks"))


def _alike(shares: Sequence[Share], by_size: bool) -> list[tuple[str, str, list[Share]]]:
    """(prefix, numbers, members): numbered blocks of one prefix (and size) together."""
    groups: dict[tuple[str, int], list[tuple[int, Share]]] = {}
    for share in shares:
        prefix, _, number = share.label.rpartition(".")
        if prefix and number.isascii() and number.isdecimal() and len(number) < 10:
            groups.setdefault((prefix, share.nbytes if by_size else -1), []).append((int(number), share))
        else:
            groups[share.label, -2] = [(-1, share)]
    return [
        (prefix, "" if kind == -2 else ranges([n for n, _ in members]), [s for _, s in members])
        for (prefix, kind), members in groups.items()
    ]


def _units(model: ModelFile) -> Table:
    counts: dict[Unit, int] = {}
    for unit in model.units.values():
        counts[unit] = counts.get(unit, 0) + 1
    body: list[list[Inline]] = []
    for unit, n in list(counts.items())[:UNITS]:
        si = "coherent SI" if unit.is_coherent else f"SI = {_affine(unit.scale, unit.offset)}"
        body.append([code(str(unit), 60), unit.dimension, si, str(n)])
    columns = [Column("unit"), Column("dimension"), Column("conversion"), Column("tensors", "right")]
    return Table(columns, body, "Units", more_text(len(counts), UNITS, "units"))


def _affine(scale: float, offset: float) -> str:
    value = f"(value {'+' if offset > 0 else '−'} {abs(offset)!r})" if offset else "value"
    return value if scale == 1.0 else f"{value} × {scale!r}"


def _lines_of(groups: Sequence[Group]) -> int:
    return sum(1 + _lines_of(g.children) for g in groups)


def _tree(groups: Sequence[Group], open: bool) -> Details:
    lines: list[tuple[int, Sequence[Inline]]] = []
    _grow(lines, groups, 0)
    total = _lines_of(groups)
    columns = [Column("name", elastic=True), Column("encoding"), Column("shape"), Column("parameters", "right")]
    columns += [Column("bytes", "right"), Column("unit")]
    used = len(columns) if any(row[5] for _, row in lines) else len(columns) - 1
    body = [(depth, row[:used]) for depth, row in lines]
    more = more_text(total, len(lines), "rows")
    return Details("Structure, repeated blocks folded", Tree(columns[:used], body, more=more), open)


def _grow(lines: list[tuple[int, Sequence[Inline]]], groups: Sequence[Group], depth: int) -> None:
    """Rows of a folded tree in order, at most `TREE_ROWS`."""
    for g in groups:
        if len(lines) >= TREE_ROWS:
            return
        label: Inline = code(g.label)
        if g.count > 1:
            label = Line(
                [Text(f"{g.count} ×", "strong"), label, Text(f"(N = {g.numbers}; below: one of them)", "muted")]
            )
        row = g.row if not g.children else None
        first = [code(row.encoding), shape_text(row.shape)] if row else ["", ""]
        unit = code(row.unit, 40) if row and row.unit else ""
        lines.append((depth, [label, *first, human_count(g.parameters), human_size(g.nbytes), unit]))
        _grow(lines, g.children, depth + 1)


def _tensors(shown: Sequence[Row], total: int, tensors: str | None, open: bool) -> Details:
    n = len(shown)
    title: Inline = f"Tensors ({n})"
    if tensors is not None:
        title = Line([f"Tensors: {n} of {total} match", code(tensors)])
    limit = n if n <= ALL_ROWS else FIRST_ROWS
    columns = tensor_columns(shown[:limit])
    more = more_text(n, limit, "tensors", "; choose with a glob: --tensors 'blk.0.*'")
    body = list(zip(*(cells for _, cells in columns), strict=True))
    return Details(title, Table([c for c, _ in columns], body, more=more), open)


def _files(model: ModelFile) -> Details:
    counts: dict[int, int] = {}
    for i in model.columns.files or ():
        counts[int(i)] = counts.get(int(i), 0) + 1
    body: list[list[Inline]] = [
        [code(os.path.basename(s.name)), human_size(s.size), str(counts.get(i, 0))]
        for i, s in enumerate(model.sources[:METADATA_ROWS])
    ]
    columns = [Column("file", elastic=True), Column("size", "right"), Column("tensors", "right")]
    more = more_text(len(model.sources), METADATA_ROWS, "files")
    return Details(f"Files ({len(model.sources)})", Table(columns, body, more=more))


def _metadata(model: ModelFile, full: bool, open: bool) -> Details:
    listed = metadata_rows(model)
    limit = len(listed) if full else METADATA_ROWS
    body: list[list[Inline]] = [[code(r.key), Text(r.type, "muted"), code(r.text, VALUE)] for r in listed[:limit]]
    columns = [Column("key", elastic=True), Column("type"), Column("value", elastic=True)]
    more = more_text(len(listed), limit, "keys", ": m.metadata has them all")
    parts: list[Part] = [Table(columns, body, more=more)]
    template = model.metadata.get("tokenizer.chat_template")
    if full and isinstance(template, str):
        rest = len(template) - TEMPLATE
        text = template[:TEMPLATE] + (f"\n… {rest} more characters" if rest > 0 else "")
        parts.append(Details("Chat template", Pre(text), True))
    return Details(f"Metadata ({plural(len(listed), 'key')})", Stack(parts), open)


def _container(model: ModelFile) -> list[Part]:
    """The facts; that metadata are present is seen above."""
    facts: list[list[Inline]] = [[k, code(str(v), VALUE)] for k, v in model.facts.items() if k != "metadata present"]
    table = Table([Column("fact"), Column("value", elastic=True)], facts)
    return [Details("Container", table)] if facts else []

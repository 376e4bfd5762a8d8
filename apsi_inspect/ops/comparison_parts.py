"""A `Comparison` as parts: the verdict in a sentence, how names were matched, the worst tensors first.

Identical tensors are a count. `tests/test_compare.py` enforces what is shown and what is folded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..listing import human_count, human_size
from ..parts import Badge, Column, Details, Line, Stack, Strip, Table, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..parts import Inline, Part
    from .comparison import Compared, Comparison, KeyDifference, Side

SHOWN = 20  # tensors, keys
FEW = 8  # rounded tensors, and keys that only one has: they are many, and well


def comparison_parts(c: Comparison) -> Stack:
    """What a comparison shows."""
    counts = c.counts
    chips: list[tuple[str, Inline]] = [("tensors", str(len(c.tensors)))]
    chips += [(word, str(n)) for word, n in counts.items() if n]
    title = Line([_name(c.a, c), "→", _name(c.b, c)])
    sentence = Text(c.reason[:1].upper() + c.reason[1:] + ".")
    parts: list[Part] = [Strip(title, Badge(c.verdict), chips), sentence, _sides(c)]
    parts += [Badge(f.severity, f.message) for f in c.notes]
    for word, part in (("changed", _changed), ("shape differs", _shapes), ("missing", _missing)):
        found = _worst(c.of(word))
        if found:
            parts.append(part(found))
    noise = _worst(c.of("quantization noise"))
    if noise:
        parts += [_by_encoding(noise), _rounded(noise)]
    noted = [t for t in c.of("identical") if t.note]
    if noted:
        rows: list[list[Inline]] = [[_names(t), t.note] for t in noted[:SHOWN]]
        table = Table([Column("tensor", elastic=True), Column("", elastic=True)], rows, more=_more(noted, SHOWN))
        parts.append(Details(f"Identical, but ({len(noted)})", table))
    parts += _metadata(c)
    return Stack(parts)


def _name(side: Side, c: Comparison) -> Text:
    """The file's name; with its folder where both have the same name."""
    same = os.path.basename(c.a.path) == os.path.basename(c.b.path)
    return Text(side.path if same else os.path.basename(side.path), "code")


def _sides(c: Comparison) -> Table:
    rows: list[list[Inline]] = [
        [
            Text(letter, "strong"),
            Text(s.path, "code"),
            s.format,
            Text(s.architecture, "code") if s.architecture else "",
            str(s.tensors),
            human_count(s.parameters),
            human_size(s.nbytes),
        ]
        for letter, s in (("A", c.a), ("B", c.b))
    ]
    heads = [Column(""), Column("file", elastic=True), Column("format"), Column("architecture")]
    return Table([*heads, *(Column(x, "right") for x in ("tensors", "parameters", "size"))], rows)


def _worst(tensors: Sequence[Compared]) -> list[Compared]:
    """The largest relative error first; natural order where values were not compared."""
    return sorted(tensors, key=lambda t: -(t.metric("rel_l2") or 0.0))


def _noted(heads: list[Column], rows: list[list[Inline]]) -> tuple[list[Column], list[list[Inline]]]:
    """With the notes, the last cells, in a column of their own; without it where there are none."""
    if any(row[-1] for row in rows):
        return [*heads, Column("", elastic=True)], rows
    return heads, [row[:-1] for row in rows]


def _changed(tensors: Sequence[Compared]) -> Table:
    rows: list[list[Inline]] = []
    for t in tensors[:SHOWN]:
        count = f"{t.differ} of {t.numel}"
        numbers = [_number(t.metric(m), m) for m in ("sqnr_db", "rel_l2")]
        rows.append([_names(t), _encodings(t), count, *numbers, *_greatest(t), t.note])
    heads = [Column("tensor", elastic=True), Column("encoding")]
    heads += [Column(x, "right") for x in ("changed", "SQNR dB", "rel. error", "greatest change", "at")]
    return Table(*_noted(heads, rows), "Changed tensors, the worst first", _more(tensors, SHOWN))


def _greatest(t: Compared) -> tuple[str, str]:
    """The values that are furthest apart, and where."""
    if t.sums is None or not t.sums.max_abs:
        return "–", ""
    return f"{t.at[0]:.4g} → {t.at[1]:.4g}", f"[{', '.join(map(str, t.max_at or ()))}]"


def _shapes(tensors: Sequence[Compared]) -> Table:
    rows: list[list[Inline]] = [[_names(t), _shape(t.shape_a), _shape(t.shape_b), t.note] for t in tensors[:SHOWN]]
    heads = [Column("tensor", elastic=True), Column("in A", "right"), Column("in B", "right")]
    return Table(*_noted(heads, rows), "Tensors of another shape", _more(tensors, SHOWN))


def _missing(tensors: Sequence[Compared]) -> Table:
    rows: list[list[Inline]] = [
        [_names(t), Text(t.encoding_a or t.encoding_b, "code"), _shape(t.shape_a or t.shape_b), t.note]
        for t in tensors[:SHOWN]
    ]
    heads = [Column("tensor", elastic=True), Column("encoding"), Column("shape", "right"), Column("", elastic=True)]
    return Table(heads, rows, "Missing tensors", _more(tensors, SHOWN))


def _shape(shape: tuple[int, ...] | None) -> str:
    return " × ".join(map(str, shape or ())) or "scalar"


def _more(things: Sequence[object], shown: int) -> str:
    return f"{len(things) - shown} more" if len(things) > shown else ""


def _rounded(noise: Sequence[Compared]) -> Details:
    rows: list[list[Inline]] = []
    for t in noise[:FEW]:
        numbers = [_number(t.metric(m), m) for m in ("sqnr_db", "rel_l2", "cosine", "max_abs_error")]
        rows.append([_names(t), _encodings(t), *numbers, _against(t), t.note])
    heads = [Column("tensor", elastic=True), Column("encoding")]
    heads += [Column(x, "right") for x in ("SQNR dB", "rel. error", "cosine", "max error", "our rounding")]
    return Details("Rounded tensors, the worst first", Table(*_noted(heads, rows), more=_more(noise, FEW)))


def _against(t: Compared) -> str:
    """The error as a multiple of that of our own rounding."""
    return "exactly" if t.rounded else "–" if t.ratio is None else f"{t.ratio:.2f} ×"


def _names(t: Compared) -> Text:
    """The name; GGUF's, which is the shorter one, where a map gave it."""
    return Text(min(str(t.a), str(t.b), key=len) if t.how == "map" else t.name, "code")


def _encodings(t: Compared) -> Inline:
    before, after = t.encoding_a or "–", t.encoding_b or "–"
    return Text(before if before == after else f"{before} → {after}", "code")


def _number(value: float | None, metric: str) -> str:
    if value is None or value != value:
        return "–"
    return {"sqnr_db": f"{value:.1f}", "cosine": f"{value:.6f}"}.get(metric, f"{value:.3g}")


def _by_encoding(noise: Sequence[Compared]) -> Table:
    """A line per pair of encodings: how many, how far apart."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for t in noise:
        groups.setdefault((t.encoding_a, t.encoding_b), []).append(t)
    rows: list[list[Inline]] = []
    for ts in groups.values():
        exact = sum(bool(t.rounded) for t in ts)
        db = sorted(t.metric("sqnr_db") or 0.0 for t in ts)
        rel = max(t.metric("rel_l2") or 0.0 for t in ts)
        rows.append(
            [
                _encodings(ts[0]),
                str(len(ts)),
                human_count(sum(t.numel for t in ts)),
                f"{db[0]:.1f}" if len(ts) == 1 else f"{db[0]:.1f} … {db[-1]:.1f}",
                f"{rel:.3g}",
                f"{exact} of {len(ts)}",
            ]
        )
    labels = ("tensors", "parameters", "SQNR dB", "worst rel. error", "exactly as we round")
    return Table(
        [Column("encoding"), *(Column(x, "right") for x in labels)], rows, "Differences that rounding explains"
    )


def _metadata(c: Comparison) -> list[Part]:
    out: list[Part] = []
    for what, found in (("Metadata", c.metadata), ("Units", c.units)):
        changed = [d for d in found if d.a is not None and d.b is not None]
        only = [[d for d in found if d.b is None], [d for d in found if d.a is None]]
        if not found:
            continue
        words = [f"{len(changed)} changed"] if changed else []
        words += [f"{len(ds)} only in {letter}" for letter, ds in zip("AB", only, strict=True) if ds]
        listed = [*changed[:SHOWN], *only[0][:FEW], *only[1][:FEW]]
        rows = [_key_row(d) for d in listed]
        more = _more(found, len(listed))
        columns = [Column("key", elastic=True), Column("A", elastic=True), Column("B", elastic=True)]
        title = f"{what} that differs: {', '.join(words)}" if what == "Metadata" else f"{what} that differ"
        out.append(Details(title, Table(columns, rows, more=more), open=len(changed) > 0))
    return out


def _key_row(d: KeyDifference) -> list[Inline]:
    return [Text(d.key, "code"), *(Text("–", "muted") if v is None else Text(v, "code") for v in (d.a, d.b))]

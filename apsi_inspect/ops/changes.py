"""What a save or conversion did to each tensor and key: the report of `save_gguf` and `convert`.

`tests/test_convert.py` compares the sizes with the files, and a dry run with what is then written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..display import Displayable
from ..listing import human_size
from ..model import Finding

if TYPE_CHECKING:
    from ..parts import Inline, Part

SCHEMA_VERSION = 1
SHOWN = 20
ACTIONS = ("kept", "exact", "expanded", "re-encoded")


class TensorChange(NamedTuple):
    """One tensor.

    Attributes
    ----------
    source, name
        Its names before and after.
    before, after
        Encodings.
    action
        ``"kept"``: the same bytes; ``"exact"``: other bytes of the same values; ``"expanded"``: a wider type, the same
        values; ``"re-encoded"``: rounded.
    reason
        Why it is not what was asked for, or "".
    nbytes_before, nbytes
        Stored bytes.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    action: str
    reason: str
    nbytes_before: int
    nbytes: int


class KeyChange(NamedTuple):
    """A metadata key that is not simply kept: ``"dropped"``, ``"renamed"`` or ``"added"``, and why."""

    key: str
    action: str
    reason: str


class ConversionReport(Displayable):
    """The outcome of a save or conversion (or what it would be, for a dry run).

    Attributes
    ----------
    source, target
        Paths; `source` is "" for a save.
    format
        Of the target.
    files
        What was written, in order; the last one (or the only one) is what to open.
    size_before, size_after
        Bytes of all files, headers included.
    tensors, keys
        What happened to each.
    findings
        What there is to know about the result.
    dry_run
        True where nothing was written.
    """

    def __init__(
        self,
        source: str,
        target: str,
        format: str,
        files: list[str],
        size_before: int,
        size_after: int,
        tensors: list[TensorChange],
        keys: list[KeyChange],
        findings: list[Finding],
        dry_run: bool = False,
    ) -> None:
        self.source, self.target, self.format, self.files = source, target, format, files
        self.size_before, self.size_after = size_before, size_after
        self.tensors, self.keys, self.findings, self.dry_run = tensors, keys, findings, dry_run

    @property
    def path(self) -> str:
        """What to open."""
        return self.files[-1] if self.format != "gguf" else self.files[0]

    def of(self, action: str) -> list[TensorChange]:
        """The tensors of one action."""
        return [t for t in self.tensors if t.action == action]

    @property
    def renamed(self) -> list[TensorChange]:
        """Tensors whose name changed."""
        return [t for t in self.tensors if t.source != t.name]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "dry_run": self.dry_run,
            "files": list(self.files),
            "size_before": self.size_before,
            "size_after": self.size_after,
            "tensors": [{**t._asdict(), "shape": list(t.shape)} for t in self.tensors],
            "metadata": [k._asdict() for k in self.keys],
            "findings": [f._asdict() for f in self.findings],
        }

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self.of(a))} {a}" for a in ACTIONS if self.of(a))
        verb = "would write" if self.dry_run else "wrote"
        return f"<{verb} {self.path!r}: {counts or 'no tensors'}, {human_size(self.size_after)}>"

    def _parts(self) -> Part:
        from ..listing import human_count
        from ..parts import Badge, Column, Details, Stack, Strip, Table, Text

        chips: list[tuple[str, Inline]] = [("tensors", str(len(self.tensors)))]
        chips += [(a, human_count(len(self.of(a)))) for a in ACTIONS if self.of(a)]
        if self.size_before:
            chips.append(("size before", f"{human_size(self.size_before)} ({self.size_before} bytes)"))
        chips.append(("size after", f"{human_size(self.size_after)} ({self.size_after} bytes)"))
        if len(self.files) > 1:
            chips.append(("files", str(len(self.files))))
        kind = f"{self.format}, {'dry run: nothing is written' if self.dry_run else 'written'}"
        parts: list[Part] = [Strip(Text(self.path, "code"), kind, chips)]
        parts += [Badge(f.severity, f.message) for f in self.findings[: 5 * SHOWN]]
        if len(self.findings) > 5 * SHOWN:
            parts.append(Text(f"… {len(self.findings) - 5 * SHOWN} more: .findings has them all", "muted"))
        groups: dict[tuple[str, str, str, str], list[TensorChange]] = {}
        for t in self.tensors:
            groups.setdefault((t.before, t.after, t.action, t.reason), []).append(t)
        rows: list[list[Inline]] = [
            [
                Text(f"{before} → {after}" if before != after else before, "code"),
                action,
                str(len(ts)),
                human_size(sum(t.nbytes_before for t in ts)),
                human_size(sum(t.nbytes for t in ts)),
                Text(ts[0].name if len(ts) == 1 else f"{ts[0].name} …", "code"),
                reason,
            ]
            for (before, after, action, reason), ts in list(groups.items())[:SHOWN]
        ]
        heads = [Column("encoding"), Column("action"), Column("tensors", "right"), Column("before", "right")]
        heads += [Column("after", "right"), Column("which", elastic=True), Column("why", elastic=True)]
        more = f"{len(groups) - SHOWN} more kinds" if len(groups) > SHOWN else ""
        parts.append(Table(heads, rows, "Tensors", more))
        if self.renamed:
            pairs = [[Text(t.source, "code"), Text(t.name, "code")] for t in self.renamed[:SHOWN]]
            more = f"{len(self.renamed) - SHOWN} more" if len(self.renamed) > SHOWN else ""
            parts.append(Details("Renamed tensors", Table([Column("before"), Column("after")], pairs, more=more)))
        if self.keys:
            lines: list[list[Inline]] = [[Text(k.key, "code"), k.action, k.reason] for k in self.keys[: 2 * SHOWN]]
            more = f"{len(self.keys) - 2 * SHOWN} more" if len(self.keys) > 2 * SHOWN else ""
            columns = [Column("key"), Column("action"), Column("why", elastic=True)]
            parts.append(Details("Metadata that is not simply kept", Table(columns, lines, more=more), open=True))
        return Stack(parts)

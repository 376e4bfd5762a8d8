"""`Report`: what checking a model found, frozen; the same facts as text, HTML and JSON.

Statuses (one word each, `docs/apsim-format.md` and the glossary): authentic (signature checked with a key), intact
(digests match, nobody vouches), damaged, unsigned, other-key, incomplete, not-checked. `tests/test_verify.py` enforces
them.
"""

from __future__ import annotations

from typing import NamedTuple

from .display import Displayable
from .errors import VerificationError, quote, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .integrity.check import Damage
    from .model import Finding

SCHEMA_VERSION = 1
SHOWN = 100  # parts and findings, the worst first
# From worst to best; the whole has the worst status of what counts.
ORDER = ("damaged", "incomplete", "other-key", "unsigned", "not-checked", "intact", "authentic")


class Part(NamedTuple):
    """One thing that was checked: structure, table, data, metadata, signature, index, or a shard by its file."""

    name: str
    status: str
    message: str


class Report(Displayable):
    """The outcome of `verify`.

    Attributes
    ----------
    path, format
        What was checked.
    status
        The word for the whole.
    parts
        What was checked, each with its own status.
    damage
        Byte ranges whose digest does not fit, with the tensors they touch.
    findings
        What opening the file noticed.
    key_id
        Public id of the key that signed it; None where it is not signed.
    with_key
        Whether a key was given: then only ``"authentic"`` is good.
    """

    __slots__ = ("damage", "findings", "format", "key_id", "parts", "path", "status", "with_key")

    def __init__(
        self,
        path: str,
        format: str,
        status: str,
        parts: tuple[Part, ...],
        damage: tuple[Damage, ...] = (),
        findings: tuple[Finding, ...] = (),
        key_id: str | None = None,
        with_key: bool = False,
    ) -> None:
        for name, value in (
            ("path", path),
            ("format", format),
            ("status", status),
            ("parts", parts),
            ("damage", damage),
            ("findings", findings),
            ("key_id", key_id),
            ("with_key", with_key),
        ):
            object.__setattr__(self, name, value)

    path: str
    format: str
    status: str
    parts: tuple[Part, ...]
    damage: tuple[Damage, ...]
    findings: tuple[Finding, ...]
    key_id: str | None
    with_key: bool

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Report does not change")

    @property
    def ok(self) -> bool:
        """With a key: authentic. Without: nothing that was checked is wrong or missing."""
        return self.status == "authentic" if self.with_key else self.status in ("authentic", "intact", "not-checked")

    def part(self, name: str) -> Part | None:
        """The part of that name."""
        return next((p for p in self.parts if p.name == name), None)

    @property
    def reason(self) -> str:
        """One sentence on the whole: the message of the part that decided."""
        return next((p.message for p in self.parts if p.status == self.status), self.status)

    def raise_if_failed(self) -> Report:
        """Raise where this is not `ok`; else return the report itself.

        Raises
        ------
        VerificationError
            With the status and the reason.
        """
        if not self.ok:
            fresh = self.status in ("damaged", "incomplete") and not self.with_key
            hint = "copy or download it again" if fresh else None
            raise VerificationError(self.path, f"{self.status}: {self.reason}", hint=hint, status=self.status)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, with a `schema_version`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "file": self.path,
            "format": self.format,
            "status": self.status,
            "ok": self.ok,
            "with_key": self.with_key,
            "key_id": self.key_id,
            "parts": [p._asdict() for p in self.parts],
            "damage": [{**d._asdict(), "tensors": list(d.tensors)} for d in self.damage],
            "findings": [f._asdict() for f in self.findings],
        }

    def __repr__(self) -> str:
        return f"<Report {visible(self.path)}: {self.status}>"

    def _parts(self) -> Any:
        from .parts import Badge, Column, Line, Stack, Strip, Table, Text

        chips = [("key", Text(self.key_id, "code"))] if self.key_id else []
        head = Strip(Text(self.path, "code"), Badge(self.status), [("format", self.format), *chips])
        parts = self.parts if len(self.parts) <= SHOWN else sorted(self.parts, key=lambda p: ORDER.index(p.status))
        rows: list[list[Any]] = [[Text(p.name, "code"), Badge(p.status), p.message] for p in parts[:SHOWN]]
        more = f"{len(parts) - SHOWN} more, none of them worse: .parts has them all" if len(parts) > SHOWN else ""
        columns = [Column("part"), Column("status"), Column("", elastic=True)]
        below: list[Any] = [Table(columns, rows, more=more)]
        if self.damage:
            where: list[list[Any]] = [
                [str(d.begin), str(d.end), Line([Text(quote(n), "code") for n in d.tensors[:5]]), Text(d.file, "code")]
                for d in self.damage[:20]
            ]
            columns = [Column("from byte", "right"), Column("to byte", "right"), Column("tensors", "left", True)]
            columns.append(Column("file"))
            more = f"{len(self.damage) - 20} more" if len(self.damage) > 20 else ""
            below.append(Table(columns, where, "Damaged bytes", more))
        below += [Badge(f.severity, f.message) for f in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            below.append(Text(f"… {len(self.findings) - SHOWN} more: .findings has them all", "muted"))
        return Stack([head, *below])

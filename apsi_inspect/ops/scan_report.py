"""`ScanReport`: the outcome of `scan`, frozen; the same facts as text, HTML and JSON."""

from __future__ import annotations

from typing import NamedTuple

from ..display import Displayable
from ..errors import ModelFileError, quote, visible
from ..model import Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA_VERSION = 1
MAX_FINDINGS = 1000


class Name(NamedTuple):
    """A name that a pickle asks for: how often, and ``"allowed"``, ``"known"``, ``"unknown"`` or ``"dangerous"``."""

    path: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    verdict: str
    where: str


class ScanReport(Displayable):
    """What `scan` found.

    Attributes
    ----------
    path
        What was scanned.
    verdict
        ``"safe"``, ``"unsafe"`` or ``"unknown"``.
    findings
        What speaks against it, worst first.
    globals
        Every name that a pickle in it asks for.
    coverage
        What was read.
    complete
        False where something could not be read or judged.
    """

    __slots__ = ("complete", "coverage", "findings", "globals", "path", "verdict")

    path: str
    verdict: str
    findings: tuple[Finding, ...]
    globals: tuple[Name, ...]
    coverage: str
    complete: bool

    def __init__(
        self,
        path: str,
        verdict: str,
        findings: tuple[Finding, ...],
        globals: tuple[Name, ...],
        coverage: str,
        complete: bool,
    ) -> None:
        for name, value in zip(self.__slots__, (complete, coverage, findings, globals, path, verdict), strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a ScanReport does not change")

    @property
    def ok(self) -> bool:
        """The verdict is safe."""
        return self.verdict == "safe"

    @property
    def reason(self) -> str:
        """One sentence on the whole."""
        if not self.ok:
            return self.findings[0].message if self.findings else "nothing of it was read"
        return "everything that a loader would execute was read, and asks for tensors and plain values only"

    def raise_if_failed(self) -> ScanReport:
        """Raise where the verdict is not safe; else return the report itself.

        Raises
        ------
        ModelFileError
            With the verdict and the first reason.
        """
        if not self.ok:
            raise ModelFileError(self.path, f"{self.verdict}: {self.reason}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, with a `schema_version`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "file": self.path,
            "verdict": self.verdict,
            "complete": self.complete,
            "coverage": self.coverage,
            "findings": [f._asdict() for f in self.findings],
            "globals": [n._asdict() for n in self.globals],
        }

    def __repr__(self) -> str:
        return f"<ScanReport {visible(self.path, 80)}: {self.verdict}>"

    def _parts(self) -> Any:
        from ..listing import plural
        from ..parts import Badge, Column, Details, Stack, Strip, Table, Text

        head = Strip(Text(visible(self.path, 80), "code"), Badge(self.verdict), [("read", self.coverage)])
        below: list[Any] = [Text(visible(self.reason, 300))] if self.ok or not self.findings else []
        below += [Badge(f.severity, visible(f.message, 300)) for f in self.findings[:20]]
        if len(self.findings) > 20:
            below.append(Text(f"… {plural(len(self.findings) - 20, 'more finding')}", "muted"))
        if self.globals:
            shown = self.globals[:100]
            rows: list[Any] = [[Text(visible(n.path, 120), "code"), n.verdict, str(n.count)] for n in shown]
            more = f"{len(self.globals) - 100} more: .globals has them all" if len(self.globals) > 100 else ""
            table = Table([Column("name", elastic=True), Column("verdict"), Column("times", "right")], rows, more=more)
            below.append(Details(f"Names that pickles ask for ({len(self.globals)})", table, self.verdict != "safe"))
        return Stack([head, *below])


class Seen:
    """What a scan has collected so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.names: dict[tuple[str, str], list[Any]] = {}
        self.parts: dict[str, int] = {}
        self.unsure = False

    def add(self, finding: Finding, unsure: bool = False) -> None:
        """A finding; `unsure`: it leaves open whether the file is safe."""
        self.unsure = self.unsure or unsure
        if len(self.findings) < MAX_FINDINGS or finding.severity == "error":
            self.findings.append(finding)

    def read(self, what: str) -> None:
        """Something that was read to its end."""
        self.parts[what] = self.parts.get(what, 0) + 1

    def name(self, path: str, count: int, verdict: str, where: str) -> None:
        """A name that a pickle asks for."""
        entry = self.names.setdefault((path, where), [0, verdict])
        entry[0] += count

    def report(self, path: str) -> ScanReport:
        """The whole."""
        names = [Name(p, n, v, where) for (p, where), (n, v) in self.names.items()]
        rank = {"dangerous": 0, "unknown": 1, "known": 2, "allowed": 3}
        names.sort(key=lambda n: (rank[n.verdict], n.path))
        found = list(self.findings)
        for n in names:
            place = f"{visible(n.where, 80)}: " if n.where else ""
            if n.verdict == "dangerous":
                text = f"{place}the pickle asks for {quote(n.path, 120)} ×{n.count}, which runs code or can be made to"
                found.append(Finding("error", "dangerous-global", text))
            elif n.verdict == "unknown":
                text = f"{place}the pickle asks for {quote(n.path, 120)} ×{n.count}, of which nothing is known"
                found.append(Finding("warning", "unknown-global", text))
                self.unsure = True
        order = {"error": 0, "warning": 1, "note": 2}
        found.sort(key=lambda f: order[f.severity])
        unsafe = any(f.severity == "error" for f in found)
        verdict = "unsafe" if unsafe else "unknown" if self.unsure or not self.parts else "safe"
        coverage = ", ".join(what if n == 1 else f"{n} × {what}" for what, n in self.parts.items()) or "nothing"
        return ScanReport(path, verdict, tuple(found), tuple(names), coverage, not self.unsure)

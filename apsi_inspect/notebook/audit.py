"""`audit`: every place in scripts and notebooks that loads, saves, signs or checks with this package, found statically.

Contract: nothing is imported or run. Names are followed through ``import apsi_inspect as ai``, ``from apsi_inspect
import load_model as lm`` and ``from apsi_inspect import *``; magics, ``!apsi …`` lines and commands given to
subprocess are listed too. A path is given where it is a literal. What static reading cannot follow (`getattr` with a
computed name, `exec`, `eval`, `importlib`) is listed as ``dynamic`` where it can be seen; methods of an opened model
are not.
`tests/test_audit.py` enforces this.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

from ..display import Displayable
from ..errors import ModelFileError, ValueRefusedError, brief, quote
from ..listing import plural
from ..permit import check_read
from .audit_code import Names, Use, as_python, uses_in

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 1
ENDINGS = (".py", ".ipynb", ".ipy")
SHOWN = 100  # uses in a notebook
_LIMIT = 64 << 20  # bytes of a script or notebook


class AuditReport(Displayable):
    """What `audit` found: `uses` in order, and the files that were `read` and the ones that could not be (`unread`)."""

    __slots__ = ("files", "path", "unread", "uses")

    def __init__(self, path: str, uses: tuple[Use, ...], files: tuple[str, ...], unread: tuple[str, ...]) -> None:
        for name, value in (("path", path), ("uses", uses), ("files", files), ("unread", unread)):
            object.__setattr__(self, name, value)

    path: str
    uses: tuple[Use, ...]
    files: tuple[str, ...]
    unread: tuple[str, ...]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an AuditReport does not change")

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "path": self.path,
            "files": list(self.files),
            "unread": list(self.unread),
            "uses": [{**u._asdict(), "reads": list(u.reads), "writes": list(u.writes)} for u in self.uses],
        }

    def __repr__(self) -> str:
        return f"<AuditReport {quote(self.path)}: {plural(len(self.uses), 'use')} in {plural(len(self.files), 'file')}>"

    def _parts(self, shown: int | None = SHOWN) -> Any:
        """At most `shown` uses (None: all)."""
        from ..parts import Badge, Column, Line, Stack, Strip, Table, Text

        counts = [(f"{n} {kind}") for kind in _ORDER if (n := sum(u.kind == kind for u in self.uses))]
        chips = [("read", plural(len(self.files), "file")), ("uses", ", ".join(counts) or "none")]
        body: list[Any] = [Strip(Text(self.path, "code"), "loading, saving and checking", chips)]
        rows = [
            [
                Text(f"{u.file}:{u.line}" if u.cell is None else f"{u.file} [cell {u.cell}]:{u.line}", "code"),
                u.kind,
                Text(u.name, "code"),
                Line([Text(quote(p), "code") for p in u.reads]) if u.reads else "",
                Line([Text(quote(p), "code") for p in u.writes]) if u.writes else "",
            ]
            for u in self.uses[:shown]
        ]
        if rows:
            columns = [Column("where"), Column("kind"), Column("name"), Column("reads", "left", True), Column("writes")]
            body.append(Table(columns, rows, more=_left(len(self.uses), shown, "use", "uses")))
        body += [Badge("warning", f"not read: {message}") for message in self.unread[:shown]]
        if left := _left(len(self.unread), shown, "file that could not be read", "files that could not be read"):
            body.append(Text(f"… {left}", "muted"))
        return Stack(body)


def _left(total: int, shown: int | None, one: str, many: str) -> str:
    left = 0 if shown is None else total - shown
    return f"{left} more {one if left == 1 else many}: .to_dict() and apsi audit have them all" if left > 0 else ""


_ORDER = ("load", "check", "save", "sign", "convert", "shell", "dynamic")


def audit(path: str | os.PathLike[str]) -> AuditReport:
    """List every use of the loading, saving, signing and checking functions, magics and commands.

    Parameters
    ----------
    path
        A script, a notebook, or a folder of them (hidden folders are left out, links to folders not followed).

    Returns
    -------
    AuditReport
        Nothing of what was audited has been run.

    Raises
    ------
    OSError
        The path is missing or unreadable.
    ModelFileError
        It is a single file that is no Python and no notebook.
    """
    name = os.fsdecode(path)
    if not os.path.isdir(name):
        broken: list[str] = []
        return AuditReport(name, tuple(_uses_of(name, broken)), (name,), tuple(broken))
    uses: list[Use] = []
    files: list[str] = []
    unread: list[str] = []
    for file in _files_in(name):
        try:
            uses += _uses_of(file, unread)
            files.append(file)
        except (ModelFileError, OSError) as exc:
            unread.append(str(exc))
    return AuditReport(name, tuple(uses), tuple(files), tuple(unread))


def _files_in(folder: str) -> Iterator[str]:
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (os.path.join(base, n) for n in sorted(names) if n.endswith(ENDINGS))


def _regular(path: str) -> None:
    """A pipe would wait for somebody who writes to it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ModelFileError(path, "is no regular file; a script or a notebook was expected")


def _text(path: str) -> str:
    check_read(path, local=True)
    _regular(path)
    with open(path, "rb") as f:
        raw = f.read(_LIMIT + 1)
    if len(raw) > _LIMIT:
        raise ModelFileError(path, f"is larger than {_LIMIT >> 20} MiB; a script or a notebook was expected")
    from io import BytesIO
    from tokenize import detect_encoding

    try:
        encoding, _ = detect_encoding(BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as exc:
        raise ModelFileError(path, f"is no text: {exc}") from None


def notebook_cells(path: str) -> list[tuple[int, str]]:
    """Number (from 1) and source of each code cell of a notebook, of format 4 or 3.

    Raises
    ------
    ValueRefusedError
        It is no notebook.
    """
    try:
        document = json.loads(_text(path))
        cells = document["cells"] if "cells" in document else document["worksheets"][0]["cells"]
        found = [c.get("source", c.get("input", "")) for c in cells if c["cell_type"] == "code"]
        return [(i, s if isinstance(s, str) else "".join(s)) for i, s in enumerate(found, 1)]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        if isinstance(exc, OSError):
            raise
        raise ValueRefusedError(f"{quote(path)} is no notebook: {brief(exc)}") from None


def _uses_of(path: str, broken: list[str]) -> list[Use]:
    """The uses of a file; cells that are no Python are added to `broken`, and the others are read all the same."""
    if path.endswith(".ipynb"):
        try:
            cells = notebook_cells(path)
        except ValueRefusedError as exc:
            raise ModelFileError(path, "is no notebook", hint=str(exc)) from None
        names = Names()
        uses = []
        for number, source in cells:
            try:
                uses += uses_in(path, number, as_python(source), names)
            except ModelFileError as exc:
                broken.append(str(exc))
        return uses
    source = _text(path)
    return uses_in(path, None, as_python(source) if path.endswith(".ipy") else source, Names())

"""`audit`: every place in scripts and notebooks that loads, saves, signs or checks with this package, found statically.

Contract: nothing is imported or run. Names are followed through ``import apsi_inspect as ai``, ``from apsi_inspect
import load_model as lm`` and ``from apsi_inspect import *``; magics, ``!apsi …`` lines and commands given to
subprocess are listed too. A path is given where it is a literal. What static reading cannot follow (`getattr` with a
computed name, `exec`, `eval`, `importlib`) is listed as ``dynamic`` where it can be seen; methods of an opened model
are not.
`tests/test_audit.py` enforces this.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from ..display import Displayable
from ..errors import ModelFileError, ValueRefusedError, brief, quote
from ..listing import plural
from ..permit import check_read

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 1
ENDINGS = (".py", ".ipynb", ".ipy")
SHOWN = 100  # uses in a notebook
_LIMIT = 64 << 20  # bytes of a script or notebook


class Does(NamedTuple):
    """What a public function does with its path arguments, as (position, name)."""

    kind: str  # load, save, convert, check
    reads: tuple[tuple[int, str], ...] = ()
    writes: tuple[tuple[int, str], ...] = ()


_FIRST, _MODEL = ((0, "path"),), ((0, "model"),)
FUNCTIONS: dict[str, Does] = {
    **dict.fromkeys(("open", "load_model", "load_gguf", "load_safetensors", "torch_load", "onnx_model"),
                    Does("load", _FIRST)),
    **dict.fromkeys(("model_info", "gguf_info", "safetensors_info", "stats", "plan", "hardware_plan", "metadata_widget",
                     "units_widget", "quant_error_widget"),
                    Does("load", _MODEL)),
    "quant_error": Does("load", ((0, "model_or_tensor"),)),
    "compare": Does("load", ((0, "a"), (1, "b"))),
    "verify": Does("check", _FIRST),
    "scan": Does("check", _FIRST),
    **dict.fromkeys(("save_model", "save_gguf", "save_safetensors"), Does("save", (), _FIRST)),
    "convert": Does("convert", ((0, "src"),), ((1, "dst"),)),
    "report": Does("save", _MODEL, ((1, "path"),)),
    "signature_widget": Does("check", _FIRST),
}  # fmt: skip
MAGICS = {"apsi_info": "load", "apsi_verify": "check", "apsi_compare": "load", "apsi_convert": "convert"}
_PACKAGE = "apsi_inspect"


class Use(NamedTuple):
    """One place that uses the package.

    Attributes
    ----------
    file, cell, line
        Where; `cell` counts the code cells of a notebook from 1 and is None in a script.
    name
        The function, magic or command.
    kind
        ``"load"``, ``"save"``, ``"convert"``, ``"check"``, ``"sign"`` (saving with a signature), ``"shell"`` (the apsi
        command), ``"dynamic"`` (cannot be followed).
    reads, writes
        The path arguments that are literals.
    code
        The call as it stands there, shortened.
    """

    file: str
    cell: int | None
    line: int
    name: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    code: str


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
        return AuditReport(name, tuple(_uses_in(name, broken)), (name,), tuple(broken))
    uses: list[Use] = []
    files: list[str] = []
    unread: list[str] = []
    for file in _files_in(name):
        try:
            uses += _uses_in(file, unread)
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


def _uses_in(path: str, broken: list[str]) -> list[Use]:
    """The uses of a file; cells that are no Python are added to `broken`, and the others are read all the same."""
    if path.endswith(".ipynb"):
        try:
            cells = notebook_cells(path)
        except ValueRefusedError as exc:
            raise ModelFileError(path, "is no notebook", hint=str(exc)) from None
        names = _Names()
        uses = []
        for number, source in cells:
            try:
                uses += _uses(path, number, _python(source), names)
            except ModelFileError as exc:
                broken.append(str(exc))
        return uses
    source = _text(path)
    return _uses(path, None, _python(source) if path.endswith(".ipy") else source, _Names())


def _python(source: str) -> str:
    """A cell with its magics and ``!`` lines as the calls that IPython makes of them."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call]
    except (SyntaxError, RecursionError):  # the parser says what is wrong with it
        return source


class _Names:
    """What names of a script stand for: the package itself, its functions."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.functions: dict[str, str] = {}

    def learn(self, node: ast.AST) -> None:
        """From an import statement."""
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == _PACKAGE:
                    self.packages.add((a.asname or a.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE and not node.level:
            for a in node.names:
                known = FUNCTIONS if a.name == "*" else {a.name: None} if a.name in FUNCTIONS else {}
                self.functions.update({(a.asname or n): n for n in known})
                if not known and a.name.islower():  # a module: from apsi_inspect.ops import load
                    self.packages.add(a.asname or a.name)
        elif isinstance(node, ast.Assign) and self.is_package(node.value):  # x = ai
            self.packages.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.Assign) and (name := self.function(node.value)):  # load = ai.load_model
            self.functions.update({t.id: name for t in node.targets if isinstance(t, ast.Name)})

    def function(self, node: ast.AST) -> str | None:
        """The public function that an expression names, or None."""
        if isinstance(node, ast.Name):
            return self.functions.get(node.id)
        if isinstance(node, ast.Attribute):
            base: ast.AST = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in self.packages and node.attr in FUNCTIONS:
                return node.attr
        return None

    def is_package(self, node: ast.AST) -> bool:
        """Whether an expression is the package itself."""
        return isinstance(node, ast.Name) and node.id in self.packages


def _uses(path: str, cell: int | None, source: str, names: _Names) -> list[Use]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        where = None if cell is None else f"cell {cell}"
        raise ModelFileError(path, f"is no Python: {brief(exc)}", where=where) from None
    placed = [n for n in ast.walk(tree) if isinstance(n, ast.expr | ast.stmt)]
    nodes = sorted(placed, key=lambda n: (n.lineno, n.col_offset))
    for node in nodes:
        names.learn(node)
    # expressions that are a part of another one: the function of a call, the `ai.ops` of `ai.ops.x`
    inner = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    inner |= {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            found += _inside(path, cell, node, names)
            use = _call(node, names)
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__" and names.is_package(node.value):
            use = ("__dict__", "dynamic", (), ())
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inner:
            name = names.function(node)
            use = None if name is None else (name, FUNCTIONS[name].kind, (), ())
        else:
            continue
        if use is not None:
            code = brief(" ".join((ast.get_source_segment(source, node) or "").split()), 120)
            found.append(Use(path, cell, node.lineno, *use, code))
    return found


def _inside(path: str, cell: int | None, node: ast.Call, names: _Names) -> list[Use]:
    """What a magic runs: Python (%time, %%capture, …), or a shell (%%bash, %sx, …)."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    texts = [_literal(a) or "" for a in node.args]
    if function == "magic" and texts:  # of old: the name and the line in one text
        function, texts = "run_line_magic", [*texts[0].lstrip("%").partition(" ")[::2]]
    if function not in ("run_line_magic", "run_cell_magic") or not texts:
        return []
    code = " ".join(texts[-1].split("\n"))[:120] if len(texts) > 1 else ""
    if texts[0] in _SHELL_MAGICS:
        return [Use(path, cell, node.lineno, *c, brief(code, 120)) for t in texts[1:] for c in _commands(t)]
    if function == "run_line_magic" and texts[0] in MAGICS and getattr(node.func, "attr", "") == "magic":
        use = _magic(texts[0], texts[1:])
        return [] if use is None else [Use(path, cell, node.lineno, *use, brief(code, 120))]
    if texts[0] not in _CODE_MAGICS or len(texts) < 2:
        return []
    source = _OPTIONS.sub("", texts[1]) if function == "run_line_magic" else "\n".join(texts[2:])
    inner = _uses(path, cell, _python(source), names)
    first = node.lineno + (function == "run_cell_magic") - 1
    return [use._replace(line=use.line + first) for use in inner]


_CODE_MAGICS = ("time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "debug")
_SHELL_MAGICS = ("bash", "sh", "script", "system", "sx", "!", "!!", "cmd")
_OPTIONS = re.compile(r"^(\s*-\w+(\s+[0-9.]+(?=\s))?)*\s*")


def _commands(text: str) -> list[_Found]:
    """The `apsi` commands of a piece of shell."""
    found = []
    for part in re.split(r"&&|\|\||[;|&\n]", text):
        words = _split(part)
        while words and (words[0] in _BEFORE or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL)):
            del words[0]
        found += _command(words)
    return found


_BEFORE = ("sudo", "time", "nohup", "env", "exec", "(", "{", "then", "do", "!")


def _command(words: list[str]) -> list[_Found]:
    modules = words[:3:2] == ["-m", _PACKAGE] or words[1:3] == ["-m", _PACKAGE]
    if not words or not (os.path.basename(words[0]) == "apsi" or modules):
        return []
    return [(" ".join(words[:3]), "shell", (), ())]


_Found = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _call(node: ast.Call, names: _Names) -> _Found | None:
    name = names.function(node.func)
    if name is not None:
        does = FUNCTIONS[name]
        kind = "sign" if does.kind in ("save", "convert") and _signs(node) else does.kind
        return name, kind, _literals(node, does.reads), _literals(node, does.writes)
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    texts = [_literal(a) for a in node.args]
    first = texts[0] if texts else None
    if function in ("run_line_magic", "run_cell_magic") and first is not None:
        return _magic(first, [t or "" for t in texts[1:]])
    if function in _SHELLS:
        return _shell(node)
    if function == "vars" and node.args and names.is_package(node.args[0]):
        return function, "dynamic", (), ()
    if function == "getattr" and node.args and names.is_package(node.args[0]):
        wanted = texts[1] if len(texts) > 1 else None
        if wanted is None or wanted in FUNCTIONS:
            return wanted or "getattr", "dynamic", (), ()
    if function in ("import_module", "__import__") and first is not None and first.split(".")[0] == _PACKAGE:
        return function, "dynamic", (), ()
    if isinstance(node.func, ast.Name) and function in ("exec", "eval") and first is not None and _PACKAGE in first:
        return function, "dynamic", (), ()
    return None


_SHELLS = ("system", "getoutput", "run", "call", "check_call", "check_output", "Popen", "getstatusoutput")


def _magic(name: str, texts: list[str]) -> _Found | None:
    if name not in MAGICS:  # (what %time and %%bash run: `_inside`)
        if name in ("load_ext", "reload_ext") and texts and texts[0].strip() == _PACKAGE:
            return f"%{name}", "load", (), ()
        return None
    words = [w for w in _split(texts[0] if texts else "") if not w.startswith("-")]
    if name == "apsi_convert":
        return f"%{name}", "convert", tuple(words[:1]), tuple(words[1:2])
    lines = [w for line in "\n".join(texts[1:]).splitlines() for w in _split(line)[:1]]  # of a cell: a path each
    return f"%{name}", MAGICS[name], (*words[: 2 if name == "apsi_compare" else 1], *lines), ()


def _shell(node: ast.Call) -> _Found | None:
    """A literal command line that runs `apsi`."""
    if not node.args:
        return None
    given = node.args[0]
    if isinstance(given, ast.List | ast.Tuple):
        found = _command([_literal(e) or "…" for e in given.elts])
    else:
        found = _commands(_literal(given) or "")
    return found[0] if found else None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _literal(node: ast.AST) -> str | None:
    """A text that stands there as such, also inside ``Path(…)`` or ``os.path.expanduser(…)``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("Path", "PurePath", "expanduser", "expandvars", "str"):
            return _literal(node.args[0])
    return None


def _argument(node: ast.Call, position: int, name: str) -> ast.AST | None:
    plain = node.args[: position + 1]
    if len(plain) > position and not any(isinstance(a, ast.Starred) for a in plain):
        return node.args[position]
    return next((k.value for k in node.keywords if k.arg == name), None)


def _literals(node: ast.Call, wanted: tuple[tuple[int, str], ...]) -> tuple[str, ...]:
    given = (_argument(node, position, name) for position, name in wanted)
    return tuple(text for a in given if a is not None and (text := _literal(a)) is not None)


def _signs(node: ast.Call) -> bool:
    """Whether ``sign=`` or ``key=`` is given and is not plainly None or False."""
    given = [k.value for k in node.keywords if k.arg in ("sign", "key")]
    return any(not (isinstance(v, ast.Constant) and v.value in (None, False)) for v in given)
